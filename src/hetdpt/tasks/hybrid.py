"""One-to-one and one-to-many queries side by side (Jia et al., "DETRs with Hybrid Matching", 2023), and their loss.

Knows queries, boxes and targets, but no layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss

from hetdpt.core.processes import process_count, sum_over_processes

Truth = Mapping[str, Tensor]
"""The objects in an image: ``boxes`` (n, 4), centre, width and height relative to it, and ``class_labels`` (n,)."""
FOCAL = 0.25
"""The weight alpha of objects in the focal loss."""


class Answer(NamedTuple):
    """The output of queries for each image."""

    logits: Tensor
    """(B, Q, classes)."""
    boxes: Tensor
    """(B, Q, 4): centre, width and height, relative to the image."""

    def part(self, queries: slice) -> Answer:
        """Return the output of some of the queries."""
        return Answer(self.logits[:, queries], self.boxes[:, queries])


class Weights(NamedTuple):
    """Weights of labels, of the distance between boxes and of their overlap, in the loss and in the matching."""

    label: float
    box: float
    overlap: float


def apart(one: int, many: int, device: torch.device) -> Tensor:
    """Return which queries attend to each other (Q, Q): the first ``one`` among themselves, and the other ``many``.

    >>> apart(1, 2, torch.device("cpu")).int().tolist()
    [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    """
    is_many = torch.arange(one + many, device=device) >= one
    return is_many[:, None] == is_many


def repeated(truths: Sequence[Truth], times: int) -> list[Truth]:
    """Return the truths with every object repeated ``times`` times."""
    return [{name: value.repeat(times, *[1] * (value.ndim - 1)) for name, value in truth.items()} for truth in truths]


class MatchedLoss:
    """The loss of answers that are matched with objects one to one, optimally (Carion et al., 2020).

    Focal loss for labels, L1 distance and generalised overlap for boxes, per object.
    """

    def __init__(self, classes: int, weights: Weights) -> None:
        self._weights = weights
        self._matcher: Any = DeformableDetrHungarianMatcher(*weights)
        self._criterion: Any = DeformableDetrImageLoss(self._matcher, classes, FOCAL, [])

    def match(self, answer: Answer, truths: Sequence[Truth]) -> list[tuple[Tensor, Tensor]]:
        """Return for each image the matched queries and the object of each."""
        found: list[tuple[Tensor, Tensor]] = self._matcher(_spelled(answer), truths)
        return found

    def __call__(self, answers: Sequence[Answer], truths: Sequence[Truth], objects: float) -> Tensor:
        """Return the sum of the losses of ``answers``, each matched separately, divided by ``objects`` or 1."""
        return torch.stack([*self._losses(answers, truths, max(1.0, objects))]).sum()

    def _losses(self, answers: Sequence[Answer], truths: Sequence[Truth], objects: float) -> Iterator[Tensor]:
        for answer in answers:
            answer = Answer(answer.logits.float(), answer.boxes.float())
            if not (answer.logits.isfinite().all() and answer.boxes.isfinite().all()):
                yield answer.logits.sum() * torch.nan  # nothing can be matched; training reports it and stops
                continue
            spelled, matched = _spelled(answer), self.match(answer, truths)
            label = self._criterion.loss_labels(spelled, truths, matched, objects)["loss_ce"]
            box = self._criterion.loss_boxes(spelled, truths, matched, objects)
            found: Tensor = (
                self._weights.label * label
                + self._weights.box * box["loss_bbox"]
                + self._weights.overlap * box["loss_giou"]
            )
            yield found


def objects_per_process(truths: Sequence[Truth], device: torch.device) -> float:
    """Return the average number of objects per process; every process must call this."""
    count = torch.tensor(float(sum(len(truth["class_labels"]) for truth in truths)), device=device)
    return (sum_over_processes(count) / process_count()).item()


def _spelled(answer: Answer) -> dict[str, Tensor]:
    return {"logits": answer.logits, "pred_boxes": answer.boxes}
