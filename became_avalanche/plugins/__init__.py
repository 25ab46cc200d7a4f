"""What a user puts into ``plugins=[...]``."""
