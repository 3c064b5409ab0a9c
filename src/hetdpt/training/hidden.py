"""Hidden states of a teacher as a target: how much the stream of a student differs from it after each block.

Only what the student still computes is compared. Nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.adapters.anatomy import Handle
from hetdpt.core.errors import ModelError
from hetdpt.core.plan import Plan
from hetdpt.surgery.record import Record, layout_of, record_of, survey_of, with_layout

Streams = dict[int, Tensor]
"""The stream after each block, by its number: (B, N, D), the class token first."""


class BlockOutputs:
    """Reads the stream after each block of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.last: dict[int, Handle] = {handle.site.block: handle for handle in survey_of(model).handles}
        """The last branch of each block."""

    @contextmanager
    def watch(self) -> Iterator[Streams]:
        """Yield a dictionary that the next forward pass fills."""
        streams = Streams()
        with ExitStack() as hooks:
            for number, handle in self.last.items():
                block = self.model.get_submodule(handle.owner)
                hooks.callback(block.register_forward_hook(partial(_keep, streams, number, handle)).remove)
            yield streams


def _keep(streams: Streams, number: int, handle: Handle, _: nn.Module, args: Any, output: Any) -> None:
    while isinstance(output, tuple):  # of transformers, or of a block in a tail; the stream comes first
        output = output[0]
    is_map = handle.parts is not None and handle.parts.is_direct
    axis = handle.parts.gate_layout.axis if is_map and handle.parts else -1
    if axis >= 0:
        output = output.movedim(1 + axis, -1)
    streams[number] = output.movedim(handle.images_at, 0).flatten(1, -2)


class HiddenLoss:
    """The mean over blocks of 1 - cosine between the streams of a student and its teacher.

    Streams are normed first by a LayerNorm without weights, because a few channels have values a hundred times those
    of others. The cosine is that of each token, averaged over class tokens and over patches apart; both count half.
    Blocks whose patches the student does not compute are compared by their class tokens.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        self.student, self.teacher = BlockOutputs(student), BlockOutputs(teacher)
        self.protected = protected_tokens(teacher)
        record = record_of(student)
        self.channels = record.channels if record else None

    def __call__(self, student: Streams, teacher: Streams) -> Tensor:
        """Return the loss, a scalar, for streams of the same images."""
        losses = [self._of_block(student[number], teacher[number]) for number in student.keys() & teacher.keys()]
        return torch.stack(losses).mean()

    def _of_block(self, student: Tensor, teacher: Tensor) -> Tensor:
        if self.channels is not None:
            teacher = teacher[..., list(self.channels)]
        kept = min(self.protected, student.shape[1], teacher.shape[1])
        pairs = [(student[:, :kept], teacher[:, :kept])] if kept else []
        if student.shape[1] == teacher.shape[1] > kept:
            pairs.append((student[:, kept:], teacher[:, kept:]))
        return torch.stack([1 - _cosine(*pair).mean() for pair in pairs]).mean()


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of each pair of tokens (B, N, D), normed."""
    width = one.shape[-1:]
    return F.cosine_similarity(F.layer_norm(one.float(), width), F.layer_norm(other.float(), width), dim=-1)


def protected_tokens(model: nn.Module) -> int:
    """Return how many tokens of ``model`` are class, distillation or register tokens; 0 where all are patches."""
    try:
        record = with_layout(model, record_of(model) or Record(survey_of(model), Plan()))
    except ModelError:  # its blocks get maps, or tokens of several sizes
        return 0
    return layout_of(record).protected
