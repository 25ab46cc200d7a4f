"""Kinds of layers, one file each: inputs as columns, weights as rows, per-sample gradients. Plain torch."""
