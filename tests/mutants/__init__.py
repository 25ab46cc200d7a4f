"""Breaks formulas and guards of the package on purpose: see ``run.py``."""
