"""The steps of a collection as a tree: a step begins from the model its parent came to. Chains that begin alike share
steps. No files here."""

from __future__ import annotations

from dataclasses import dataclass

from hetdpt.core.plan import Budget, Kind
from hetdpt.selection.predictor.samples import Chain

DENSE = "dense"
LETTERS = {"attention": "a", "activation": "g"}  # as in the paper's m^a and m^g


@dataclass(frozen=True)
class SampleNode:
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
        return chain_of(self.kinds)


def tree_of(chains: dict[Chain, tuple[Kind, ...]]) -> dict[str, SampleNode]:
    """Return the steps of ``chains`` by their keys, each after the one it begins from.

    >>> list(tree_of({"attention": ("attention",) * 2, "interleaved": ("attention", "activation")}))
    ['dense', 'a', 'aa', 'ag']
    """
    nodes = {DENSE: SampleNode(DENSE, None, (), ())}
    for kinds in chains.values():
        parent = DENSE
        for count in range(1, len(kinds) + 1):
            key = "".join(LETTERS[kind] for kind in kinds[:count])
            nodes.setdefault(key, SampleNode(key, parent, kinds[:count], kinds[count - 1 : count]))
            parent = key
    return nodes


def chain_of(kinds: tuple[Kind, ...]) -> str:
    """Return the first of the chains that takes layers of these kinds."""
    if not kinds:
        return DENSE
    return kinds[0] if len(set(kinds)) == 1 else "interleaved"


def in_turn(budget: Budget) -> tuple[Kind, ...]:
    """Return the kinds of the layers of ``budget``, in turn as long as there are both.

    >>> in_turn(Budget(1, 3))
    ('attention', 'activation', 'activation', 'activation')
    """
    counts: dict[Kind, int] = {"attention": budget.attention, "activation": budget.activation}
    turns = [(turn, number, kind) for number, (kind, count) in enumerate(counts.items()) for turn in range(count)]
    return tuple(kind for _, _, kind in sorted(turns))
