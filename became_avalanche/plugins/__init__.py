"""The plugins that users put into ``plugins=[...]`` of an Avalanche strategy."""
