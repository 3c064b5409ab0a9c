"""Values and algebra that every other package builds on: plans, gates, folding, errors."""
