"""Samples of accuracy, to files: a run directory that processes of one or several machines fill together.

run.json      what was asked for; all processes ask for the same
dense/        the model as it was given
prices.json   what its layers cost
samples/      one file for each step that is done
samples.csv   the same as a table, for ``hetdpt predict``
steps/        models and checkpoints of steps that are not done, or that others can begin from
claims/       who works on which step
recheck/      as samples/, for splits that were measured again

Steps form a tree: a step begins from the model its parent came to. Chains that begin alike share steps.
"""
