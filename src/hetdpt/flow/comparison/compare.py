"""A comparison of methods: each chooses layers, all get the same fine-tuning (paper, Fig. 7 and its ablations).

A run directory that processes of one or several machines fill together:

run.json        what was asked for; more layers, methods and seeds may come later
samples/        a directory of hetdpt collect, for the methods whose budget is split by the predictor
plans/          the layers that each method chose, and by what scores
models/         a fine-tuning for each plan and seed: its numbers, and which images its model gets right
dense.json      the same of the dense model
speed.json      how fast the models are, measured when all else is done
results.json    all of it, and what it sums up to; results.csv has the rows, comparison.png accuracy against speedup
searches/       checkpoints of searches that are not done
claims/         who works on what

The validation images decide nothing: layers are chosen on training images, and an accuracy is that of the last epoch,
not of the best. Where samples are collected here, they are measured on a fifth of the training images, held out for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.errors import PlanError, PredictError
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import Budget, Plan
from hetdpt.data.sources import Data, open_data
from hetdpt.data.subset import hold_out
from hetdpt.flow.collection.collect import collect_into
from hetdpt.flow.collection.work import SampleDone as Sampled
from hetdpt.flow.collection.work import Workplace
from hetdpt.flow.comparison.rows import RESULTS, DenseModel, MethodComparison, summarise
from hetdpt.flow.comparison.rows import ComparisonRow as Compared
from hetdpt.flow.comparison.work import Cell, ComparisonDone, ComparisonJob, plan_key
from hetdpt.report.comparison import draw, write_csv
from hetdpt.selection.methods import METHODS, method_called
from hetdpt.selection.predictor.polynomial import Row
from hetdpt.selection.predictor.pricing import split_layers
from hetdpt.selection.predictor.rows import plain_rows
from hetdpt.selection.predictor.samples import CollectConfig
from hetdpt.selection.select import SelectConfig
from hetdpt.store.atomic import write_json, written
from hetdpt.store.run_directory import share
from hetdpt.surgery.remove import place_, ready, removable
from hetdpt.training.recover import RecoverConfig

SAMPLES, TABLE, FIGURE = "samples", "results.csv", "comparison.png"
GIVEN = (
    "samples of accuracy were given; where those were measured on the validation images, the splits by the predictor "
    "have seen the images that accuracies are reported on"
)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What is compared, and how."""

    layers: tuple[int, ...]
    """How many layers go: every method chooses for each of these."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Names from ``METHODS``."""
    seeds: int = 1
    """How many; the first is that of ``recovery``, the others follow it. A seed is that of a choice and of the
    fine-tuning after it. The predictor's split is the same for all."""
    selection: SelectConfig
    """How layers are chosen."""
    recovery: RecoverConfig
    """The fine-tuning, the same for all."""
    collection: CollectConfig | None = None
    """How accuracy is sampled for the methods whose budget the predictor splits; None where samples are given."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 1:
            raise PlanError(f"layers are {self.layers}; one number or more from 1 on, each once, was expected")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise PlanError(f"methods are {self.methods}; one or more, each once, was expected")
        for method in self.methods:
            method_called(method)
        if self.seeds < 1:
            raise PlanError(f"seeds is {self.seeds}; 1 or more was expected")
        if self.collection is not None and self.collection.removal != self.selection.removal:
            raise PlanError(
                f"accuracy would be sampled with removal {self.collection.removal!r}, but layers are to go with "
                f"{self.selection.removal!r}; use the same for both"
            )

    def cells(self, offered: Budget) -> tuple[Cell, ...]:
        """Return what can be compared in a model that offers so many layers of each kind."""
        first = self.recovery.training.seed
        return tuple(
            Cell(layers, method, seed)
            for seed in range(first, first + self.seeds)
            for layers in self.layers
            for method in self.methods
            if layers <= _most(method, offered)
        )


def compare_into(
    directory: str | Path,
    model: nn.Module,
    data: str | Data,
    config: CompareConfig,
    place: Workplace | None = None,
    *,
    samples: Sequence[Row] | None = None,
) -> Iterator[ComparisonDone | Sampled]:
    """Let every method choose layers of ``model``, fine-tune all of them alike, and yield every task once on disk.

    Called again it goes on where it was killed; with more layers, methods or seeds it adds to what is there. Called by
    several processes, with one ``directory`` that all of them see, each takes the next task that nobody works on.
    Methods that choose the same layers share one fine-tuning. ``MethodComparison.read(directory)`` returns the results.

    ``samples`` of accuracy decide how the predictor splits budgets. Without them they are collected first, measured on
    a part of the training images that is held out, so that the validation images decide nothing.
    """
    directory, place = Path(directory), place or Workplace()
    place.require_alone(config.recovery.training.precision, "methods are compared")
    opened = data if isinstance(data, Data) else open_data(data)
    place_(clone(model).eval(), Plan(removal=config.selection.removal))  # one pruned otherwise is refused
    dense = ready(model, config.selection.removal)  # knows its sites, which are then looked for but once
    kinds = [site.kind for site in removable(dense)]
    offered = Budget(kinds.count("attention"), kinds.count("activation"))
    cells = config.cells(offered)
    _require_some(cells, config, offered)
    is_split, sampled = any(_is_split(cell.method) for cell in cells), list(samples or ())
    held = hold_out(opened) if is_split and samples is None else None
    if held and config.collection is None:
        raise PredictError("a method that splits a budget needs samples of accuracy; give samples, or how to collect")
    share(directory, _asked(model, opened, config, place, samples))
    dense.to(find_device(place.device))
    if held and config.collection:
        layers = max(config.layers)
        for step in collect_into(directory / SAMPLES, dense, held, config.collection, place, layers=layers):
            sampled.append(step.step.sample)
            yield step
    splits = split_layers(dense, sampled, config.layers, config.selection.removal) if is_split else {}
    job = ComparisonJob(directory, dense, opened, config.selection, config.recovery, place, cells, splits)
    yield from job.work()
    notes = [*_missing(config, offered), *([GIVEN] if is_split and samples is not None else ())]
    _write(directory, _compared(job, notes))


def _write(directory: Path, found: MethodComparison) -> None:
    write_json(directory / RESULTS, found.to_dict())
    with written(directory / TABLE) as scratch:
        write_csv(found, scratch)
    with written(directory / FIGURE) as scratch:
        draw(found, scratch)


def _is_split(method: str) -> bool:
    """Whether the predictor splits the budget of ``method``."""
    return method_called(method).split == "map"


def _most(method: str, offered: Budget) -> int:
    """Return how many layers ``method`` can take."""
    counts = asdict(offered)
    only = method_called(method).only
    return counts[only] if only else sum(counts.values())


def _require_some(cells: Sequence[Cell], config: CompareConfig, offered: Budget) -> None:
    for layers in config.layers:
        if not any(cell.layers == layers for cell in cells):
            raise PlanError(
                f"{layers} layers are to go, but this model has {offered.attention} attention and "
                f"{offered.activation} activation layers that can go with removal {config.selection.removal!r}; "
                "ask for fewer"
            )


def _asked(
    model: nn.Module, data: Data, config: CompareConfig, place: Workplace, samples: Sequence[Row] | None
) -> dict[str, Any]:
    """Return all that decides what a row is, as plain JSON; which rows there are to be does not."""
    settings = asdict(config)
    del settings["layers"], settings["methods"], settings["seeds"]
    return {
        "model": fingerprint(model),
        **data.facts(place.workers),
        "config": settings,
        "samples": plain_rows(samples) if samples else None,
        "batch": place.batch,
    }


def _missing(config: CompareConfig, offered: Budget) -> Iterator[str]:
    """Yield a sentence for each row that there cannot be."""
    for layers in config.layers:
        for method in config.methods:
            if layers > (most := _most(method, offered)):
                only = method_called(method).only
                yield f"{method} has no row for {layers} layers: this model has {most} {only} layers that can go"


def _compared(job: ComparisonJob, notes: Sequence[str]) -> MethodComparison:
    """Return what all that is done in the directory comes to, also what was asked for at other times."""
    dense, timed = job.trained(None), job.timed()
    assert dense is not None
    assert timed is not None
    order = list(METHODS)
    rows, answers, warnings = list[Compared](), list[str | None](), list(notes)
    for cell in sorted(job.every_cell(), key=lambda cell: (cell.layers, order.index(cell.method), cell.seed)):
        chosen, trained = job.chosen(cell), job.trained(cell)
        if chosen is None or trained is None or (key := plan_key(chosen.plan)) not in timed.plans:
            continue  # another process is at it
        numbers = trained.start, trained.accuracy, chosen.seconds
        rows.append(Compared(cell.layers, cell.method, cell.seed, chosen.plan, *numbers, timed.plans[key]))
        answers.append(trained.right)
        warnings += [f"the split of {cell.layers} layers: {warning}" for warning in chosen.warnings]
    whole = DenseModel(dense.accuracy, dense.images, timed.macs, timed.params, timed.throughput)
    first = min((row.method for row in rows), key=order.index)
    summaries = summarise(rows, answers, whole, first)
    return MethodComparison(first, timed.measured, whole, tuple(rows), summaries, tuple(dict.fromkeys(warnings)))
