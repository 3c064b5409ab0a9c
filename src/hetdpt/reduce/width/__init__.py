"""Width pruning."""
