"""The maths of stage 2: Fisher information and merging rules. Plain torch."""
