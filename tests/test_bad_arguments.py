"""Every option of every command with every sort of wrong value: exit code 2, one sentence, nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import test_cli
import test_training_cli
from PIL import Image
from test_cli import Run

import hetdpt
from hetdpt.cli import app

run = test_cli.run  # the fixture
WRONG = {"integer": ("x", "-7", "1.5", ""), "number": ("x", "nan", "-1", "")}
WRONG_TEXTS = ("", "no such thing", "\u2028[{")
UNUSED = {"--data-root", "--revision", "--message"}  # with these data and models any text will do
TASK = ("--epochs", "1", "--batch-size", "8", "--workers", "0")
LOOP = ("--epochs", "1", "--batch-size", "8", "--per-class", "2", "--workers", "0")
WORDS: dict[str, tuple[str, ...]] = {
    "run": ("MODEL", "--data", "demo", "--layers", "2", "--images", "16", "--workers", "0"),
    "collect": ("MODEL", "--data", "demo", "--rounds", "1,1,1", "--images", "16", *LOOP),
    "oneshot": ("MODEL", "--data", "demo", "--layers", "2", "--images", "16"),
    "frontier": ("MODEL", "--data", "demo", "--speedup", "1.2", "--images", "16"),
    "select": ("MODEL", "--data", "demo", "--layers", "2", "--images", "16", *LOOP),
    "compare": ("MODEL", "--data", "demo", "--layers", "2", "--methods", "random", "--images", "16", *LOOP),
    "observe": ("MODEL", "--data", "demo", "--blocks", "0", "--images", "16", *LOOP),
    "tokens": ("MODEL", "--r", "1,2", "--data", "demo", "--workers", "0"),
    "transfer": ("MODEL", "--data", "demo", "--plan", "PLAN", "--workers", "0"),
    "train": ("MODEL", "--data", "demo", *LOOP),
    "recover": ("MODEL", "--plan", "PLAN", "--data", "demo", *LOOP),
    "scan": ("MODEL", "--data", "demo", "--images", "16"),
    "width": ("MODEL", "--macs", "80%", "--data", "demo", "--images", "16"),
    "eval": ("MODEL", "--data", "demo", "--workers", "0"),
    "bench": ("MODEL",),
    "inspect": ("MODEL",),
    "apply": ("MODEL", "--plan", "PLAN"),
    "predict": ("SAMPLES", "--layers", "2"),
    "explain": ("MODEL", "--image", "IMAGE"),
    "detect train": ("MODEL", "--data", "shapes", "--size", "32", *TASK),
    "segment train": ("MODEL", "--data", "shapes", "--size", "32", *TASK),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "status": ("PLACE",),
    "report": ("PLACE",),
    "export": ("PLACE",),
    "push": ("PLACE", "someone/model"),
    "detect eval": ("PLACE", "--data", "shapes"),
    "segment eval": ("PLACE", "--data", "shapes"),
}
"""Commands about what others have written, which is not there."""
FEW = ("oneshot", "scan", "eval", "bench", "inspect", "apply")  # options, so that it takes seconds
MODELS = ("", "no_such_model", "hf:", ".", "..", "/dev/null", "vit_tiny_patch16_224\n", "ü" * 300)
TRIED: list[str] = []
_ROOT: Any = app
COMMANDS: dict[str, Any] = {
    f"{name} {part}" if part else name: inner
    for name, command in _ROOT.commands.items()
    for part, inner in getattr(command, "commands", {"": command}).items()
}
PARAMS = {name: command.get_params(click.Context(command)) for name, command in COMMANDS.items()}
CONTRADICTIONS: dict[str, tuple[str, ...]] = {
    "run": ("--samples", "SAMPLES", "--rounds", "1,1,1"),
    "oneshot": ("--speedup", "1.5"),
    "select": ("--attention", "1", "--activation", "2"),
    "width": ("--params", "50%"),
    "collect": ("--fraction", "0.5"),
    "observe": ("--no-recovery",),
    "predict": ("--prices", "SAMPLES", "--model", "MODEL"),
    "recover": ("--fraction", "0.5"),
    "train": ("--fraction", "0.5"),
}
"""What contradicts the words of a command."""


def options(command: str) -> list[Any]:
    """Return the options of a command that take a value, but for where it writes."""
    named = [one for one in PARAMS[command] if one.param_type_name == "option" and not one.is_flag]
    return [one for one in named if one.opts[0] not in {"--out", *UNUSED}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    test_training_cli.build(folder / "dense")
    (folder / "plan.json").write_text(hetdpt.Plan(attention=(1,), activation=(2,)).to_json())
    rows = ["attention,activation,accuracy", "0,0,70", "1,0,69", "2,0,66", "0,1,68", "0,2,64", "1,1,66", "2,2,60"]
    (folder / "samples.csv").write_text("\n".join(rows))
    Image.new("RGB", (16, 16), "red").save(folder / "image.png")
    return folder


def words_of(command: str, home: Path) -> list[str]:
    words = placed({**WORDS, **OTHERS}[command], home)
    has_out = any(one.opts[0] == "--out" for one in PARAMS[command])
    out = "out.png" if command == "explain" else "out"
    return [*command.split(), *words, *(("--out", str(home / out)) if has_out else ())]


def placed(words: tuple[str, ...], home: Path) -> list[str]:
    """Return words with files in the place of their names."""
    files = {"MODEL": "dense", "PLAN": "plan.json", "SAMPLES": "samples.csv", "IMAGE": "image.png", "PLACE": "none"}
    return [str(home / files[word]) if word in files else word for word in words]


@pytest.fixture(autouse=True)
def count(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Say how many commands were tried, for docs/reliability.md."""
    TRIED.clear()
    yield
    record_property("tried: command line", len(TRIED))


def require_refused(told: test_cli.Result, what: str) -> None:
    TRIED.append(what)
    lines = [line for line in told.err.splitlines() if line.lower().startswith("error")]
    assert (told.code, len(lines)) == (2, 1), f"{what}: {told}"
    assert "Traceback" not in told.err, what


@pytest.mark.parametrize(
    "command", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in WORDS]
)
def test_wrong_values_are_refused(command: str, home: Path, run: Run) -> None:
    tried = 0
    for option in options(command):
        for value in WRONG.get(option.type.name, WRONG_TEXTS):
            given = words_of(command, home)
            name = option.opts[0]
            require_refused(run(*given, name, value), f"{command} {name} {value!r}")
            written = (home / "out").exists()
            shutil.rmtree(home / "out", ignore_errors=True)
            assert not written, f"{command} {name} {value!r} has written something"
            tried += 1
    assert tried >= 2 * len(options(command)) > 0


def test_every_command_is_tried() -> None:
    assert {*WORDS, *OTHERS, "demo", "recipes"} == COMMANDS.keys()  # the last two have nothing to be wrong


@pytest.mark.parametrize("command", [*WORDS, *OTHERS])
def test_what_is_missing_or_unknown_is_refused(command: str, home: Path, run: Run) -> None:
    given = words_of(command, home)
    require_refused(run(*command.split()), f"{command} alone")
    require_refused(run(*given, "--no-such-option"), f"{command} with an unknown option")
    require_refused(run(*given, "one", "too", "many"), f"{command} with too much")
    for at in [at for at, word in enumerate(given) if word.startswith("--")]:
        require_refused(run(*given[: at + 1]), f"{command} that ends with {given[at]}")


@pytest.mark.parametrize("command", [name for name in WORDS if WORDS[name][0] == "MODEL"])
@pytest.mark.parametrize("model", MODELS)
def test_wrong_models_are_refused(command: str, model: str, home: Path, run: Run) -> None:
    named = command.split()
    require_refused(run(*named, model, *words_of(command, home)[len(named) + 1 :]), f"{command} {model!r}")


@pytest.mark.parametrize("command", OTHERS)
def test_wrong_places_are_refused(command: str, home: Path, run: Run) -> None:
    named = command.split()
    for place in ("", "no such thing", "/dev/null", str(home), str(home / "plan.json"), "ü" * 300):
        require_refused(run(*named, place, *words_of(command, home)[len(named) + 1 :]), f"{command} {place!r}")


@pytest.mark.parametrize("command", CONTRADICTIONS)
def test_contradictions_are_refused(command: str, home: Path, run: Run) -> None:
    more = placed(CONTRADICTIONS[command], home)
    require_refused(run(*words_of(command, home), *more), f"{command} and {' '.join(more)}")
    assert not (home / "out").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("inspect", ""), "an argument"),
        (("inspect", "demo", "--plan", "  "), "--plan"),
        (("inspect", "demo", "--plan="), "--plan"),
        (("", "demo"), "an argument"),
    ],
)
def test_an_empty_word_is_named(run: Run, words: tuple[str, ...], what: str) -> None:
    run(*words).is_refused(f"{what} is empty; give it a value, or leave it out")
