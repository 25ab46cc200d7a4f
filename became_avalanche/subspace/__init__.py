"""The maths of stage 1: subspaces of layer inputs, and projections away from them. Plain torch."""
