"""What a comparison of methods came to: one row for each method, number of layers and seed, and what they sum up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from torch import Tensor

from hetdpt.core.errors import FileError, first_line
from hetdpt.core.plan import Plan
from hetdpt.data.sources import Data
from hetdpt.data.streams import Stream
from hetdpt.store.atomic import parse_json

RESULTS = "results.json"
DRAWS = 10_000
DERIVED = ("splits", "accuracy", "spread")  # of a summary, in JSON for those who read it
RIGHT, WRONG, UNREAD = "1", "0", "-"


@dataclass(frozen=True)
class PlanSpeed:
    """What the merged model costs beside the dense one."""

    speedup: float
    """Of interleaved runs."""
    low: float
    """Lower end of its 95 % interval over rounds."""
    high: float
    macs: int
    """Of one image."""
    params: int
    ms: float | None = None
    """Of one batch, when it was timed in turns with the others; None in what was written before that was kept."""


@dataclass(frozen=True)
class ComparisonRow:
    """What one method came to, for one number of layers and one seed."""

    layers: int
    method: str
    seed: int
    plan: Plan
    start: float
    """Accuracy in percent before the fine-tuning."""
    accuracy: float
    """And of the merged model after its last epoch."""
    seconds: float
    """That the choice took, since the last restart; to sample accuracy for its split comes on top."""
    speed: PlanSpeed

    @property
    def split(self) -> str:
        """As attention+activation.

        >>> speed = PlanSpeed(1.2, 1.1, 1.3, 10, 10)
        >>> ComparisonRow(3, "hetdpt", 0, Plan(attention=(1,), activation=(0, 2)), 70.0, 75.0, 1.5, speed).split
        '1+2'
        """
        return _split(self.plan)


def _split(plan: Plan) -> str:
    return f"{plan.budget.attention}+{plan.budget.activation}"


@dataclass(frozen=True)
class DenseModel:
    """The model that nothing was taken from."""

    accuracy: float
    images: int
    """That accuracies are measured on."""
    macs: int
    params: int
    throughput: float
    """Images per second."""


@dataclass(frozen=True)
class Difference:
    """By how many points of accuracy a method is better than another, on the same images and seeds."""

    value: float
    low: float
    """Lower end of the interval that holds 95 % of the bootstrap means, over images and seeds."""
    high: float


@dataclass(frozen=True)
class MethodSummary:
    """What one method came to for one number of layers, over all seeds."""

    layers: int
    method: str
    plans: tuple[Plan, ...]
    """Each that a seed led to, once."""
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    """One for each seed."""
    difference: Difference | None
    """To the first method; None for itself, and where images cannot be told apart (a stream of shards)."""
    start: float
    """Mean accuracy before the fine-tuning."""
    speedup: float
    """Mean over seeds."""
    macs: float
    """Mean part that is left of the dense model's."""
    seconds: float
    """Mean, of the choice."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Those of the plans, each once, as attention+activation."""
        return tuple(dict.fromkeys(map(_split, self.plans)))

    @property
    def accuracy(self) -> float:
        """Mean over seeds."""
        return fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class MethodComparison:
    """All that was compared in one directory."""

    first: str
    """The method that the others are compared to."""
    measured: str
    """Where and how speed was: device, dtype and batch."""
    dense: DenseModel
    rows: tuple[ComparisonRow, ...]
    summaries: tuple[MethodSummary, ...]
    warnings: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(summary.method for summary in self.summaries))

    def of(self, method: str) -> list[MethodSummary]:
        """Return what ``method`` came to, fewer layers first."""
        return [summary for summary in self.summaries if summary.method == method]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, with what follows from it."""
        values = asdict(self)
        for row, known in zip(values["rows"], self.rows, strict=True):
            row["split"] = known.split
        for summary, found in zip(values["summaries"], self.summaries, strict=True):
            summary |= {name: getattr(found, name) for name in DERIVED}
        return values

    @classmethod
    def read(cls, directory: Path) -> MethodComparison:
        """Return what is written in a directory of ``hetdpt compare``; ``FileError`` if there is none."""
        file = directory / RESULTS
        try:
            return cls.from_dict(parse_json(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FileError(f"{file} cannot be read ({first_line(error)}); run hetdpt compare again") from None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MethodComparison:
        """Return what ``to_dict`` made ``values`` of."""
        return cls(
            values["first"],
            values["measured"],
            DenseModel(**values["dense"]),
            tuple(_row(row) for row in values["rows"]),
            tuple(_summary(summary) for summary in values["summaries"]),
            tuple(values["warnings"]),
        )


def _row(values: dict[str, Any]) -> ComparisonRow:
    known = {name: value for name, value in values.items() if name != "split"}
    return ComparisonRow(**{**known, "plan": Plan.from_dict(values["plan"]), "speed": PlanSpeed(**values["speed"])})


def _summary(values: dict[str, Any]) -> MethodSummary:
    known = {name: value for name, value in values.items() if name not in DERIVED}
    lists = {name: tuple(values[name]) for name in ("seeds", "accuracies")}
    plans = tuple(map(Plan.from_dict, values["plans"]))
    difference = Difference(**values["difference"]) if values["difference"] else None
    return MethodSummary(**{**known, **lists, "plans": plans, "difference": difference})


def summarise(
    rows: Sequence[ComparisonRow], answers: Sequence[str | None], dense: DenseModel, first: str
) -> tuple[MethodSummary, ...]:
    """Return what each method came to for each number of layers, compared to the method ``first``.

    ``answers`` say for every row which images the model got right, as ``RIGHT``, ``WRONG`` and ``UNREAD``.
    """
    right = {(row.layers, row.method, row.seed): found for row, found in zip(rows, answers, strict=True)}
    groups: dict[tuple[int, str], list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault((row.layers, row.method), []).append(row)
    found = []
    for (layers, method), group in groups.items():
        pairs = [(right[layers, method, row.seed], right.get((layers, first, row.seed))) for row in group]
        found.append(
            MethodSummary(
                layers=layers,
                method=method,
                plans=tuple(dict.fromkeys(row.plan for row in group)),
                seeds=tuple(row.seed for row in group),
                accuracies=tuple(row.accuracy for row in group),
                difference=difference_of(pairs) if method != first else None,
                start=fmean(row.start for row in group),
                speedup=fmean(row.speed.speedup for row in group),
                macs=fmean(row.speed.macs for row in group) / dense.macs,
                seconds=fmean(row.seconds for row in group),
            )
        )
    return tuple(found)


class Answers:
    """Which validation images of ``data`` a model gets right."""

    def __init__(self, data: Data) -> None:
        has_no_numbers = data.val is None or isinstance(data.val, Stream)
        self._found = None if has_no_numbers else [UNREAD] * len(data.val or ())

    def add(self, indices: Tensor, is_right: Tensor) -> None:
        """Take the answers to some images, as ``evaluate`` gives them."""
        if self._found is not None:
            for index, right in zip(indices.tolist(), is_right.tolist(), strict=True):
                self._found[index] = RIGHT if right else WRONG

    @property
    def text(self) -> str | None:
        """One mark per image; None where images have no numbers, as in a stream of shards."""
        return "".join(self._found) if self._found is not None else None


def difference_of(pairs: Sequence[tuple[str | None, str | None]]) -> Difference | None:
    """Return how much better the first of each pair is, the mean over seeds; a pair is two models of one seed.

    The bootstrap draws images, each with the answers of all models to it, and seeds where there are several. Pairs
    that lack an answer are left out.

    >>> difference_of([("1101", "1001")]).value
    25.0
    >>> difference_of([("11-1", "1001")]).value  # of three images
    33.33...
    """
    known = [(one, other) for one, other in pairs if one and other and len(one) == len(other)]
    if not known:
        return None
    answers = np.array([[list(one), list(other)] for one, other in known])  # (seeds, 2, images)
    is_read = (answers != UNREAD).all(axis=(0, 1))
    right = (answers[:, :, is_read] == RIGHT).astype(int)
    gains = right[:, 0] - right[:, 1]  # (seeds, images)
    seeds, images = gains.shape
    if not images:
        return None
    values, counts = np.unique(gains, axis=1, return_counts=True)  # images of the same gains are one to the bootstrap
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(images, counts / images, DRAWS) / images
    chosen = generator.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds
    means = 100 * np.einsum("ds,sv,dv->d", chosen, values, drawn)
    low, high = np.percentile(means, (2.5, 97.5))
    return Difference(float(100 * gains.mean()), float(low), float(high))
