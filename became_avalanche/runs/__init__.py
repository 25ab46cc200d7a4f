"""Runs: their specifications, how they are trained, and the folders in which they are kept."""
