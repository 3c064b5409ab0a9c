"""The storeys of the house: imports only go down, rooms on one storey are strangers, libraries stay in their rooms."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import hetdpt

HOUSE = Path(hetdpt.__file__).parent

# From the top floor down, as in docs/architecture.md; rooms of later issues have their place already.
STOREYS = [
    {"cli"},
    {"studies", "tasks"},
    {"flow"},
    {"selection", "export", "report"},
    {"training", "reduce"},
    {"measurement"},
    {"surgery", "data"},
    {"adapters", "results"},
    {"store"},
    {"core"},
]
FENCES = {
    "timm": {"adapters", "data", "training"},
    "transformers": {"adapters", "tasks"},
    "accelerate": {"adapters", "training"},
    "torch_pruning": {"reduce"},
    "pycocotools": {"tasks"},
    "torchmetrics": {"tasks"},
    "onnx": {"export"},
    "onnxruntime": {"export"},
    "onnxscript": {"export"},
    "huggingface_hub": {"export"},
    "matplotlib": {"report"},
    "sklearn": {"data", "selection"},
    "scipy": {"selection"},
    "datasets": {"data"},
    "webdataset": {"data"},
    "jinja2": {"report"},
    "yaml": {"store"},
    "rich": {"cli"},
    "filelock": {"store"},
    "psutil": {"core"},
    "click": {"cli"},
}
WITHOUT_TORCH = {"report", "results"}
WITHOUT_TORCH_TOO = {
    *(f"core/{name}.py" for name in ("plan", "goals", "tokens", "errors", "format", "host", "published")),
    *(f"selection/predictor/{name}.py" for name in ("rows", "polynomial", "allocate")),
    *(f"store/{name}.py" for name in ("atomic", "queue", "lock", "settings", "config_diff", "stage_directory")),
    "data/table.py",
}
# The front door hands out names lazily and knows every room.
DOORS = {"__init__", "__main__"}


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Return the modules a file imports, also inside functions, but not for the type checker alone."""
    tree = ast.parse(path.read_text())
    hidden = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [alias.name for alias in node.names if not alias.name.startswith("__")]
            found |= {f"hetdpt.{name}" for name in names} if node.module == "hetdpt" else {node.module or ""}
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


FILES = sorted(path for path in HOUSE.rglob("*.py") if room_of(path) not in DOORS)


def storey(room: str) -> int:
    floors = [number for number, rooms in enumerate(STOREYS) if room in rooms]
    assert floors, f"room {room} is not in the plan of the house"
    return floors[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "hetdpt" and len(parts) > 1 and parts[1] != room:
            assert storey(parts[1]) > storey(room), f"{room} must not import {module}"
        if parts[0] in FENCES:
            assert room in FENCES[parts[0]], f"{parts[0]} belongs in {FENCES[parts[0]]}, not in {room}"
        if room in WITHOUT_TORCH or str(path.relative_to(HOUSE)) in WITHOUT_TORCH_TOO:
            assert parts[0] != "torch", f"{path} must not import torch"


def test_the_picture_in_the_docs_shows_these_storeys() -> None:
    text = (HOUSE.parent.parent / "docs" / "architecture.md").read_text()
    picture = next(block for block in text.split("```") if block.strip().startswith("cli"))
    drawn = [line.split() for line in picture.strip().splitlines()]
    assert [{room.strip("[]") for room in rooms} for rooms in drawn] == STOREYS
    built = {room for rooms in drawn for room in rooms if not room.startswith("[")}
    assert built == {room_of(path) for path in FILES}, "rooms in brackets are not built yet"


def test_no_forward_is_copied_and_no_pickle_is_loaded() -> None:
    for path in FILES:
        text = path.read_text()
        loads = [line for line in text.splitlines() if "torch.load(" in line]
        assert all("weights_only=True" in line for line in loads), f"{path} loads a pickle"
        assert ".forward =" not in text, f"{path} overrides a forward"


def test_a_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(HOUSE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_function_has_more_than_twelve_arguments() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
                assert count <= 12, f"{node.name} in {path} has {count} arguments; group them in a config"
