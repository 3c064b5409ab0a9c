"""``EXPORTS``: the runtimes that a model can be exported to, one row each. No torch, so that the help can read it.

A new runtime is a row here and a module of ``hetdpt.export`` with two functions: ``write(model, images, path)`` writes
the file, with a dynamic batch, and ``open_file(path)`` returns a function from a batch to the tensors that the runtime
computes. The command line, the run, its report, the model card and the contract test follow the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hetdpt.core.errors import FileError, ModelError


@dataclass(frozen=True)
class ExportRuntime:
    """One runtime."""

    name: str
    """How a run's settings and its results call it."""
    title: str
    """What the file is."""
    runner: str
    """What runs the file, and is compared with torch."""
    suffix: str
    """The suffix of the file, by which ``hetdpt export`` chooses the runtime."""
    packages: tuple[str, ...]
    """What has to be installed for it, as Python imports it."""
    extra: str
    """The extra of hetdpt that installs them."""
    module: str
    """The module of ``hetdpt.export`` that writes and runs such files."""

    @property
    def file(self) -> str:
        """The name of the file in a run directory."""
        return f"model{self.suffix}"

    def load(self) -> Any:
        """Return the module; ``ModelError`` if a package it needs is missing."""
        try:
            for package in self.packages:
                import_module(package)
        except ImportError:
            needed = ", ".join(self.packages)
            raise ModelError(f"export to {self.title} needs {needed}; install hetdpt[{self.extra}]") from None
        return import_module(f"hetdpt.export.{self.module}")


EXPORTS = {
    row.name: row
    for row in (
        ExportRuntime(
            name="onnx",
            title="ONNX",
            runner="ONNX Runtime",
            suffix=".onnx",
            packages=("onnx", "onnxscript", "onnxruntime"),
            extra="export",
            module="onnx",
        ),
    )
}
SUFFIXES = ", ".join(f"{row.suffix} ({row.title})" for row in EXPORTS.values())


def runtime_of(path: Path) -> ExportRuntime:
    """Return the runtime of the file ``path``, by its suffix.

    >>> runtime_of(Path("small.onnx")).runner
    'ONNX Runtime'
    """
    for row in EXPORTS.values():
        if path.suffix == row.suffix:
            return row
    raise FileError(f"{path} does not say what to export to; give a file that ends in {SUFFIXES}")


def require_runtimes(names: Iterable[str]) -> None:
    """Raise ``ModelError`` for a name that is no runtime."""
    for name in names:
        if name not in EXPORTS:
            raise ModelError(f"models are exported to {', '.join(EXPORTS)}, not to {name!r}")
