"""Import health: the package and its help need neither torch, timm nor transformers; public names come when used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import hetdpt

HEAVY = ("torch", "timm", "transformers", "torchvision", "numpy")
REPORT = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def run(*command: str) -> str:
    """Return what a new Python prints last; a module imported by this process says nothing about the next one."""
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import hetdpt",
        "from hetdpt import Plan, HetDPTError, published_plans; published_plans()",
        "import hetdpt.cli",
        "import hetdpt; dir(hetdpt)",
    ],
)
def test_importing_needs_no_heavy_library(code: str) -> None:
    assert run("-c", f"{code}; {REPORT}") == "[]"


@pytest.mark.parametrize("command", [["--help"], ["inspect", "--help"], ["apply", "--help"], ["--version"]])
def test_help_needs_no_heavy_library(command: list[str]) -> None:
    code = f"""
import sys
from hetdpt.cli import main
sys.argv = ["hetdpt", *{command!r}]
try:
    main()
except SystemExit as end:
    assert end.code == 0
{REPORT}
"""
    assert run("-c", code) == "[]"


def test_python_m_hetdpt_is_the_command_line() -> None:
    assert run("-m", "hetdpt", "--version") == f"hetdpt {hetdpt.__version__}"


@pytest.mark.parametrize("name", hetdpt.__all__)
def test_public_name_resolves_to_what_its_home_defines(name: str) -> None:
    value = getattr(hetdpt, name)
    home = import_module(hetdpt._HOME_OF[name])
    assert value is getattr(home, name)
    if callable(value):  # a table has no home of its own
        assert value.__module__ == home.__name__


def test_dir_lists_every_public_name() -> None:
    assert set(hetdpt.__all__) <= set(dir(hetdpt))
    assert "__version__" in dir(hetdpt)


def test_homes_and_all_agree() -> None:
    names = [name for names in hetdpt._HOMES.values() for name in names]
    assert sorted(names) == sorted(hetdpt.__all__)
    assert len(set(names)) == len(names)


def test_no_public_name_hides_a_module() -> None:
    """A module is an attribute of its package once imported, so a function of that name would come and go."""
    for name in hetdpt.__all__:
        with pytest.raises(ModuleNotFoundError, match=f"No module named 'hetdpt.{name}'"):
            import_module(f"hetdpt.{name}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hetdpt' has no attribute 'prunee'"):
        _ = hetdpt.prunee
    assert not hasattr(hetdpt, "torch")
