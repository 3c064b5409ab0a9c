"""``predict`` from the command line, on CSV files of every make: what it prints and leaves, every bad input refused."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import test_cli
from PIL import Image
from test_cli import Run
from test_training_cli import build

from hetdpt.core.goals import GOALS
from hetdpt.core.plan import Budget, Sample
from hetdpt.results import Price, Prices
from hetdpt.selection.predictor.polynomial import fit_predictor
from hetdpt.selection.predictor.rows import read_rows, write_rows

run = test_cli.run  # the fixture

REFERENCE = json.loads((Path(__file__).parents[1] / "benchmarks" / "reference" / "reference.json").read_text())
LISTING, TABLE = REFERENCE["map_listing_16"], REFERENCE["map_table_22"]
COUNTS = (Sample(Budget(0, 0), 81.8), Sample(Budget(1, 4), 78.25))
RATIOS = [(1.0, 1.0, 81.8), (0.92, 0.67, 78.25)]
# 12 blocks; MACs, parameters and milliseconds go down by different amounts
PRICES = Prices(Price(4e9, 20e6, 100.0), (Price(1e8, 8e5, 3.0),) * 12, (Price(2e8, 5e5, 2.0),) * 12, "abacus, batch 8")


def written(path: Path, rows: list[Any], names: str = "a,t,accuracy") -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names.split(","), *rows])
    return path


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of wins are nothing of this file, and what takes the time."""
    monkeypatch.setattr("hetdpt.selection.predictor.allocate.DRAWS", 20)


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    """The 16 samples of the paper's listing, with two decimals."""
    return written(tmp_path / "listing.csv", LISTING["rows"])


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    (tmp_path / "prices.json").write_text(PRICES.to_json())
    return tmp_path / "prices.json"


# Files


@pytest.mark.parametrize(
    "text",
    [
        "attention,activation,accuracy\n0,0,81.8\n1,4,78.25\n",
        "attention;activation;accuracy\n0;0;81,8\n1;4;78,25\n",
        "attention;activation;accuracy\n0;0;81.8\n1;4;78.25\n",
        "attention\tactivation\taccuracy\n0\t0\t81,8\n1\t4\t78.25",
        "attention,activation,accuracy\r\n0,0,81.8\r\n1,4,78.25\r\n",
        "attention,activation,accuracy\r0,0,81.8\r1,4,78.25\r",
        "\ufeffattention,activation,accuracy\n0,0,81.8\n1,4,78.25\n",
        '"attention","activation", "accuracy"\n"0","0","81,8"\n1,4,"78,25"\n',
        "\n Attention , ACTIVATION,Accuracy \n\n 0 ,0, 81.8\n,,\n1.0,4,78.25\n\n",
        "chain,accuracy,layer,activation,te,attention\nboth,81.8,,0,nan,0\nboth,78.25,3,4,0.1,1\n",
        "attention,activation,accuracy,\n0,0,81.8,\n1,4,78.25,,\n",
        "a,t,attention,activation,accuracy\n1,1,0,0,81.8\n0.92,0.67,1,4,78.25\n",
        'note;attention;activation;accuracy\n"a; b, c";0;0;81,8\n"two\nlines";1;4;78,25\n',
    ],
    ids=[
        "commas", "decimal commas", "semicolons", "tabs", "CRLF", "CR", "BOM", "quoted", "spaces and blanks",
        "more columns", "empty columns", "both sets", "cells with delimiters",
    ],
)  # fmt: skip
def test_spreadsheets_of_every_make_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples.csv").write_bytes(text.encode())
    assert tuple(read_rows(tmp_path / "samples.csv")) == COUNTS


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_ratios_are_read_as_written(tmp_path: Path, delimiter: str, encoding: str) -> None:
    lines = [delimiter.join(map(str, row)) for row in [("A", "t ", "accuracy"), *RATIOS]]
    if delimiter != ",":
        lines = [line.replace(".", ",") for line in lines]
    (tmp_path / "samples.csv").write_bytes("\r\n".join(lines).encode(encoding))
    assert read_rows(tmp_path / "samples.csv") == RATIOS


def test_what_is_written_is_read(tmp_path: Path) -> None:
    samples = [*COUNTS, Sample(Budget(12, 0), 100 / 3)]
    write_rows(tmp_path / "samples.csv", samples)
    assert read_rows(tmp_path / "samples.csv") == samples
    write_rows(tmp_path / "samples.csv", samples, {"chain": ["a, b", "", "c"], "te": [0.1, None, 3]})
    assert read_rows(tmp_path / "samples.csv") == samples
    assert (tmp_path / "samples.csv").read_text().splitlines()[1] == '0,0,81.8,"a, b",0.1'


# What is predicted


@pytest.mark.parametrize(
    ("table", "layers", "given", "split"),
    [
        (LISTING, 8, ("--as-given",), "two_decimal"),
        (LISTING, 10, ("--as-given",), "two_decimal"),
        (LISTING, 8, (), "exact"),
        (LISTING, 10, (), "exact"),
        (TABLE, 8, ("--as-given",), "two_decimal"),
    ],
)
def test_the_reference(run: Run, tmp_path: Path, table: Any, layers: int, given: tuple[str, ...], split: str) -> None:
    expected = table[f"expected_with_{split}_ratios"]
    file = written(tmp_path / "samples.csv", table["rows"])
    result = run("predict", file, "--blocks", 12, "--layers", layers, *given, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out, parse_constant=pytest.fail)  # JSON as others read it
    assert found["budget"] == expected["removed_for_k"][str(layers)]
    assert found["wanted"] == {"layers": layers}
    assert {row["layers"] for row in found["table"]} == {layers}
    assert (found["blocks"], len(found["samples"]), found["fit"]["degree"]) == (12, len(table["rows"]), 2)
    for name in ("mae", "rmse"):
        assert found["fit"][name] == pytest.approx(expected[name], abs=5e-5)  # printed to four digits
    for term, value in expected.get("coefficients", {}).items():
        assert found["fit"]["coefficients"][term] == pytest.approx(value, abs=5e-7)  # printed to six


def test_the_screen_says_what_json_says(run: Run, listing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetdpt.selection.predictor.allocate.DRAWS", 2000)
    call = ("predict", listing, "--blocks", 12, "--layers", 8, "--as-given")
    result, found = run(*call), run(*call, "--json").values
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 200
    lines = result.out.splitlines()
    assert lines[0] == "16 samples of a model with 12 blocks"
    assert found["fit"]["formula"] in lines
    assert found["fit"]["pruned_formula"] in lines
    for row in found["fit"]["tried"]:
        note = "chosen" if row["degree"] == 2 else f"not eligible: {row['why_not']}" if row["why_not"] else ""
        assert re.search(rf"│ {row['degree']} +│ {row['mae']:.4f} │ {row['rmse']:.4f} │ {note} *│", result.out)
    for row in found["table"]:
        interval = re.escape(f"[{row['low']:.2f}, {row['high']:.2f}]")
        cells = [row["attention"], row["activation"], 8, f"{row['predicted']:.2f}", interval]
        assert re.search(r" +│ +".join([*map(str, cells), f"{100 * row['share']:.1f} %"]), result.out)
    assert (
        "remove 4 attention and 4 activation layers: predicted 73.95 % [72.40, 75.49]; wins 41 % of 2,000 bootstrap "
        "draws; cannot be told from: 3+5, 5+3, 2+6, 6+2, 1+7, 7+1, 0+8, 8+0\n"
    ) in result.out
    assert result.err == "".join(f"warning: {text}\n" for text in found["warnings"])
    assert "4 attention + 4 activation is beyond the samples" in result.err


def test_without_a_budget_there_is_the_fit_and_the_frontier(run: Run, listing: Path) -> None:
    found = run("predict", listing, "--blocks", 12, "--json").values
    assert (found["table"], found["budget"], found["wanted"], found["prices"]) == (None, None, None, None)
    assert [row["layers"] for row in found["frontier"]] == list(range(25))
    assert "share" not in found["frontier"][0]
    result = run("predict", listing, "--blocks", 12)
    assert "frontier: what to remove for each number of layers" in result.out
    assert "bootstrap" not in result.out
    assert "tied" not in result.out
    assert "\n5 more; --all prints them too\n" in result.out
    whole = run("predict", listing, "--blocks", 12, "--all")
    assert "more;" not in whole.out
    assert len(whole.out.splitlines()) == len(result.out.splitlines()) + 4  # five rows for one line


def test_counts_of_layers_are_exact_ratios(run: Run, listing: Path, tmp_path: Path) -> None:
    rows = [(round(12 - 12 * a), round(12 - 12 * t), accuracy) for a, t, accuracy in LISTING["rows"]]
    file = written(tmp_path / "counts.csv", rows, "attention,activation,accuracy")
    by_counts, by_ratios = (
        run("predict", path, "--blocks", 12, "--layers", 10, "--json").values for path in (file, listing)
    )
    assert by_counts == by_ratios


Test = Callable[[int, int], bool]
BUDGETS: dict[str, tuple[tuple[Any, ...], Test]] = {
    "layers": (("--layers", 7), lambda a, t: a + t == 7),
    "macs": (("--macs", "2.9G"), lambda a, t: 4e9 - 1e8 * a - 2e8 * t <= 2.9e9),
    "macs in percent": (("--macs", "72.5%"), lambda a, t: 4e9 - 1e8 * a - 2e8 * t <= 2.9e9),
    "params": (("--params", "1.61e4K"), lambda a, t: 20e6 - 8e5 * a - 5e5 * t <= 16.1e6),
    "params in percent": (("--params", "80 %"), lambda a, t: 20e6 - 8e5 * a - 5e5 * t <= 16e6),
    "speedup": (("--speedup", 1.3), lambda a, t: 100 / (100 - 3 * a - 2 * t) >= 1.3),
    "all of them": (
        ("--layers", 11, "--macs", "60%", "--params", "14M", "--speedup", 1.35),
        lambda a, t: (
            a + t == 11
            and 40 - a - 2 * t <= 24
            and 20e6 - 8e5 * a - 5e5 * t <= 14e6
            and 100 / (100 - 3 * a - 2 * t) >= 1.35
        ),
    ),
}


@pytest.mark.parametrize("text", ["2.9G", "2.9 g", "2900M", "2900000k", "2900000000", "2.9e9", "2.9e3m", "29e2 M"])
def test_suffixes(text: str) -> None:
    assert GOALS["macs"].parse(text).of(4e9) == pytest.approx(2.9e9)  # one rounding


@pytest.mark.parametrize(("text", "value"), [("72.5%", 2.9e9), ("72.5 %", 2.9e9), ("100%", 4e9), ("57%", 2.28e9)])
def test_percentages(text: str, value: float) -> None:
    assert GOALS["macs"].parse(text).of(4e9) == value  # to the bit, so that a split with just as much meets it


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_of_every_kind(run: Run, listing: Path, prices: Path, name: str) -> None:
    options, is_met = BUDGETS[name]
    found = run("predict", listing, "--blocks", 12, "--prices", prices, *options, "--json").values
    predictor = fit_predictor(LISTING["rows"], blocks=12)
    feasible = [Budget(a, t) for a, t in product(range(13), repeat=2) if is_met(a, t)]
    ranked = sorted(feasible, key=lambda budget: -predictor.predict(budget))
    assert 1 <= len(ranked) < 169
    assert [Budget(row["attention"], row["activation"]) for row in found["table"]] == ranked
    best = found["table"][0]
    assert found["budget"] == {"attention": best["attention"], "activation": best["activation"]}
    assert best["macs"] == pytest.approx(4e9 - 1e8 * best["attention"] - 2e8 * best["activation"])
    assert best["speedup"] == pytest.approx(100 / (100 - 3 * best["attention"] - 2 * best["activation"]))


def test_prices_are_shown_with_the_device_of_their_times(run: Run, listing: Path, prices: Path) -> None:
    result = run("predict", listing, "--blocks", 12, "--prices", prices, "--speedup", 1.15)
    assert "what to remove for speedup >= 1.15, by prediction" in result.out
    assert "frontier: what to remove for each speedup" in result.out
    assert re.search(r"^ 4 +│ +1 │ +5 │ .* │ 3\.40 G │ 16\.30 M │ +1\.163x │ best *$", result.out, re.MULTILINE)
    assert "\nspeedups are predicted by the time of each layer (abacus, batch 8)\n" in result.out
    tables = [line for line in result.out.splitlines() if "│" in line or "┃" in line]
    assert max(map(len, tables)) <= 120


def test_costs_without_times_are_enough_for_macs(run: Run, listing: Path, tmp_path: Path) -> None:
    layer = Price(1e8, 1e6)
    (tmp_path / "untimed.json").write_text(Prices(Price(4e9, 20e6), (layer,) * 12, (layer,) * 12).to_json())
    options = ("predict", listing, "--blocks", 12, "--prices", tmp_path / "untimed.json")
    result = run(*options, "--macs", "80%")
    assert result.code == 0
    assert "frontier: what to remove for each number of layers" in result.out
    assert "speedup" not in result.out
    run(*options, "--speedup", 1.2).is_refused(
        "the goal speedup needs the time of each layer, which these prices do not have; measure them again"
    )


def test_a_model_is_priced_here(run: Run, tmp_path: Path) -> None:
    rows = [(1 - a / 2, 1 - t / 2, 80 - 2 * a - 3 * t) for a, t in product(range(3), repeat=2)]
    options = ("predict", written(tmp_path / "two.csv", rows), "--blocks", 2, "--macs", "85%")
    model = ("--model", build(tmp_path / "dense", depth=2), "--batch", 1, "--device", "cpu")
    result = run(*options, *model, "--out", tmp_path / "out", "--json")
    assert (result.code, result.err) == (0, "")
    found = result.values["prices"]
    assert (len(found["attention"]), len(found["activation"])) == (2, 2)
    assert found["measured"] == "cpu, float32, batch 1"
    again = run(*options, "--prices", tmp_path / "out" / "prices.json", "--json")
    assert again.values == result.values


def test_another_model_is_not_priced(run: Run, listing: Path) -> None:
    run("predict", listing, "--blocks", 12, "--model", "test_vit", "--img-size", 32).is_refused(
        "test_vit has 6 blocks, but the samples are of a model with 12; give that one"
    )
    run("predict", listing, "--blocks", 12, "--model", "test_vit", "--removal", "magic").is_refused_like(
        r"removal is one of plain, .*, not 'magic'"
    )


# Directories


def run_directory(path: Path, **files: str) -> Path:
    """Return what ``hetdpt collect`` leaves."""
    path.mkdir()
    rows = [(round(12 - 12 * a), round(12 - 12 * t), accuracy, "both") for a, t, accuracy in LISTING["rows"]]
    written(path / "samples.csv", rows, "attention,activation,accuracy,chain")
    texts = {"prices": PRICES.to_json(), "run": json.dumps({"blocks": 12, "epochs": 1}), **files}
    for name, text in texts.items():
        (path / f"{name}.json").write_text(text)
    return path


def test_a_run_directory_knows_blocks_and_prices(run: Run, listing: Path, prices: Path, tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run")
    found = run("predict", directory, "--speedup", 1.2, "--json").values
    assert found == run("predict", listing, "--blocks", 12, "--prices", prices, "--speedup", 1.2, "--json").values
    cheaper = tmp_path / "cheaper.json"
    cheaper.write_text(altered := PRICES.to_json().replace("100.0", "200.0"))
    why = "they are not what was written; without the checksum they are taken as they are"
    run("predict", directory, "--speedup", 1.2, "--prices", cheaper).is_refused_like(f".*cheaper.json.*{why}.*")
    cheaper.write_text(json.dumps({key: value for key, value in json.loads(altered).items() if key != "checksum"}))
    other = run("predict", directory, "--speedup", 1.2, "--prices", cheaper, "--json").values
    assert (other["prices"]["dense"]["ms"], found["prices"]["dense"]["ms"]) == (200, 100)


def test_a_run_directory_that_is_not_whole(run: Run, tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", run="{}")
    run("predict", directory).is_refused(
        f"{directory} does not say how many blocks the model has; give --blocks, such as --blocks 12"
    )
    (directory / "run.json").write_text('{"blocks": "12"}')
    run("predict", directory).is_refused(
        f"{directory} does not say how many blocks the model has; give --blocks, such as --blocks 12"
    )
    (directory / "run.json").unlink()
    run("predict", directory).is_refused(
        f"{directory} does not say how many blocks the model has; give --blocks, such as --blocks 12"
    )
    assert run("predict", directory, "--blocks", 12, "--json").values["blocks"] == 12
    (directory / "prices.json").write_text("[]")
    run("predict", directory, "--blocks", 12).is_refused_like(
        rf"{directory}/prices.json cannot be read \(.*\); measure them again with --model"
    )
    (directory / "prices.json").unlink()
    run("predict", directory, "--blocks", 12, "--speedup", 1.2).is_refused_like(
        "the goal speedup needs the cost of each layer; give --prices FILE, .*"
    )
    (directory / "samples.csv").unlink()
    run("predict", directory).is_refused(
        f"{directory} has no samples.csv; give a CSV, or a directory of hetdpt collect"
    )


def test_blocks_that_contradict_the_directory_are_refused(run: Run, tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run")
    run("predict", directory, "--blocks", 24).is_refused(
        f"{directory} was collected from a model with 12 blocks, not 24; leave --blocks out"
    )


def test_out_holds_all_of_it(run: Run, listing: Path, prices: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = ("predict", listing, "--blocks", 12, "--prices", prices, "--layers", 8)
    result = run(*call, "--out", out)
    names = ["frontier.csv", "frontier.png", "predict.json", "prices.json", "splits.csv"]
    assert sorted(file.name for file in out.iterdir()) == names
    assert result.out.endswith(f"\nwritten to {out}: {', '.join(names)}\n")
    found = json.loads((out / "predict.json").read_text())
    assert found == run(*call, "--json").values
    for name, rows in (("splits", found["table"]), ("frontier", found["frontier"])):
        with (out / f"{name}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows]
        assert texts == lines
    with Image.open(out / "frontier.png") as image:
        assert image.width > 1000
    run("predict", out / "splits.csv", "--blocks", 12).is_refused_like(
        rf"{out}/splits.csv has the columns attention, activation, layers, predicted, low, .*; expected .*"
    )


def test_what_is_there_stays_unless_it_is_ours_and_meant(run: Run, listing: Path, tmp_path: Path) -> None:
    call, out = ("predict", listing, "--blocks", 12), tmp_path / "out"
    assert run(*call, "--out", out).code == 0
    assert sorted(file.name for file in out.iterdir()) == ["frontier.csv", "frontier.png", "predict.json"]
    run(*call, "--out", out).is_refused(f"{out} exists already; give another path, or allow overwriting")
    assert run(*call, "--layers", 4, "--out", out, "--overwrite").code == 0
    assert (out / "splits.csv").is_file()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("")
    run(*call, "--out", mine).is_refused(f"{mine} exists already; give another path, or allow overwriting")
    run(*call, "--out", mine, "--overwrite").is_refused(
        f"{mine} is not overwritten, because it has no predict.json and so was not made by hetdpt; remove it yourself"
    )
    assert [file.name for file in mine.iterdir()] == ["thesis.txt"]


# Bad input

EXPECTED = "attention, activation, accuracy (layers removed, percent) or a, t, accuracy (ratios kept, percent)"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", f"{{file}} is empty; expected a CSV with the columns {EXPECTED}"),
        ("\r\n \r\n", f"{{file}} is empty; expected a CSV with the columns {EXPECTED}"),
        ("a,t,accuracy\n", "{file} has a header but no rows; expected a line for each sample"),
        ("a;t;top-1\n1;1;80\n", f"{{file}} has the columns a, t, top-1; expected {EXPECTED} in its first line"),
        ("1,1,81.8\n1,1,81\n", f"{{file}} has the columns 1, 1, 81.8; expected {EXPECTED} in its first line"),
        ("a,t,accuracy,t\n1,1,80,1\n", "{file} has the column t twice; keep one"),
        (b"PK\x03\x04\x14\x00\x06\x00", "{file} is not a CSV: it is not text in UTF-8; export it as CSV (UTF-8)"),
        (b"\xff\xd8\xff\xe0JFIF", "{file} is not a CSV: it is not text in UTF-8; export it as CSV (UTF-8)"),
        (
            'a,t,accuracy\n1,1,"80\n1,1,80\n',
            "line 3 of {file} is not CSV (unexpected end of data); export the table again",
        ),
        ("a,t,accuracy\n\n1,1,good\n", "line 3 of {file} has the accuracy 'good'; expected a number"),
        ("a,t,accuracy\n1,nan,80\n", "line 2 of {file} has the t 'nan'; expected a number"),
        ("a,t,accuracy\n1,1,80\n1,1\n", "line 3 of {file} has no accuracy; expected a number"),
        (
            "a,t,accuracy\n0,92,1,81,3\n",
            "line 2 of {file} has 5 cells, but the header has 3; if numbers have a decimal comma, separate cells "
            "by semicolons",
        ),
        (
            "attention,activation,accuracy\n0,0,80\n-1,0,80\n",
            "line 3 of {file} has the attention -1; expected a whole number of layers, at least 0",
        ),
        (
            "attention,activation,accuracy\n0,1.5,80\n",
            "line 2 of {file} has the activation 1.5; expected a whole number of layers, at least 0",
        ),
        (
            "attention,activation,accuracy\n0,13,80\n",
            "sample 1 removes 0 attention and 13 activation layers of 12 blocks; expected 0 to 12 of each: is the "
            "number of blocks right?",
        ),
        (
            "a,t,accuracy\n1,1,80\n0.5,1,70\n",
            "got 2 samples, but at least 5 are needed: a polynomial of degree 1 has 3 coefficients, and 2 samples "
            "are left out in turn",
        ),
    ],
)
def test_bad_files(run: Run, tmp_path: Path, content: str | bytes, text: str) -> None:
    file = tmp_path / "samples.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    run("predict", file, "--blocks", 12).is_refused(text.format(file=file))


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    run("predict", tmp_path / "nowhere.csv", "--blocks", 12).is_refused(
        f"there is no file {tmp_path}/nowhere.csv; give a CSV with the columns {EXPECTED}"
    )


def test_blocks_are_not_guessed(run: Run, listing: Path) -> None:
    run("predict", listing, "--layers", 8).is_refused(
        f"{listing} does not say how many blocks the model has; give --blocks, such as --blocks 12"
    )
    run("predict", listing, "--blocks", 0).is_refused("blocks is 0; expected 1 to 200")
    run("predict", listing, "--blocks", 10).is_refused_like(r"sample 2 keeps a fraction of 0\.92, .*")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--layers", 30), r"no split meets layers = 30; the nearest is 12 attention \+ 12 activation, 24 layers, .*"),
        (("--layers", -1), "--layers is '-1'; expected a whole number of at least 0, such as 8"),
        (("--macs", "1%"), r"no split meets macs <= 40M; the nearest is 12 attention \+ 12 activation, .*"),
        (
            ("--speedup", 9),
            r"no split meets speedup >= 9; the nearest is 12 attention \+ 12 .*, a speedup of 2\.5, .*",
        ),
        (("--speedup", "nan"), "--speedup is 'nan'; expected a number above 0, such as 1.5"),
        (
            ("--params", "0%"),
            "--params is '0%'; expected a number above 0, such as 16M, or a percentage .*",
        ),
        *(
            (
                ("--macs", amount),
                f"--macs is '{re.escape(amount)}'; expected a number above 0, such as 3G, or a percentage of the dense "
                "model such as 70%",
            )
            for amount in ("many", "3,2G", "-3G", "3.2GM", "%")
        ),
        (("--batch", 4, "--num-classes", 10), "there is no model for --num-classes, --batch; add --model MODEL"),
        (("--model", "test_vit"), "--prices and --model both say what layers cost; give one of them"),
    ],
)
def test_bad_options(run: Run, listing: Path, prices: Path, options: tuple[Any, ...], text: str) -> None:
    run("predict", listing, "--blocks", 12, "--prices", prices, *options).is_refused_like(text)


@pytest.mark.parametrize("option", [("--macs", "70%"), ("--macs", "3G"), ("--params", "16M"), ("--speedup", 1.2)])
def test_costs_need_prices(run: Run, listing: Path, option: tuple[Any, ...]) -> None:
    name = option[0].removeprefix("--")
    run("predict", listing, "--blocks", 12, *option).is_refused_like(
        f"the goal {name} needs the cost of each layer; give --prices FILE, .*"
    )


def test_bad_prices(run: Run, listing: Path, tmp_path: Path) -> None:
    call = ("predict", listing, "--blocks", 12, "--prices", tmp_path / "prices.json")
    run(*call).is_refused_like(
        rf"the prices {tmp_path}/prices.json cannot be read: .*No such file.*; measure them with --model MODEL"
    )
    for content in (b"\xff\xfe", b"{", b"[]", b"{}", PRICES.to_json().replace("100.0", '"fast"').encode()):
        (tmp_path / "prices.json").write_bytes(content)
        run(*call).is_refused_like(rf"(the prices )?{tmp_path}/prices.json cannot be read.*; measure them .*--model.*")
    deep = Prices(PRICES.dense, PRICES.attention * 2, PRICES.activation * 2)
    (tmp_path / "prices.json").write_text(deep.to_json())
    run(*call).is_refused(
        "the prices are of 24 attention and 24 activation layers, but the samples are of a model with 12 blocks; "
        "give prices and samples of the same model"
    )


def test_a_csv_needs_no_torch(listing: Path, prices: Path, tmp_path: Path) -> None:
    options = ["--blocks", "12", "--layers", "8", "--prices", str(prices), "--out", str(tmp_path / "out"), "--json"]
    code = (
        "import json, sys\nfrom hetdpt.cli import main\n"
        f"sys.argv = {['hetdpt', 'predict', str(listing), *options]!r}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'timm', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr == "[]\n"
    assert json.loads(result.stdout)["budget"] == {"attention": 4, "activation": 4}
