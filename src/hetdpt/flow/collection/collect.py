"""Samples of accuracy from a dense model, in files; and splits of a budget that are measured again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import nn

from hetdpt.adapters.identity import fingerprint
from hetdpt.core.errors import FileError, PredictError, first_line
from hetdpt.core.modules import find_device
from hetdpt.core.plan import Budget, Kind
from hetdpt.data.sources import Data, open_data
from hetdpt.export.saved import load
from hetdpt.flow.collection.tree import DENSE, SampleNode, in_turn, tree_of
from hetdpt.flow.collection.work import RECHECK, SAMPLES, CollectionJob, SampleDone
from hetdpt.flow.execution import Execution
from hetdpt.results import Prices
from hetdpt.selection.predictor.polynomial import FEWEST, Row
from hetdpt.selection.predictor.rows import read_rows, samples_file
from hetdpt.selection.predictor.samples import Chain, CollectConfig
from hetdpt.store.atomic import parse_json
from hetdpt.store.config_diff import first_difference
from hetdpt.store.run_directory import RUN, share
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready, removable

LONGER = 3  # times the epochs, when a split is measured again
ALONE = "samples are collected"


def collect_into(
    directory: str | Path,
    model: nn.Module,
    data: str | Data,
    config: CollectConfig,
    execution: Execution | None = None,
    *,
    chain: Chain | None = None,
    prices: Prices | None = None,
    layers: int = 0,
) -> Iterator[SampleDone]:
    """Sample how the accuracy of ``model`` depends on the layers removed, and yield every step once it is on disk.

    Called again, it resumes where it was killed, and with more rounds where it ended. Several processes may share one
    ``directory`` that all of them see: each takes the next step that no other works on, yields the results of all, and
    returns when all steps are finished. ``chain`` takes the steps of that one alone. ``prices`` of the layers are
    measured if not given. ``layers`` is how many are to be removed in the end, if known: ``config.rounds`` of None
    reach that far.
    """
    directory, execution = Path(directory), execution or Execution()
    execution.require_alone(config.recovery.training.precision, ALONE)
    opened = data if isinstance(data, Data) else open_data(data)
    base = ready(model, config.removal)
    offered = [site.kind for site in removable(base)]
    blocks = require_record(base).survey.anatomy.blocks
    chains = config.chains(blocks, Budget(offered.count("attention"), offered.count("activation")), layers)
    if chain is not None and chain not in chains:
        raise PredictError(f"the chain {chain} has no rounds; those that have are {', '.join(chains)}")
    if config.rounds is None:
        _require_enough(chains, config)
    share(directory, _asked(model, opened, config, execution, blocks))
    tree = tree_of(chains)
    model = model.to(find_device(execution.device))
    job = CollectionJob(directory, SAMPLES, model, opened, config, execution, tree, prices)
    wanted = [n for n in tree.values() if chain is None or n.kinds == chains[chain][: len(n.kinds)]]
    yield from job.run(wanted)


def recheck_into(
    directory: str | Path,
    budgets: Sequence[Budget],
    data: str | Data,
    execution: Execution | None = None,
    *,
    epochs: int | None = None,
) -> Iterator[SampleDone]:
    """Measure ``budgets`` again, each by a longer fine-tuning from the dense model, and yield each once it is on disk.

    ``directory`` is one of ``collect_into``; its model and settings are used. ``epochs`` are three times as many as
    its steps had, by default. Layers are chosen by transfer entropy as in the chains, the two kinds in turn.
    """
    directory, execution = Path(directory), execution or Execution()
    opened = data if isinstance(data, Data) else open_data(data)
    asked = read_run(directory)
    if difference := first_difference({"data": asked.get("data")}, opened.facts()):
        raise PredictError(f"{directory} was collected on other data: {difference}; give the same data")
    config = TypeAdapter(CollectConfig).validate_python(asked["config"])
    epochs = epochs or LONGER * config.recovery.training.epochs
    execution.require_alone(config.recovery.training.precision, ALONE)
    settings = {"training.epochs": epochs, "training.minutes": None}
    longer = replace(config, recovery=config.recovery.with_settings(settings), fine_tunes=True)
    root = SampleNode(DENSE, None, (), ())
    nodes = {DENSE: root}
    for budget in budgets:
        kinds = in_turn(budget)
        key = f"{budget.attention}-{budget.activation}-epochs-{epochs}"
        nodes[key] = SampleNode(key, DENSE, kinds, kinds)
    model = load(directory / DENSE).to(find_device(execution.device))
    job = CollectionJob(directory, RECHECK, model, opened, longer, execution, nodes)
    yield from job.run([node for node in nodes.values() if node is not root])


def _require_enough(chains: dict[Chain, tuple[Kind, ...]], config: CollectConfig) -> None:
    """Raise ``PredictError`` if no predictor could be fitted to all possible samples."""
    samples = len(tree_of(chains))
    if samples < FEWEST or "interleaved" not in chains:
        raise PredictError(
            f"no predictor could be fitted: with removal {config.removal!r} this model gives {samples} samples, of the "
            f"chains {', '.join(chains) or 'none'}, but {FEWEST} of both kinds are needed; try --removal calibrated"
        )


def _asked(model: nn.Module, data: Data, config: CollectConfig, execution: Execution, blocks: int) -> dict[str, Any]:
    """Return all that decides the result of a step, as plain JSON; how many steps there are does not."""
    return {
        "model": fingerprint(model),
        "blocks": blocks,
        **data.facts(execution.workers),
        "config": asdict(replace(config, rounds=None)),
        "batch": execution.batch,
    }


def read_run(directory: Path) -> dict[str, Any]:
    """Return the settings of the collection in ``directory``; ``FileError`` if there is none."""
    try:
        asked: dict[str, Any] = parse_json((directory / RUN).read_text(encoding="utf-8"))
        TypeAdapter(CollectConfig).validate_python(asked["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{directory} is not a run directory of hetdpt collect ({first_line(error)})") from None
    return asked


def read_samples(samples: Path, blocks: int) -> list[Row]:
    """Return the samples in a CSV or a directory of ``hetdpt collect``; those of another model are refused."""
    sampled = read_run(samples).get("blocks") if samples.is_dir() else blocks
    if blocks != sampled:
        raise PredictError(
            f"{samples} was collected from a model with {sampled} blocks, but this one has {blocks}; give its samples"
        )
    return [*read_rows(samples_file(samples))]
