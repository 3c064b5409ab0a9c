"""The stages of a run, each from what was asked for to what it came to."""
