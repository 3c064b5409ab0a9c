"""From a budget to a plan: which layers to remove. It has no training loop of its own and writes no files."""
