"""Samples of accuracy: prune, fine-tune briefly, evaluate, and again (paper, Algorithms 1 and 2). It writes no files.

Three chains, each from the dense model: attention layers only, activations only, and both in turn. A step of a chain
removes one more layer from the result of the step before it, the one with the least transfer entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from hetdpt.core.errors import DataError, PredictError
from hetdpt.core.modules import Peeked
from hetdpt.core.plan import KINDS, Budget, Kind, Plan, Removal, Sample, Site
from hetdpt.core.progress import StepProgress
from hetdpt.data.sources import Data
from hetdpt.measurement.accuracy import evaluate
from hetdpt.selection.entropy import transfer_entropy
from hetdpt.surgery.calibrate import variants_of
from hetdpt.surgery.remove import ready_for, removable
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import Keeper, Progress

Chain = Literal["attention", "activation", "interleaved"]
CHAINS: tuple[Chain, ...] = get_args(Chain)
PURPOSE = "a chain of removals"


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """How accuracy is sampled."""

    recovery: RecoverConfig
    """The brief fine-tuning of each step, such as that of the recipe ``brief``."""
    rounds: tuple[int, int, int] | None = None
    """Rounds of the chains attention, activation and interleaved, such as 8,8,3; a round of the last removes a layer of
    each kind. None: about 8/12, 8/12 and 3/12 of the blocks, as in the larger table of the paper, and of the last as
    many as reach the number of layers to remove, where that is known."""
    removal: Removal = "calibrated"
    """What removed layers leave behind: a name from ``styles.PRESETS`` or (attention style, activation style)."""
    images: int = 256
    """Training images to fit replacements and measure transfer entropy on."""
    fine_tunes: bool = True
    """Whether samples are fine-tuned; otherwise a sample is the accuracy right after the removal."""

    def __post_init__(self) -> None:
        if self.rounds is not None and not (len(self.rounds) == 3 and min(self.rounds) >= 0 and max(self.rounds) > 0):
            raise PredictError(
                f"rounds is {self.rounds}; expected one number for each of the chains {', '.join(CHAINS)}, 0 for none, "
                "such as 5,5,3"
            )
        if self.images < 2:
            raise PredictError(f"images is {self.images}; transfer entropy needs at least 2")
        Plan(removal=self.removal)  # refuses an unknown one

    def chains(self, blocks: int, offered: Budget, layers: int = 0) -> dict[Chain, tuple[Kind, ...]]:
        """Return the kinds of the layers that each chain removes, in order.

        ``offered`` are the layers that can be removed, ``layers`` is the goal, or 0 if it is not known.

        >>> CollectConfig(recovery=RecoverConfig(), rounds=(2, 0, 1)).chains(12, Budget(12, 12))
        {'attention': ('attention', 'attention'), 'interleaved': ('attention', 'activation')}
        """
        rounds = self.rounds or _usual_rounds(blocks, offered, layers)
        turns: tuple[tuple[Kind, ...], ...] = (("attention",), ("activation",), ("attention", "activation"))
        found: dict[Chain, tuple[Kind, ...]] = {}
        for chain, turn, number in zip(CHAINS, turns, rounds, strict=True):
            kinds = turn * number
            for kind, most in zip(KINDS, (offered.attention, offered.activation), strict=True):
                if kinds.count(kind) > most:
                    raise PredictError(
                        f"{number} rounds of the chain {chain} remove {kinds.count(kind)} {kind} layers, but this "
                        f"model has {most} that can be removed; give fewer rounds"
                    )
            if kinds:
                found[chain] = kinds
        return found


def _usual_rounds(blocks: int, offered: Budget, layers: int = 0) -> tuple[int, int, int]:
    """Return the paper's rounds for 12 blocks, scaled to ``blocks``, but enough for degree 2 if there are as many.

    The interleaved chain removes ``layers`` layers, so that no split of them is far from a sample.

    >>> _usual_rounds(12, Budget(12, 12)), _usual_rounds(12, Budget(12, 12), layers=8), _usual_rounds(4, Budget(4, 4))
    ((8, 8, 3), (8, 8, 4), (3, 3, 2))
    """
    one, both = max(round(8 * blocks / 12), 3), max(round(blocks / 4), 2, -(-layers // 2))
    most = max(offered.attention - 1, 1)  # without any attention, the class is predicted from one patch, or from none
    return min(one, most, offered.attention), min(one, offered.activation), min(both, most, offered.activation)


@dataclass(frozen=True)
class EntropyPick:
    """A removed layer, and the transfer entropy by which it was chosen."""

    site: Site
    te: float


@dataclass(frozen=True)
class SampleStep:
    """One more sample: layers were removed, and the model was fine-tuned and evaluated."""

    kinds: tuple[Kind, ...]
    """Kinds of all removed layers, in the order of removal."""
    picks: tuple[EntropyPick, ...]
    """The layers removed in this step."""
    before: float
    """Accuracy in percent before the fine-tuning."""
    accuracy: float
    """Accuracy of the model that was kept: after it, or before it if that is better."""
    seconds: float
    speedup: float | None = None
    """Speedup of the merged model over the dense one; None if it was not measured."""
    is_start: bool = False
    """Whether the fine-tuning made it worse, so that the model from before it was kept."""

    @property
    def budget(self) -> Budget:
        return Budget(self.kinds.count("attention"), self.kinds.count("activation"))

    @property
    def sample(self) -> Sample:
        return Sample(self.budget, self.accuracy)


def prune_next(
    student: nn.Module,
    kind: Kind,
    images: Iterable[Tensor],
    removal: Removal = "calibrated",
    progress: StepProgress | None = None,
) -> tuple[nn.Module, EntropyPick]:
    """Return a copy of ``student`` without one more layer of ``kind``, the one with the least transfer entropy.

    TE is measured on the fine-tuned student, so that it shows what the layer adds now. ``images`` are iterated several
    times; replacements are fitted on them.
    """
    images = Peeked(images, student, PURPOSE)
    base = ready_for(images.first, student, removal)
    left = [site for site in removable(base) if site.kind == kind]
    if not left:
        raise PredictError(f"a chain removes one more {kind} layer, but no removable one is left; give fewer rounds")
    try:
        entropies = transfer_entropy(student, images, sites=left, removal=removal, progress=progress)
    except DataError as error:
        raise PredictError(f"no {kind} layer can be chosen: {error}; or give fewer rounds") from None
    site = min(left, key=entropies.__getitem__)
    pruned = variants_of(base, [site], images)[site]  # around the student's own weights, which training would change
    return deepcopy(pruned), EntropyPick(site, entropies[site])


def fine_tune(
    student: nn.Module,
    teacher: nn.Module,
    data: Data,
    config: RecoverConfig | None,
    *,
    device: str | None = None,
    workers: int = 0,
    keeper: Keeper | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Iterator[tuple[int, float]]:
    """Train ``student`` in place and yield (epoch, accuracy in percent), epoch 0 before anything is trained.

    Accuracies are of ``data.val``, so that those of different students can be compared; nothing else is held out.
    If ``keeper`` has a state, training resumes from it, and epochs that were yielded before are not yielded again.
    """
    if config is None:
        yield 0, evaluate(student, data, workers=workers).top1
        return
    config = config.with_settings({"hold_out": 0.0})
    epochs = recover(student, teacher, data, config, device=device, workers=workers, keeper=keeper, watch=watch)
    for epoch in epochs:
        assert epoch.last is not None
        yield epoch.number, epoch.last
