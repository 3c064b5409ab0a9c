"""Reductions that combine with removed layers: width (Torch-Pruning) and tokens (ToMe, GTP)."""
