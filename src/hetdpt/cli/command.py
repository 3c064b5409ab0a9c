"""A command is made from its options, a dataclass: a field is an option, the line under it is its help.

An option that is a setting of a config, such as ``option("RecoverConfig.training.epochs")``, has the type and the help
of that field. Configs are read as source and not imported: they need torch, and ``--help`` must not wait for it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from inspect import get_annotations
from math import isnan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, dataclass_transform, get_type_hints

import click

import hetdpt
from hetdpt.core.goals import GOALS, Goal
from hetdpt.core.plan import Plan

WIDTH = 100  # columns of a help page at most
MAIN = "Options"  # the title of the options that a command does not share


NOTHING_SPECIAL: dict[str, Any] = {
    "flag": "", "least": None, "type": None, "is_argument": False, "shows_default": True, "panel": "", "help": "",
    "settings": (),
}  # fmt: skip
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
                _, kind, name = _split(setting)
                if kind == config:
                    found[name] = tuple(value) if isinstance(value, list) else value
        return found


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
    module, kind, name = _split(setting)
    *tables, leaf = name.split(".")
    for table in tables:
        module, kind = _home(module, _fields(module, kind)[table].annotation)
    return _fields(module, kind)[leaf]


def _split(setting: str) -> tuple[str, str, str]:
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
def _fields(module: str, kind: str) -> dict[str, Declared]:
    """Return the fields of a dataclass by name, those of its bases too."""
    body = next(node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == kind)
    found: dict[str, Declared] = {}
    for base in body.bases:
        if isinstance(base, ast.Name):
            found |= _fields(*_home(module, base.id))
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


class AtLeast(click.ParamType[Any]):
    """A number of a click type, ``least`` or more."""

    def __init__(self, kind: click.ParamType[Any], least: float | None) -> None:
        self.kind, self.least, self.name = kind, least, kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = self.kind.convert(value, param, ctx)
        if isnan(found):
            self.fail(f"{value!r} is not a number", param, ctx)
        if self.least is not None and found < self.least:
            self.fail(f"{value} is less than {self.least}", param, ctx)
        return found


class Several(click.ParamType[Any]):
    """Values with commas between, such as 8,8,3."""

    name = "a,b,..."

    def __init__(self, kind: click.ParamType[Any], count: int | None) -> None:
        self.kind, self.count = kind, count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parts = [part.strip() for part in value.split(",")]
        if self.count not in (None, len(parts)):
            self.fail(f"{value!r} is not {self.count} values with commas between", param, ctx)
        return tuple(self.kind.convert(part, param, ctx) for part in parts if part)


class RemovalStyle(click.ParamType[Any]):
    """What removed layers leave behind: a name, or one style for each kind of layer with a comma between."""

    name = "style"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        styles = [style.strip() for style in value.split(",")]
        return Plan(removal=(styles[0], styles[1]) if len(styles) == 2 else value).removal


class GoalAmount(click.ParamType[Any]):
    """What a goal of the table can be written as: a number, with a unit or a percentage for costs."""

    def __init__(self, goal: Goal) -> None:
        self.goal, self.name = goal, goal.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        amount = self.goal.parse(value, f"--{self.goal.name}")
        return str(amount) if amount.is_share else amount.value


def _type(annotation: str, least: float | None) -> click.ParamType[Any]:
    """Return what reads values of a type that is written as ``annotation``."""
    kind = annotation.removesuffix(" | None")
    if kind.startswith("tuple["):
        parts = kind.removeprefix("tuple[").removesuffix("]").split(", ")
        count = None if "..." in parts else len(parts)
        return _type(parts[0], least) if parts[0] == "Removal" else Several(_type(parts[0], least), count)
    if kind.startswith("Literal["):
        return click.Choice(ast.literal_eval(f"[{kind.removeprefix('Literal[')}"))
    known: dict[str, Callable[[], click.ParamType[Any]]] = {
        "int": lambda: AtLeast(click.INT, least),
        "float": lambda: AtLeast(click.FLOAT, least),
        "Path": lambda: click.Path(path_type=Path),
        "Removal": RemovalStyle,
    }
    return known.get(kind, lambda: click.STRING)()


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
        PanelOption([f"--{name}", f"{one.name}_{name}"], type=GoalAmount(GOALS[name]), help=GOALS[name].help)
        for name in one.metadata["goals"]
    ]


def _parameter(one: Field[Any], part: Any) -> click.Parameter:
    """Return the parameter of a field that is declared in the class ``part``."""
    about: Mapping[str, Any] = {**NOTHING_SPECIAL, **one.metadata}
    own = _fields(part.__module__, part.__name__)[one.name]
    source = declared(about["settings"][0]) if about["settings"] else own
    is_many = source.annotation.startswith(("list[", "tuple[Removal"))
    annotation = re.sub(r"^list\[(.*)\]$", r"\1", source.annotation)
    words: dict[str, Any] = {"type": about["type"] or _type(annotation, about["least"])}
    words["required"] = one.default is MISSING and one.default_factory is MISSING
    if one.default is not MISSING:
        words["default"] = one.default
    shown = own.default if source is own else source.default if about["shows_default"] else None
    shown = one.default if shown is None and one.default is not MISSING else shown
    text = (about["help"] or own.help or source.help) + ("" if shown in HIDDEN else f"  [default: {shown}]")
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

    def __init__(
        self, name: str, help: str, functions: Mapping[str, Mapping[str, Callable[..., None] | click.Command]]
    ) -> None:
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
                formatter.write_dl([(name, _first_line(self.commands[name].help)) for name in part])


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
