"""Analyses of a model that do not change it: scan, observations, relevance, transfer, tokens."""
