"""Run directories: what was asked for, checkpoints, numbers, stages. They do not know what a run does."""
