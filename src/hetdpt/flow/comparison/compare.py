"""A comparison of methods: each chooses layers, all get the same fine-tuning (paper, Fig. 7 and its ablations).

A run directory that processes of one or several machines fill together:

run.json        the settings; layers, methods and seeds may be added later
samples/        a directory of hetdpt collect, for the methods whose budget is split by the predictor
plans/          the layers that each method chose, and their scores
models/         a fine-tuning for each plan and seed: its numbers, and which images its model gets right
dense.json      the same of the dense model
speed.json      how fast the models are, measured when all else is finished
results.json    all results and a summary; results.csv has the rows, comparison.png accuracy against speedup
searches/       checkpoints of unfinished searches
claims/         which process works on which task

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
from hetdpt.core.errors import FileError, PlanError, PredictError, first_line
from hetdpt.core.modules import clone, find_device
from hetdpt.core.plan import Budget, Plan
from hetdpt.data.sources import Data, open_data
from hetdpt.data.subset import hold_out
from hetdpt.flow.collection.collect import collect_into
from hetdpt.flow.collection.work import SampleDone
from hetdpt.flow.comparison.statistics import summarise
from hetdpt.flow.comparison.work import Cell, ComparisonDone, ComparisonJob, plan_key
from hetdpt.flow.execution import Execution
from hetdpt.report.comparison import COLUMNS, csv_rows, draw
from hetdpt.results import ComparisonRow, DenseModel, MethodComparison, from_json
from hetdpt.selection.methods import BY_LAYERS, METHODS, method_called, require_budget
from hetdpt.selection.predictor.polynomial import Row
from hetdpt.selection.predictor.pricing import split_layers
from hetdpt.selection.predictor.rows import plain_rows
from hetdpt.selection.predictor.samples import CollectConfig
from hetdpt.selection.select import SelectConfig
from hetdpt.store.atomic import parse_json, write_csv, write_json, written
from hetdpt.store.run_directory import share
from hetdpt.surgery.remove import place_, ready, removable
from hetdpt.training.recover import RecoverConfig

SAMPLES, RESULTS, TABLE, FIGURE = "samples", "results.json", "results.csv", "comparison.png"
GIVEN = (
    "samples of accuracy were given; where those were measured on the validation images, the splits by the predictor "
    "have seen the images that accuracies are reported on"
)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What is compared, and how."""

    layers: tuple[int, ...]
    """Numbers of layers to remove, such as 2,4,6; every method chooses for each of them."""
    methods: tuple[str, ...] = BY_LAYERS
    """Names from ``METHODS``, of those that remove a number of layers."""
    seeds: int = 1
    """How many seeds to repeat everything with. The first is that of ``recovery``, the others follow it. A seed is that
    of a choice and of the fine-tuning after it. The predictor's split is the same for all."""
    selection: SelectConfig
    """How layers are chosen."""
    recovery: RecoverConfig
    """The fine-tuning, the same for all."""
    collection: CollectConfig | None = None
    """How accuracy is sampled for the methods whose budget the predictor splits; None where samples are given."""
    trim: bool = True
    """Do not compute tokens that no output depends on; outputs stay the same."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 1:
            raise PlanError(f"layers are {self.layers}; one number or more from 1 on, each once, was expected")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise PlanError(f"methods are {self.methods}; one or more, each once, was expected")
        for method in self.methods:
            require_budget(method_called(method))
        if self.seeds < 1:
            raise PlanError(f"seeds is {self.seeds}; 1 or more was expected")
        if self.collection is not None and self.collection.removal != self.selection.removal:
            raise PlanError(
                f"accuracy would be sampled with removal {self.collection.removal!r}, but layers removed with "
                f"{self.selection.removal!r}; use the same for both"
            )

    def cells(self, offered: Budget) -> tuple[Cell, ...]:
        """Return what can be compared in a model that offers ``offered`` layers of each kind."""
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
    execution: Execution | None = None,
    *,
    samples: Sequence[Row] | None = None,
) -> Iterator[ComparisonDone | SampleDone]:
    """Let every method choose layers of ``model``, fine-tune all of them alike, and yield every task once on disk.

    Called again, it resumes where it was killed; more layers, methods or seeds are added to the results. Several
    processes may share one ``directory`` that all of them see: each takes the next task that no other works on.
    Methods that choose the same layers share one fine-tuning. ``read_comparison(directory)`` returns the results.

    ``samples`` of accuracy decide how the predictor splits budgets. Without them they are collected first, measured on
    a part of the training images that is held out, so that the validation images decide nothing.
    """
    directory, execution = Path(directory), execution or Execution()
    execution.require_alone(config.recovery.training.precision, "methods are compared")
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
    share(directory, _asked(model, opened, config, execution, samples))
    dense.to(find_device(execution.device))
    if held and config.collection:
        layers = max(config.layers)
        for step in collect_into(directory / SAMPLES, dense, held, config.collection, execution, layers=layers):
            sampled.append(step.result.sample)
            yield step
    splits = split_layers(dense, sampled, config.layers, config.selection.removal) if is_split else {}
    job = ComparisonJob(
        directory, dense, opened, config.selection, config.recovery, execution, cells, splits, config.trim
    )
    yield from job.run()
    notes = [*_missing(config, offered), *([GIVEN] if is_split and samples is not None else ())]
    _write(directory, _compared(job, notes))


def read_comparison(directory: Path) -> MethodComparison:
    """Return the results in a directory of ``hetdpt compare``; ``FileError`` if there are none."""
    file = directory / RESULTS
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read ({first_line(error)}); run hetdpt compare again") from None
    return from_json(MethodComparison, values, file)


def _write(directory: Path, found: MethodComparison) -> None:
    write_json(directory / RESULTS, found.to_dict())
    write_csv(directory / TABLE, COLUMNS, csv_rows(found))
    with written(directory / FIGURE) as scratch:
        draw(found, scratch)


def _is_split(method: str) -> bool:
    return method_called(method).split == "map"


def _most(method: str, offered: Budget) -> int:
    counts = asdict(offered)
    only = method_called(method).only
    return counts[only] if only else sum(counts.values())


def _require_some(cells: Sequence[Cell], config: CompareConfig, offered: Budget) -> None:
    for layers in config.layers:
        if not any(cell.layers == layers for cell in cells):
            raise PlanError(
                f"{layers} layers are to be removed, but with removal {config.selection.removal!r} this model has only "
                f"{offered.attention} attention and {offered.activation} activation layers to remove; give fewer"
            )


def _asked(
    model: nn.Module, data: Data, config: CompareConfig, execution: Execution, samples: Sequence[Row] | None
) -> dict[str, Any]:
    """Return all that decides a row, as plain JSON; which rows there are does not."""
    settings = asdict(config)
    del settings["layers"], settings["methods"], settings["seeds"]
    return {
        "model": fingerprint(model),
        **data.facts(execution.workers),
        "config": settings,
        "samples": plain_rows(samples) if samples else None,
        "batch": execution.batch,
    }


def _missing(config: CompareConfig, offered: Budget) -> Iterator[str]:
    """Yield a sentence for each row that is impossible."""
    for layers in config.layers:
        for method in config.methods:
            if layers > (most := _most(method, offered)):
                only = method_called(method).only
                yield f"{method} has no row for {layers} layers: this model has {most} removable {only} layers"


def _compared(job: ComparisonJob, notes: Sequence[str]) -> MethodComparison:
    dense, timed = job.trained(None), job.timed()
    assert dense is not None
    assert timed is not None
    order = list(METHODS)
    rows, answers, warnings = list[ComparisonRow](), list[str | None](), list(notes)
    for one in sorted(job.every_choice(), key=lambda one: (one.layers, order.index(one.method), one.seed)):
        trained, key = job.trained(one), plan_key(one.plan)
        if trained is None or key not in timed.plans:
            continue  # another process works on it
        numbers = trained.start, trained.accuracy, one.seconds
        rows.append(ComparisonRow(one.layers, one.method, one.seed, one.plan, *numbers, timed.plans[key]))
        answers.append(trained.right)
        warnings += [f"the split of {one.layers} layers: {warning}" for warning in one.warnings]
    whole = DenseModel(dense.accuracy, dense.images, timed.macs, timed.params, timed.throughput)
    first = min((row.method for row in rows), key=order.index)
    summaries = summarise(rows, answers, whole, first)
    return MethodComparison(first, timed.measured, whole, tuple(rows), summaries, tuple(dict.fromkeys(warnings)))
