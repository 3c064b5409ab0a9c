"""Fields of dataclasses as their source declares them. Read, not imported: configs need torch, --help must not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hetdpt


class Declared(NamedTuple):
    """A field of a dataclass, as its source has it."""

    annotation: str
    default: Any
    help: str


def declared(setting: str) -> Declared:
    """Return how a setting is declared in the source of its config.

    >>> declared("RecoverConfig.training.batch_size").annotation
    'int'
    """
    module, kind, name = split_setting(setting)
    *tables, leaf = name.split(".")
    for table in tables:
        module, kind = _home(module, declared_fields(module, kind)[table].annotation)
    return declared_fields(module, kind)[leaf]


def split_setting(setting: str) -> tuple[str, str, str]:
    """Return the module of a config class, its name and that of the setting; public classes need no module."""
    parts = setting.split(".")
    at = next(number for number, part in enumerate(parts) if part[0].isupper())
    module = ".".join(parts[:at]) or hetdpt._HOME_OF[parts[at]]
    return module, parts[at], ".".join(parts[at + 1 :])


@cache
def _tree(module: str) -> ast.Module:
    file = Path(hetdpt.__file__).parent.joinpath(*module.split(".")[1:])
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _home(module: str, kind: str) -> tuple[str, str]:
    """Return the module that defines the class which ``module`` knows as ``kind``, and its name."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and kind in (alias.name for alias in node.names):
            return node.module or "", kind
    return module, kind


@cache
def declared_fields(module: str, kind: str) -> dict[str, Declared]:
    """Return the fields of a dataclass by name, those of its bases too."""
    body = next(node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == kind)
    found: dict[str, Declared] = {}
    for base in body.bases:
        if isinstance(base, ast.Name):
            found |= declared_fields(*_home(module, base.id))
    for node, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = Declared(ast.unparse(node.annotation), _literal(node.value), _text(below))
    return found


def _literal(node: ast.AST | None) -> Any:
    """Return the value of a default that is written out; None for a call or a name."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def _text(node: ast.AST | None) -> str:
    """Return the first sentence of the text under a field."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
        return ""
    words = " ".join(node.value.value.split()).replace("``", "")
    return re.split(r"(?<=\.) (?=[A-Z0-9])", words)[0]
