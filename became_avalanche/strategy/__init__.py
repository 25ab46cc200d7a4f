"""What plugins and metrics share: passes over data, weights, stages, state and checkpoints of an Avalanche strategy."""
