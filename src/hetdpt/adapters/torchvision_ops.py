"""Lets ``import torchvision`` (so timm too) succeed where its compiled operators do not load.

A torchvision wheel built for CUDA next to a CPU build of torch cannot load its operators; its import then fails with
"operator torchvision::nms does not exist". ``install`` waits for that import and defines the two operators it
needs, if they are missing. Where torchvision works it does nothing. Imports no torch until torchvision is imported.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

OPERATORS = ("nms", "qnms")
_keep: list[Any] = []  # the definitions of a torch library live as long as it does


class _Cure(MetaPathFinder):
    """Intercepts the first import of torchvision, defines the operators, and leaves the import to other finders."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            define_missing_operators()
        return None


def install() -> None:
    """Define torchvision's missing operators when it is first imported, if it is not imported yet."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Cure) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Cure())


def define_missing_operators() -> list[str]:
    """Define the operators that torchvision needs at import and cannot load; return their names."""
    import torch

    if _loads():
        return []
    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep.append(library)
    return missing


def _loads() -> bool:
    """Whether the operators of the installed torchvision load; True where none is installed."""
    import torch

    spec = PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    try:
        for binary in Path(spec.origin).parent.glob("_C.*"):
            torch.ops.load_library(binary)
    except OSError:
        return False
    return True
