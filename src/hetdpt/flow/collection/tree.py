"""The steps of a collection as a tree: a step starts from the model its parent ended with. Chains that start alike
share steps. No files here."""

from __future__ import annotations

from dataclasses import dataclass

from hetdpt.core.plan import KINDS, Budget, Kind
from hetdpt.selection.predictor.rows import LETTERS
from hetdpt.selection.predictor.samples import Chain

DENSE = "dense"


@dataclass(frozen=True)
class SampleNode:
    """A step of the tree.

    >>> print(SampleNode("aag", "aa", ("attention", "attention", "activation"), ("activation",)))
    2 attention layers and 1 activation layer removed
    """

    key: str
    """``dense``, or a letter for each removed layer: ``aag``."""
    parent: str | None
    kinds: tuple[Kind, ...]
    """Of all layers removed by then, in order."""
    new: tuple[Kind, ...]
    """Of those removed in this step."""

    @property
    def chain(self) -> str:
        """The first of the chains that has this step."""
        return chain_of(self.kinds)

    def __str__(self) -> str:
        counts = ((kind, self.kinds.count(kind)) for kind in KINDS)
        removed = [f"{count} {kind} layer{'s' if count > 1 else ''}" for kind, count in counts if count]
        return f"{' and '.join(removed)} removed" if removed else "the dense model"


def tree_of(chains: dict[Chain, tuple[Kind, ...]]) -> dict[str, SampleNode]:
    """Return the steps of ``chains`` by their keys, each after the one it starts from.

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
    """Return the first of the chains that removes layers of these kinds."""
    if not kinds:
        return DENSE
    return kinds[0] if len(set(kinds)) == 1 else "interleaved"


def in_turn(budget: Budget) -> tuple[Kind, ...]:
    """Return the kinds of the layers of ``budget``, alternating while there are both.

    >>> in_turn(Budget(1, 3))
    ('attention', 'activation', 'activation', 'activation')
    """
    counts: dict[Kind, int] = {"attention": budget.attention, "activation": budget.activation}
    turns = [(turn, number, kind) for number, (kind, count) in enumerate(counts.items()) for turn in range(count)]
    return tuple(kind for _, _, kind in sorted(turns))
