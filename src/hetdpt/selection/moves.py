"""MOVES: everything that can be removed from a model step by step, a row each; what is offered and how it is fitted.

A move is fitted in closed form on images without labels. Which moves are made is decided by ``selection.frontier``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone
from hetdpt.core.plan import FewerFeatures, FewerTokens, FrontierMove, Kind, Styled, Tail
from hetdpt.core.styles import STYLES
from hetdpt.core.tokens import Tokens
from hetdpt.reduce.tokens.reduce import reduce_tokens_, restore_tokens_
from hetdpt.reduce.width.features import feature_counts, with_fewer_features
from hetdpt.surgery.arrange import kept_of
from hetdpt.surgery.calibrate import fit_sites, replaced, with_tail
from hetdpt.surgery.record import layout_of, require_record
from hetdpt.surgery.remove import removable, without
from hetdpt.surgery.tail import is_tail_possible

CHUNKS = 12  # of the hidden features of an FFN; each is one move
PARTS = 96  # of the tokens; each is one move, in every block
JUMPS = (1, 2, 4)  # moves at once that are offered first: a few tokens save less time than matching takes
Batches = Iterable[Tensor]


@dataclass(frozen=True, kw_only=True)
class MoveKind:
    """One kind of move."""

    name: str
    offers: Callable[[nn.Module, nn.Module], list[Any]]
    """Returns the moves that a model can make next; also given the dense model."""
    variants: Callable[[nn.Module, list[Any], Batches], dict[Any, nn.Module]]
    """Returns a copy of a model with each of some moves, each fitted as if it were the only one."""
    about: str
    """One sentence."""


def _layers(kind: Kind, *styles: str) -> Callable[[nn.Module, nn.Module], list[Styled]]:
    """Return what offers the layers of ``kind``, each in the style of the model's removal and in ``styles``."""

    def offers(model: nn.Module, _: nn.Module) -> list[Styled]:
        sites = [site for site in removable(model) if site.kind == kind and site.block < _stop(model)]
        own = require_record(model).plan.style_of(kind).name
        return [Styled(site, style) for site in sites for style in dict.fromkeys((own, *styles))]

    return offers


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


def _tails(model: nn.Module, _: nn.Module) -> list[Tail]:
    if not is_tail_possible(model):
        return []
    record = require_record(model)
    length = record.survey.anatomy.blocks - kept_of(record)[0] + 1
    return [Tail(length)] if length <= record.survey.anatomy.blocks else []


def _with_tails(model: nn.Module, moves: list[Tail], batches: Batches) -> dict[Tail, nn.Module]:
    return {move: with_tail(model, move.length, batches) for move in moves}


def _features(model: nn.Module, dense: nn.Module) -> list[FewerFeatures]:
    """Return a chunk less for each FFN whose patches are updated; at least one chunk stays."""
    first, stop = feature_counts(dense), _stop(model)
    chunks = {block: chunk_of(first[block]) for block in first}
    left = {block: count for block, count in feature_counts(model).items() if block < stop and count > chunks[block]}
    return [FewerFeatures(block, count - chunks[block]) for block, count in left.items()]


def chunk_of(count: int) -> int:
    """Return how many of ``count`` hidden features one move removes: about a twelfth, a multiple of 8 if possible.

    >>> chunk_of(768), chunk_of(1536), chunk_of(100), chunk_of(4)
    (64, 128, 8, 1)
    """
    return max(count // CHUNKS // 8 * 8, min(count // CHUNKS, 8), 1)


def _tokens(model: nn.Module, dense: nn.Module) -> list[FewerTokens]:
    """Return a few more tokens merged in every block with attention, if ``model`` supports that."""
    try:
        count = layout_of(require_record(reduce_tokens_(clone(dense), Tokens("tome", 1)))).tokens
    except ModelError:
        return []
    tokens, part = require_record(model).tokens, max(count // PARTS, 1)
    more = [tokens.r + part] if tokens else [part * jump for jump in JUMPS]
    return [FewerTokens(Tokens("tome", r)) for r in more if r * _stop(model) <= count]  # some are left


def _with_fewer_tokens(model: nn.Module, moves: list[FewerTokens], _: Batches) -> dict[FewerTokens, nn.Module]:
    return {move: reduce_tokens_(clone(model), move.tokens) for move in moves}


MOVES: dict[str, MoveKind] = {
    row.name: row
    for row in (
        MoveKind(
            name="attention",
            offers=_layers("attention", "linear"),
            variants=_without_layers,
            about="The attention of a block becomes a constant or a linear layer.",
        ),
        MoveKind(
            name="activation",
            offers=_layers("activation"),
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
            variants=with_fewer_features,
            about="The FFN of a block loses a chunk of its hidden features.",
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

    >>> kind_of(Tail(2)), kind_of(FewerFeatures(3, 64))
    ('tail', 'features')
    """
    if isinstance(move, Styled):
        return move.site.kind
    if isinstance(move, FewerTokens):
        return "tokens"
    return "tail" if isinstance(move, Tail) else "features"


def offered(model: nn.Module, dense: nn.Module, kinds: Iterable[str]) -> list[FrontierMove]:
    """Return all moves of ``kinds`` that ``model`` can make next, which was made from ``dense``."""
    return [move for kind in kinds for move in MOVES[kind].offers(model, dense)]


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
