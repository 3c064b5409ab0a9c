"""The cure for a torchvision whose operators do not load: it works in any order of imports, and only where needed.

What an import does can be seen only in a process that has not done it, so most tests start one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetdpt.adapters.torchvision_ops import define_missing_operators

FINDERS = "[type(finder).__name__ for finder in sys.meta_path].count('_Cure')"


def run(code: str, *places: Path) -> str:
    """Return what a new Python prints, with ``places`` before its installed packages."""
    path = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-W", "error::UserWarning", "-c", f"import sys\n{code}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A place with a torchvision that has no compiled operators, hence none that could fail."""
    package = tmp_path / "place" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package.parent


@pytest.mark.parametrize(
    "code",
    [
        "import hetdpt, timm",
        pytest.param("import torch, hetdpt, timm", marks=pytest.mark.slow),
        pytest.param("import hetdpt, torch, torchvision, timm", marks=pytest.mark.slow),
        "import hetdpt, transformers, timm; from timm.models import VisionTransformer",
    ],
)
def test_timm_imports_after_hetdpt_whatever_comes_between(code: str) -> None:
    assert run(f"{code}\nprint(timm.is_model('test_vit'), {FINDERS})") == "True 0"


def test_the_installed_torchvision_gets_the_operators_it_lacks() -> None:
    code = """
from hetdpt.adapters.torchvision_ops import _loads, define_missing_operators
loads = _loads()
names = define_missing_operators()
import torch, torchvision
print(loads, names, all(hasattr(torch.ops.torchvision, name) for name in names))
"""
    found = run(code)
    if found.startswith("True"):
        assert found == "True [] True"
        pytest.skip("the operators of the installed torchvision load, so there is nothing to cure here")
    assert found == "False ['nms', 'qnms'] True"


def test_operators_that_do_not_load_are_defined_once(place: Path) -> None:
    (place / "torchvision" / "_C.so").write_text("built for another torch")
    code = f"""
import hetdpt
from hetdpt.adapters.torchvision_ops import define_missing_operators
print(define_missing_operators(), define_missing_operators(), {FINDERS})
import torchvision
print({FINDERS}, torchvision.__file__)
"""
    expected = ["['nms', 'qnms'] [] 1", f"0 {place / 'torchvision' / '__init__.py'}"]
    assert run(code, place).splitlines() == expected


def test_nothing_is_defined_for_a_torchvision_without_binaries(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)
    assert define_missing_operators() == []


def test_nothing_is_defined_where_the_operators_load(place: Path) -> None:
    (place / "torchvision" / "_C.so").symlink_to(torch._C.__file__)  # any shared library that loads
    code = """
import hetdpt, torch, torchvision
from hetdpt.adapters import torchvision_ops
print(torchvision_ops._keep, hasattr(torch.ops.torchvision, "nms"), torchvision_ops.define_missing_operators())
"""
    assert run(code, place) == "[] False []"


def test_nothing_is_defined_where_no_torchvision_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert define_missing_operators() == []


def test_installing_twice_leaves_one_finder_and_needs_no_torch() -> None:
    code = f"""
import hetdpt
from hetdpt.adapters import torchvision_ops
torchvision_ops.install()
torchvision_ops.install()
print({FINDERS}, "torch" in sys.modules)
"""
    assert run(code) == "1 False"


def test_installing_after_torchvision_leaves_no_finder(place: Path) -> None:
    assert run(f"import torchvision, hetdpt\nprint({FINDERS}, 'torch' in sys.modules)", place) == "0 False"


def test_other_imports_leave_the_finder_in_place() -> None:
    assert run(f"import hetdpt, json.tool\nprint({FINDERS})") == "1"
