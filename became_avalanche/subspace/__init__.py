"""The maths of stage 1: input subspaces. Plain torch."""
