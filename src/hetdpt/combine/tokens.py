"""Token reduction on a model, with or without all its layers: put on, and taken off again."""

from __future__ import annotations

from torch import nn

from hetdpt.reductions import Tokens


def reduce_tokens_(model: nn.Module, tokens: Tokens) -> nn.Module:
    """Let the blocks of ``model`` that have attention hand on fewer tokens than they are given."""
    raise NotImplementedError
