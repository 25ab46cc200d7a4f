"""Loggers: CSV files that show stages, and Weights & Biases."""
