"""A command is made from its options, a dataclass: a field is an option, the line under it is its help.

An option that is a setting of a config, such as ``option("RecoverConfig.training.epochs")``, has the type and the help
of that field.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import get_annotations
from math import isnan, nan
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform, get_type_hints

import click

from hetdpt.cli.declared import declared, declared_fields, split_setting
from hetdpt.core.goals import GOALS, Goal
from hetdpt.core.plan import Plan
from hetdpt.core.styles import PRESETS

WIDTH = 100  # columns of a help page at most
MAIN = "Options"  # the title of the options that a command does not share
NOTHING_SPECIAL: dict[str, Any] = {
    "flag": "", "least": None, "type": None, "is_argument": False, "shows_default": True, "panel": "", "help": "",
    "settings": (),
}  # fmt: skip
REMOVAL = f"What replaces removed layers: {', '.join(PRESETS)}, or a pair of styles such as linear,calibrated."
HIDDEN = (None, False, True, (), 0)
"""Defaults that help does not show."""


def option(*settings: str, default: Any = None, is_required: bool = False, **about: Any) -> Any:
    """Return the field of an option that needs more than a type, a default and a line of help.

    ``settings`` are what it stands for, such as ``RecoverConfig.training.epochs``; the first one has its type and help.
    ``about`` may have the ``flag`` if it is not named as the field, the ``least`` number, the ``type`` that reads it,
    the ``panel`` and the ``help`` in place of its own, and whether it ``is_argument`` and ``shows_default``.
    """
    assert about.keys() <= NOTHING_SPECIAL.keys()
    about["settings"] = settings
    if is_required:
        return field(metadata=about)
    return field(default_factory=list, metadata=about) if default == [] else field(default=default, metadata=about)


def goal_options(*names: str) -> Any:
    """Return the field of some of ``GOALS``, of all by default: a mapping with those that were given."""
    return field(default_factory=dict, metadata={"goals": names or tuple(GOALS)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, goal_options))
class Options:
    """The options of a command as they were given: subclasses are frozen dataclasses.

    Groups of options are classes that commands inherit from; ``--help`` shows each group under its ``panel``.
    """

    panel: ClassVar[str] = MAIN

    def __init_subclass__(cls, panel: str = MAIN) -> None:
        cls.panel = panel
        dataclass(frozen=True, kw_only=True)(cls)

    def settings(self, config: str) -> dict[str, Any]:
        """Return the settings of the class called ``config`` that were given as options, such as ``training.lr``."""
        found = {}
        for one in _fields_of(type(self)):
            value = getattr(self, one.name)
            for setting in one.metadata.get("settings", ()) if value not in (None, []) else ():
                _, kind, name = split_setting(setting)
                if kind == config:
                    found[name] = tuple(value) if isinstance(value, list) else None if value is AUTO else value
        return found


def _type(annotation: str, least: float | None) -> Any:
    """Return the parser of a type that is written as ``annotation``: a type of click, or a function."""
    kind = annotation.removesuffix(" | None")
    if kind.startswith("tuple["):
        parts = kind.removeprefix("tuple[").removesuffix("]").split(", ")
        return _type(parts[0], least) if parts[0] == "Removal" else _several(_type(parts[0], least), parts)
    if kind.startswith("Literal["):
        return click.Choice(ast.literal_eval(kind.removeprefix("Literal")))
    if kind in ("int", "float"):
        return _number(int if kind == "int" else float, least)
    return {"Path": click.Path(path_type=Path), "Removal": style}.get(kind, click.STRING)


def _number(kind: type, least: float | None) -> Any:
    """Return the parser of numbers of at least ``least``; nan is refused."""

    def number(text: str) -> Any:
        try:
            found = kind(text)
        except ValueError:
            found = nan
        if isnan(found):
            raise click.BadParameter(f"expected a {'whole ' if kind is int else ''}number, got {text!r}")
        if least is not None and found < least:
            raise click.BadParameter(f"expected at least {least}, got {text}")
        return found

    number.__name__ = "integer" if kind is int else "number"  # what help shows
    return number


def _several(read: Any, parts: list[str]) -> Any:
    """Return the parser of comma-separated values, as many as ``parts`` unless they end in dots."""

    def values(text: str) -> Any:
        given = [part.strip() for part in str(text).split(",") if part.strip()]
        if "..." not in parts and len(given) != len(parts):
            raise click.BadParameter(f"expected {len(parts)} values with commas between, got {text!r}")
        return tuple(read(part) for part in given)

    return values


def style(text: str) -> Any:
    """Return the removal that is written as ``text``: a name, or one style for each kind of layer."""
    styles = [part.strip() for part in text.split(",")]
    return Plan(removal=(styles[0], styles[1]) if len(styles) == 2 else text).removal


AUTO = object()
"""The value of an option that sets None, which as a value says that the option was not given."""


def tail_length(text: str) -> Any:
    """Return the length of a tail; ``AUTO`` for auto."""
    return AUTO if text == "auto" else _number(int, 0)(text)


def _goal(goal: Goal) -> Any:
    def amount(text: str) -> Any:
        found = goal.parse(text, f"--{goal.name}")
        return str(found) if found.is_share else found.value

    return amount


class PanelOption(click.Option):
    """An option that knows under which title it is shown."""

    def __init__(self, names: list[str], panel: str = MAIN, **words: Any) -> None:
        super().__init__(names, **words)
        self.panel = panel

    def get_help_extra(self, ctx: click.Context) -> Any:
        return {"required": "required"} if self.required else {}


class DescribedArgument(click.Argument):
    """An argument with help, shown with the options."""

    def __init__(self, names: list[str], text: str, **words: Any) -> None:
        super().__init__(names, **words)
        self.text, self.panel = text, MAIN

    def make_metavar(self, ctx: click.Context) -> str:
        name = super().make_metavar(ctx)
        return name if self.required else f"[{name}]"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.text + ("  [required]" if self.required else "")


def _fields_of(kind: type[Options]) -> tuple[Field[Any], ...]:
    return fields(kind)  # type: ignore[arg-type]  # what Options makes of its subclasses


def _parameters(kind: type[Options]) -> list[click.Parameter]:
    """Return the parameters of a command: arguments, what is required, its own options, then those of its groups."""
    owners = {name: part for part in reversed(kind.__mro__) for name in get_annotations(part)}
    found: list[click.Parameter] = []
    for one in sorted(_fields_of(kind), key=lambda one: owners[one.name] is not kind):
        found += _goal_parameters(one) if "goals" in one.metadata else [_parameter(one, owners[one.name])]
    return sorted(found, key=lambda one: (one.param_type_name != "argument", not one.required))


def _goal_parameters(one: Field[Any]) -> list[click.Parameter]:
    return [
        PanelOption([f"--{name}", f"{one.name}_{name}"], type=_goal(goal), metavar=goal.metavar, help=goal.help)
        for name, goal in GOALS.items()
        if name in one.metadata["goals"]
    ]


def _parameter(one: Field[Any], part: Any) -> click.Parameter:
    about: Mapping[str, Any] = {**NOTHING_SPECIAL, **one.metadata}
    own = declared_fields(part.__module__, part.__name__)[one.name]
    source = declared(about["settings"][0]) if about["settings"] else own
    is_many = source.annotation.startswith(("list[", "tuple[Removal"))
    annotation = re.sub(r"^list\[(.*)\]$", r"\1", source.annotation)
    words: dict[str, Any] = {"type": about["type"] or _type(annotation, about["least"])}
    words["required"] = one.default is MISSING and one.default_factory is MISSING
    if one.default is not MISSING:
        words["default"] = one.default
    shown = own.default if source is own else source.default if about["shows_default"] else None
    shown = one.default if shown is None and one.default is not MISSING else shown
    text = about["help"] or own.help or (REMOVAL if "Removal" in annotation else source.help)
    if shown not in HIDDEN:
        text += f"  [default: {','.join(shown) if isinstance(shown, tuple) else shown}]"
    panel = about["panel"] or part.panel
    if about["is_argument"]:
        metavar = about["flag"] or one.name.upper()
        return DescribedArgument([one.name], text, nargs=-1 if is_many else 1, metavar=metavar, **words)
    name = about["flag"] or f"--{one.name.replace('_', '-')}"
    if source.annotation == "bool":
        words |= {"type": None, "is_flag": True}
        name += f"/--no-{name.removeprefix('--')}" if source.default is True else ""
    return PanelOption([name, one.name], panel, multiple=is_many, help=text, **words)


class OptionsCommand(click.Command):
    """A command whose parameters are made when they are needed, and are shown in panels."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        whole: Any = getattr(function, "func", function)  # of a partial
        self.kind: type[Options] | None = get_type_hints(whole).get("options")
        super().__init__(name, help=whole.__doc__, callback=self._call, context_settings={"max_content_width": WIDTH})
        self.function = function

    def _call(self, **values: Any) -> None:
        if self.kind is None:
            return self.function()
        for one in _fields_of(self.kind):
            if names := one.metadata.get("goals"):
                given = {name: values.pop(f"{one.name}_{name}") for name in names}
                values[one.name] = {name: value for name, value in given.items() if value is not None}
            elif one.default_factory is list:
                values[one.name] = list(values[one.name])
        return self.function(self.kind(**values))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params and self.kind is not None:
            self.params = _parameters(self.kind)
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {MAIN: []}
        for part in (self.kind or Options).__mro__:
            panels.setdefault(getattr(part, "panel", MAIN), [])
        for one in self.get_params(ctx):
            if record := one.get_help_record(ctx):
                panels.setdefault(getattr(one, "panel", [*panels][-1]), []).append(record)  # --help joins the last
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


Titles = Mapping[str, Mapping[str, Callable[..., None] | click.Command]]


class Commands(click.Group):
    """Commands under titles; each is a function of its options."""

    def __init__(self, name: str, help: str, functions: Titles) -> None:
        self.titles = functions
        commands = {
            name: function if isinstance(function, click.Command) else OptionsCommand(name, function)
            for part in functions.values()
            for name, function in part.items()
        }
        super().__init__(name, help=help, commands=commands, no_args_is_help=True)
        self.context_settings = {"max_content_width": WIDTH}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, part in self.titles.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, (self.commands[name].help or "").strip().partition("\n")[0]) for name in part]
                )
