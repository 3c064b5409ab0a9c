"""From the predictor to a budget: how many layers of each kind to remove (paper, Algorithm 3), and how sure that is.

Every split that meets the goals is listed with its predicted accuracy; none is measured here. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from scipy.spatial import Delaunay

from hetdpt.core.errors import PredictError
from hetdpt.core.format import budget_text
from hetdpt.core.goals import GOALS, Wanted, show
from hetdpt.core.plan import Budget, Sample
from hetdpt.results import Prices, Split
from hetdpt.selection.predictor.polynomial import Predictor

DRAWS = 2000
ROUNDS = 100  # of drawing, where few of the draws determine the polynomial


@dataclass(frozen=True)
class Allocation:
    """A budget, and the table it was chosen from."""

    predictor: Predictor
    wanted: Wanted
    table: tuple[Split, ...]
    """Every split that meets the goals, the best first."""
    limits: Budget
    """How many layers of each kind there are."""

    @property
    def budget(self) -> Budget:
        """The budget to use."""
        return self.best.budget

    @property
    def best(self) -> Split:
        """The best of the splits that were measured again or, if none was, the best predicted."""
        if not self.rechecked:
            return self.table[0]
        return max(self.rechecked, key=lambda split: (split.measured or 0.0, *_preference(split.budget)))

    @property
    def rechecked(self) -> tuple[Split, ...]:
        """The splits of the table that were measured by a longer fine-tuning."""
        return tuple(split for split in self.table if split.measured is not None)

    def with_rechecked(self, samples: Iterable[Sample]) -> Allocation:
        """Return the allocation that follows from measured ``samples`` of some of its splits."""
        measured = {sample.budget: sample.accuracy for sample in samples}
        table = (replace(split, measured=measured.get(split.budget, split.measured)) for split in self.table)
        return replace(self, table=tuple(table))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What makes the choice doubtful, a sentence each; a split that was measured again is not doubtful."""
        found, best = list(self.predictor.warnings), self.best
        if best.is_beyond and best.measured is None:
            found.append(
                f"{best} is beyond the samples ({_nearest(self.predictor, best)}); collect more samples, or recheck it"
            )
        for degree in self.predictor.rivals:
            rival = self.predictor.with_degree(degree)  # fitted once, for all splits
            table = (replace(split, accuracy=rival.predict(split.budget)) for split in self.table)
            other = min(table, key=_rank)
            if other.budget != best.budget and other.measured is None:
                found.append(
                    f"the samples do not determine the degree: degree {degree} predicts left-out samples nearly as "
                    f"well and would choose {other}; collect more samples, or recheck it"
                )
        inner = [split for split in self.table if not self._is_corner(split)]
        if best.layers and self._is_corner(best) and inner and all(split.measured is None for split in inner):
            found.append(
                f"the predictor prefers a corner, {best}: the best split that is not one, {inner[0]}, is predicted "
                f"{best.accuracy - inner[0].accuracy:.2f} points lower; recheck both before you rely on it"
            )
        return tuple(found)

    def _is_corner(self, split: Split) -> bool:
        counts = (split.budget.attention, self.limits.attention), (split.budget.activation, self.limits.activation)
        return any(count in (0, limit) for count, limit in counts)


def allocate(predictor: Predictor, *, prices: Prices | None = None, **goals: float | None) -> Allocation:
    """Return how many layers of each kind to remove: the split with the highest predicted accuracy that meets all.

    ``goals`` are one or several of ``layers``, ``speedup``, ``macs`` and ``params`` (``core.goals.GOALS``); all but
    ``layers`` need ``prices``. Of equals, fewer layers are preferred, then fewer attention layers.

    >>> from hetdpt.selection.predictor.polynomial import fit_predictor
    >>> rows = [(1, 1, 80), (0.75, 1, 78), (0.5, 1, 70), (1, 0.75, 76), (1, 0.5, 74), (0.75, 0.75, 75)]
    >>> allocation = allocate(fit_predictor(rows, blocks=4), layers=2)
    >>> allocation.budget, len(allocation.table)
    (Budget(attention=0, activation=2), 3)
    """
    wanted = Wanted({name: value for name, value in goals.items() if value is not None})
    every = surface(predictor, prices)
    _require_prices(wanted, prices)
    table = [split for split in every if wanted.miss(split.measures) == 0]
    if not table:
        nearest = min(every, key=lambda split: (wanted.miss(split.measures), split.layers))
        raise PredictError(
            f"no split meets {wanted}; the nearest is {nearest}, {show(nearest.measures)}; change the goal to that"
        )
    shares = _shares(predictor, [split.budget for split in table])
    ranked = sorted(zip(table, shares, strict=True), key=lambda pair: _rank(pair[0]))
    best = ranked[0][0]
    rows = tuple(replace(s, share=share, is_tied=_is_tied(predictor, best, s)) for s, share in ranked)
    return Allocation(predictor, wanted, rows, _limits(predictor, prices))


def best_splits(predictor: Predictor, prices: Prices | None = None) -> tuple[Split, ...]:
    """Return the best split for every budget: for every number of layers or, if layers are timed, every speedup.

    The best for a speedup is the most accurate split that is at least as fast; one that is no faster and less accurate
    than another is never the best.
    """
    every = sorted(surface(predictor, prices), key=_rank)
    if prices is None or prices.dense.ms is None:
        best: dict[int, Split] = {}
        for split in every:
            best.setdefault(split.layers, split)
        return tuple(best[layers] for layers in sorted(best))
    found: list[Split] = []
    for split in every:  # from the most accurate on
        if not found or (split.speedup or 0) > (found[-1].speedup or 0):
            found.append(split)
    return tuple(found)


def surface(predictor: Predictor, prices: Prices | None) -> list[Split]:
    """Return every possible split with its predictions, fewer layers first."""
    limits = _limits(predictor, prices)
    pairs = product(range(limits.attention + 1), range(limits.activation + 1))
    budgets = sorted((Budget(*pair) for pair in pairs), key=_preference, reverse=True)
    area, found = _Area(predictor), []
    for budget in budgets:
        a, t = predictor.ratios(budget)
        low, high = predictor.interval(a, t)
        split = Split(budget, predictor.predict(a, t), low, high, area.is_outside(a, t))
        if prices is not None:
            cost = prices.measures(budget)
            split = replace(split, macs=cost.macs, params=cost.params, ms=cost.ms, speedup=cost.speedup)
        found.append(split)
    return found


class _Area:
    """Where samples determine the polynomial: in their convex hull, where leverage is no larger than at any of them.

    Leverage is x (X'X)^-1 x', the variance of a prediction relative to that of a sample. Chains of one kind make a
    hull whose middle is far from all of them.
    """

    def __init__(self, predictor: Predictor) -> None:
        points = np.array(predictor.points)
        exact = np.round(points * predictor.blocks) / predictor.blocks  # a sample at 0.67 reaches to 8/12
        self.hull = Delaunay(np.concatenate([points, exact]))
        self.predictor, self.inverse = predictor, np.linalg.pinv(predictor.terms(predictor.points)).T
        self.most = max(self._leverage(a, t) for a, t in np.concatenate([points, exact]))

    def is_outside(self, a: float, t: float) -> bool:
        """Whether the prediction at (a, t) is extrapolated."""
        is_outside = self.hull.find_simplex([a, t], tol=1e-9) < 0
        return bool(is_outside or self._leverage(a, t) > self.most + 1e-9)

    def _leverage(self, a: float, t: float) -> float:
        return float(np.square(self.inverse @ self.predictor.terms([(a, t)])[0]).sum())


def _limits(predictor: Predictor, prices: Prices | None) -> Budget:
    if prices is None:
        return Budget(predictor.blocks, predictor.blocks)
    counts = Budget(prices.count("attention"), prices.count("activation"))
    if max(counts.attention, counts.activation) > predictor.blocks:
        raise PredictError(
            f"the prices are of {counts.attention} attention and {counts.activation} activation layers, but the "
            f"samples are of a model with {predictor.blocks} blocks; give prices and samples of the same model"
        )
    return counts


def _preference(budget: Budget) -> tuple[int, int]:
    """Return a key that is larger for the preferred one of equals: fewer layers, then fewer attention layers."""
    return -budget.layers, -budget.attention


def _rank(split: Split) -> tuple[float, int, int]:
    fewer, attention = _preference(split.budget)
    return -round(split.accuracy, 9), -fewer, -attention  # what differs by rounding alone is a tie


def _require_prices(wanted: Wanted, prices: Prices | None) -> None:
    needed = [GOALS[name] for name in wanted.conditions if name != "layers"]
    if needed and prices is None:
        raise PredictError(
            f"the goal {' and '.join(goal.name for goal in needed)} needs the cost of each layer; give --prices FILE, "
            "or --model MODEL to measure them; a directory of hetdpt collect has them"
        )
    timed = next((goal for goal in needed if goal.is_timed), None)
    if timed and prices is not None and prices.dense.ms is None:
        raise PredictError(
            f"the goal {timed.name} needs the time of each layer, which these prices do not have; measure them again"
        )


def _is_tied(predictor: Predictor, best: Split, other: Split) -> bool:
    """Whether the interval of the difference between two predictions contains 0."""
    low, _ = predictor.difference(predictor.ratios(best.budget), predictor.ratios(other.budget))
    return round(low, 9) <= 0


def _shares(predictor: Predictor, budgets: Sequence[Budget], seed: int = 0) -> list[float]:
    """Return the fraction of bootstrap draws in which each of ``budgets`` is predicted best.

    A draw takes as many samples as there are, with replacement, and fits the same degree to them; draws that do not
    determine the polynomial are repeated.
    """
    basis, turn = np.linalg.qr(predictor.terms(predictor.points))
    grid = np.linalg.solve(turn.T, predictor.terms([predictor.ratios(budget) for budget in budgets]).T).T
    accuracies, generator = np.array(predictor.accuracies), np.random.default_rng(seed)
    wins, drawn = np.zeros(len(budgets)), 0
    for _ in range(ROUNDS):
        chosen = generator.integers(len(basis), size=(DRAWS, len(basis)))
        terms = basis[chosen]  # (draws, samples, coefficients)
        is_sound = np.linalg.svd(terms, compute_uv=False)[:, -1] > 1e-6
        solutions = np.linalg.pinv(terms[is_sound]) @ accuracies[chosen[is_sound]][..., None]
        predicted = (grid @ solutions)[: DRAWS - drawn, :, 0]  # (draws, budgets)
        np.add.at(wins, predicted.round(9).argmax(1), 1)  # of equals the first, and those come in order of preference
        drawn += len(predicted)
        if drawn == DRAWS:
            break
    return [float(count) for count in wins / max(drawn, 1)]


def _nearest(predictor: Predictor, split: Split) -> str:
    a, t = predictor.ratios(split.budget)
    x, y = min(predictor.points, key=lambda point: abs(point[0] - a) + abs(point[1] - t))
    removed = Budget(round((1 - x) * predictor.blocks), round((1 - y) * predictor.blocks))
    return f"the nearest is {budget_text(removed)}"
