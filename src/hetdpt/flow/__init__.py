"""From a dense model to a faster one: the run and its stages, one-shot removal, sampling, comparison of methods."""
