"""What pyproject.toml says of other packages: all that are imported, with bounds that hold."""

from __future__ import annotations

import re
import sys
from importlib.metadata import packages_distributions

import pytest
from lower_bounds import PYPROJECT, lower_bounds
from packaging.utils import canonicalize_name
from packaging.version import Version
from test_rooms import FILES, imports

PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (PYPROJECT.parent / "constraints.txt").read_text(), re.M)
}
BOUNDS = {canonicalize_name(name): Version(version) for name, version in lower_bounds().items()}


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_the_version_that_is_tested_lies_within_the_bound(name: str) -> None:
    assert BOUNDS[name] <= PINS[name]


def test_all_that_is_imported_is_declared() -> None:
    """Also where another package happens to bring it along today."""
    modules = {module.partition(".")[0] for file in FILES for module in imports(file)}
    others = modules - sys.stdlib_module_names - {"hetdpt", "__future__"}
    owners = packages_distributions()
    packages = {canonicalize_name(owners[module][0]) for module in others}
    assert len(packages) > 15
    assert packages <= BOUNDS.keys()
