"""Settings as files: TOML or YAML read to plain values, plain values written as YAML. Knows no setting."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from hetdpt.core.errors import FileError, first_line


def read_settings(file: Path) -> dict[str, Any]:
    """Return what is written in a file of settings, tables within tables; nothing where it is empty."""
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise FileError(f"settings are read from a file whose name ends in .toml, .yaml or .yml, not from {file}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the settings {file} cannot be read: {first_line(error)}; give another file") from None
    try:
        tree = tomllib.loads(text) if file.suffix == ".toml" else parse_yaml(text)
        if not isinstance(tree, dict | NoneType):
            raise ValueError(f"a {type(tree).__name__} is no table of names")
    except (tomllib.TOMLDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(f"the settings {file} are damaged ({_why(error)}); correct them") from None
    return tree or {}


def parse_yaml(text: str) -> Any:
    """Return the plain values of a text in YAML."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def write_yaml(values: Any) -> str:
    """Return plain values, texts for paths and lists for tuples, as YAML that ``parse_yaml`` reads again."""
    text: str = yaml.dump(_plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes 1e-5 for a number, as JSON and YAML 1.2 do, and no key twice, as TOML does.

    An alias is refused: a few lines of them stand for more values than fit in memory.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias is not taken, write out what it stands for", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes the texts that the loader would take for numbers, and writes out what is there twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
    )


def _plain(value: Any) -> Any:
    """Return ``value`` in the words of a file."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _why(error: Exception) -> str:
    """Return what is wrong in a file, and where."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return first_line(error)
