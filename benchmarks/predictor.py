"""What the accuracy predictor and its budgets are worth, where the truth is known: planted surfaces, simulated samples.

    python benchmarks/predictor.py [--draws 2000] [--few 100] [--out benchmarks/results/predictor.json]

The planted surface is the polynomial of degree 2 through the 16 rows of the paper's listing (exact ratios), 12 blocks,
8 layers to remove; the best split of it is 4 attention + 4 activation. A sample is that surface plus normal noise. The
degree is selected anew in each draw, as in use. No model is trained here. Needs two and a half minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import hetdpt
from hetdpt import Budget, Predictor, Sample
from hetdpt.export.saved import versions
from hetdpt.selection.predictor import polynomial

REFERENCE = Path(__file__).parent / "reference" / "reference.json"
BLOCKS, LAYERS, SEED = 12, 8, 0
NOISES = (0.1, 0.3, 0.6)  # points; the 16 rows themselves scatter by 0.30 around their polynomial
RECHECK = 0.1  # points of noise that a longer run is left with
BIASES = (-2.0, -1.0, -0.5, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0)  # points for each activation that is gone
FACTORS = (1.0, 1.25, 1.5, 2.0)
SPLITS = tuple(Budget(count, LAYERS - count) for count in range(LAYERS + 1))
PROBES = (Budget(1, 1), Budget(3, 3), Budget(4, 4), Budget(2, 6), Budget(6, 2), Budget(0, 8), Budget(8, 0))


def planted() -> Predictor:
    rows = json.loads(REFERENCE.read_text())["map_listing_16"]["rows"]
    return hetdpt.fit_predictor(rows, blocks=BLOCKS)


def design(alone: int, together: int) -> list[Budget]:
    """Return the budgets of the paper's table: two chains of one kind, and one in which the kinds take turns."""
    single = [Budget(count, 0) for count in range(1, alone + 1)] + [Budget(0, count) for count in range(1, alone + 1)]
    both = [Budget(count - less, count) for count in range(1, together + 1) for less in (1, 0)]
    return list(dict.fromkeys([Budget(0, 0), *single, *both]))


DESIGNS = {
    "16 samples": design(5, 3),
    "22 samples": design(8, 3),
    "22 samples, more of them mixed": design(5, 6),
    "32 samples": design(8, 8),
}


def fits(truth: Predictor, budgets: list[Budget], noise: float, draws: int) -> Iterator[Predictor]:
    generator = np.random.default_rng(SEED)
    surface = accuracies(truth, budgets)
    for _ in range(draws):
        values = surface + noise * generator.standard_normal(len(surface))
        rows = [Sample(budget, float(value)) for budget, value in zip(budgets, values, strict=True)]
        yield hetdpt.fit_predictor(rows, blocks=BLOCKS)


def accuracies(predictor: Predictor, budgets: tuple[Budget, ...] | list[Budget]) -> np.ndarray:
    found: np.ndarray = predictor.predict([predictor.ratios(budget) for budget in budgets])
    return found


def order(predictor: Predictor) -> list[int]:
    """Return the splits from the best predicted on, as ``allocate`` orders them; without its bootstrap, for speed."""
    predicted = accuracies(predictor, SPLITS).round(9)
    return sorted(range(len(SPLITS)), key=lambda index: (-predicted[index], index))


def alone(predictor: Predictor, degree: int) -> Predictor:
    """Return the same samples with this degree, as if no other had been thought of."""
    rows = tuple(row for row in predictor.tried if row.degree == degree)
    return replace(predictor, degree=degree, tried=rows)


def coverage(truth: Predictor, predictors: list[Predictor]) -> dict[str, Any]:
    """Return how often intervals hold the truth: as reported, of the selected degree alone, and of the right one."""
    ways = {
        "reported": predictors,
        "degree selected": [alone(predictor, predictor.degree) for predictor in predictors],
        "degree known": [alone(predictor, 2) for predictor in predictors],
    }
    return {
        "degrees": share(predictor.degree for predictor in predictors),
        "rivals": share(" and ".join(map(str, predictor.rivals)) for predictor in predictors),
        **{way: intervals(truth, chosen) for way, chosen in ways.items()},
    }


def intervals(truth: Predictor, predictors: list[Predictor]) -> dict[str, Any]:
    """Return for each probe how often its interval holds the truth, and how wide it is.

    And how often the truly best split ``is_tied`` with the best predicted.
    """
    right, best = accuracies(truth, PROBES), order(truth)[0]
    hits, widths, ties = [], [], []
    for predictor in predictors:
        ends = np.array([predictor.interval(*predictor.ratios(budget)) for budget in PROBES])
        hits.append((ends[:, 0] <= right) & (right <= ends[:, 1]))
        widths.append(ends[:, 1] - ends[:, 0])
        first = predictor.ratios(SPLITS[order(predictor)[0]])
        ties.append(round(predictor.difference(first, predictor.ratios(SPLITS[best]))[0], 9) <= 0)
    names = [name(budget) for budget in PROBES]
    return {
        "holds the truth": dict(zip(names, np.mean(hits, axis=0).round(4).tolist(), strict=True)),
        "median width": dict(zip(names, np.median(widths, axis=0).round(2).tolist(), strict=True)),
        "best split among the tied": round(float(np.mean(ties)), 4),
    }


def rivalry(truth: Predictor, predictors: list[Predictor]) -> dict[str, Any]:
    """Return what intervals are if degrees count as rivals up to so many times the least RMSE."""
    usual, found = polynomial.RIVAL, {}
    for factor in FACTORS:
        polynomial.RIVAL = factor
        found[str(factor)] = intervals(truth, [replace(predictor) for predictor in predictors])  # nothing is cached
    polynomial.RIVAL = usual
    return found


def choices(truth: Predictor, predictors: list[Predictor]) -> dict[str, Any]:
    """Return how often the choice is right, and how many points it costs; at once, or after a recheck of the first."""
    right, generator = accuracies(truth, SPLITS), np.random.default_rng(SEED + 1)
    orders = [order(predictor) for predictor in predictors]
    found: dict[str, Any] = {"chosen": share(name(SPLITS[ranked[0]]) for ranked in orders)}
    found["degrees"] = share(predictor.degree for predictor in predictors)
    for count in (1, 3, 5):
        picks = []
        for ranked in orders:
            measured = right[ranked[:count]] + RECHECK * generator.standard_normal(count) * (count > 1)
            picks.append(ranked[int(measured.argmax())])
        costs = right.max() - right[picks]
        found["predicted" if count == 1 else f"recheck of {count}"] = {
            "right": round(float((costs == 0).mean()), 4),
            "points lost": round(float(costs.mean()), 4),
        }
    return found


def shares(truth: Predictor, predictors: list[Predictor]) -> dict[str, float]:
    """Return what the bootstrap says of the choice, and how often the choice is right."""
    best = SPLITS[order(truth)[0]]
    tables = [hetdpt.allocate(predictor, layers=LAYERS).table for predictor in predictors]
    assert all(
        table[0].budget == SPLITS[order(predictor)[0]] for table, predictor in zip(tables, predictors, strict=True)
    )
    return {
        "draws": len(tables),
        "share of the choice, mean": round(float(np.mean([table[0].share for table in tables])), 4),
        "choice is right": round(float(np.mean([table[0].budget == best for table in tables])), 4),
        "share of the truly best, mean": round(
            float(np.mean([split.share for table in tables for split in table if split.budget == best])), 4
        ),
        "splits tied, mean": round(float(np.mean([sum(split.is_tied for split in table) for table in tables])), 2),
    }


def biased(truth: Predictor, budgets: list[Budget]) -> list[dict[str, Any]]:
    """Return what is chosen if every activation that is gone makes a sample read wrong by so much; no noise."""
    right, found = accuracies(truth, SPLITS), []
    for bias in BIASES:
        values = accuracies(truth, budgets) + [bias * budget.activation for budget in budgets]
        rows = [Sample(budget, float(value)) for budget, value in zip(budgets, values, strict=True)]
        ranked = order(hetdpt.fit_predictor(rows, blocks=BLOCKS))
        best = max(ranked[:3], key=lambda index: right[index])
        found.append(
            {
                "points for each activation": bias,
                "chosen": name(SPLITS[ranked[0]]),
                "points lost": round(float(right.max() - right[ranked[0]]), 4),
                "best of the first three": name(SPLITS[best]),
                "points lost then": round(float(right.max() - right[best]), 4),
            }
        )
    return found


def name(budget: Budget) -> str:
    return f"{budget.attention}+{budget.activation}"


def share(values: Any) -> dict[str, float]:
    counts = Counter(values)
    return {str(value): round(counts[value] / counts.total(), 4) for value in sorted(counts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="draws of 16 samples")
    parser.add_argument("--few", type=int, default=100, help="draws of more samples, and of the bootstrap")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/predictor.json"))
    options = parser.parse_args()
    begun, truth = time.perf_counter(), planted()
    found: dict[str, Any] = {
        "command": f"python benchmarks/predictor.py --draws {options.draws} --few {options.few}",
        "device": f"{platform.processor() or platform.machine()}, float64",
        "versions": versions(),
        "planted": truth.pruned_formula,
        "truth": {
            name(split): round(float(value), 4) for split, value in zip(SPLITS, accuracies(truth, SPLITS), strict=True)
        },
        "coverage": {},
        "choices": {},
    }
    for label, budgets in DESIGNS.items():
        draws = options.draws if label == "16 samples" else options.few
        for noise in NOISES:
            predictors = list(fits(truth, budgets, noise, draws))
            found["coverage"].setdefault(label, {})[str(noise)] = {"draws": draws, **coverage(truth, predictors)}
            found["choices"].setdefault(label, {})[str(noise)] = {"draws": draws, **choices(truth, predictors)}
            print(f"{label}, noise {noise}: {found['choices'][label][str(noise)]['predicted']}", flush=True)
            if noise > 0.1 and label in ("16 samples", "22 samples"):
                rival = rivalry(truth, predictors[: 4 * options.few])
                found.setdefault("rivals by factor", {}).setdefault(label, {})[str(noise)] = rival
            if noise == 0.3 and label in ("16 samples", "22 samples"):
                found.setdefault("bootstrap", {})[label] = shares(truth, predictors[: options.few // 2])
    found["bias by kind"] = biased(truth, DESIGNS["16 samples"])
    found["seconds"] = round(time.perf_counter() - begun)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
