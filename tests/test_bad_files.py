"""Every file that hetdpt reads, made up or mutilated: it is read, or refused in one sentence, and never a traceback."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_training_cli
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

import hetdpt
from hetdpt.cli import main
from hetdpt.core.errors import HetDPTError
from hetdpt.data.sources import open_data
from hetdpt.flow.collection.collect import read_run
from hetdpt.flow.comparison.compare import read_comparison
from hetdpt.flow.config import RunConfig
from hetdpt.results import Prices, RunSummary
from hetdpt.store.stage_directory import read_flow
from hetdpt.tasks.boxes import open_boxes

EXAMPLES = settings(
    max_examples=int(os.environ.get("HETDPT_EXAMPLES", "25")),  # benchmarks/bad_input.py asks for more
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=9), one, max_size=4), max_leaves=9
)
TRIED: Counter[str] = Counter()


def tell(*words: object, is_json: bool = False) -> tuple[int, str]:
    """Give a command, and return its exit code and what it said on stderr; with ``is_json`` on stdout too."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["hetdpt", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            main()
    except SystemExit as end:
        return int(end.code or 0), err.getvalue() + (out.getvalue() if is_json else "")
    finally:
        sys.argv = before
    raise AssertionError("a command ends by an exit code")


def require_read_or_refused(what: str, *words: object) -> bool:
    """Give a command; return whether it took what it was given."""
    code, told = tell(*words)
    TRIED[what] += 1
    lines = [line for line in told.splitlines() if not line.startswith("warning: ")]
    assert (code, lines) == (0, []) or (code, len(lines)) == (2, 1), told
    return code == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    test_training_cli.build(folder / "dense")
    return folder


@pytest.fixture(autouse=True)
def count(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Say how many files were tried, for docs/reliability.md."""
    TRIED.clear()
    yield
    for what, tried in TRIED.items():
        record_property(f"tried: {what}", tried)


# Plans


PLANS = st.fixed_dictionaries(
    {},
    optional={
        "attention": VALUES | st.lists(st.integers(-2, 5), max_size=4),
        "activation": VALUES | st.lists(st.integers(-2, 5), max_size=4),
        "removal": VALUES | st.sampled_from(["plain", "norm", "authors", "calibrated", ["skip", "drop"]]),
        "anatomy": VALUES, "fits": VALUES, "more": VALUES,
    },
)  # fmt: skip


@EXAMPLES
@given(PLANS | VALUES)
def test_plans(home: Path, values: Any) -> None:
    file = home / "plan.json"
    file.write_text(json.dumps(values))
    require_read_or_refused("plan", "inspect", home / "dense", "--plan", file, "--json")


@EXAMPLES
@given(
    st.binary(max_size=60) | st.sampled_from([b"[" * 9999, b'{"attention": [1e999]}', b"\xff\xfe[\x001\x00", b"{}\0"])
)
def test_plans_that_are_no_json(home: Path, content: bytes) -> None:
    file = home / "plan.json"
    file.write_bytes(content)
    require_read_or_refused("plan", "inspect", home / "dense", "--plan", file, "--json")


# JSON of every sort


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "saved model": ("hetdpt.json", hetdpt.load),
    "task": ("task.json", hetdpt.load_task),
    "plan": ("plan.json", lambda folder: hetdpt.Plan.from_json((folder / "plan.json").read_text())),
    "prices": ("prices.json", lambda folder: Prices.from_json((folder / "prices.json").read_text())),
    "collection": ("run.json", read_run),
    "comparison": ("results.json", read_comparison),
    "summary": ("summary.json", RunSummary.read),
    "flow": ("flow.json", read_flow),
    "shards": ("_info.json", lambda folder: open_data(f"wds/{folder}")),
    "boxes": ("annotations/instances_train2017.json", lambda folder: open_boxes(str(folder))),
}
NASTY = {
    "deep": "[" * 9999,
    "deep table": '{"a": ' * 9999,
    "long number": f'{{"a": {"9" * 5000}}}',
    "text": "no JSON",
}


@pytest.mark.parametrize("nasty", NASTY)
@pytest.mark.parametrize("reader", READERS)
def test_json_that_python_cannot_read(tmp_path: Path, reader: str, nasty: str) -> None:
    name, read = READERS[reader]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(NASTY[nasty])
    TRIED["JSON"] += 1
    with pytest.raises(HetDPTError):
        read(tmp_path)


# Settings


NAMES = st.sampled_from(
    [
        "model",
        "data",
        "layers",
        "removal",
        "images",
        "recovery",
        "recovery.training.lr",
        "compare",
        "recipe",
        "seed",
        "x",
    ]
)


@EXAMPLES
@given(st.dictionaries(NAMES | st.text(max_size=9), VALUES, max_size=5))
def test_settings(home: Path, values: Any) -> None:
    file = home / "config.yaml"
    file.write_text(json.dumps(values))  # which YAML is a superset of, nearly
    TRIED["settings"] += 1
    with suppress(HetDPTError):
        RunConfig.resolve(file=file, changes={"model": "demo", "data": "demo", "out": home / "run", "layers": 2})


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\u2028b", "\x1b[2Ja"])
def test_a_sentence_is_one_line_whatever_it_quotes(home: Path, name: str) -> None:
    file = home / "config.yaml"
    file.write_text(json.dumps({name: 1}))
    assert not require_read_or_refused("settings", "run", "--config", file, "--dry-run")
    _, told = tell("run", "--config", file, "--dry-run")
    assert told.rstrip("\n").isprintable()


@EXAMPLES
@given(st.binary(max_size=60), st.sampled_from([".yaml", ".toml", ".txt", ""]))
def test_settings_that_are_no_such_file(home: Path, content: bytes, suffix: str) -> None:
    file = home / f"config{suffix}"
    file.write_bytes(b"layers" + content)
    assert not require_read_or_refused("settings", "run", "--config", file, "--dry-run")


# Samples


CELLS = st.sampled_from(["0", "1", "2", "3", "-1", "70", "69.5", "nan", "inf", "", "x", '"', "1e400", "0x1", "\u0661"])


@EXAMPLES
@given(st.lists(st.lists(CELLS, min_size=3, max_size=4), max_size=12), st.sampled_from(["", "\ufeff", "\0", "more,"]))
def test_tables_of_samples(home: Path, rows: list[list[str]], start: str) -> None:
    file = home / "samples.csv"
    file.write_text("\n".join([f"{start}attention,activation,accuracy", *(",".join(row) for row in rows)]))
    code, told = tell("predict", file, "--layers", "2", "--blocks", "3", "--json")
    TRIED["samples"] += 1
    assert code == 0 or (code, len([line for line in told.splitlines() if line.startswith("error")])) == (2, 1), told
    assert "Traceback" not in told


# Checkpoints


def mutilated(content: bytes, seed: int) -> bytes:
    """Return ``content`` with some bytes changed, cut off, added, or put elsewhere."""
    chance, changed = random.Random(seed), bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        if (way := chance.randrange(4)) == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            del changed[at:]
        elif way == 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 30))
        else:
            changed[at:] = changed[at:][::-1]
    return bytes(changed)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_checkpoints(home: Path, suffix: str) -> None:
    state, file = hetdpt.load(home / "dense").state_dict(), home / f"weights{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    whole = file.read_bytes()
    words = ("inspect", "vit_tiny_patch16_224", "--weights", file, "--json")
    for seed in range(40):
        head = mutilated(whole[:4000], seed) if seed % 2 else whole[:4000]
        file.write_bytes(head + (whole[4000:] if seed % 2 else mutilated(whole[4000:], seed)))
        assert not require_read_or_refused("checkpoint", *words)


class Harm:
    """What a pickle may hold."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".bin", ".pkl"])
@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_a_checkpoint_that_would_run_code(home: Path, suffix: str, way: str) -> None:
    file, mark = home / f"evil{suffix}", home / "was here"
    content = {"state_dict": {"head.weight": Harm(mark)}}
    file.write_bytes(pickle.dumps(content)) if way == "pickle" else torch.save(content, file)
    assert not require_read_or_refused("checkpoint", "inspect", home / "dense", "--weights", file)
    assert not require_read_or_refused("checkpoint", "inspect", "vit_tiny_patch16_224", "--weights", file)
    assert not mark.exists()


# Saved models


@pytest.mark.parametrize("name", ["hetdpt.json", "model.safetensors"])
def test_saved_models(home: Path, name: str) -> None:
    file = home / "dense" / name
    whole = file.read_bytes()
    try:
        for seed in range(30):
            file.write_bytes(changed := mutilated(whole, seed))
            assert changed == whole or not require_read_or_refused("saved model", "inspect", home / "dense")
    finally:
        file.write_bytes(whole)


# Images


def picture(mode: str, form: str, size: tuple[int, int] = (20, 24), **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 4), dtype=np.uint8)
    image = Image.fromarray(pixels[..., :3])
    if mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(pixels[..., 0].astype(np.float32))
    elif mode != "RGB":
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def animated() -> bytes:
    frames = [Image.new("P", (20, 20), colour) for colour in range(5)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


TURNED = b"Exif\0\0II*\0\b\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0"
IMAGES: dict[str, tuple[str, Callable[[], bytes], bool]] = {
    "RGB": ("a.png", lambda: picture("RGB", "PNG"), True),
    "CMYK": ("a.jpg", lambda: picture("CMYK", "JPEG"), True),
    "YCbCr": ("a.jpg", lambda: picture("YCbCr", "JPEG"), True),
    "grey": ("a.png", lambda: picture("L", "PNG"), True),
    "grey with alpha": ("a.png", lambda: picture("LA", "PNG"), True),
    "alpha": ("a.png", lambda: picture("RGBA", "PNG"), True),
    "palette": ("a.png", lambda: picture("P", "PNG"), True),
    "palette with transparency": ("a.png", lambda: picture("P", "PNG", transparency=b"\0\1\2"), True),
    "black and white": ("a.png", lambda: picture("1", "PNG"), True),
    "16 bits": ("a.png", lambda: picture("I;16", "PNG"), True),
    "floats": ("a.tif", lambda: picture("F", "TIFF"), True),
    "one pixel": ("a.png", lambda: picture("RGB", "PNG", (1, 1)), True),
    "one row": ("a.png", lambda: picture("RGB", "PNG", (1, 900)), True),
    "animated": ("a.gif", animated, True),
    "progressive": ("a.jpg", lambda: picture("RGB", "JPEG", progressive=True), True),
    "wrong extension": ("a.jpg", lambda: picture("RGB", "PNG"), True),
    "webp": ("a.webp", lambda: picture("RGB", "WEBP"), True),
    "turned by its EXIF": ("a.jpg", lambda: picture("RGB", "JPEG", exif=TURNED), True),
    "truncated": ("a.jpg", lambda: picture("RGB", "JPEG", (200, 200))[:-900], False),
    "huge": ("a.ppm", lambda: b"P6 60000 60000 255\n" + bytes(99), False),
    "thin": ("a.png", lambda: picture("RGB", "PNG", (1, 200_000)), False),
    "flat": ("a.png", lambda: picture("RGB", "PNG", (200_000, 1)), False),
    "text": ("a.png", lambda: b"no image", False),
    "empty": ("a.png", bytes, False),
    "html": ("a.png", lambda: b"<svg onload=alert(1)>", False),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return images of ten classes to validate on, one of each."""
    root = tmp_path_factory.mktemp("images")
    for number in range(10):
        place = root / "val" / f"class{number}"
        place.mkdir(parents=True)
        (place / "0.png").write_bytes(picture("RGB", "PNG"))
    return root


@pytest.mark.parametrize("kind", IMAGES)
def test_images(home: Path, folder: Path, kind: str) -> None:
    name, make, is_readable = IMAGES[kind]
    file = folder / "val" / "class3" / name
    file.write_bytes(make())
    try:
        code, told = tell("eval", home / "dense", "--data", folder, "--workers", "0", "--json", is_json=True)
    finally:
        file.unlink()
    TRIED["image"] += 1
    assert code == 0, told
    assert json.loads(told)["unreadable"] == ([] if is_readable else [str(file)])


@EXAMPLES
@given(st.integers(0, 2**31), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"]))
def test_mutilated_images(home: Path, folder: Path, seed: int, form: str) -> None:
    file = folder / "val" / "class3" / f"a.{form.lower()}"
    file.write_bytes(mutilated(picture("RGB", form), seed))
    try:
        code, told = tell("eval", home / "dense", "--data", folder, "--workers", "0", "--json", "--quiet")
    finally:
        file.unlink()
    TRIED["image"] += 1
    assert code == 0, told
    assert "Traceback" not in told
