"""The accuracy of every point of a frontier on labelled validation images. It decides nothing, and trains nothing.

What is measured is kept in a run directory of its own, model by model, so that a kill loses one model at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from hetdpt.adapters.models import num_classes_of
from hetdpt.core.modules import clone, digest
from hetdpt.core.plan import Plan
from hetdpt.core.progress import StageProgress
from hetdpt.data.sources import Data, check_classes, open_data
from hetdpt.data.streams import Stream
from hetdpt.data.subset import subset
from hetdpt.measurement.accuracy import BATCH, evaluate
from hetdpt.reduce.apply import apply_
from hetdpt.results import FrontierPoint, FrontierResult, Scores, from_json, to_json
from hetdpt.store.run_directory import Run
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.tail import trim_if_possible_

DENSE = Plan()


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Labelled images to measure accuracy on, and how they are read."""

    data: Data
    """Its split ``val`` is used."""
    batch_size: int = BATCH
    workers: int = 0

    @classmethod
    def open(
        cls, name: str, model: nn.Module, images: int, *, root: Path | None = None, download: bool = False
    ) -> Validation:
        """Return at most ``images`` validation images of the data called ``name``, with the classes in proportion.

        ``DataError`` says why there are none: no labels, no split of their own, or other classes than the model's.
        """
        opened = open_data(name, root=root, download=download)  # without train, images of val would be fitted on
        check_classes(opened.num_classes, num_classes_of(model))
        val = opened.val
        assert val is not None
        if images < len(val) and not isinstance(val, Stream):
            val = subset(val, fraction=(images - 0.5) / len(val))  # which is rounded up
        return cls(data=replace(opened, train=None, val=val))


def with_accuracy(
    directory: Path,
    found: FrontierResult,
    model: nn.Module,
    batches: Iterable[Tensor],
    validation: Validation,
    *,
    watch: Callable[[FrontierPoint, float], None] | None = None,
    progress: StageProgress | None = None,
) -> FrontierResult:
    """Return ``found`` with the accuracy of ``model`` and of every point, whose plan is applied and fitted on ``batches``.

    Scores are kept in ``directory``; ``watch`` is called with every point that was measured now, and its speedup.
    """
    run = Run.open(directory, {"model": digest(model), **validation.data.facts()})
    with run.alone():
        known = _known(run)
        points = list[FrontierPoint]()
        for number, plan in enumerate((DENSE, *(point.plan for point in found.points))):
            is_new = _key(plan) not in known
            if is_new:
                text = f"accuracy of model {number + 1}/{len(found.points) + 1}"
                known[_key(plan)] = _scores(model, plan, batches, validation, partial(progress, text) if progress else None)
                run.checkpoints.keep({"scores": {key: to_json(scores) for key, scores in known.items()}})
            if plan is not DENSE:
                points.append(replace(found.points[number - 1], accuracy=known[_key(plan)]))
                if is_new and watch is not None:
                    watch(points[-1], found.speedup(points[-1]))
    return replace(found, points=tuple(points), dense_accuracy=known[_key(DENSE)])


def _known(run: Run) -> dict[str, Scores]:
    state = run.checkpoints.latest()
    return from_json(dict[str, Scores], state["scores"], run.directory) if state else {}


def _key(plan: Plan) -> str:
    return replace(plan, fits=()).to_json()


def _scores(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Tensor],
    validation: Validation,
    progress: Callable[[int, int], None] | None,
) -> Scores:
    """Return the scores of the model that ``hetdpt apply`` makes of ``plan``."""
    if not plan.is_empty:
        model = merge_(apply_(clone(model), plan, batches))
        trim_if_possible_(model)
    reading = {"batch_size": validation.batch_size, "workers": validation.workers}
    return evaluate(model, validation.data, **reading, progress=progress)
