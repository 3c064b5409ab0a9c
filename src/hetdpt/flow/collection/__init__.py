"""Samples of accuracy in a run directory that processes of one or several machines fill together.

run.json      the settings, the same for all processes
dense/        the dense model
prices.json   the cost of its layers
samples/      one file for each finished step
samples.csv   the same as a table, for ``hetdpt predict``
steps/        models and checkpoints of unfinished steps, and models that other steps start from
claims/       which process works on which step
recheck/      as samples/, for splits that were measured again

Steps form a tree: a step starts from the model its parent ended with. Chains that start alike share steps.
"""
