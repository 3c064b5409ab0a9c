"""Whole questions about a model, each answered by a run directory that processes of one or several machines fill."""
