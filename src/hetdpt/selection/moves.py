"""MOVES: everything that can be removed from a model step by step, a row each; what is offered and how it is fitted.

A move is fitted in closed form on images without labels. Which moves are made is decided by ``selection.frontier``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone
from hetdpt.core.plan import (
    NARROWER,
    FewerDims,
    FewerFeatures,
    FewerHeads,
    FewerTokens,
    FrontierMove,
    Kind,
    Styled,
    Tail,
)
from hetdpt.core.styles import STYLES
from hetdpt.core.tokens import Tokens
from hetdpt.reduce.tokens.reduce import reduce_tokens_, restore_tokens_
from hetdpt.reduce.width.inner import dim_counts, feature_counts, head_counts, with_narrower
from hetdpt.surgery.arrange import kept_of
from hetdpt.surgery.calibrate import fit_sites, replaced, with_tail
from hetdpt.surgery.record import layout_of, require_record
from hetdpt.surgery.remove import removable, without
from hetdpt.surgery.replacement import why_not_removable
from hetdpt.surgery.tail import is_tail_possible

CHUNKS = 12  # of the hidden features of an FFN; each is one move
DIM_CHUNKS = 8  # of the dimensions of the heads of an attention; each is one move
STEP = 8  # of the sizes of FFNs, where it is not measured
STEPS = (1, 8, 16, 32, 64)  # of which the device may need one
SLOWER = 1.03  # times as long as with the best step, a feature may take
PARTS = 192  # of the tokens; each is one move, in every block
JUMPS = (1, 2, 4, 8)  # moves at once that are offered first: a few tokens save less time than matching takes
Batches = Iterable[Tensor]


@dataclass(frozen=True, kw_only=True)
class MoveKind:
    """One kind of move."""

    name: str
    offers: Callable[[nn.Module, nn.Module, int], list[Any]]
    """Returns the moves that a model can make next; also given the dense model, and the step of the sizes of FFNs."""
    variants: Callable[[nn.Module, list[Any], Batches], dict[Any, nn.Module]]
    """Returns a copy of a model with each of some moves, each fitted as if it were the only one."""
    about: str
    """One sentence."""


def _attentions(model: nn.Module, dense: nn.Module, _: int) -> list[Styled]:
    """Return the attention layers, each in the model's own style and others.

    Values for each position are as fast as one constant and fit better, but merged tokens have no position.
    """
    return _layers(model, "attention", *(("linear",) if _tokens_to_merge(dense) else ("position", "linear")))


def _activations(model: nn.Module, *_: Any) -> list[Styled]:
    return _layers(model, "activation")


def _layers(model: nn.Module, kind: Kind, *styles: str) -> list[Styled]:
    """Return the layers of ``kind``, each in the model's own style and in those ``styles`` that it can have."""
    record = require_record(model)
    own, stop = record.plan.style_of(kind).name, _stop(model)
    handles = [record.handle_of(site) for site in removable(model) if site.kind == kind and site.block < stop]
    return [
        Styled(handle.site, style)
        for handle in handles
        for style in dict.fromkeys((own, *styles))
        if why_not_removable(handle, STYLES[style]) is None
    ]


def _stop(model: nn.Module) -> int:
    """Return the first block in which patches are not updated: there is next to nothing to save from there on."""
    record = require_record(model)
    return record.survey.anatomy.blocks if record.layout is None else kept_of(record)[0]


def _without_layers(model: nn.Module, moves: list[Styled], batches: Batches) -> dict[Styled, nn.Module]:
    wanted: dict[Any, list[str]] = {}
    for move in moves:
        if STYLES[move.style].fit:
            wanted.setdefault(move.site, []).append(move.style)
    fitted = fit_sites(model, wanted, batches) if wanted else {}
    found = {Styled(site, style): replaced(model, one) for (site, style), one in fitted.items()}
    return {move: found[move] if move in found else without(model, move.site, move.style) for move in moves}


def _tails(model: nn.Module, *_: Any) -> list[Tail]:
    if not is_tail_possible(model):
        return []
    record = require_record(model)
    length = record.survey.anatomy.blocks - kept_of(record)[0] + 1
    return [Tail(length)] if length <= record.survey.anatomy.blocks else []


def _with_tails(model: nn.Module, moves: list[Tail], batches: Batches) -> dict[Tail, nn.Module]:
    return {move: with_tail(model, move.length, batches) for move in moves}


def _features(model: nn.Module, dense: nn.Module, step: int) -> list[FewerFeatures]:
    """Return a chunk less for each FFN whose patches are updated; at least one chunk stays."""
    first, stop = feature_counts(dense), _stop(model)
    chunks = {block: chunk_of(first[block], step) for block in first}
    left = {block: count for block, count in feature_counts(model).items() if block < stop and count > chunks[block]}
    return [FewerFeatures(block, count - chunks[block]) for block, count in left.items()]


def _heads(model: nn.Module, *_: Any) -> list[FewerHeads]:
    """Return a head less for each attention whose queries are of all tokens; at least one head stays."""
    left = {block: count for block, count in head_counts(model).items() if block < _stop(model) and count > 1}
    return [FewerHeads(block, count - 1) for block, count in left.items()]


def _head_dims(model: nn.Module, dense: nn.Module, _: int) -> list[FewerDims]:
    """Return a few dimensions less for the heads of each attention whose queries are of all tokens."""
    chunks = {block: dims_chunk_of(count) for block, count in dim_counts(dense).items()}
    left = {block: count for block, count in dim_counts(model).items() if block < _stop(model)}
    return [FewerDims(block, count - chunks[block]) for block, count in left.items() if count > chunks[block]]


def chunk_of(count: int, step: int = STEP) -> int:
    """Return how many of ``count`` hidden features one move removes: a twelfth, in multiples of ``step`` if it can.

    >>> chunk_of(768), chunk_of(1536), chunk_of(100), chunk_of(4), chunk_of(1000, 1)
    (64, 128, 8, 1, 83)
    """
    part = max(count // CHUNKS, 1)
    return part // step * step or part


def dims_chunk_of(count: int) -> int:
    """Return how many of ``count`` dimensions of each head one move removes: an eighth, at least one."""
    return max(count // DIM_CHUNKS, 1)


def sizes_to_time(count: int) -> dict[int, int]:
    """Return a size near ``count`` less a chunk for each of ``STEPS`` that fits in one: an odd multiple of it.

    >>> sizes_to_time(768), sizes_to_time(100)
    ({1: 705, 8: 712, 16: 720, 32: 736, 64: 704}, {1: 93, 8: 88})
    """
    part = max(count // CHUNKS, 1)
    return {step: ((count - part) // step | 1) * step for step in STEPS if step <= part}


def step_of(times: Mapping[int, float]) -> int:
    """Return the smallest step of sizes that is nearly as fast as the best, given the time of one feature for each.

    >>> step_of({1: 1.2, 8: 1.01, 16: 1.0, 32: 1.0})
    8
    """
    return min((step for step, time in times.items() if time <= SLOWER * min(times.values())), default=STEP)


def _tokens(model: nn.Module, dense: nn.Module, _: int) -> list[FewerTokens]:
    """Return a few more tokens merged in every block with attention, if ``model`` supports that."""
    tokens, count = require_record(model).tokens, _tokens_to_merge(dense)
    part = max(count // PARTS, 1)
    more = [tokens.r + part] if tokens else [part * jump for jump in JUMPS]
    return [FewerTokens(Tokens("tome", r)) for r in more if 0 < r * _stop(model) <= count]  # some are left


def _tokens_to_merge(dense: nn.Module) -> int:
    """Return how many tokens a model has, 0 if it cannot merge them."""
    try:
        return layout_of(require_record(reduce_tokens_(clone(dense), Tokens("tome", 1)))).tokens
    except ModelError:
        return 0


def _with_fewer_tokens(model: nn.Module, moves: list[FewerTokens], _: Batches) -> dict[FewerTokens, nn.Module]:
    return {move: reduce_tokens_(clone(model), move.tokens) for move in moves}


MOVES: dict[str, MoveKind] = {
    row.name: row
    for row in (
        MoveKind(
            name="attention",
            offers=_attentions,
            variants=_without_layers,
            about="The attention of a block becomes a constant, values for each position, or a linear layer.",
        ),
        MoveKind(
            name="activation",
            offers=_activations,
            variants=_without_layers,
            about="The FFN of a block becomes one linear layer, for patches alone where class tokens can keep it.",
        ),
        MoveKind(
            name="tail",
            offers=_tails,
            variants=_with_tails,
            about="Patches are not updated in one more of the last blocks.",
        ),
        MoveKind(
            name="features",
            offers=_features,
            variants=with_narrower,
            about="The FFN of a block loses a chunk of its hidden features.",
        ),
        MoveKind(
            name="heads",
            offers=_heads,
            variants=with_narrower,
            about="The attention of a block loses a head.",
        ),
        MoveKind(
            name="head_dims",
            offers=_head_dims,
            variants=with_narrower,
            about="The heads of the attention of a block lose an eighth of their dimensions.",
        ),
        MoveKind(
            name="tokens",
            offers=_tokens,
            variants=_with_fewer_tokens,
            about="Every block with attention merges a few more similar tokens (ToMe).",
        ),
    )
}


def kind_of(move: FrontierMove) -> str:
    """Return the name of the row of ``MOVES`` that a move is of.

    >>> kind_of(Tail(2)), kind_of(FewerFeatures(3, 64)), kind_of(FewerHeads(3, 2))
    ('tail', 'features', 'heads')
    """
    if isinstance(move, Styled):
        return move.site.kind
    if isinstance(move, FewerTokens):
        return "tokens"
    if isinstance(move, Tail):
        return "tail"
    return next(name for name, kind in NARROWER.items() if isinstance(move, kind))


def offered(model: nn.Module, dense: nn.Module, kinds: Iterable[str], step: int = STEP) -> list[FrontierMove]:
    """Return all moves of ``kinds`` that ``model`` can make next, which was made from ``dense``.

    Chunks of hidden features are multiples of ``step``, where FFNs are wide enough.
    """
    return [move for kind in kinds for move in MOVES[kind].offers(model, dense, step)]


def variants(model: nn.Module, moves: Iterable[FrontierMove], batches: Batches) -> dict[FrontierMove, nn.Module]:
    """Return a copy of ``model`` with each of ``moves``, each fitted as if it were the only one, on all tokens."""
    tokens, whole = require_record(model).tokens, restore_tokens_(clone(model))
    by_kind: dict[str, list[FrontierMove]] = {}
    for move in moves:
        by_kind.setdefault(kind_of(move), []).append(move)
    found: dict[FrontierMove, nn.Module] = {}
    for kind, some in by_kind.items():
        found |= MOVES[kind].variants(whole, some, batches)
    for variant in found.values():
        if tokens and require_record(variant).tokens is None:
            reduce_tokens_(variant, tokens)
    return found
