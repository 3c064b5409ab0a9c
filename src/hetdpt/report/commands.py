"""The commands that repeat a run, and those that use its model. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from hetdpt.core.goals import GOALS
from hetdpt.core.plan import Budget
from hetdpt.report.run import RunRecord
from hetdpt.store.stage_directory import CONFIG

SHORT = ("weights", "num_classes", "img_size", "data_root", *GOALS, "method", "samples", "tokens")
LISTS = ("depths", "compare")
YES = ("pretrained", "download", "plus")


@dataclass(frozen=True)
class Command:
    about: str
    text: str


def commands(record: RunRecord) -> list[Command]:
    """Return commands that repeat the run, and that load its model."""
    config = record.directory / CONFIG
    found = [
        Command("The same run, with every setting, from the command line", f"hetdpt run --config {quote(str(config))}"),
        Command("The same in Python", f"import hetdpt\n\nhetdpt.run(hetdpt.RunConfig.resolve(file={str(config)!r}))"),
        Command(f"In short; all other settings are those of the recipe, or of {CONFIG}", join(_words(record))),
    ]
    if (saved := record.results.save) is not None:
        model = record.directory / saved.model
        found.append(Command("The faster model in Python", f"import hetdpt\n\nmodel = hetdpt.load({str(model)!r})"))
    return found


def further(budget: Budget, directory: Path) -> str:
    """Return the command that tries ``budget`` beside the run in ``directory``.

    >>> further(Budget(3, 5), Path("runs/a"))
    "hetdpt run --config runs/a/config.yaml --set 'budget=[3, 5]' --out runs/a-next"
    """
    split = f"budget=[{budget.attention}, {budget.activation}]"
    config, out = str(directory / CONFIG), f"{directory}-next"
    return join(["hetdpt", "run", "--config", config, "--set", split, "--out", out])


def _words(record: RunRecord) -> list[str]:
    config = record.config
    words = ["hetdpt", "run", record.model, "--data", record.data]
    for name in SHORT:
        if config.get(name) is not None:
            words += [
                f"--{name.replace('_', '-')}",
                GOALS[name].format(config[name]) if name in GOALS else str(config[name]),
            ]
    words += [f"--{name}" for name in YES if config.get(name)]
    for name in LISTS:
        if config.get(name):
            words += [f"--{name}", ",".join(map(str, config[name]))]
    return [*words, "--out", str(record.directory)]
