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

from hetdpt.adapters.anatomy import Handle, Survey
from hetdpt.core.errors import ModelError, TrainError
from hetdpt.core.plan import Plan
from hetdpt.surgery.kept import MeanStep
from hetdpt.surgery.record import InputSize, Record, layout_of, record_of, survey_of, with_layout

Streams = dict[int, Tensor]
"""The stream after each block, by its number: (B, N, D), the class token first."""


class BlockOutputs:
    """Reads the stream after each block of a model."""

    def __init__(self, model: nn.Module, survey: Survey) -> None:
        self.model = model
        last = {handle.site.block: handle for handle in survey.handles}
        self.last: dict[int, Handle] = {n: handle for n, handle in last.items() if not self._is_mean(handle)}
        """The last branch of each block whose output is a stream."""

    def _is_mean(self, handle: Handle) -> bool:
        """Whether a block was trimmed so that its last layer runs on the mean of tokens; it has no stream of tokens."""
        return any(isinstance(module, MeanStep) for module in self.model.get_submodule(handle.owner).modules())

    @contextmanager
    def watch(self, images: int) -> Iterator[Streams]:
        """Yield a dictionary that the next forward pass, of so many images, fills."""
        streams = Streams()
        with ExitStack() as hooks:
            for handle in self.last.values():
                block = self.model.get_submodule(handle.owner)
                hooks.callback(block.register_forward_hook(partial(_keep, streams, images, handle)).remove)
            yield streams


def _keep(streams: Streams, images: int, handle: Handle, _: nn.Module, args: Any, output: Any) -> None:
    while isinstance(output, tuple):  # of transformers, or of a block in a tail; the stream comes first
        output = output[0]
    output = output.movedim(handle.images_at, 0)
    if output.ndim == 2:  # one vector, to which a head has pooled the tokens
        output = output.unsqueeze(1)
    tokens = output.movedim(_channel_axis(output, handle), -1)
    streams[handle.site.block] = tokens.reshape(images, -1, tokens.shape[-1])  # parts of an image may be apart


def _channel_axis(stream: Tensor, handle: Handle) -> int:
    """Return the axis of the channels in (B, N, D) or in feature maps (B, H, W, D) or (B, D, H, W).

    The last branch may get its values in another layout than that of the stream.
    """
    if handle.parts is None or stream.ndim == 3:
        return -1
    layout = handle.parts.gate_layout
    own = [1 + layout.axis] if len(layout.shape) == stream.ndim - 1 else []
    return next((axis for axis in (*own, -1, 1) if stream.shape[axis] == layout.width), -1)


class HiddenLoss:
    """The mean over blocks of 1 - cosine between the streams of a student and its teacher.

    Streams are normed first by a LayerNorm without weights, because the values of a few channels are a hundred times
    as large as the rest. The cosine is that of each token, averaged over class tokens and over patches apart; both
    count half. Blocks whose patches the student does not compute are compared by their class tokens.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        ours = survey_of(student)
        theirs = survey_of(teacher, ours.input_size)
        self.student, self.teacher = BlockOutputs(student, ours), BlockOutputs(teacher, theirs)
        self.protected = protected_tokens(teacher, ours.input_size)
        self._channels = _channels_of(student, teacher)
        blocks = [survey.anatomy.blocks for survey in (ours, theirs)]
        if blocks[0] != blocks[1]:
            raise TrainError(
                f"hidden states are compared block by block, but the student has {blocks[0]} blocks and the teacher "
                f"{blocks[1]}; use the model that was pruned as teacher"
            )

    def targets(self, teacher: Streams) -> Streams:
        """Return the streams of the teacher as they are compared: the channels that the student has, normed."""
        return {number: _normed(self._kept(stream)) for number, stream in teacher.items()}

    def _kept(self, stream: Tensor) -> Tensor:
        return stream if self._channels is None else stream[..., self._channels]

    def tokens(self, student: Streams, targets: Streams) -> dict[int, int]:
        """Return how many tokens of each block are compared, the first ones; blocks without any are left out."""
        counts = {number: self._common(student[number], targets[number]) for number in sorted(student.keys() & targets)}
        found = {number: count for number, count in counts.items() if count}
        if not found:
            raise TrainError("the student computes no tokens that its teacher computes; set distillation.hidden to 0")
        return found

    def _common(self, student: Tensor, target: Tensor) -> int:
        if student.shape[-1] != target.shape[-1]:
            raise TrainError(
                f"the stream of the student has {student.shape[-1]} channels and that of the teacher "
                f"{target.shape[-1]}, and which of them were kept is not recorded; narrow the model again, or set "
                "distillation.hidden to 0"
            )
        counts = student.shape[1], target.shape[1]
        if target.shape[-1] == 1:  # which a norm turns into zeros; a block of CSATv2 has such a map
            return 0
        return counts[0] if counts[0] == counts[1] else min(self.protected, *counts)

    def __call__(self, student: Streams, targets: Streams) -> Tensor:
        """Return the loss, a scalar, for a student's streams and the ``targets`` of the same images."""
        counts = self.tokens(student, targets)
        return torch.stack([self._of_block(student[n][:, :c], targets[n][:, :c]) for n, c in counts.items()]).mean()

    def _of_block(self, student: Tensor, target: Tensor) -> Tensor:
        cosines = F.cosine_similarity(_normed(student), target.float(), dim=-1)  # (B, N)
        parts = [part for part in (cosines[:, : self.protected], cosines[:, self.protected :]) if part.shape[1]]
        return 1 - torch.stack([part.mean() for part in parts]).mean()


def _normed(stream: Tensor) -> Tensor:
    return F.layer_norm(stream.float(), stream.shape[-1:])


def _channels_of(student: nn.Module, teacher: nn.Module) -> list[int] | None:
    """Return which channels of the teacher's stream the student has; None if all, or if that is not recorded."""
    ours, theirs = (record.channels if (record := record_of(model)) else None for model in (student, teacher))
    if ours is None or ours == theirs:
        return None
    places = {channel: place for place, channel in enumerate(theirs)} if theirs else {one: one for one in ours}
    if missing := [channel for channel in ours if channel not in places]:
        raise TrainError(
            f"the student has channel {missing[0]} of the stream, which the teacher has not; use the model that was "
            "pruned as teacher, or set distillation.hidden to 0"
        )
    return [places[channel] for channel in ours]


def protected_tokens(model: nn.Module, input_size: InputSize | None = None) -> int:
    """Return how many tokens of ``model`` are class, distillation or register tokens; 0 where all are patches."""
    try:
        record = with_layout(model, record_of(model) or Record(survey_of(model, input_size), Plan()))
    except ModelError:  # its blocks get maps, or tokens of several sizes
        return 0
    return layout_of(record).protected
