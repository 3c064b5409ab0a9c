"""MAP, the model accuracy predictor (paper, stage 1, step 1): a polynomial in the retained ratios. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import comb, isfinite, sqrt
from typing import Any

import numpy as np
from scipy.stats import t as student_t
from sklearn.model_selection import LeavePOut
from sklearn.preprocessing import PolynomialFeatures

from hetdpt.core.errors import PredictError
from hetdpt.core.plan import Budget, Sample

DEGREES = (1, 2, 3, 4)
FEWEST = 3 + 2  # samples: the coefficients of degree 1, and two to leave out
MOST_BLOCKS = 200
LEVEL = 0.95  # of intervals
UNDECIDED = 0.1  # of the left-out pairs may leave samples that do not determine a degree
RIVAL = 1.5  # times the least RMSE: with few samples, a smaller difference says nothing (docs/method.md)
POOR = 0.8  # of the variance of accuracies, explained for samples held out
DECIMALS = 0.005  # what rounding to two decimals takes from a ratio
Row = Sample | Sequence[float]
"""A sample, or (retained attention ratio a, retained activation ratio t, accuracy in percent)."""


@dataclass(frozen=True)
class LeaveTwoOut:
    """How well a degree predicts samples that it was not fitted to."""

    degree: int
    mae: float
    rmse: float
    why_not: str = ""
    """Why this degree cannot be chosen; empty if it can."""


@dataclass(frozen=True)
class Predictor:
    """P(a, t) = sum of theta_ij a^i t^j over i + j <= degree: accuracy in percent by retained ratios.

    a = n_a / L and t = n_g / L for n_a attention and n_g activation layers kept out of L blocks.
    """

    blocks: int
    """L."""
    points: tuple[tuple[float, float], ...]
    """(a, t) of each sample."""
    accuracies: tuple[float, ...]
    degree: int
    """The degree with the least RMSE of those in ``tried`` that can be chosen."""
    tried: tuple[LeaveTwoOut, ...]

    @property
    def mae(self) -> float:
        """Mean absolute error, leaving two samples out."""
        return self._chosen.mae

    @property
    def rmse(self) -> float:
        """Root of the mean squared error, leaving two samples out."""
        return self._chosen.rmse

    @property
    def _chosen(self) -> LeaveTwoOut:
        return next(row for row in self.tried if row.degree == self.degree)

    @property
    def explained(self) -> float:
        """1 - RMSE^2 / variance of the accuracies: 1 is perfect, 0 as good as their mean."""
        variance = float(np.var(self.accuracies))
        return 1 - self.rmse**2 / variance if variance else 0.0

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """theta by term: ``1``, ``a``, ``t``, ``a^2``, ``a*t``, ``t^2``, ..."""
        return {_term(i, j, "a", "t"): value for (i, j), value in self._theta.items()}

    @cached_property
    def pruned_coefficients(self) -> dict[str, float]:
        """The same polynomial in the pruned ratios p = 1 - a and q = 1 - t, by a^i = sum_k C(i, k) (-p)^k."""
        found = dict.fromkeys(self._theta, 0.0)
        for (i, j), theta in self._theta.items():
            for k in range(i + 1):
                for m in range(j + 1):
                    found[k, m] += theta * comb(i, k) * comb(j, m) * (-1) ** (k + m)
        return {_term(i, j, "p", "q"): value for (i, j), value in found.items()}

    @property
    def formula(self) -> str:
        """P by retained ratios."""
        return f"P(a, t) = {_sum(self.coefficients)}"

    @property
    def pruned_formula(self) -> str:
        """P by pruned ratios."""
        return f"P(p, q) = {_sum(self.pruned_coefficients)}"

    def ratios(self, budget: Budget) -> tuple[float, float]:
        """Return (a, t) without the layers of ``budget``."""
        return _kept(budget.attention, self.blocks), _kept(budget.activation, self.blocks)

    def predict(self, a: Any, t: Any = None) -> Any:
        """Return the accuracy in percent at retained ratios ``a`` and ``t``, which may be arrays.

        ``a`` alone may be a ``Budget``, or pairs (a, t).

        >>> rows = [(1, 1, 80), (0.5, 1, 70), (1, 0.5, 60), (0.5, 0.5, 50), (0.75, 1, 75)]
        >>> predictor = fit_predictor(rows, blocks=4)
        >>> round(predictor.predict(0.75, 0.75), 6), round(predictor.predict(Budget(1, 1)), 6)
        (65.0, 65.0)
        """
        if isinstance(a, Budget):
            a, t = self.ratios(a)
        elif t is None:
            a, t = np.asarray(a, dtype=float).T
        pairs = np.stack(np.broadcast_arrays(a, t), axis=-1)  # (..., 2)
        found = (self.terms(pairs.reshape(-1, 2)) @ self._solution).reshape(pairs.shape[:-1])
        return float(found) if found.ndim == 0 else found

    def interval(self, a: float, t: float) -> tuple[float, float]:
        """Return the interval of the accuracy at (a, t) at ``LEVEL``, if the surface is such a polynomial.

        It spans the intervals of all ``rivals``, for percentages clipped to 0 and 100.
        """
        low, high = self._reach([(a, t)], [1.0])
        if not self._is_percent:
            return low, high
        return min(max(low, 0.0), 100.0), min(max(high, 0.0), 100.0)

    def difference(self, one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
        """Return the interval of the accuracy at ``one`` minus that at ``other``, as ``interval`` does."""
        return self._reach([one, other], [1.0, -1.0])

    def _reach(self, points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
        """Return the interval of a weighted sum of the accuracies at ``points``."""
        ends = [surface.interval(points, weights) for surface in self._surfaces]
        return min(low for low, _ in ends), max(high for _, high in ends)

    @property
    def rivals(self) -> tuple[int, ...]:
        """The degrees with an RMSE close to that of the chosen one, itself among them."""
        return tuple(row.degree for row in self.tried if not row.why_not and row.rmse <= RIVAL * self.rmse + 1e-9)

    def with_degree(self, degree: int) -> Predictor:
        """Return the predictor with another ``degree``."""
        return replace(self, degree=degree)

    def terms(self, points: Iterable[tuple[float, float]]) -> np.ndarray:
        """Return the terms 1, a, t, a^2, ... of each of ``points``, (n, p)."""
        return _terms(self.degree, np.array(list(points), dtype=float))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the fit doubtful, a sentence each."""
        found, least, most = [], min(self.accuracies), max(self.accuracies)
        if not self._is_percent or 0 < most <= 1:
            found.append(f"accuracies are from {least:g} to {most:g}, but should be in percent: 81.8, not 0.818")
        if least == most:
            found.append(f"all samples have the same accuracy, {least:g} %; is the model trained for this data?")
        elif self.explained < POOR:
            found.append(
                f"the fit is poor: on left-out samples it explains {max(self.explained, 0):.0%} of the variance (RMSE "
                f"{self.rmse:.2f} points); collect more samples, or fine-tune each of them longer"
            )
        return tuple(found)

    @property
    def _is_percent(self) -> bool:
        return min(self.accuracies) >= 0 and max(self.accuracies) <= 100

    @cached_property
    def _surfaces(self) -> tuple[_Surface, ...]:
        points, accuracies = np.array(self.points), np.array(self.accuracies)
        return tuple(_Surface.fitted(degree, points, accuracies) for degree in self.rivals)

    @cached_property
    def _solution(self) -> np.ndarray:
        return _solve(self.terms(self.points), np.array(self.accuracies))

    @property
    def _theta(self) -> dict[tuple[int, int], float]:
        powers = _powers(self.degree)
        return {(int(i), int(j)): float(value) for (i, j), value in zip(powers, self._solution, strict=True)}


@dataclass(frozen=True)
class _Surface:
    """The polynomial of one degree fitted to all samples, and its uncertainty."""

    degree: int
    solution: np.ndarray
    """theta, (p,)."""
    reach: np.ndarray
    """t s (X+)' for the pseudo-inverse X+ of the terms X: |reach x| is half the interval of x theta, (n, p)."""

    @classmethod
    def fitted(cls, degree: int, points: np.ndarray, accuracies: np.ndarray) -> _Surface:
        terms = _terms(degree, points)
        solution, free = _solve(terms, accuracies), len(terms) - terms.shape[1]
        residuals = accuracies - terms @ solution
        scale = student_t.ppf((1 + LEVEL) / 2, free) * sqrt(residuals @ residuals / free)
        return cls(degree, solution, np.linalg.pinv(terms).T * float(scale))

    def interval(self, points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
        """Return x theta -+ t sqrt(s^2 x (X'X)^-1 x'), Student's t on n - p, for x the weighted terms of ``points``."""
        x = np.array(weights) @ _terms(self.degree, np.array(points))
        middle, half = float(x @ self.solution), float(np.linalg.norm(self.reach @ x))
        return middle - half, middle + half


def fit_predictor(rows: Iterable[Row], blocks: int = 12, exact: bool = True) -> Predictor:
    """Return the polynomial fitted to ``rows``; its degree predicts best when leaving two out (paper, L2OCV).

    Rows are samples, or (a, t, accuracy) with retained ratios and percent. ``exact`` reads 0.67 as 8/12; without it
    ratios are used as given. Every two samples are left out once, the predictions for each sample are averaged, and
    the degree with the least RMSE is fitted again to all. Degrees with more coefficients than samples to fit, or that
    the samples do not determine, are not chosen.
    """
    if not 1 <= blocks <= MOST_BLOCKS:
        raise PredictError(f"blocks is {blocks}; expected 1 to {MOST_BLOCKS}")
    found = [_read(row, number, blocks, exact) for number, row in enumerate(rows, 1)]
    _require_different(found, blocks)
    points = np.array([row[:2] for row in found]).reshape(-1, 2)
    accuracies = np.array([row[2] for row in found])
    _require_enough(points)
    tried = tuple(_leave_two_out(degree, points, accuracies) for degree in DEGREES)
    best = min((row for row in tried if not row.why_not), key=lambda row: round(row.rmse, 9))  # of equals the lowest
    pairs = tuple((float(a), float(t)) for a, t in points)
    return Predictor(blocks, pairs, tuple(float(value) for value in accuracies), best.degree, tried)


def _read(row: Row, number: int, blocks: int, exact: bool) -> tuple[float, float, float]:
    """Return (a, t, accuracy) of a row; ``PredictError`` if it is not a sample."""
    if isinstance(row, Sample):
        counts = row.budget.attention, row.budget.activation
        if not all(0 <= count <= blocks for count in counts):
            raise PredictError(
                f"sample {number} removes {counts[0]} attention and {counts[1]} activation layers of {blocks} blocks; "
                f"expected 0 to {blocks} of each: is the number of blocks right?"
            )
        a, t, accuracy = _kept(counts[0], blocks), _kept(counts[1], blocks), row.accuracy
    else:
        try:
            a, t, accuracy = (float(value) for value in row)
        except (TypeError, ValueError):
            raise PredictError(f"sample {number} is {row!r}; expected three numbers (a, t, accuracy)") from None
        if not (0 <= a <= 1 and 0 <= t <= 1):
            raise PredictError(
                f"sample {number} has the ratios {a:g} and {t:g}; a and t are the fractions of layers that are kept, "
                "from 0 to 1"
            )
        if exact:
            a, t = (_snap(ratio, number, blocks) for ratio in (a, t))
    if not isfinite(accuracy):
        raise PredictError(f"sample {number} has the accuracy {accuracy:g}; expected a number in percent")
    return a, t, accuracy


def _kept(removed: int, blocks: int) -> float:
    """Return n / blocks to the same bit as ``_snap``; 1 - 4/12 is not 8/12."""
    return (blocks - removed) / blocks


def _snap(ratio: float, number: int, blocks: int) -> float:
    """Return the nearest n / blocks; 0.67 is 8/12, but 0.7 is refused."""
    nearest = round(ratio * blocks) / blocks
    if abs(nearest - ratio) > DECIMALS + 1e-9:
        raise PredictError(
            f"sample {number} keeps a fraction of {ratio:g}, which is not n/{blocks}: the nearest is "
            f"{round(ratio * blocks)}/{blocks} = {nearest:.3f}; is the number of blocks right?"
        )
    return nearest


def _require_different(rows: list[tuple[float, float, float]], blocks: int) -> None:
    seen: dict[tuple[float, float], tuple[int, float]] = {}
    for number, (a, t, accuracy) in enumerate(rows, 1):
        if (a, t) in seen:
            first, other = seen[a, t]
            where = f"samples {first} and {number} have the same ratios, a = {a:.4g} and t = {t:.4g} ({blocks} blocks)"
            if other == accuracy:
                raise PredictError(f"{where}, and the same accuracy; leave one out")
            raise PredictError(f"{where}, but the accuracies {other:g} and {accuracy:g}; keep one, or their mean")
        seen[a, t] = number, accuracy


def _require_enough(points: np.ndarray) -> None:
    if len(points) < FEWEST:
        raise PredictError(
            f"got {len(points)} samples, but at least {FEWEST} are needed: a polynomial of degree 1 has 3 "
            "coefficients, and 2 samples are left out in turn"
        )
    if problem := _why_not(1, points):
        raise PredictError(
            f"no polynomial can be fitted: {problem}; add samples with only attention layers removed, and with only "
            "activations removed"
        )


def _why_not(degree: int, points: np.ndarray) -> str:
    """Return why ``degree`` cannot be chosen for samples at ``points``; empty if it can."""
    terms = _terms(degree, points)
    if terms.shape[1] > len(points) - 2:
        return f"it has {terms.shape[1]} coefficients for {len(points) - 2} samples"
    if np.linalg.matrix_rank(terms) < terms.shape[1]:
        return f"the {len(points)} samples do not determine its {terms.shape[1]} coefficients"
    return ""


def _leave_two_out(degree: int, points: np.ndarray, accuracies: np.ndarray) -> LeaveTwoOut:
    terms = _terms(degree, points)
    sums, ranks = np.zeros(len(points)), list[int]()
    for rest, pair in LeavePOut(2).split(terms):
        solution, _, rank, _ = np.linalg.lstsq(terms[rest], accuracies[rest], rcond=None)
        sums[pair] += terms[pair] @ solution
        ranks.append(int(rank))
    errors = sums / (len(points) - 1) - accuracies
    mae, rmse = float(np.abs(errors).mean()), float(np.sqrt((errors**2).mean()))
    why_not = _why_not(degree, points)
    undecided = np.mean(np.array(ranks) < terms.shape[1])
    if degree > 1 and not why_not and undecided > UNDECIDED:
        why_not = f"without two, samples do not determine its {terms.shape[1]} coefficients ({undecided:.0%} of pairs)"
    return LeaveTwoOut(degree, mae, rmse, why_not)


def _solve(terms: np.ndarray, accuracies: np.ndarray) -> np.ndarray:
    solution: np.ndarray = np.linalg.lstsq(terms, accuracies, rcond=None)[0]
    return solution


def _terms(degree: int, points: np.ndarray) -> np.ndarray:
    """Return 1, a, t, a^2, ... of each of ``points``: (n, 2) -> (n, p)."""
    powers = _powers(degree)
    terms: np.ndarray = points[:, :1] ** powers[:, 0] * points[:, 1:] ** powers[:, 1]
    return terms


@cache
def _powers(degree: int) -> np.ndarray:
    """Return the exponents (i, j) of each term, (p, 2), in the order of scikit-learn."""
    powers: np.ndarray = PolynomialFeatures(degree).fit([[1.0, 1.0]]).powers_
    return powers


def _term(i: int, j: int, first: str, second: str) -> str:
    """Return the name of a term.

    >>> [_term(i, j, "a", "t") for i, j in ((0, 0), (1, 0), (2, 0), (1, 1), (0, 2))]
    ['1', 'a', 'a^2', 'a*t', 't^2']
    """
    factors = [name if power == 1 else f"{name}^{power}" for name, power in ((first, i), (second, j)) if power]
    return "*".join(factors) or "1"


def _sum(coefficients: Mapping[str, float]) -> str:
    """Return the polynomial as text.

    >>> _sum({"1": 31.684, "a": 50.653, "a^2": -19.795})
    '31.684 + 50.653 a - 19.795 a^2'
    """
    parts, least = [], 1e-9 * max(abs(value) for value in coefficients.values())
    for term, value in coefficients.items():
        value = value if abs(value) > least else 0.0  # rounding errors
        sign = "- " if value < 0 else "+ "
        parts.append(f"{sign}{abs(value):.5g}" + ("" if term == "1" else f" {term}"))
    text = " ".join(parts)
    return text.removeprefix("+ ") if text.startswith("+") else f"-{text.removeprefix('- ')}"
