"""From a budget to a plan: which layers go. No loop of its own, and no files."""
