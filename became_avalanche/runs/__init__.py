"""A run from its specification to its result."""
