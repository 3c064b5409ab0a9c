"""Files of a run: atomic writes, locks, checkpoints, metrics, settings. Knows no model."""
