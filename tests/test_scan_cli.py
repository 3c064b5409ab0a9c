"""``scan`` from the command line: what it prints and leaves behind, and every bad input refused."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_cli
from PIL import Image
from test_cli import Run
from test_training_cli import build

import hetdpt
from hetdpt.cli import live
from hetdpt.studies.scan import ScanTable

run = test_cli.run  # the fixture

DEMO = ("--data", "demo", "--images", 8, "--judge-images", 6, "--batch-size", 4)
FAST = (*DEMO, "--no-latency")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("scan") / "dense", depth=2)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of nine images, without classes."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 255, (9, 20, 24, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def table_in(text: str) -> ScanTable:
    json.loads(text, parse_constant=pytest.fail)  # JSON as others read it
    return ScanTable.from_json(text)


def test_json_alone(run: Run, dense: Path) -> None:
    result = run("scan", dense, *DEMO, "--batch", 2, "--json")
    assert (result.code, result.err) == (0, "")
    table = table_in(result.out)
    assert table.sites == tuple(hetdpt.sites(hetdpt.load(dense)))
    assert len(table.rows) == 2 * (5 + 2)
    assert (table.fitted_on, table.judged_on, table.is_apart) == (8, 6, True)
    assert table.latency is not None
    assert table.latency.batch == 2
    assert {row.ms_saved.batch for row in table.rows if row.ms_saved} == {2}


def test_a_table_and_the_files(run: Run, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("scan", dense, *DEMO, "--batch", 1, "--out", out)
    assert (result.code, result.err) == (0, "")
    assert sorted(file.name for file in out.iterdir()) == ["scan.csv", "scan.json", "scan.png"]
    table = table_in((out / "scan.json").read_text())
    with (out / "scan.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(table.rows) + len(table.tails)
    with Image.open(out / "scan.png") as image:
        assert image.width > 1000
    assert "tails: damage if patches are not updated" in result.out
    assert max(map(len, result.out.splitlines())) <= 120
    for row in table.rows:
        assert row.style in result.out
    assert result.out.count("*") == len(table.sites) + 1  # the best of each, and what the sign means
    assert "fitted on 8 images, compared on 6 others. Damage is the KL to the dense answers, in nats;" in result.out
    assert f"dense: {table.latency}\n" in result.out
    assert result.out.endswith(f"\nwritten to {out}: scan.json, scan.csv, scan.png\n")


def test_without_latency_nothing_is_timed(run: Run, dense: Path) -> None:
    result = run("scan", dense, *FAST)
    assert result.code == 0
    assert "ms" not in re.findall(r"\w+", result.out.replace("MACs and ms that it saves", ""))
    assert "dense:" not in result.out
    table = table_in(run("scan", dense, *FAST, "--json").out)
    assert table.latency is None


def test_the_seed_decides_which_images(run: Run, dense: Path) -> None:
    one, again, other = (run("scan", dense, *FAST, "--json", "--seed", seed).out for seed in (0, 0, 1))
    assert one == again != other


def test_layers_that_nothing_replaces_are_named(run: Run, dense: Path) -> None:
    out = run("scan", dense, *FAST).out
    table = table_in(run("scan", dense, *FAST, "--json").out)
    said = re.findall(r"^nothing can replace (\w+) (\d+): the best, (\w+), does", out, re.MULTILINE)
    assert said == [(site.kind, str(site.block), table.best(site).style) for site in table.irreplaceable]


def test_one_of_them_is_named(run: Run, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetdpt.studies.scan.LIMIT", 0.0)
    out = run("scan", dense, *FAST).out
    assert len(re.findall(r"nothing can replace (attention|activation) [01]: the best, \w+, does \S+\n", out)) == 4


def test_too_few_images_for_others_are_used_twice(run: Run, dense: Path, images: Path) -> None:
    options = ("--data", images, "--images", 6, "--judge-images", 4, "--no-latency")
    result = run("scan", dense, *options)
    assert result.out.startswith("9 images are too few for 6 and 4 others; damage is measured on the same images\n")
    assert "fitted on 6 images, compared on 6 of them." in result.out
    table = table_in(run("scan", dense, *options, "--json").out)
    assert (table.fitted_on, table.judged_on, table.is_apart) == (6, 6, False)


@pytest.mark.slow
def test_random_weights_are_pointed_out(run: Run) -> None:
    note = "note: the weights are random; give --weights FILE or --pretrained to use a trained model\n"
    result = run("scan", "test_vit", "--img-size", 32, "--num-classes", 4, *FAST)
    assert result.code == 0
    assert note in result.out


def test_progress_now_and_then_where_nobody_watches(run: Run, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    result = run("scan", dense, *FAST)
    assert result.code == 0
    assert re.search(r"^fitting 2/2, 0:00:00 left$", result.err, re.MULTILINE)
    assert re.search(r"^comparing 3/32, \d:\d\d:\d\d left$", result.err, re.MULTILINE)
    assert run("scan", dense, *FAST, "--quiet").err == ""
    assert run("scan", dense, *FAST, "--json").err == ""


def test_what_is_there_stays_unless_it_is_ours_and_meant(run: Run, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("scan", dense, *FAST, "--out", out).code == 0
    before = (out / "scan.json").read_text()
    run("scan", dense, *FAST, "--out", out).is_refused(f"{out} exists already; give another path, or allow overwriting")
    assert run("scan", dense, *FAST, "--out", out, "--seed", 3, "--overwrite").code == 0
    assert (out / "scan.json").read_text() != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    run("scan", dense, *FAST, "--out", tmp_path / "mine", "--overwrite").is_refused(
        f"{tmp_path / 'mine'} is not overwritten, because it has no scan.json and so was not made by hetdpt; "
        "remove it yourself"
    )


def test_a_pruned_model_is_scanned_too(run: Run, dense: Path, tmp_path: Path) -> None:
    model = hetdpt.load(dense)
    hetdpt.save(hetdpt.prune_(model, hetdpt.Plan(attention=(0,))), tmp_path / "pruned")
    table = table_in(run("scan", tmp_path / "pruned", *FAST, "--json").out)
    assert [row.style for row in table.rows] == ["identity", "skip", "identity"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--data", "nowhere"), r"there is no folder nowhere; data is a folder with train/ and val/, .*"),
        (("--data", "demo", "--device", "abacus"), r"device 'abacus' is not available; available: .*cpu"),
    ],
)
def test_bad_options_are_refused(run: Run, dense: Path, options: tuple[Any, ...], text: str) -> None:
    run("scan", dense, *options).is_refused_like(text)


def test_bad_images_are_refused(run: Run, dense: Path, images: Path) -> None:
    for file in images.iterdir():
        file.write_bytes(b"no image")
    run("scan", dense, "--data", images, "--images", 4, "--judge-images", 4).is_refused_like(
        rf"none of 4 images can be read, for example {images}/\d.png; check the files"
    )
    for file in images.iterdir():
        Image.new("RGB", (20, 20)).save(file)
    run("scan", dense, "--data", images, "--images", 4, "--judge-images", 4, "--quiet").is_refused(
        "the model has the same output for all 4 images; give images that differ"
    )
