"""What is predicted, as files: tables that can be read back, and figures that are figures."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from test_report import size_of

from hetdpt.core.errors import FileError
from hetdpt.core.plan import Budget
from hetdpt.report.prediction import CHOICE, COLUMNS, draw, summary, values_of
from hetdpt.results import Price, Prices, Split
from hetdpt.selection.predictor.allocate import Allocation, allocate, best_splits
from hetdpt.selection.predictor.polynomial import Predictor, fit_predictor
from hetdpt.store.atomic import write_csv

REFERENCE = json.loads((Path(__file__).parents[1] / "benchmarks" / "reference" / "reference.json").read_text())
ROWS = REFERENCE["map_listing_16"]["rows"]


def prices_of(dense: float | None, attention: float | None, activation: float | None, blocks: int = 12) -> Prices:
    kinds = [(Price(1e8, 1e6, ms),) * blocks for ms in (attention, activation)]
    return Prices(Price(4e9, 30e6, dense), kinds[0], kinds[1], "abacus, float32, batch 8")


TIMED, UNTIMED = prices_of(100.0, 3.0, 2.0), prices_of(None, None, None)
FREE = prices_of(30.0, 2.0, 2.0)  # whose layers take more time than there is, by rounding


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return fit_predictor(ROWS, blocks=12)


@pytest.fixture(scope="module")
def allocation(predictor: Predictor) -> Allocation:
    return allocate(predictor, layers=8, prices=TIMED)


# The tables


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cells(split: Split) -> list[str]:
    budget, speedup = split.budget, "" if split.speedup in (None, inf) else split.speedup
    numbers = split.layers, split.accuracy, split.low, split.high, split.is_beyond, split.macs, split.params, speedup
    return ["" if value is None else str(value) for value in (budget.attention, budget.activation, *numbers)]


@pytest.mark.parametrize("prices", [None, UNTIMED, TIMED, FREE], ids=["none", "untimed", "timed", "free"])
def test_csv_and_back(tmp_path: Path, predictor: Predictor, prices: Prices | None) -> None:
    found = best_splits(predictor, prices)
    write_csv(tmp_path / "frontier.csv", COLUMNS, map(values_of, found))
    lines = read(tmp_path / "frontier.csv")
    assert tuple(lines[0]) == COLUMNS
    assert [list(line.values()) for line in lines] == [cells(split) for split in found]


def test_a_choice_has_its_columns(tmp_path: Path, allocation: Allocation) -> None:
    rows = [values_of(split, is_choice=True) for split in allocation.table]
    write_csv(tmp_path / "splits.csv", CHOICE, rows)
    lines = read(tmp_path / "splits.csv")
    assert tuple(lines[0]) == CHOICE
    assert CHOICE[: len(COLUMNS)] == COLUMNS
    assert [(float(line["share"]), line["is_tied"] == "True") for line in lines] == [
        (split.share, split.is_tied) for split in allocation.table
    ]


def test_a_table_of_predictions_is_no_table_of_samples() -> None:
    assert "accuracy" not in COLUMNS


def test_the_summary_is_json(predictor: Predictor, allocation: Allocation) -> None:
    values = summary(predictor, best_splits(predictor, FREE), allocation, FREE)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert None in [row["speedup"] for row in values["frontier"]]  # infinite
    assert Prices.from_json(json.dumps(values["prices"])) == FREE
    assert values["budget"] == {"attention": 4, "activation": 4}
    assert values["warnings"] == list(allocation.warnings)
    assert summary(predictor, best_splits(predictor))["table"] is None


# The figure


def text_of(path: Path) -> str:
    """Return the words of a figure; matplotlib keeps them as comments beside the shapes."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_a_figure_by_layers(tmp_path: Path, predictor: Predictor, allocation: Allocation) -> None:
    draw(best_splits(predictor), predictor, tmp_path / "frontier.png", chosen=allocation.best)
    width, height = size_of(tmp_path / "frontier.png")
    assert 1200 <= width <= 3000
    assert 700 <= height <= 2000
    draw(best_splits(predictor), predictor, tmp_path / "frontier.svg", chosen=allocation.best)
    words = text_of(tmp_path / "frontier.svg").splitlines()
    for expected in (
        "layers removed",
        "accuracy [%]",
        "95 % intervals",
        "samples",
        "best predicted, beyond the samples: a guess",
        "chosen: 4+4",
        "15 further out are not drawn",
        "3+3",
        "4+4",
    ):
        assert expected in words, expected


def test_a_figure_by_speedup_names_the_device(tmp_path: Path, predictor: Predictor) -> None:
    draw(best_splits(predictor, TIMED), predictor, tmp_path / "frontier.svg", TIMED)
    words = text_of(tmp_path / "frontier.svg")
    assert "predicted speedup, by the time of each layer (abacus, float32, batch 8)" in words
    assert "chosen" not in words
    draw(best_splits(predictor, UNTIMED), predictor, tmp_path / "frontier.svg", UNTIMED)
    assert "layers removed" in text_of(tmp_path / "frontier.svg").splitlines()


def test_labels_leave_room_for_each_other(tmp_path: Path, predictor: Predictor) -> None:
    crowded = prices_of(100.0, 3.0, 2.9)
    draw(best_splits(predictor, crowded), predictor, tmp_path / "frontier.svg", crowded)
    named = re.findall(r"^\d+\+\d+$", text_of(tmp_path / "frontier.svg"), re.MULTILINE)
    assert 5 <= len(named) < len(best_splits(predictor, crowded)) / 2
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    "prices",
    [FREE, prices_of(100.0, -1.0, -2.0), prices_of(100.0, 0.0, 0.0), prices_of(100.0, 3.0, -1.0)],
    ids=["faster than time", "slower", "no faster", "one slower"],
)
def test_whatever_layers_cost_it_is_drawn(tmp_path: Path, predictor: Predictor, prices: Prices) -> None:
    best = allocate(predictor, layers=20, prices=prices).best
    draw(best_splits(predictor, prices), predictor, tmp_path / "frontier.png", prices, best)
    size_of(tmp_path / "frontier.png")


@pytest.mark.parametrize("blocks", [2, 24])
def test_models_of_every_depth(tmp_path: Path, blocks: int) -> None:
    budgets = [Budget(a, t) for a in range(3) for t in range(3)]
    rows = [(1 - b.attention / blocks, 1 - b.activation / blocks, 80 - b.attention) for b in budgets]
    predictor = fit_predictor(rows, blocks=blocks)
    draw(best_splits(predictor), predictor, tmp_path / "frontier.png")
    size_of(tmp_path / "frontier.png")


def test_other_suffixes_are_refused(tmp_path: Path, predictor: Predictor) -> None:
    with pytest.raises(FileError, match="^a figure is a file that ends in .png or .svg, but frontier.bmp does not$"):
        draw(best_splits(predictor), predictor, tmp_path / "frontier.bmp")


def test_the_room_is_light_until_it_draws() -> None:
    names = ("torch", "matplotlib", "sklearn")
    code = f"import sys, hetdpt.report.prediction; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"
