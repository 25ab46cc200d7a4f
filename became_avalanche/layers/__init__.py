"""What the layers of a model do with their weights, one file per kind of layer. Plain torch."""
