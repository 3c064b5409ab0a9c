"""How good a student is after an epoch: its accuracy and, on held-out images, its distance to the teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hetdpt.core.processes import sum_over_processes
from hetdpt.data.batches import EvaluationBatches
from hetdpt.data.views import Batch
from hetdpt.measurement.accuracy import measure_accuracy
from hetdpt.measurement.agreement import Damage
from hetdpt.training.trainer import Evaluation


class Evaluator:
    """Measures models on the same images again and again.

    ``teacher`` gives the logits of images. It is asked once about each, and how far the models' answers are from its
    answers then decides which epoch is the best: a few hundred images are too few for accuracies to tell epochs apart.
    """

    def __init__(self, batches: EvaluationBatches, teacher: Callable[[Tensor], Tensor] | None = None) -> None:
        self._batches, self._teacher = batches, teacher
        self._answers: dict[int, Tensor] = {}
        self.unreadable: set[str] = set()

    def __call__(self, model: nn.Module) -> Evaluation:
        """Return how good ``model`` is, over all processes."""
        damage = Damage(is_classifier=True)

        def compare(batch: Batch, logits: Tensor) -> None:
            is_read = batch.targets >= 0
            damage.add(self._answers_to(batch, logits)[is_read], logits[is_read])

        scores = measure_accuracy(model, self._batches, watch=compare if self._teacher is not None else None)
        self.unreadable.update(scores.unreadable)
        if self._teacher is None:
            return Evaluation(scores.top1)
        sums = torch.tensor([damage.lost, damage.whole], dtype=torch.float64)
        damage.lost, damage.whole = sum_over_processes(sums, next(model.parameters()).device).tolist()
        return Evaluation(scores.top1, damage.value)

    def _answers_to(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return the logits of the teacher for a batch, whose images come in the same batches every time."""
        assert self._teacher is not None
        first = int(batch.indices[0])
        if first not in self._answers:
            self._answers[first] = self._teacher(batch.images.to(logits.device)).float().cpu()
        return self._answers[first]
