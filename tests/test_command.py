"""Commands are made from dataclasses: every option has help; one that is a setting is a setting of its config."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import click
import pytest

import hetdpt
from hetdpt.cli import app
from hetdpt.cli.command import MAIN, Options, option
from hetdpt.cli.declared import declared, split_setting
from hetdpt.store.settings import setting_types

COMMANDS: dict[str, Any] = {
    f"{name} {part}" if part else name: inner
    for name, command in app.commands.items()
    for part, inner in getattr(command, "commands", {"": command}).items()
}
KINDS = {name: command.kind for name, command in COMMANDS.items() if command.kind}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = COMMANDS[name]
    context = click.Context(command, info_name=name)
    for one in command.get_params(context):
        record = one.get_help_record(context)
        assert record, one
        assert record[1].partition("  [")[0].endswith("."), f"{one.opts[0]}: {record[1]}"
        assert "`" not in record[1]
    assert command.help.splitlines()[0].endswith(".")


@pytest.mark.parametrize("name", KINDS)
def test_an_option_that_is_a_setting_is_one_of_its_config(name: str) -> None:
    for one in fields(KINDS[name]):
        for setting in one.metadata.get("settings", ()):
            module, kind, leaf = split_setting(setting)
            config = getattr(__import__(module, fromlist=[kind]), kind)
            assert leaf in setting_types(config), setting
            assert declared(setting).help, setting


def test_help_of_every_command_needs_no_torch() -> None:
    code = f"""
import sys
from hetdpt.cli import app
for words in {[name.split() for name in COMMANDS]}:
    try:
        app([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
assert not {{"torch", "timm", "transformers", "torchvision", "numpy"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


def test_what_most_people_need_comes_first() -> None:
    command = COMMANDS["run"]
    text = command.get_help(click.Context(command, info_name="run"))
    first = text.partition(f"{MAIN}:")[2].partition("\n\n")[0]
    for name in ("MODEL", "--data", "--out", "--layers", "--speedup", "--macs", "--params", "--epochs", "--dry-run"):
        assert f"  {name}" in first or f"[{name}]" in first, name
    assert "--precision" not in first
    assert "\nTraining:\n" in text


class _Group(Options, panel="Group"):
    seed: int = option(default=0)
    """A seed."""


class _Own(_Group):
    epochs: Any = option("RecoverConfig.training.epochs", least=1)
    names: list[str] = option(default=[])
    """Names; may be repeated."""


def test_settings_are_those_that_were_given() -> None:
    assert _Own().settings("RecoverConfig") == {}
    assert _Own(epochs=3, seed=5).settings("RecoverConfig") == {"training.epochs": 3}
    assert _Own(epochs=3).settings("RunConfig") == {}
    with pytest.raises(AttributeError, match="cannot assign"):
        _Own().seed = 1  # type: ignore[misc]


def test_help_says_what_the_field_of_the_config_says() -> None:
    assert hetdpt.TrainConfig.__doc__
    context = click.Context(COMMANDS["train"])
    (epochs,) = [one for one in COMMANDS["train"].get_params(context) if one.name == "epochs"]
    assert epochs.help == declared("TrainConfig.epochs").help != ""
