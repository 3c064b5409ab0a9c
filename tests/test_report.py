"""A scan as files: a table that can be read back, and figures that are figures."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hetdpt.core.errors import FileError
from hetdpt.core.plan import KINDS, Kind, Measurement, Site
from hetdpt.core.styles import STYLES
from hetdpt.measurement.costs import Costs
from hetdpt.report.scan import COLUMNS, LOOKS, csv_rows, draw
from hetdpt.store.atomic import write_csv
from hetdpt.studies.scan import ScanRow, ScanTable

SHOWN = {"attention": ("skip", "norm", "constant", "position", "linear"), "activation": ("identity", "calibrated")}
DAMAGE = {"skip": 1.5, "norm": 4.0, "constant": 0.5, "position": 0.4, "linear": 0.1, "identity": 6.2}


def table_of(blocks: int = 3, kinds: tuple[Kind, ...] = KINDS, is_timed: bool = True, **styles: Any) -> ScanTable:
    rows = []
    for block in range(blocks):
        for kind in kinds:
            for style in {**SHOWN, **styles}[kind]:
                damage = 6.3 if (kind, block) == ("activation", 0) else DAMAGE.get(style, 0.2) * (1 + block % 3)
                saved = Measurement("saved", 2.5 + block % 2, "ms", "cpu", "float32", 8, 0.1, 20) if is_timed else None
                r2 = 0.9 if STYLES[style].fit else None
                site = Site(kind, block, f"blocks.{block}.{kind}", style == "drop")
                rows.append(ScanRow(site, style, 100 * damage, r2, damage, damage <= 2, 1000 + block, saved))
    whole = Measurement("latency", 95.0, "ms", "cpu", "float32", 8, 1.0, 20) if is_timed else None
    return ScanTable(tuple(rows), (), True, 4.0, Costs(1, 10**9, 10**9), whole, 256, 128, True)


# The table


@pytest.mark.parametrize("is_timed", [True, False])
def test_csv_and_back(tmp_path: Path, is_timed: bool) -> None:
    table = table_of(is_timed=is_timed)
    write_csv(tmp_path / "scan.csv", COLUMNS, csv_rows(table))
    with (tmp_path / "scan.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    for row, line in zip(table.rows, lines, strict=True):
        site = Site(line["kind"], int(line["block"]), line["path"], line["is_gated"] == "True")  # type: ignore[arg-type]
        assert (site, line["style"], float(line["te"]), float(line["damage"])) == (
            row.site, row.style, row.te, row.damage,
        )  # fmt: skip
        assert (float(line["r2"]) if line["r2"] else None) == row.r2
        assert (line["is_replaceable"] == "True", int(line["macs_saved"])) == (row.is_replaceable, row.macs_saved)
        if row.ms_saved is None:
            assert [line[name] for name in COLUMNS[-5:]] == [""] * 5
        else:
            found = float(line["ms_saved"]), float(line["ms_spread"]), line["device"], line["dtype"], int(line["batch"])
            assert found == (row.ms_saved.value, 0.1, "cpu", "float32", 8)


# The figure


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 20  # something is drawn
        return image.size


@pytest.mark.parametrize("blocks", [1, 12, 40])
def test_a_figure_is_a_png_of_sensible_size(tmp_path: Path, blocks: int) -> None:
    draw(table_of(blocks), tmp_path / "scan.png")
    width, height = size_of(tmp_path / "scan.png")
    assert 1500 <= width <= 3000
    assert 1000 <= height <= 2000


def test_a_figure_as_svg_says_what_it_shows(tmp_path: Path) -> None:
    draw(table_of(), tmp_path / "scan.svg")
    text = (tmp_path / "scan.svg").read_text()
    for words in (
        "attention removed: damage on 128 images",
        "KL to dense [nats]",
        "an answer that ignores the image",
        "nothing replaces it",
        "time saved, of 95 ms (cpu, float32, batch 8)",
        *SHOWN["attention"],
        *SHOWN["activation"],
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "table",
    [
        table_of(is_timed=False),
        table_of(kinds=("attention",)),
        table_of(kinds=("activation",)),
        table_of(activation=("calibrated", "drop")),
        table_of(attention=("norm",), activation=("identity",)),
        replace(table_of(), is_classifier=False),
    ],
    ids=["not timed", "attention", "activation", "gated", "pruned", "features"],
)
def test_whatever_is_missing_the_rest_is_drawn(tmp_path: Path, table: ScanTable) -> None:
    draw(table, tmp_path / "scan.png")
    size_of(tmp_path / "scan.png")


def test_zero_and_infinity_have_their_place_on_a_logarithm(tmp_path: Path) -> None:
    rows = [replace(row, te=0.0, damage=0.0) if row.style == "linear" else row for row in table_of().rows]
    rows = [replace(row, te=inf, damage=inf) if row.style == "skip" else row for row in rows]
    draw(replace(table_of(), rows=tuple(rows)), tmp_path / "scan.png")
    size_of(tmp_path / "scan.png")


def test_every_style_has_a_look_of_its_own() -> None:
    assert set(LOOKS) <= set(STYLES)
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)
    for styles in SHOWN.values():
        assert len({LOOKS[style].marker for style in styles}) == len(styles)


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="^a figure is a file that ends in .png or .svg, but scan.bmp does not$"):
        draw(table_of(), tmp_path / "scan.bmp")


def test_the_room_is_light_until_it_draws() -> None:
    code = "import sys, hetdpt.report.scan; print([n for n in ('torch', 'matplotlib', 'timm') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"
