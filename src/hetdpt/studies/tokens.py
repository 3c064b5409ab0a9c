"""Accuracy against speed of models with fewer and fewer tokens, such as a dense and a pruned one (paper, Fig. 8).

A run directory that processes of one or several machines fill together:

run.json      what was asked for; more models and more numbers of tokens may come later
points/       one file for each model and number: what is left of its costs and its accuracy
speed.json    how fast all of them are, timed in turns when all else is done
claims/       who works on what
tokens.json   all of it; also as tokens.csv and tokens.png
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.adapters.models import input_size_of, num_classes_of
from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import DataError, MeasureError, ModelError, PlanError
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import Budget, Measurement
from hetdpt.core.tokens import Tokens
from hetdpt.data.sources import Data, check_classes, open_data
from hetdpt.data.subset import subset
from hetdpt.flow.collection.work import CLAIMS, Workplace
from hetdpt.measurement.accuracy import BATCH, evaluate
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import measure_throughput
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.report.tokens import draw, write_csv
from hetdpt.results import Ratio
from hetdpt.store.atomic import keep_json, write_json, written
from hetdpt.store.queue import Claim, Job, work
from hetdpt.store.run_directory import share
from hetdpt.studies.observe import read_measured
from hetdpt.surgery.record import InputSize, record_of, require_record, survey_of
from hetdpt.surgery.remove import ready

POINTS, SPEED = "points", "speed.json"
RESULTS, TABLE, FIGURE = "tokens.json", "tokens.csv", "tokens.png"


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """What tokens go by, how many, and how it is measured."""

    r: tuple[int, ...]
    """Tokens that go in each block with attention. 0, the model as it is, is measured whether asked for or not."""
    method: str = "tome"
    """A name from ``TOKEN_METHODS``."""
    schedule: str = "constant"
    """``constant``, or ``decreasing``: more in the first blocks, as many in all."""
    fraction: float | None = None
    """Part of the validation images that accuracy is measured on; None for all."""
    per_class: int | None = None
    """So many of each class instead."""
    batch_size: int = BATCH
    """Images at once where accuracy is measured; it changes no number."""
    batch: int | None = None
    """Images at once where speed is: 256 on a GPU and 8 on a CPU by default."""
    runs: int = 100
    """Rounds in which each model runs once."""
    seconds: float | None = 60.0
    """After which there are no more rounds, five at least."""

    def __post_init__(self) -> None:
        if not self.r or len(set(self.r)) < len(self.r):
            raise PlanError(f"r is {self.r}; one number of tokens or more, each once, was expected, such as (0, 4, 8)")
        for r in self.r:
            self.tokens(r)  # refuses what is none

    def tokens(self, r: int) -> Tokens:
        return Tokens(self.method, r, self.schedule)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All values of ``r`` that are measured, in order."""
        return tuple(sorted({0, *self.r}))


@dataclass(frozen=True)
class TokensCase:
    """One model, and how many tokens go."""

    model: str
    r: int


@dataclass(frozen=True)
class Point:
    """What a case costs and gets right."""

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
    """How fast a case is, in turns with all others."""

    throughput: Measurement
    speedup: Ratio
    """Over the first model with all its tokens."""


Speeds = dict[str, TokensSpeed]
"""By the key of the case."""


@dataclass(frozen=True)
class TokensRow:
    """All that was measured of a case."""

    model: str
    tokens: Tokens
    removed: Budget
    """Layers that the model had lost before."""
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


@dataclass(frozen=True)
class TokensDone:
    """A piece of work that is done."""

    case: TokensCase | None
    """None where all cases were timed."""
    result: Point | Speeds
    is_own: bool
    """Whether this process did it, now."""


def tokens_into(
    directory: str | Path,
    models: Mapping[str, nn.Module],
    data: str | Data,
    config: TokensConfig,
    place: Workplace | None = None,
) -> Iterator[TokensDone]:
    """Measure each of ``models`` with all and with fewer of its tokens, and yield every result once it is on disk.

    Speedups are over the first model as it is. Called again it goes on where it was killed; with other models beside
    the first, or other numbers of tokens, it measures those that are new, and times all of them anew. Called by
    several processes, with one ``directory`` that all of them see, each takes what nobody works on.
    """
    directory, place = Path(directory), place or Workplace()
    place.require_alone("float32", "tokens are reduced")
    opened = data if isinstance(data, Data) else open_data(data, splits=("val",))
    bench = Bench(models, opened, config, place)
    share(directory, _asked(bench))
    job: Job[TokensCase | None, Point | Speeds] = _TokensJob(directory, bench)
    points, speeds = dict[TokensCase, Point](), Speeds()
    for case, result, is_own in work(directory / CLAIMS, [*bench.cases, None], job):
        if isinstance(result, Point):
            assert case is not None
            points[case] = result
        else:
            speeds = result
        yield TokensDone(case, result, is_own)
    _write(directory, bench.rows(points, speeds))


def measure_tokens(
    models: Mapping[str, nn.Module], data: Data | None, config: TokensConfig, place: Workplace | None = None
) -> list[TokensRow]:
    """Return what ``tokens_into`` would measure, without a directory; without ``data`` there is no accuracy."""
    bench = Bench(models, data, config, place or Workplace())
    return bench.rows({case: bench.measure(case) for case in bench.cases}, bench.time())


class Bench:
    """The models, and what is measured of them."""

    def __init__(
        self, models: Mapping[str, nn.Module], data: Data | None, config: TokensConfig, place: Workplace
    ) -> None:
        _require_comparable(models)
        device = find_device(place.device)
        self.models = {name: ready(model.to(device), "plain") for name, model in models.items()}
        self.digests = {name: fingerprint(model) for name, model in models.items()}
        if len(set(self.digests.values())) < len(models):
            raise MeasureError(f"{' and '.join(models)} are not all different models; give each once")
        self.data = _chosen(data, config, self.models) if data else None
        self.config, self.place = config, place
        self.cases = [TokensCase(name, r) for name in models for r in config.numbers]
        # all at once: they share their weights, and what cannot be is refused before anything is measured
        self.reduced = {case: self._reduced(case) for case in self.cases}

    def key(self, case: TokensCase) -> str:
        """Return its name among files and claims."""
        return f"{self.digests[case.model][:12]}-{case.r}"

    def _reduced(self, case: TokensCase) -> nn.Module:
        """Return the model of ``case``, around the very weights of the one that was given."""
        model = self.models[case.model]
        return reduce_tokens_(clone(model), self.config.tokens(case.r)) if case.r else model

    def measure(self, case: TokensCase) -> Point:
        model, place, config = self.reduced[case], self.place, self.config
        size = input_size_of(model)
        costs = Costs.of(model, size)
        left = tokens_left(model, size), costs.macs, costs.params
        if self.data is None:
            return Point(*left)
        scores = evaluate(
            model,
            self.data,
            batch_size=config.batch_size,
            workers=place.workers,
            progress=place.stage(f"{case.model}, r {case.r}: evaluating"),
        )
        return Point(*left, scores.top1, scores.low, scores.high, scores.count)

    def time(self) -> Speeds:
        """Return how fast all cases are, by key."""
        config = self.config
        timed = measure_throughput(
            {self.key(case): model for case, model in self.reduced.items()},
            batch=config.batch,
            runs=config.runs,
            seconds=config.seconds,
            progress=self.place.stage("timing"),
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
        raise MeasureError("there is no model to reduce the tokens of; give one or more, such as {'dense': model}")
    for name, size in sizes.items():
        if size != sizes[first]:
            raise ModelError(
                f"{first} takes images of {_spell(sizes[first])}, but {name} of {_spell(size)}; models are timed on "
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


def _spell(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def _words(tokens: Tokens) -> str:
    return f"{tokens.method}, r {tokens.r}, {tokens.schedule}"


def _asked(bench: Bench) -> dict[str, Any]:
    """Return all that decides what a result is, as plain JSON; which results there are to be does not."""
    assert bench.data is not None
    settings, how = asdict(bench.config), asdict(bench.config.tokens(0))
    del settings["r"], settings["batch_size"], how["r"]
    return {"model": next(iter(bench.digests.values())), **bench.data.facts(), "config": settings | how}


@dataclass(frozen=True)
class _TokensJob:
    """What a process does in one directory; where there is no case, all of them are timed."""

    directory: Path
    bench: Bench

    def name(self, case: TokensCase | None) -> str:
        return self.bench.key(case) if case else "time"

    def result(self, case: TokensCase | None) -> Point | Speeds | None:
        if case:
            point: Point | None = read_measured(self._file(case), Point)
            return point
        speeds: Speeds | None = read_measured(self._file(None), Speeds)
        return speeds if speeds and all(self.bench.key(case) in speeds for case in self.bench.cases) else None

    def can_begin(self, case: TokensCase | None) -> bool:
        """Whether nothing is measured meanwhile, where speed is."""
        return case is not None or all(self._file(case).is_file() for case in self.bench.cases)

    def wait(self, who: str) -> None:
        self.bench.place.wait(who)

    def take(self, case: TokensCase | None, claim: Claim) -> None:
        """Do it, and write what came out."""
        if case:
            values = asdict(self.bench.measure(case))
        else:
            values = {key: asdict(speed) for key, speed in self.bench.time().items()}
        claim.require_held()
        keep_json(self._file(case), values)

    def _file(self, case: TokensCase | None) -> Path:
        return self.directory / POINTS / f"{self.bench.key(case)}.json" if case else self.directory / SPEED


def _write(directory: Path, rows: list[TokensRow]) -> None:
    values = [row.to_dict() for row in rows]
    write_json(directory / RESULTS, {"points": values})
    with written(directory / TABLE) as scratch:
        write_csv(values, scratch)
    with written(directory / FIGURE) as scratch:
        draw(values, scratch)
