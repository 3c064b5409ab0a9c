"""What detectors and segmenters share: a backbone, class names, their own loss, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from torch import nn

from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import DataError
from hetdpt.core.modules import memory_advice
from hetdpt.core.processes import gather_lists
from hetdpt.data.batches import OrderedBatches
from hetdpt.tasks.annotated import AnnotatedBatch
from hetdpt.tasks.backbone import Backbone


class TaskScores(Protocol):
    """The scores of a model; a frozen dataclass of plain numbers."""

    @property
    def score(self) -> float:
        """The one number that training reports, in percent."""

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Files that could not be read and were not scored."""

    def record(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""


class TaskModel(nn.Module):
    """A backbone with the head of a task.

    ``forward(images, targets)`` returns the loss of a batch, ``forward(images)`` the output.
    """

    task: ClassVar[str]
    """The row of ``TASKS`` that it belongs to."""

    def __init__(self, backbone: Backbone, classes: Sequence[str], config: Any) -> None:
        super().__init__()
        self.backbone, self.classes, self.config = backbone, tuple(classes), config

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its images."""
        return input_size_of(self.backbone.model)[1:]

    def require_batch(self, images: int) -> None:
        """Raise ``TrainError`` if it cannot be trained with so few ``images`` per batch."""

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the model in the backbone exempts; timm calls this method."""
        model: Any = self.backbone.model
        own = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        return {f"backbone.model.{name}" for name in own}


def measure_batches(
    batches: OrderedBatches, measure: Callable[[AnnotatedBatch], int], progress: Callable[[int, int], None] | None
) -> list[str]:
    """Call ``measure`` with each batch and return the files that could not be read, of all processes.

    ``measure`` returns how many images it has measured; ``DataError`` if there was none on any process.
    """
    count, unreadable = 0, list[str]()
    for number, batch in enumerate(batches, 1):
        with memory_advice(f"{len(batch.images)} images at once do not fit in memory; lower --batch-size"):
            count += measure(batch)
        unreadable += batch.unreadable
        if progress is not None:
            progress(number, len(batches))
    unreadable = sorted(set(gather_lists(unreadable)))
    if not sum(gather_lists([count])):
        raise DataError(f"none of the images can be read, for example {unreadable[0]}; check the files")
    return unreadable
