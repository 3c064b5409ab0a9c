"""Samples of accuracy, to files: a run directory that processes of one or several machines fill together.

run.json      what was asked for; all processes ask for the same
dense/        the model as it was given
prices.json   what its layers cost
samples/      one file for each step that is done
samples.csv   the same as a table, for ``hetdpt predict``
steps/        models and checkpoints of steps that are not done, or that others can begin from
claims/       who works on which step
recheck/      as samples/, for splits that were measured again

Steps form a tree: a step begins from the model its parent came to. Chains that begin alike share steps.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.claims import Claim, holder
from hetdpt.data.sources import Data, open_data
from hetdpt.data.unlabelled import ImageBatches
from hetdpt.errors import FileError, PredictError, TrainError, first_line
from hetdpt.export.saved import RECIPE, load, save
from hetdpt.files import written
from hetdpt.measurement.accuracy import evaluate
from hetdpt.measurement.speed import measure_throughput
from hetdpt.modules import digest, find_device
from hetdpt.plan import Budget, Kind, Site
from hetdpt.predictor.polynomial import FEWEST
from hetdpt.predictor.prices import PRICES_FILE
from hetdpt.predictor.pricing import measure_prices
from hetdpt.predictor.rows import SAMPLES_FILE, write_rows
from hetdpt.predictor.samples import Chain, CollectConfig, Pick, Step, fine_tune, prune_next
from hetdpt.recovery import RecoverConfig
from hetdpt.runs import CHECKPOINTS, METRICS, RUN, Checkpoints, Metrics, share
from hetdpt.surgery import known, merge_, ready, removable
from hetdpt.training.processes import start
from hetdpt.training.trainer import Progress

DENSE = "dense"
SAMPLES, RECHECK, STEPS, CLAIMS = "samples", "recheck", "steps", "claims"
START, LAST, PICKS = "start", "last", "picks.json"
LETTERS = {"attention": "a", "activation": "g"}  # as in the paper's m^a and m^g
WAIT = 1.0  # seconds between two looks at what others do
TIMING_SECONDS = 10.0
LONGER = 3  # times the epochs, when a split is measured again
StageProgress = Callable[[str, int, int], None]
"""Called with what is being done and (steps done, in all)."""


@dataclass(frozen=True)
class Node:
    """A step of the tree, taken or not."""

    key: str
    """``dense``, or a letter for each layer that is gone: ``aag``."""
    parent: str | None
    kinds: tuple[Kind, ...]
    """Of all layers that are gone then, in order."""
    new: tuple[Kind, ...]
    """Of those that go in this step."""

    @property
    def chain(self) -> str:
        """The first of the chains that has this step."""
        return _chain_of(self.kinds)


@dataclass(frozen=True)
class Done:
    """A step that is done."""

    node: Node
    step: Step
    is_own: bool
    """Whether this process took it, now."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """How this process works; none of it decides what comes out."""

    device: str | None = None
    workers: int = 0
    minutes: float = 10.0
    """Between two checkpoints."""
    batch: int | None = None
    """Images at once when layers are timed."""
    progress: StageProgress | None = None

    def stage(self, name: str) -> Callable[[int, int], None] | None:
        return partial(self.progress, name) if self.progress else None


def collect_into(
    directory: str | Path,
    model: nn.Module,
    data: str | Data,
    config: CollectConfig,
    place: Workplace | None = None,
    *,
    chain: Chain | None = None,
) -> Iterator[Done]:
    """Sample how the accuracy of ``model`` depends on the layers it loses, and yield every step once it is on disk.

    Called again it goes on where it was killed, and with more rounds where it ended. Called by several processes, with
    one ``directory`` that all of them see, each takes the next step that nobody works on; a process yields what the
    others did too, and returns when all is done. ``chain`` takes the steps of that one alone.
    """
    directory, place = Path(directory), place or Workplace()
    _require_alone(config.recovery, place)
    opened = data if isinstance(data, Data) else open_data(data)
    base = ready(model, config.removal)
    offered = [site.kind for site in removable(base)]
    blocks = known(base).survey.anatomy.blocks
    chains = config.chains(blocks, Budget(offered.count("attention"), offered.count("activation")))
    if chain is not None and chain not in chains:
        raise PredictError(f"the chain {chain} has no rounds; those that have are {', '.join(chains)}")
    if config.rounds is None:
        _require_enough(chains, config)
    share(directory, _asked(model, opened, config, blocks))
    tree = _tree(chains)
    job = _Job(directory, SAMPLES, model.to(find_device(place.device)), opened, config, place, tree)
    wanted = [n for n in tree.values() if chain is None or n.kinds == chains[chain][: len(n.kinds)]]
    yield from job.work(wanted)


def recheck_into(
    directory: str | Path,
    budgets: Sequence[Budget],
    data: str | Data,
    place: Workplace | None = None,
    *,
    epochs: int | None = None,
) -> Iterator[Done]:
    """Measure ``budgets`` again, each by a longer fine-tuning from the dense model, and yield every one once on disk.

    ``directory`` is one of ``collect_into``; its model and settings are used. ``epochs`` are three times as many as
    its steps had, by default. Layers are chosen by transfer entropy as in the chains, the two kinds in turn.
    """
    directory, place = Path(directory), place or Workplace()
    opened = data if isinstance(data, Data) else open_data(data)
    asked = read_run(directory)
    if opened.name != asked["data"]:
        raise PredictError(f"{directory} was collected on {asked['data']}, not on {opened.name}; give the same data")
    config = TypeAdapter(CollectConfig).validate_python(asked["config"])
    epochs = epochs or LONGER * config.recovery.training.epochs
    _require_alone(config.recovery, place)
    longer = replace(config, recovery=config.recovery.with_settings({"training.epochs": epochs}), fine_tunes=True)
    root = Node(DENSE, None, (), ())
    nodes = {DENSE: root}
    for budget in budgets:
        kinds = _in_turn(budget)
        key = f"{budget.attention}-{budget.activation}-epochs-{epochs}"
        nodes[key] = Node(key, DENSE, kinds, kinds)
    model = load(directory / DENSE).to(find_device(place.device))
    job = _Job(directory, RECHECK, model, opened, longer, place, nodes)
    yield from job.work([node for node in nodes.values() if node is not root])


def _require_enough(chains: dict[Chain, tuple[Kind, ...]], config: CollectConfig) -> None:
    """Refuse to begin where nothing could be fitted to all the samples there can be."""
    samples = len(_tree(chains))
    if samples < FEWEST or "interleaved" not in chains:
        raise PredictError(
            f"no predictor could be fitted: with removal {config.removal!r} this model gives {samples} samples, of the "
            f"chains {', '.join(chains) or 'none'}, but {FEWEST} of both kinds are needed; try --removal calibrated"
        )


def _require_alone(config: RecoverConfig, place: Workplace) -> None:
    if start(config.training.precision, place.device).num_processes > 1:
        raise TrainError(
            "samples are collected by processes that do not know each other; start the same command several times, "
            "each with its own --device, instead of torchrun or accelerate"
        )


@dataclass(frozen=True)
class _Job:
    """What there is to do in one directory, and with what."""

    directory: Path
    results: str
    """The folder for what steps came to."""
    model: nn.Module
    data: Data
    config: CollectConfig
    place: Workplace
    tree: dict[str, Node]

    def work(self, wanted: Iterable[Node]) -> Iterator[Done]:
        """Take the steps of ``wanted`` that nobody works on, one after another, until all are done."""
        left, own = list(wanted), set[str]()
        while left:
            for node in list(left):
                if step := self.step(node):
                    left.remove(node)
                    yield Done(node, step, node.key in own)
            if found := self._next(left):
                node, claim = found
                with claim:
                    if self.step(node) is None:  # not done since we looked
                        self._take(node, claim)
                        own.add(node.key)
            elif left:
                self._wait(left)
        self._tidy()  # also what a kill after the last step has left

    def step(self, node: Node) -> Step | None:
        """Return what ``node`` came to if it is done."""
        file = self._file(node)
        return _read_step(file) if file.is_file() else None

    def _next(self, left: list[Node]) -> tuple[Node, Claim] | None:
        """Return a step that can be taken, claimed for this process; None where there is none to be had."""
        for node in left:
            if self._can_begin(node) and (claim := Claim.take(self.directory / CLAIMS, self._name(node))):
                return node, claim
        return None

    def _can_begin(self, node: Node) -> bool:
        if node.parent is None:
            return True
        return self._has_dense if node.parent == DENSE else self.step(self.tree[node.parent]) is not None

    def _wait(self, left: list[Node]) -> None:
        others = (holder(self.directory / CLAIMS, self._name(node)) for node in left)
        who = next((other for other in others if other), "another process")
        if self.place.progress:
            self.place.progress(f"waiting for {who}", 0, 0)
        time.sleep(WAIT)

    def _take(self, node: Node, claim: Claim) -> None:
        """Do what ``node`` is about, and write what it came to."""
        begun = time.monotonic()
        self._clear(node)
        if node.parent is None:
            accuracy = self._begin()
            step = Step(node.kinds, (), accuracy, accuracy, time.monotonic() - begun)
        else:
            picks = self._prune(node)
            student, accuracies = self._fine_tune(node, claim)
            speedup = self._keep(node, student)
            step = Step(node.kinds, picks, accuracies[0], accuracies[-1], time.monotonic() - begun, speedup)
        claim.require_held()
        self._file(node).parent.mkdir(exist_ok=True)
        with written(self._file(node)) as scratch:
            scratch.write_text(json.dumps(step.to_dict(), indent=1) + "\n")
        self._tidy()

    def _clear(self, node: Node) -> None:
        """Remove what a kill has left half written."""
        where, pattern = (self._folder(node), ".*") if node.parent else (self.directory, f".{DENSE}.*")
        for scratch in where.glob(pattern):
            shutil.rmtree(scratch, ignore_errors=True)

    def _begin(self) -> float:
        """Save the prices of the layers and the dense model, which others wait for, and return its accuracy."""
        place = self.place
        prices = measure_prices(self.model, removal=self.config.removal, batch=place.batch, progress=place.progress)
        with written(self.directory / PRICES_FILE) as scratch:
            scratch.write_text(prices.to_json() + "\n")
        if not self._has_dense:
            save(deepcopy(self.model).cpu(), self.directory / DENSE)
        return evaluate(self.model, self.data, workers=place.workers, progress=place.stage("evaluating")).top1

    def _prune(self, node: Node) -> tuple[Pick, ...]:
        """Save the model that ``node`` begins with, unless it is there, and return the layers it has lost."""
        start = self._folder(node) / START
        if not (start / PICKS).is_file():
            student, picks = self._model_after(node.parent), list[Pick]()
            for number, kind in enumerate(node.new, 1):
                progress = self.place.stage(f"{node.key}: choosing {kind} {number}/{len(node.new)}")
                student, pick = prune_next(student, kind, self._images, self.config.removal, progress)
                picks.append(pick)
            save(
                deepcopy(student).cpu(),
                start,
                overwrite=True,
                notes={PICKS: json.dumps([asdict(pick) for pick in picks])},
            )
        return tuple(Pick.from_dict(pick) for pick in json.loads((start / PICKS).read_text()))

    def _fine_tune(self, node: Node, claim: Claim) -> tuple[nn.Module, list[float]]:
        """Train the model that ``node`` begins with, and return it with its accuracies."""
        folder, place = self._folder(node), self.place
        student = load(folder / START).to(self._device)
        metrics = Metrics(folder / METRICS)
        keeper = _ClaimedCheckpoints(folder / CHECKPOINTS, place.minutes, claim)
        epochs = fine_tune(
            student,
            self.model,
            self.data,
            self.config.recovery if self.config.fine_tunes else None,
            device=place.device,
            workers=place.workers,
            keeper=keeper,
            watch=partial(_tell, place.stage(f"{node.key}: fine-tuning")),
        )
        for number, accuracy in epochs:
            metrics.write("epoch", update=number, accuracy=accuracy)
        return student, [line["accuracy"] for line in metrics.read("epoch")]

    def _keep(self, node: Node, student: nn.Module) -> float | None:
        """Save what a step came to, for those after it; of a split that is measured again, return the speedup."""
        if self.results == SAMPLES:
            save(student.cpu(), self._folder(node) / LAST, overwrite=True)
            return None
        models = {"dense": self.model, "pruned": merge_(student)}
        timing, batch = self.place.stage(f"{node.key}: timing"), self.place.batch
        return measure_throughput(models, batch=batch, seconds=TIMING_SECONDS, progress=timing).speedup["pruned"].value

    def _tidy(self) -> None:
        """Remove what no step needs any more, and write the table.

        The models at the ends of the chains stay, for more rounds, and that of ``a``, where the interleaved chain
        leaves the attention chain.
        """
        done = {node.key for node in self.tree.values() if self._file(node).is_file()}
        for node in (node for node in self.tree.values() if node.key in done):
            after = {other.key for other in self.tree.values() if other.parent == node.key}
            is_open = self.results == SAMPLES and (not after or node.key == LETTERS["attention"])
            for part in [START, CHECKPOINTS] if is_open or after - done else [""]:
                shutil.rmtree(self._folder(node) / part, ignore_errors=True)
        if self.results == SAMPLES:
            _write_table(self.directory)

    @property
    def _has_dense(self) -> bool:
        return (self.directory / DENSE / RECIPE).is_file()

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def _images(self) -> ImageBatches:
        if self.data.train is None:
            raise PredictError("layers are chosen on training images; open the data with the split train")
        seed, wants = self.config.recovery.training.seed, preprocessing_of(self.model)
        return ImageBatches(self.data.train, wants, count=self.config.images, seed=seed, workers=self.place.workers)

    def _model_after(self, key: str | None) -> nn.Module:
        """Return the model that the step ``key`` came to."""
        if key in (None, DENSE):
            return self.model
        model, node = self._folder(self.tree[key]) / LAST, self.tree[key]
        if not model.is_dir():
            raise FileError(f"the model of the step {key} is gone; remove {self._file(node)} to take that step again")
        return load(model).to(self._device)

    def _name(self, node: Node) -> str:
        return f"{self.results}-{node.key}"

    def _folder(self, node: Node) -> Path:
        return self.directory / STEPS / self._name(node)

    def _file(self, node: Node) -> Path:
        return self.directory / self.results / f"{node.key}.json"


class _ClaimedCheckpoints(Checkpoints):
    """Checkpoints of a step that this process has claimed; it stops where another one has taken over."""

    def __init__(self, directory: Path, minutes: float, claim: Claim) -> None:
        super().__init__(directory, minutes)
        self.claim = claim

    def keep(self, state: dict[str, Any]) -> None:
        """Write ``state`` as the newest."""
        self.claim.require_held()
        super().keep(state)


def _read_step(file: Path) -> Step:
    try:
        return Step.from_dict(json.loads(file.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(f"{file} is damaged ({first_line(error)}); remove it to take that step again") from None


def _write_table(directory: Path) -> None:
    """Write all samples there are as a table, again if there are more by then: others write it too."""
    written_ones: list[Path] | None = None
    while (files := sorted((directory / SAMPLES).glob("[!.]*.json"), key=_place_of)) != written_ones:
        steps = [_read_step(file) for file in files]
        more: dict[str, list[object]] = {
            "before": [step.before for step in steps],
            "chain": [_chain_of(step.kinds) for step in steps],
            "layers": [" ".join(_short(pick.site) for pick in step.picks) for step in steps],
            "te": [" ".join(f"{pick.te:.6g}" for pick in step.picks) for step in steps],
            "seconds": [round(step.seconds, 1) for step in steps],
        }
        write_rows(directory / SAMPLES_FILE, [step.sample for step in steps], more)
        written_ones = files


def _place_of(file: Path) -> tuple[int, int]:
    """Return where in the table a step belongs: chain by chain, the dense model first."""
    if file.stem == DENSE:
        return 0, 0
    letters = "".join(sorted(set(file.stem)))
    return ["a", "g", "ag"].index(letters) + 1 if letters in ("a", "g", "ag") else 4, len(file.stem)


def _tell(progress: Callable[[int, int], None] | None, now: Progress) -> None:
    if progress:
        progress(now.update, now.updates)


def _tree(chains: dict[Chain, tuple[Kind, ...]]) -> dict[str, Node]:
    """Return the steps of ``chains`` by their keys, each after the one it begins from.

    >>> list(_tree({"attention": ("attention",) * 2, "interleaved": ("attention", "activation")}))
    ['dense', 'a', 'aa', 'ag']
    """
    nodes = {DENSE: Node(DENSE, None, (), ())}
    for kinds in chains.values():
        parent = DENSE
        for count in range(1, len(kinds) + 1):
            key = "".join(LETTERS[kind] for kind in kinds[:count])
            nodes.setdefault(key, Node(key, parent, kinds[:count], kinds[count - 1 : count]))
            parent = key
    return nodes


def _chain_of(kinds: tuple[Kind, ...]) -> str:
    if not kinds:
        return DENSE
    return kinds[0] if len(set(kinds)) == 1 else "interleaved"


def _short(site: Site) -> str:
    return f"{LETTERS[site.kind]}{site.block}"


def _in_turn(budget: Budget) -> tuple[Kind, ...]:
    """Return the kinds of the layers of ``budget``, in turn as long as there are both.

    >>> _in_turn(Budget(1, 3))
    ('attention', 'activation', 'activation', 'activation')
    """
    counts: dict[Kind, int] = {"attention": budget.attention, "activation": budget.activation}
    turns = [(turn, number, kind) for number, (kind, count) in enumerate(counts.items()) for turn in range(count)]
    return tuple(kind for _, _, kind in sorted(turns))


def _asked(model: nn.Module, data: Data, config: CollectConfig, blocks: int) -> dict[str, Any]:
    """Return all that decides what a step comes to, as plain JSON; how many there are does not."""
    return {
        "model": digest(model),
        "blocks": blocks,
        "data": data.name,
        "classes": data.num_classes,
        "images": [len(split) if split is not None else None for split in (data.train, data.val)],
        "config": asdict(replace(config, rounds=None)),
    }


def read_run(directory: Path) -> dict[str, Any]:
    """Return what a collection in ``directory`` was asked for; ``FileError`` if there is none."""
    try:
        asked: dict[str, Any] = json.loads((directory / RUN).read_text())
        TypeAdapter(CollectConfig).validate_python(asked["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{directory} is no directory of hetdpt collect ({first_line(error)})") from None
    return asked
