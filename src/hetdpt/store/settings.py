"""Settings of a config dataclass by name, such as ``training.lr``, and as files in TOML or YAML. Knows no setting."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from hetdpt.core.errors import FileError, HetDPTError, TrainError, first_line

Config = TypeVar("Config")


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return ``config`` with some settings changed, named as in ``training.lr`` or ``drop_path``.

    An unknown name, or a value of the wrong type, is a ``TrainError``.
    """
    types = setting_types(config)
    new: Config = _replaced(config, {name: checked(types, name, value) for name, value in settings.items()})
    return new


def made(kind: type[Config], values: Mapping[str, Any], prefix: str = "") -> Config:
    """Return a config of class ``kind`` from values by name; an error names the table that it is in."""
    given: dict[str, Any] = {}
    for one, hint in get_type_hints(kind).items():
        name = f"{prefix}{one}"
        if is_dataclass(hint):
            given[one] = made(hint, values, f"{name}.")  # type: ignore[arg-type]
        elif name in values:
            given[one] = values[name]
    try:
        return kind(**given)
    except HetDPTError as error:
        raise type(error)(f"{prefix.rstrip('.')}: {error}" if prefix else str(error)) from None


def setting_types(config: Any) -> dict[str, Any]:
    """Return the type of each setting of a config, an instance or a class, by name; tables are dataclasses."""
    if isinstance(config, type):
        return dict(_types(config))
    own: Any = type(config)
    found = dict(_types(own))
    for one in fields(config):
        kind = type(getattr(config, one.name))
        if is_dataclass(kind) and not is_dataclass(found[one.name]):  # a field whose class varies
            found |= {one.name: kind, **{f"{one.name}.{name}": inner for name, inner in _types(kind).items()}}
    return found


def checked(types: Mapping[str, Any], name: str, value: Any, others: Iterable[str] = ()) -> Any:
    """Return ``value`` in the type of the setting ``name``: a tuple for a list, a path for a text.

    ``TrainError`` for an unknown name, with the nearest of ``types`` and ``others``, and for another type.
    """
    if name not in types:
        raise TrainError(f"unknown setting {name}; did you mean {' or '.join(_nearest(name, [*types, *others]))}?")
    kind, stands = types[name], value
    if is_dataclass(kind):
        inside = next(leaf for leaf in types if leaf.startswith(f"{name}.") and not is_dataclass(types[leaf]))
        raise TrainError(f"{name} is {value!r}, but it is a table of settings, such as {inside}; set those")
    if isinstance(value, list):
        stands = tuple(value)
    elif Path in (kind, *get_args(kind)) and isinstance(value, str):
        stands = Path(value)
    elif kind is str and isinstance(value, Path):
        stands = str(value)
    try:
        return TypeAdapter(kind).validate_python(stands, strict=True)
    except ValidationError:
        raise TrainError(f"{name} is {value!r}, but {spelled(kind)} was expected") from None


def spelled(kind: Any) -> str:
    """Return a description of the values of a type.

    >>> spelled(int | None), spelled(tuple[float, float]), spelled(Literal["all", "te"])
    ('a whole number or null', 'a list (a number, a number)', "'all' or 'te'")
    """
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    if kind in names:
        return names[kind]
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, parts))
    if get_origin(kind) is tuple:
        many = "..." if Ellipsis in parts else ""
        return f"a list ({', '.join(spelled(part) for part in parts if part is not Ellipsis)}{many})"
    if isinstance(kind, UnionType):
        return " or ".join(spelled(part) for part in parts)
    return "null"


@cache
def _types(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one, hint in get_type_hints(kind).items():
        inner = _types(hint) if is_dataclass(hint) else {}  # type: ignore[arg-type]
        found |= {one: hint, **{f"{one}.{name}": part for name, part in inner.items()}}
    return found


def _replaced(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    new = {}
    for one in fields(config):
        name, old = f"{prefix}{one.name}", getattr(config, one.name)
        if name in values:
            new[one.name] = values[name]
        elif any(key.startswith(f"{name}.") for key in values):
            new[one.name] = _replaced(old, values, f"{name}.")
    return replace(config, **new)


def _nearest(name: str, known: list[str]) -> list[str]:
    """Return the likely meaning: settings with that ending, or deeper in the same table, or with a similar name."""
    first, _, last = name.partition(".")
    same = [one for one in known if one.endswith(f".{name}")]
    below = [one for one in known if one.startswith(f"{first}.") and one.endswith(f".{last}")]
    return same or below or get_close_matches(name, known, 1, 0) or known[:1]


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a file as nested tables; empty for an empty file."""
    if file.suffix not in (".toml", ".yaml", ".yml"):
        raise FileError(f"settings are read from a file whose name ends in .toml, .yaml or .yml, not from {file}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the settings {file} cannot be read: {first_line(error)}; give another file") from None
    try:
        tree = tomllib.loads(text) if file.suffix == ".toml" else parse_yaml(text)
        if not isinstance(tree, dict | NoneType):
            raise ValueError(f"expected a table of names, got a {type(tree).__name__}")
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
    """Reads 1e-5 as a number, as JSON and YAML 1.2 do, and refuses a key that occurs twice, as TOML does.

    An alias is refused: a few lines of them stand for more values than fit in memory.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported, write out the value", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} occurs twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes the texts that the loader would read as numbers, and writes out values that occur twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _why(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return first_line(error)
