"""From a budget or a goal to a plan, by any of METHODS. Layers are chosen on training images; no files here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import PlanError
from hetdpt.core.modules import checked, clone
from hetdpt.core.plan import KINDS, Budget, Kind, Move, Plan, Removal, Site
from hetdpt.core.processes import broadcast_, process_count
from hetdpt.core.progress import StageProgress, StepProgress
from hetdpt.data.augmentation import Augmentation
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.selection.damage import GreedyChoice, choose, damage_of_each
from hetdpt.selection.entropy import greedy_order, require_offered, transfer_entropy
from hetdpt.selection.goal import RemovalTarget
from hetdpt.selection.importance import ImportanceSearch, Picked, Prior
from hetdpt.selection.methods import Method, Score, method_called, require_budget, require_priced
from hetdpt.selection.schedule import removal_order
from hetdpt.surgery.calibrate import gate_fitted_, refit_gates_
from hetdpt.surgery.gate import gates_by_site
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import place_, ready_for, removable
from hetdpt.training.config import TrainConfig
from hetdpt.training.objective import Distillation
from hetdpt.training.processes import start
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import Keeper, Progress

PURPOSE = "choosing layers"
POOL = 2  # candidates for each layer to remove


def usual_search() -> RecoverConfig:
    """Return how weights train in a short search: with a low learning rate, light augmentation and distillation."""
    training = TrainConfig(
        epochs=2,
        batch_size=32,
        lr=1e-5,
        lr_batch=None,
        schedule="constant",
        weight_decay=0.05,
        clip_grad=1.0,
        mixup=0.0,
        cutmix=0.0,
        smoothing=0.0,
        ema_decay=0.0,
    )
    # without auto_augment timm would use colour jitter
    augmentation = Augmentation(auto_augment=None, color_jitter=0.0, erasing=0.0, scale=(0.5, 1.0), repeats=1)
    distillation = Distillation(kind="soft", alpha=0.9, temperature=1.0)
    return RecoverConfig(training=training, augmentation=augmentation, distillation=distillation, drop_path=0.0)


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """How layers are chosen."""

    search: RecoverConfig = field(default_factory=usual_search)
    """How weights train while importances are learned; its seed is the seed of the whole selection."""
    removal: Removal = "calibrated"
    """What removed layers leave behind: a name from ``styles.PRESETS`` or (attention style, activation style). In a
    search it is also what closed gates compute; ``plain`` is the paper's."""
    images: int = 256
    """Training images to fit replacements and measure transfer entropy and damage on."""
    candidates: Literal["all", "te"] = "all"
    """Layers to search: all, or te for those with the least transfer entropy, of each kind twice as many as are
    removed, as in the paper."""
    explores: bool = True
    """Begin the search with a scan and try candidates closed, which the paper does not (``importance``)."""

    def __post_init__(self) -> None:
        if self.images < 2:
            raise PlanError(f"images is {self.images}; choosing layers needs at least 2")
        if self.candidates not in ("te", "all"):
            raise PlanError(f"candidates is {self.candidates!r}; expected 'all' or 'te'")
        Plan(removal=self.removal)  # refuses an unknown one


@dataclass(frozen=True)
class _Task:
    """The arguments of one selection."""

    model: nn.Module
    data: Data
    kinds: tuple[Kind | None, ...]
    """The kind of each layer to remove, in order, None for any; empty if a ``target`` says how much to remove."""
    target: RemovalTarget | None
    offered: list[Site]
    """The layers that can be removed."""
    config: SelectConfig
    images: ImageBatches
    device: str | None
    workers: int
    keeper: Keeper | None
    watch: Callable[[Picked], None] | None
    progress: StageProgress | None

    def stage(self, name: str) -> StepProgress | None:
        return partial(self.progress, name) if self.progress else None


def select(
    model: nn.Module,
    data: str | Data,
    budget: Budget | int | RemovalTarget,
    method: str = "hetdpt",
    config: SelectConfig | None = None,
    *,
    device: str | None = None,
    workers: int = 0,
    keeper: Keeper | None = None,
    watch: Callable[[Picked], None] | None = None,
    progress: StageProgress | None = None,
) -> Plan:
    """Return a plan that removes ``budget`` layers of ``model``, chosen by a row of ``METHODS``.

    Layers are chosen on the training images of ``data``, with their labels if importances are learned. A method that
    splits the budget needs a ``Budget``; the others use only the number of layers. One that ``is_priced`` also takes a
    ``RemovalTarget``: it removes layers, and chooses longer tails, until they save so much. ``keeper`` keeps states of
    a search to resume from; ``watch`` is called with each layer, in the order of removal.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, depth=3, num_classes=10)
    >>> plan = hetdpt.select(model, "demo", hetdpt.Budget(attention=1, activation=1), "map+te")
    >>> len(plan.attention), len(plan.activation)
    (1, 1)
    """
    row, config = method_called(method), config or SelectConfig()
    opened = data if isinstance(data, Data) else open_data(str(data))
    model.to(start(config.search.training.precision, device).device)
    images = _images(model, opened, config, workers)
    first = next(checked(images, model, PURPOSE))
    place_(clone(model).eval(), Plan(removal=config.removal), (first.shape[1], first.shape[2], first.shape[3]))
    base = ready_for(first, model, config.removal)  # one pruned in another style was refused
    target = budget if isinstance(budget, RemovalTarget) else None
    kinds = kinds_of(row, budget)
    offered = removable(base)
    require_offered(offered, kinds)
    task = _Task(model, opened, kinds, target, offered, config, images, device, workers, keeper, watch, progress)
    found = require_record(base)
    nothing = Plan(removal=config.removal, anatomy=found.survey.anatomy, tail=found.plan.tail)
    return nothing.plus(*SCORES[row.score](task))


def kinds_of(method: Method, budget: Budget | int | RemovalTarget) -> tuple[Kind | None, ...]:
    """Return the kinds of the layers to remove, in order, None for any; ``PlanError`` if there is nothing to remove.

    Of a ``RemovalTarget`` they are not known beforehand, and the method must be one that takes it.
    """
    require_budget(method)
    if isinstance(budget, RemovalTarget):
        require_priced(method)
        return ()
    count = budget if isinstance(budget, int) else budget.layers
    if count < 1 or (isinstance(budget, Budget) and min(budget.attention, budget.activation) < 0):
        raise PlanError(f"the budget is {budget}; expected at least 1 layer, and no negative numbers")
    if method.split != "map":
        return (method.only,) * count
    if isinstance(budget, int):
        raise PlanError(
            f"the method {method.name} needs the number of layers of each kind, but got {budget} in total; give both "
            "(--attention 2 --activation 3), or samples of hetdpt collect to split by"
        )
    return removal_order(budget)


def _images(model: nn.Module, data: Data, config: SelectConfig, workers: int, start: int = 0) -> ImageBatches:
    if data.train is None:
        raise PlanError("choosing layers needs training images; open the data with the split train")
    seed, wants = config.search.training.seed, preprocessing_of(model)
    return ImageBatches(data.train, wants, count=config.images, start=start, seed=seed, workers=workers)


def _by_entropy(task: _Task) -> list[Site]:
    """Return the sites removed one after another, each with the least transfer entropy of its kind."""
    order = greedy_order(
        task.model,
        task.images,
        task.kinds,
        removal=task.config.removal,
        progress=task.stage("measuring transfer entropy"),
    )
    _tell(task, order.items())
    return list(order)


def _by_damage(task: _Task) -> list[Move]:
    """Return the moves made one after another, each with the least damage, measured on other training images.

    If a target says how much they save, it is the least damage for what they save.
    """
    judge = _judge(task)
    chosen: list[GreedyChoice] = []
    for target in [task.target] if task.target else _counts(task):
        found = choose(
            task.model,
            task.images,
            target.sites,
            target.target,
            cost=target.cost,
            judge=judge,
            removal=task.config.removal,
            tail=target.tail,
            longest=target.longest,
            chosen=chosen,
            progress=task.stage("measuring damage"),
        )
        chosen = [*chosen, *found]
    moves = {choice.move: choice.damage for choice in chosen}
    _tell(task, moves.items())
    return list(moves)


def _counts(task: _Task) -> Iterator[RemovalTarget]:
    """Yield how many layers are removed after each kind: all of one, then all of the other."""
    count = 0
    for kind, more in Counter(task.kinds).items():
        count += more
        yield RemovalTarget(tuple(site for site in task.offered if kind in (None, site.kind)), float(count))


def _judge(task: _Task) -> ImageBatches:
    """Return as many training images as replacements are fitted on; other images if there are enough."""
    assert task.data.train is not None
    if len(task.data.train) <= task.images.count:
        return task.images
    return _images(task.model, task.data, task.config, task.workers, task.images.count)


def _at_random(task: _Task) -> list[Site]:
    left, found = list(task.offered), list[Site]()
    draw = np.random.default_rng(task.config.search.training.seed)
    for kind in task.kinds:
        offered = [site for site in left if kind in (None, site.kind)]
        found.append(offered[draw.integers(len(offered))])
        left.remove(found[-1])
    _tell(task, [(site, 0.0) for site in found])
    return found


def _by_importance(task: _Task) -> list[Site]:
    config = task.config
    candidates = _candidates(task)
    gated, student = Plan(removal=config.removal), deepcopy(task.model)
    gate_fitted_(student, gated, task.images, sites=candidates)
    settings = config.search.with_settings({"training.ema_decay": 0.0, "train_merged": False})
    search = ImportanceSearch(
        student,
        task.kinds,
        explores=config.explores,
        seed=settings.training.seed,
        prior=_prior(task, candidates) if config.explores else None,
        accumulate=settings.training.accumulate,
        refit=partial(_refit, student, gated, task.images),
        watch=task.watch,
    )
    epochs = recover(
        student,
        task.model,
        task.data,
        settings,
        device=task.device,
        workers=task.workers,
        keeper=task.keeper,
        watch=partial(_move, task.stage("learning importances")),
        companion=search,
        evaluates=False,
    )
    for _ in epochs:
        pass
    return [picked.site for picked in search.removed]


def _prior(task: _Task, candidates: list[Site]) -> Prior:
    """Return the damage of each candidate, the same in all processes."""
    judge, training = _judge(task), task.config.search.training
    found = damage_of_each(
        task.model,
        task.images,
        candidates,
        judge=judge,
        removal=task.config.removal,
        progress=task.stage("measuring damage"),
    )
    device = next(task.model.parameters()).device
    values = broadcast_(torch.tensor([found[site] for site in candidates], device=device))
    damages = dict(zip(candidates, values.tolist(), strict=True))
    return Prior(damages, judge.count / training.images_per_update(process_count()))


def _candidates(task: _Task) -> list[Site]:
    if None in task.kinds or task.config.candidates == "all":
        return [site for site in task.offered if None in task.kinds or site.kind in task.kinds]
    te = transfer_entropy(
        task.model,
        task.images,
        sites=task.offered,
        removal=task.config.removal,
        progress=task.stage("choosing candidates"),
    )
    chosen = [
        site
        for kind in KINDS
        for site in sorted((s for s in te if s.kind == kind), key=te.__getitem__)[: POOL * task.kinds.count(kind)]
    ]
    return [site for site in task.offered if site in chosen]


def _refit(student: nn.Module, plan: Plan, images: Iterable[Tensor]) -> None:
    """Fit the replacements again, the same ones in all processes."""
    refit_gates_(student, plan, images)
    for gate in gates_by_site(student).values():
        for parameter in gate.removed.parameters():
            broadcast_(parameter.data)


def _move(progress: StepProgress | None, now: Progress) -> None:
    if progress:
        progress(now.update, now.updates)


def _tell(task: _Task, found: Iterable[tuple[Move, float]]) -> None:
    for move, score in found:
        if task.watch is not None:
            task.watch(Picked(move, score))


SCORES: dict[Score, Callable[[_Task], Sequence[Move]]] = {
    "importance": _by_importance,
    "te": _by_entropy,
    "damage": _by_damage,
    "random": _at_random,
}
"""How each ``Method.score`` ranks layers."""
