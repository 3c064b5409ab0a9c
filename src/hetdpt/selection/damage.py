"""Layers chosen one after another, each with the least damage for what it saves; no labels.

The damage is measured after the replacements are fitted, between the outputs of the model as given and those of the
model without the layers. What a layer saves depends on those removed before; a function gives the cost of each plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.modules import Peeked, checked, clone, memory_advice, require_more_than_once
from hetdpt.core.plan import Move, Plan, Removal, Site, Tail
from hetdpt.core.progress import StepProgress
from hetdpt.measurement.agreement import Damage
from hetdpt.surgery.arrange import kept_of
from hetdpt.surgery.calibrate import variants_of, with_tail
from hetdpt.surgery.fit_tail import fit_tail_
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready_for, removable
from hetdpt.surgery.tail import is_tail_possible, trim_to_class_token_

PURPOSE = "choosing layers"
PARTS = 100  # of a step, as progress counts them
WORTH = 0.05  # of what the best saves, a move saves at least
Made = TypeVar("Made")
"""The move that a variant has made."""
Cost = Callable[[Plan], float]
"""What a plan costs; less is better."""


@dataclass(frozen=True)
class GreedyChoice:
    """One layer to remove, or a longer tail."""

    move: Move
    damage: float
    """Damage of the model with this move and all that were chosen before it."""
    gain: float
    """What it saves given all that were chosen before it: 1 layer, or milliseconds of a batch."""

    @classmethod
    def from_dict(cls, values: Any) -> GreedyChoice:
        """Return the choice whose ``asdict`` is ``values``."""
        move = values["move"]
        return cls(Tail(**move) if "length" in move else Site(**move), values["damage"], values["gain"])


def fewer_layers(plan: Plan) -> float:
    """Return a cost of ``plan`` by which each layer saves 1.

    >>> fewer_layers(Plan(attention=(1, 2)))
    -2.0
    """
    return -float(len(plan))


def cheapest(cost: Cost, plan: Plan, moves: Iterable[Move]) -> Plan:
    """Return ``plan`` with as many of ``moves`` as save something."""
    taken = list(moves)
    for move in tuple(taken):
        others = [other for other in taken if other != move]
        if cost(plan.plus(*others)) <= cost(plan.plus(*taken)):
            taken = others
    return plan.plus(*taken)


def choose(
    model: nn.Module,
    batches: Iterable[Tensor],
    sites: Iterable[Site],
    target: float,
    *,
    cost: Cost = fewer_layers,
    judge: Iterable[Tensor] | None = None,
    removal: Removal = "calibrated",
    tail: int = 0,
    longest: int = 0,
    chosen: Sequence[GreedyChoice] = (),
    memory: int = MEMORY,
    progress: StepProgress | None = None,
) -> Iterator[GreedyChoice]:
    """Yield layers to remove and longer tails, one after another, until together they save ``target``.

    Every step takes the one of ``sites`` with the least (damage(S + s) - damage(S)) / (cost(S) - cost(S + s)), where S
    are those chosen before; on a tie the one that runs first. The last step takes the one with the least damage of
    those that save enough. A tail with one more block is chosen in the same way, up to ``longest``; the model has
    ``tail`` from the start. What saves nothing, or little beside the others, is not taken. ``cost`` is of a plan, such
    as milliseconds of a batch; by default each layer saves 1.

    ``removal`` says what replaces a removed layer; replacements and tails are fitted anew in every step, on ``batches``
    and on the model with S, trimmed if it can have a tail. The damage is ``Damage``, relative to ``model`` as given, on
    the images of ``judge``, by default ``batches``. Both are read in every step and should give the same images each
    time.

    ``chosen`` are the choices of an earlier call, from which to continue. ``memory`` is that of ``CachedVariants``.
    ``progress`` is called with (hundredths of steps done, in all), an estimate where layers save more or less.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    >>> _ = nn.init.zeros_(model.blocks[1].attn.proj.weight)
    >>> attention = [site for site in hetdpt.sites(model) if site.kind == "attention"]
    >>> [choice] = choose(model, [torch.randn(8, 3, 32, 32)], attention, target=1)
    >>> choice.move.path, round(choice.damage, 6)
    ('blocks.1.attn', 0.0)
    """
    images, judge = _both(model, batches, judge, "once for each layer")
    base = current = trim_to_class_token_(ready_for(images.first, model, removal))
    nothing, taken = Plan(removal=removal), [*_tails(tail), *(choice.move for choice in chosen)]
    plan, goal = nothing.plus(*taken), cost(nothing) - target
    if cost(plan) <= goal:
        return
    left = [site for site in removable(current, sites) if not plan.removes(site)]
    for move in taken:
        current = _settled(_variants(current, [move], images)[move], move, images)
    least = cost(cheapest(cost, plan, [*left, *_tails(longest)]))
    _require_reachable(cost(nothing) - least, target, len(left))
    damage = chosen[-1].damage if chosen else 0.0
    dense = DenseOutputs(base, judge, memory)
    step = len(chosen)
    while cost(plan) > goal:
        gains = _gains(cost, plan, [*_useful(current, plan, left), *_tails(_length_after(current), longest)])
        if not gains:
            return
        steps = step + ceil((cost(plan) - goal) * len(left) / (cost(plan) - least))
        tell = _part_of(progress, step, steps)
        variants = _variants(current, gains, images)
        damages = dense.damages(current, variants, tell, length_hint(images))
        best = min(gains, key=lambda move: (damages[move] - damage) / gains[move])
        if cost(plan.plus(best)) <= goal:  # the last step: saving more than is left is worth nothing
            best = min((move for move in gains if cost(plan.plus(move)) <= goal), key=damages.__getitem__)
        _require_finite(damages[best], step)
        current, damage = _settled(variants[best], best, images), damages[best]
        plan, step, left = plan.plus(best), step + 1, [site for site in left if site != best]
        yield GreedyChoice(best, damage, gains[best])


def tail_among(damages: Mapping[Move, float], cost: Cost, is_enough: Callable[[Plan], bool]) -> int:
    """Return how long a tail is if moves are made in the order of their damage per gain until that ``is_enough``.

    ``damages`` are of each move alone; those of layers are taken to add up. Tails are those of 2 blocks and more.

    >>> layers = {Site("attention", block, ""): 1.0 for block in range(4)}
    >>> tails = {Tail(2): 0.1, Tail(3): 5.0}
    >>> tail_among({**layers, **tails}, lambda plan: 9.0 - len(plan) - plan.tail, lambda plan: len(plan) > 1)
    2
    """
    plan = Plan()
    while not is_enough(plan):
        longer = Tail(max(plan.tail, 1) + 1)
        left = [move for move in damages if (move == longer if isinstance(move, Tail) else not plan.removes(move))]
        if not (gains := _gains(cost, plan, left)):
            break
        before = damages.get(Tail(plan.tail), 0.0)
        extra = {move: damages[move] - (before if isinstance(move, Tail) else 0.0) for move in gains}
        plan = plan.plus(min(gains, key=lambda move: extra[move] / gains[move]))
    return plan.tail


def _gains(cost: Cost, plan: Plan, moves: Iterable[Move]) -> dict[Move, float]:
    """Return what each move saves after ``plan``, of those that are worth it.

    A layer that computes the class token alone saves next to nothing, beside which any damage is noise.
    """
    gains = {move: cost(plan) - cost(plan.plus(move)) for move in moves}
    least = WORTH * max(gains.values(), default=0.0)
    return {move: gain for move, gain in gains.items() if gain > 0 and gain >= least}


def _useful(model: nn.Module, plan: Plan, sites: Iterable[Site]) -> list[Site]:
    """Return ``sites`` without activations of class tokens alone, where class tokens would keep them anyway."""
    keeps = plan.class_token == "keep" and is_tail_possible(model)
    stop = kept_of(require_record(model))[0] if keeps else inf
    return [site for site in sites if site.kind == "attention" or site.block < stop]


def _tails(length: int, longest: int | None = None) -> list[Tail]:
    """Return the tail of that ``length`` in a list, which is empty for none and for one that is too long."""
    return [Tail(length)] if length and (longest is None or length <= longest) else []


def _length_after(model: nn.Module) -> int:
    """Return the length of the tail that stops patches one block earlier than ``model`` does; 0 if it can have none."""
    if not is_tail_possible(model):
        return 0
    record = require_record(model)
    return record.survey.anatomy.blocks - kept_of(record)[0] + 1


def _variants(model: nn.Module, moves: Iterable[Move], batches: Iterable[Tensor]) -> dict[Move, nn.Module]:
    """Return a copy of ``model`` with each of ``moves``, each fitted as if it were the only one."""
    moves = list(moves)
    without = variants_of(model, [move for move in moves if isinstance(move, Site)], batches)
    tails = {move: with_tail(model, move.length, batches) for move in moves if isinstance(move, Tail)}
    return {move: tails[move] if isinstance(move, Tail) else without[move] for move in moves}


def _settled(model: nn.Module, move: Move, images: Iterable[Tensor]) -> nn.Module:
    """Return ``model`` after ``move``, with its tail fitted again where a layer before it was removed."""
    return model if isinstance(move, Tail) else fit_tail_(model, images)


def damage_of_each(
    model: nn.Module,
    batches: Iterable[Tensor],
    moves: Iterable[Move],
    *,
    judge: Iterable[Tensor] | None = None,
    removal: Removal = "calibrated",
    progress: StepProgress | None = None,
) -> dict[Move, float]:
    """Return the damage of ``model`` with each of ``moves`` alone; ``batches`` and ``judge`` as in ``choose``.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    >>> _ = nn.init.zeros_(model.blocks[1].attn.proj.weight)
    >>> attention = [site for site in hetdpt.sites(model) if site.kind == "attention"]
    >>> damages = damage_of_each(model, [torch.randn(8, 3, 32, 32)], attention)
    >>> min(damages, key=damages.__getitem__).path
    'blocks.1.attn'
    """
    images, judge = _both(model, batches, judge, "to fit replacements and to judge them")
    current = trim_to_class_token_(ready_for(images.first, model, removal))
    variants = _variants(current, moves, images)
    dense = DenseOutputs(current, judge, MEMORY)
    return dense.damages(current, variants, _part_of(progress, 0, 1), length_hint(images))


def _both(
    model: nn.Module, batches: Iterable[Tensor], judge: Iterable[Tensor] | None, times: str
) -> tuple[Peeked, Iterable[Tensor]]:
    """Return the images to fit on and those to judge on, which are the same unless ``judge`` is given."""
    judge = batches if judge is None else judge
    for images in (batches, judge):
        require_more_than_once(images, times)
    peeked = Peeked(batches, model, PURPOSE)
    return peeked, peeked if judge is batches else judge


class DenseOutputs:
    """The outputs of the dense model for some images, with which those of variants are compared."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, images: Iterable[Tensor], memory: int = MEMORY) -> None:
        self.model, self.images, self.memory = model, images, memory
        dense = clone(model).eval()
        self.answers, self.marks = list[Tensor](), list[Tensor]()
        for batch in checked(images, model, PURPOSE):
            self.answers.append(Probe()(dense, batch).cpu())
            self.marks.append(_mark(batch))
        if not all(answers.isfinite().all() for answers in self.answers):
            raise ModelError("the model returns values that are not finite; check its weights, or use float32")

    def damages(
        self,
        current: nn.Module,
        variants: Mapping[Made, nn.Module],
        tell: Callable[[float], None] = lambda _: None,
        fits: int = 0,
    ) -> dict[Made, float]:
        """Return the damage of each variant of ``current``; ``tell`` is called with the fraction of the step done.

        ``fits`` is how many forward passes of the step have been made before.
        """
        found = {site: Damage.to(self.model) for site in variants}
        done, in_all = fits, fits + len(self.answers) * (1 + len(variants))
        scan: CachedVariants[Made] | None = None
        for dense, mark, images in zip(self.answers, self.marks, self._stream(), strict=True):
            _require_same(mark, images)
            with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches or memory=0"):
                scan = scan or CachedVariants(current, variants, Probe(), images, self.memory)
                for site, answers in scan.answers(images):
                    if site is not None:
                        found[site].add(dense, answers)
                    done += 1
                    tell(done / in_all)
        return {site: damage.value for site, damage in found.items()}

    @torch.no_grad()
    def damage(self, changed: nn.Module) -> float:
        """Return the damage of one model."""
        found, model = Damage.to(self.model), clone(changed).eval()
        for dense, mark, images in zip(self.answers, self.marks, self._stream(), strict=True):
            _require_same(mark, images)
            found.add(dense, Probe()(model, images))
        return found.value

    def _stream(self) -> Iterator[Tensor]:
        return checked(self.images, self.model, PURPOSE)


def _mark(images: Tensor) -> Tensor:
    """Return a number that identifies each image."""
    return images.float().flatten(1).mean(1).cpu()


def _require_same(mark: Tensor, images: Tensor) -> None:
    if len(mark) != len(images) or not torch.allclose(mark, _mark(images), rtol=1e-4, atol=1e-6):
        raise DataError(
            "choosing layers reads the images once for each layer, but they were in another order than before; "
            "give a loader that does not shuffle or augment"
        )


def _part_of(progress: StepProgress | None, step: int, steps: int) -> Callable[[float], None]:
    def tell(part: float) -> None:
        if progress:
            progress(round(PARTS * (step + part)), PARTS * steps)

    return tell


def _require_reachable(most: float, target: float, left: int) -> None:
    if most < target:
        raise PlanError(f"the goal is to save {target:g}, but all {left} layers save {most:g}; set a smaller goal")


def _require_finite(damage: float, step: int) -> None:
    if not isfinite(damage):
        raise PlanError(
            f"after {step} layers, removing any other leaves a model whose outputs are not finite; "
            "remove fewer layers, or use float32"
        )
