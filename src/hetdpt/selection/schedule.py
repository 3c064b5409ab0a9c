"""When a search removes a layer of which kind: pure functions of the budget and of progress. No torch here."""

from __future__ import annotations

from hetdpt.core.plan import Budget, Kind

FIRST_STAGE, GROWTH = 3, 2  # epochs at the paper's scale: stages of 3, 5, 7, ... (docs/method.md)


def removal_order(budget: Budget) -> tuple[Kind, ...]:
    """Return the kinds of the layers in the order of removal: in turn, beginning with the larger part of the budget.

    On a tie the activation is first (the order of the paper's release). The rest of the larger part is at the end.

    >>> removal_order(Budget(attention=1, activation=3))
    ('activation', 'attention', 'activation', 'activation')
    """
    parts: list[tuple[Kind, int]] = [("activation", budget.activation), ("attention", budget.attention)]
    (first, many), (second, few) = sorted(parts, key=lambda part: -part[1])  # stable: activation first on a tie
    order: list[Kind] = []
    for turn in range(many):
        order += [first, second] if turn < few else [first]
    return tuple(order)


def stage_ends(count: int) -> tuple[int, ...]:
    """Return the epochs, at the paper's scale, after which each of ``count`` layers is removed; stages grow.

    >>> stage_ends(4)
    (3, 8, 15, 24)
    """
    return tuple(stage * FIRST_STAGE + GROWTH * stage * (stage - 1) // 2 for stage in range(1, count + 1))


def due(update: int, updates: int, count: int) -> int:
    """Return how many of ``count`` layers are removed after ``update`` of ``updates`` updates, the last one at the end.

    The search may have any length: the stages of the paper's scale are stretched to it.

    >>> [due(update, 24, 4) for update in (0, 2, 3, 8, 15, 23, 24)]
    [0, 0, 1, 2, 3, 3, 4]
    """
    ends = stage_ends(count)
    return sum(update * ends[-1] >= updates * end for end in ends)
