"""Records of runs, and the metrics, tables, figures and reports made from them. Imports neither torch nor Avalanche."""
