"""Token reduction."""
