"""Streams of experiences."""
