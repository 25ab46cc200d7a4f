"""Benchmarks: images as Avalanche streams."""
