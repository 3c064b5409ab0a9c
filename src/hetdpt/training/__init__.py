"""The one training loop, its losses and its processes. Nothing here knows plans, stages or files."""
