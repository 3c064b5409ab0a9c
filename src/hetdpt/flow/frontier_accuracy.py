"""The accuracy of every point of a frontier on labelled validation images. It decides nothing, and trains nothing.

Every model is a task whose result is a file, so that a kill loses one model at most, and processes may share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.models import num_classes_of
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.data.sources import Data, check_classes, open_data
from hetdpt.data.subset import subset
from hetdpt.flow.execution import Execution
from hetdpt.measurement.accuracy import BATCH, evaluate
from hetdpt.reduce.apply import apply_
from hetdpt.results import FrontierPoint, FrontierResult, Scores
from hetdpt.store.jobs import Guard, Task
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.tail import trim_if_possible_

FOLDER = "accuracy"  # of the run directory
DENSE = Plan()


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation images, and how they are read."""

    data: Data
    batch_size: int = BATCH
    execution: Execution = field(default_factory=Execution)


@dataclass(frozen=True)
class PlanScores:
    """The accuracy of a plan, and what it was measured on."""

    plan: Plan
    facts: dict[str, Any]
    """``Data.facts`` of the validation images."""
    scores: Scores


def open_validation(
    name: str, model: nn.Module, images: int, *, root: Path | None = None, download: bool = False
) -> Data:
    """Return at most ``images`` validation images of the data called ``name``, with the classes in proportion.

    ``DataError`` says why there are none: no labels, other classes than the model's, or no split ``train``, without
    which replacements would be fitted on the images of ``val``.
    """
    opened = open_data(name, root=root, download=download)
    check_classes(opened.num_classes, num_classes_of(model))
    val = opened.val
    assert val is not None
    if images < len(val):
        val = subset(val, fraction=(images - 0.5) / len(val))  # which is rounded up
    return replace(opened, train=None, val=val)


def with_accuracy(
    directory: Path,
    found: FrontierResult,
    model: nn.Module,
    batches: Iterable[Tensor],
    validation: Validation,
    *,
    watch: Callable[[FrontierPoint, float], None] | None = None,
) -> FrontierResult:
    """Return ``found`` with the accuracy of ``model`` and of every point.

    A plan is applied as ``hetdpt apply`` does, fitted on ``batches``. Results are kept in ``directory``, that of the
    search; called again, only models that are not measured yet are. ``watch`` is called with every point and its
    speedup.
    """
    folder, plans = directory / FOLDER, (DENSE, *(point.plan for point in found.points))
    measure = partial(_measure, model, batches, validation)
    tasks = [_task(folder, validation.data, number, plan, measure) for number, plan in enumerate(plans)]
    points, dense = [*found.points], None
    for done in validation.execution.run(folder, tasks):
        if not done.subject:
            dense = done.result.scores
            continue
        point = replace(points[done.subject - 1], accuracy=done.result.scores)
        points[done.subject - 1] = point
        if watch is not None:
            watch(point, found.speedup(point))
    return replace(found, points=tuple(points), dense_accuracy=dense)


def _task(
    folder: Path, data: Data, number: int, plan: Plan, measure: Callable[[int, Plan], Scores]
) -> Task[int, PlanScores]:
    """Return the task of one model; a file about another plan or other images is made again."""

    def is_same(kept: PlanScores) -> bool:
        return (kept.plan, kept.facts) == (plan, data.facts())

    def make(_: Guard) -> PlanScores:
        return PlanScores(plan, data.facts(), measure(number, plan))

    key = f"{number:02d}"
    return Task.to_file(key, number, folder / f"{key}.json", PlanScores, make, is_complete=is_same)


def _measure(model: nn.Module, batches: Iterable[Tensor], validation: Validation, number: int, plan: Plan) -> Scores:
    """Return the scores of the model that ``hetdpt apply`` makes of ``plan``."""
    execution, name = validation.execution, f"point {number}" if number else "the dense model"
    if number:
        model = merge_(apply_(clone(model), plan, batches, progress=execution.stage(f"fitting {name}")))
        trim_if_possible_(model)
    return evaluate(
        model,
        validation.data,
        batch_size=validation.batch_size,
        workers=execution.workers,
        progress=execution.stage(f"accuracy of {name}"),
    )
