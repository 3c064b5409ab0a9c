"""Settings by name: a frozen dataclass of settings, some of which have settings of their own. Knows none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hetdpt.core.errors import TrainError

Config = TypeVar("Config")


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return ``config`` with some settings changed, named as in ``training.lr`` or ``drop_path``.

    A name that no setting has, and a value of another type than the setting's, is a ``TrainError``.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        _require(config, name, value)
        part, _, leaf = name.rpartition(".")
        parts.setdefault(part, {})[leaf] = value
    values: Any = config
    own = parts.pop("", {})
    found: Config = replace(
        values, **own, **{part: replace(getattr(values, part), **new) for part, new in parts.items()}
    )
    return found


def _require(config: Any, name: str, value: Any) -> None:
    known: dict[str, Any] = {}
    for leaf, kind in get_type_hints(type(config)).items():
        part = getattr(config, leaf)
        known |= {f"{leaf}.{inner}": of for inner, of in _types(part).items()} if is_dataclass(part) else {leaf: kind}
    if name not in known:
        near = get_close_matches(name, known, 1, 0)
        raise TrainError(f"there is no setting {name}; the nearest is {near[0]}")
    kind = known[name]
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        text = kind.__name__ if isinstance(kind, type) else str(kind)
        raise TrainError(f"{name} is {value!r}, but {text} was expected") from None


def _types(part: Any) -> dict[str, Any]:
    hints = get_type_hints(type(part))
    return {field.name: hints[field.name] for field in fields(part)}
