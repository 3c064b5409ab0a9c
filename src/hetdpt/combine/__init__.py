"""Depth together with width (Torch-Pruning) and with tokens (ToMe, GTP)."""
