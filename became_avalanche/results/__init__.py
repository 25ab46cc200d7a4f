"""What runs leave behind, and what people make of it. Imports neither torch nor Avalanche."""
