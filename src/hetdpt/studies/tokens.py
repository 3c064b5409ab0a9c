"""Accuracy against speed of models with fewer and fewer tokens, such as a dense and a pruned one (paper, Fig. 8).

A run directory that processes of one or several machines fill together:

run.json      the settings; models and numbers of tokens may be added later
points/       one file for each model and number of tokens: its costs and its accuracy
speed.json    the speed of all of them, timed in turns when all else is finished
claims/       which process works on which task
tokens.json   all results; also as tokens.csv and tokens.png
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.models import input_size_of, num_classes_of
from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import DataError, MeasureError, ModelError, PlanError
from hetdpt.core.format import sides
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import Budget, Measurement
from hetdpt.core.tokens import Tokens
from hetdpt.data.sources import Data, check_classes, open_data
from hetdpt.data.subset import subset
from hetdpt.flow.execution import Execution
from hetdpt.measurement.accuracy import BATCH, evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.report.tokens import draw
from hetdpt.results import Ratio
from hetdpt.store.atomic import write_csv, write_json, written
from hetdpt.store.jobs import Finished, Guard, Task
from hetdpt.store.run_directory import share
from hetdpt.surgery.record import InputSize, record_of, require_record, survey_of
from hetdpt.surgery.remove import ready

POINTS, SPEED = "points", "speed.json"
RESULTS, TABLE, FIGURE = "tokens.json", "tokens.csv", "tokens.png"


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """How tokens are reduced, how many, and how that is measured."""

    r: tuple[int, ...]
    """Tokens to remove in each block with attention; 0,4,8 tries several. 0, the whole model, is always measured."""
    method: str = "tome"
    """tome merges similar tokens; gtp adds the least important tokens to others."""
    schedule: str = "constant"
    """``constant``, or ``decreasing``: more in the first blocks, as many in all."""
    fraction: float | None = None
    """Part of the validation images that accuracy is measured on; None for all."""
    per_class: int | None = None
    """Or: images of each class."""
    batch_size: int = BATCH
    """Images at once where accuracy is measured; it changes no number."""
    batch: int | None = None
    """Images at once where speed is measured: 256 on a GPU and 8 on a CPU by default."""
    runs: int = 100
    """Rounds in which each model runs once."""
    seconds: float | None = 60.0
    """Time limit for the rounds, of which there are five at least."""

    def __post_init__(self) -> None:
        if not self.r or len(set(self.r)) < len(self.r):
            raise PlanError(f"r is {self.r}; one number of tokens or more, each once, was expected, such as (0, 4, 8)")
        for r in self.r:
            self.tokens(r)  # raises if there is no such reduction

    def tokens(self, r: int) -> Tokens:
        return Tokens(self.method, r, self.schedule)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All values of ``r`` that are measured, in order."""
        return tuple(sorted({0, *self.r}))


@dataclass(frozen=True)
class TokensCase:
    """One model, and how many tokens each block removes."""

    model: str
    r: int

    def __str__(self) -> str:
        return f"{self.model} with {self.r} tokens fewer per block" if self.r else f"{self.model} with all its tokens"


@dataclass(frozen=True)
class Point:
    """The costs and the accuracy of a case."""

    tokens_left: int
    """Of one image, at the end."""
    macs: int
    """Of one image."""
    params: int
    top1: float | None = None
    """In percent; None, as all that follow, where there are no labelled images."""
    low: float | None = None
    """Lower end of its 95 % interval."""
    high: float | None = None
    images: int | None = None


@dataclass(frozen=True)
class TokensSpeed:
    """The speed of a case, timed in turns with all others."""

    throughput: Measurement
    speedup: Ratio
    """Over the first model with all its tokens."""


Speeds = dict[str, TokensSpeed]
"""By the key of the case."""


@dataclass(frozen=True)
class TokensRow:
    """All measurements of a case."""

    model: str
    tokens: Tokens
    removed: Budget
    """Layers removed from the model before."""
    point: Point
    speed: TokensSpeed

    def to_dict(self) -> dict[str, Any]:
        """Return it flat, as plain JSON."""
        timed, ratio = self.speed.throughput, self.speed.speedup
        return {
            "model": self.model,
            **asdict(self.removed),
            **{name: getattr(self.tokens, name) for name in ("method", "r", "schedule")},
            **asdict(self.point),
            "throughput": timed.value,
            "throughput_spread": timed.spread,
            **{name: getattr(timed, name) for name in ("batch", "device", "dtype", "runs")},
            "speedup": ratio.value,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
        }


TokensDone = Finished[TokensCase | None, Point | Speeds]
"""The case is None where all cases were timed."""


def tokens_into(
    directory: str | Path,
    models: Mapping[str, nn.Module],
    data: str | Data,
    config: TokensConfig,
    execution: Execution | None = None,
) -> Iterator[TokensDone]:
    """Measure each of ``models`` with all and with fewer of its tokens, and yield every result once it is on disk.

    Speedups are over the first model with all its tokens. Called again, it resumes where it was killed; with other
    models beside the first, or other numbers of tokens, it measures the new ones and times all of them again. Several
    processes may share one ``directory`` that all of them see: each takes the next task that no other works on.
    """
    directory, execution = Path(directory), execution or Execution()
    execution.require_alone("float32", "tokens are reduced")
    opened = data if isinstance(data, Data) else open_data(data, splits=("val",))
    bench = Bench(models, opened, config, execution)
    share(directory, _asked(bench))
    points, speeds = dict[TokensCase, Point](), Speeds()
    for done in execution.run(directory, _tasks(directory, bench)):
        if done.subject:
            points[done.subject] = done.result
        else:
            speeds = done.result
        yield done
    _write(directory, bench.rows(points, speeds))


def _tasks(directory: Path, bench: Bench) -> Iterator[Task[TokensCase | None, Any]]:
    for case in bench.cases:
        key, measure = bench.key(case), partial(_measure, bench, case)
        yield Task.to_file(key, case, directory / POINTS / f"{key}.json", Point, measure)
    keys = set(map(bench.key, bench.cases))
    yield Task.to_file(
        "time", None, directory / SPEED, Speeds, lambda _: bench.time(), is_last=True, is_complete=keys.issubset
    )


def _measure(bench: Bench, case: TokensCase, _: Guard) -> Point:
    return bench.measure(case)


def measure_tokens(
    models: Mapping[str, nn.Module], data: Data | None, config: TokensConfig, execution: Execution | None = None
) -> list[TokensRow]:
    """Return the rows of ``tokens_into`` without a directory; without ``data`` there is no accuracy."""
    bench = Bench(models, data, config, execution or Execution())
    return bench.rows({case: bench.measure(case) for case in bench.cases}, bench.time())


class Bench:
    """The models, and how each case is measured."""

    def __init__(
        self, models: Mapping[str, nn.Module], data: Data | None, config: TokensConfig, execution: Execution
    ) -> None:
        _require_comparable(models)
        device = find_device(execution.device)
        self.models = {name: ready(model.to(device), "plain") for name, model in models.items()}
        self.digests = {name: fingerprint(model) for name, model in models.items()}
        if len(set(self.digests.values())) < len(models):
            raise MeasureError(f"{' and '.join(models)} are not all different models; give each once")
        self.data = _chosen(data, config, self.models) if data else None
        self.config, self.execution = config, execution
        self.cases = [TokensCase(name, r) for name in models for r in config.numbers]
        # all at once: they share their weights, and impossible ones raise before anything is measured
        self.reduced = {case: self._reduced(case) for case in self.cases}

    def key(self, case: TokensCase) -> str:
        """Return its name among files and claims."""
        return f"{self.digests[case.model][:12]}-{case.r}"

    def _reduced(self, case: TokensCase) -> nn.Module:
        """Return the model of ``case``, which shares the weights of the one that was given."""
        model = self.models[case.model]
        return reduce_tokens_(clone(model), self.config.tokens(case.r)) if case.r else model

    def measure(self, case: TokensCase) -> Point:
        model, execution, config = self.reduced[case], self.execution, self.config
        size, number = input_size_of(model), self.cases.index(case) + 1
        costs = Costs.of(model, size)
        left = tokens_left(model, size), costs.macs, costs.params
        if self.data is None:
            return Point(*left)
        scores = evaluate(
            model,
            self.data,
            batch_size=config.batch_size,
            workers=execution.workers,
            progress=execution.stage(f"{number} of {len(self.cases)}: {case}, evaluating"),
        )
        return Point(*left, scores.top1, scores.low, scores.high, scores.count)

    def time(self) -> Speeds:
        """Return the speed of all cases, by key."""
        config = self.config
        timed = measure_throughput(
            {self.key(case): model for case, model in self.reduced.items()},
            batch=config.batch,
            runs=config.runs,
            seconds=config.seconds,
            progress=self.execution.stage("timing all models in turns"),
        )
        return {key: TokensSpeed(timed.throughput[key], timed.speedup[key]) for key in timed.throughput}

    def rows(self, points: Mapping[TokensCase, Point], speeds: Speeds) -> list[TokensRow]:
        found = []
        for case in self.cases:
            removed = require_record(self.models[case.model]).plan.budget
            measured = points[case], speeds[self.key(case)]
            found.append(TokensRow(case.model, self.config.tokens(case.r), removed, *measured))
        return found


def tokens_left(model: nn.Module, size: InputSize) -> int:
    """Return how many tokens of an image the last FFNs are given, class and distillation token among them."""
    handles = [handle for handle in survey_of(model, size).handles if handle.site.kind == "activation"]
    counts: list[int] = []

    def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        counts.append(given[0].shape[1])  # (B, N, D)

    @contextmanager
    def watch(copy: nn.Module, _: dict[str, Tensor], __: Tensor) -> Iterator[None]:
        for handle in handles:
            copy.get_submodule(handle.ffn.first if handle.ffn else handle.site.path).register_forward_pre_hook(look)
        yield

    dry_run(model, (1, *size), watch)
    return min(counts)  # where places are filled again for a mean over them, not the last


def _require_comparable(models: Mapping[str, nn.Module]) -> None:
    """Raise ``ModelError`` unless all models have all their tokens, and take images of one size."""
    sizes = {name: input_size_of(model) for name, model in models.items()}
    first = next(iter(sizes), None)
    if first is None:
        raise MeasureError("no model was given; give one or more, such as {'dense': model}")
    for name, size in sizes.items():
        if size != sizes[first]:
            raise ModelError(
                f"{first} takes images of {sides(sizes[first])}, but {name} of {sides(size)}; models are timed on "
                "the same images, so give those of one size"
            )
        record = record_of(models[name])
        if record and record.tokens:
            raise ModelError(
                f"{name} reduces its tokens already ({_words(record.tokens)}); give the model it was before"
            )


def _chosen(data: Data, config: TokensConfig, models: Mapping[str, nn.Module]) -> Data:
    """Return the validation images that accuracy is measured on; ``DataError`` where they do not fit a model."""
    for model in models.values():
        check_classes(data.num_classes, num_classes_of(model))
    if data.val is None:
        raise DataError("accuracy is measured on the split val; open the data with it")
    if config.fraction is None and config.per_class is None:
        return data
    return replace(data, val=subset(data.val, fraction=config.fraction, per_class=config.per_class))


def _words(tokens: Tokens) -> str:
    return f"{tokens.method}, r {tokens.r}, {tokens.schedule}"


def _asked(bench: Bench) -> dict[str, Any]:
    """Return all that decides a result, as plain JSON; which results there are does not."""
    assert bench.data is not None
    settings, how = asdict(bench.config), asdict(bench.config.tokens(0))
    del settings["r"], settings["batch_size"], how["r"]
    return {"model": next(iter(bench.digests.values())), **bench.data.facts(), "config": settings | how}


def _write(directory: Path, rows: list[TokensRow]) -> None:
    values = [row.to_dict() for row in rows]
    write_json(directory / RESULTS, {"points": values})
    write_csv(directory / TABLE, list(values[0]), values)
    with written(directory / FIGURE) as scratch:
        draw(values, scratch)
