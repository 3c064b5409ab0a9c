"""Print the oldest version of every package that pyproject.toml allows, as constraints for pip.

python tests/lower_bounds.py > bounds.txt && pip install -c bounds.txt -e '.[dev]'
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of every package that hetdpt or one of its extras needs."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    found: dict[str, str] = {}
    for line in (*project["dependencies"], *(line for extra in extras for line in extra)):
        bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", line)
        assert bound, f"{line!r} in pyproject.toml is not of the form name>=version"
        name, version = bound.groups()
        assert found.setdefault(name, version) == version, f"{name} has two lower bounds in pyproject.toml"
    return found


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lower_bounds().items()))
