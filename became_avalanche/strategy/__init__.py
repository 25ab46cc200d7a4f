"""What plugins and metrics need of an Avalanche strategy: passes over data, weights, stages, state, checkpoints."""
