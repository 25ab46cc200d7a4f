"""The metrics of the paper, as Avalanche metrics."""
