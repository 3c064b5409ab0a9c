"""The command observe: the two observations of the paper on any model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import DataOptions, ModelOptions, OutputOptions, TrainingOptions, WorkOptions
from hetdpt.cli.show import by_others, print_, print_json, table
from hetdpt.core.errors import PlanError
from hetdpt.core.format import percent
from hetdpt.core.plan import KINDS, Kind

if TYPE_CHECKING:
    from hetdpt.core.plan import Removal
    from hetdpt.results import Observations
    from hetdpt.studies.observe import Observed


class ObserveOptions(ModelOptions, DataOptions, TrainingOptions, WorkOptions, OutputOptions):
    out: Path
    """Run directory; processes that share it share the work, and an interrupted one is resumed."""
    blocks: Any = option("ObserveConfig.blocks")
    removal: list[Any] = option("ObserveConfig.removals", default=[])
    no_recovery: bool = False
    """Observe gradients only, and remove no layer."""
    gradient_epochs: Any = option("ObserveConfig.gradient_epochs", least=1)
    images: Any = option("ObserveConfig.images", least=2)
    recipe: str = option(panel="Training", default="brief")
    """Recipe that sets the defaults; hetdpt recipes lists them."""


def observe(options: ObserveOptions) -> None:
    """Observe how attention and activation differ: in gradients, and in accuracy without each layer."""
    from hetdpt.studies.observe import ObserveConfig, observe_into, read_results

    if options.no_recovery and options.blocks is not None:
        raise PlanError("--no-recovery removes no layer, so that --blocks has no use; leave one of them out")
    given = options.settings("ObserveConfig") | ({"blocks": ()} if options.no_recovery else {})
    config = ObserveConfig(recovery=options.recovery(), **given)
    data, network = options.open_data(), options.open_model(config.recovery.training.seed)
    with options.live() as display:
        for one in observe_into(options.out, network, data, config, options.execution(display)):
            display.say(_line(one))
    found = read_results(options.out)
    if options.as_json:
        return print_json(directory=str(options.out), **found.to_dict())
    for each in found.removals:
        _print(found, each)
    options.note_random_weights()
    click.echo(f"written to {options.out}: results.json, results.csv, results.png")


def _line(one: Observed) -> str:
    from hetdpt.core.format import removal_text
    from hetdpt.results import Asymmetry, Disparity

    result, by = one.result, by_others(one.is_own)
    if isinstance(result, Disparity):
        medians = ", ".join(f"{kind} {_short(result.magnitude(kind))}" for kind in KINDS)
        return f"{removal_text(result.removal)}, gradients: {medians}{by}"
    if isinstance(result, Asymmetry):
        accuracies = " -> ".join(f"{accuracy:.2f}" for accuracy in result.accuracies)
        return f"{removal_text(result.removal)}, without {result.site}: {accuracies} %{by}"
    return f"dense: accuracy {percent(result.accuracy)}{by}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _print(found: Observations, removal: Removal) -> None:
    from hetdpt.core.format import removal_text

    after = f"{found.epochs} epoch{'s' * (found.epochs > 1)}"
    columns = ["|gradient|", "removed", f"after {after}"] if found.asymmetries else ["|gradient|"]
    title = f"{removal_text(removal)}: gradients, and accuracy in % without the layer"
    rows = table(title, "block", *(f"{kind}\n{column}" for kind in KINDS for column in columns))
    cells = {kind: _cells(found, removal, kind) for kind in KINDS}
    for block in sorted({block for of in cells.values() for block in of}):
        lines = [cells[kind].get(block, ["-"] * len(columns)) for kind in KINDS]
        rows.add_row(str(block), *(cell for line in lines for cell in line[: len(columns)]))
    print_(rows)
    for sentence in (_gradients(found, removal), _drops(found, removal, after)):
        if sentence:
            click.echo(f"{removal_text(removal)}: {sentence}")


def _cells(found: Observations, removal: Removal, kind: Kind) -> dict[int, list[str]]:
    """Return, by block, the gradient, the accuracy right after the removal and the last one."""
    cells: dict[int, list[str]] = {}
    disparity = found.disparity(removal)
    for layer in disparity.layers if disparity else ():
        if layer.site.kind == kind:
            cells[layer.site.block] = [_short(layer.magnitude), "-", "-"]
    for row in found.of(removal, kind):
        ends = [f"{row.accuracies[0]:.2f}", f"{row.accuracies[-1]:.2f}"]
        cells[row.site.block] = [*cells.get(row.site.block, ["-"])[:1], *ends]
    return cells


def _gradients(found: Observations, removal: Removal) -> str | None:
    one = found.disparity(removal)
    if one is None or one.ratio() is None:
        return None
    medians = " and ".join(_short(one.magnitude(kind)) for kind in reversed(KINDS))
    each = [_short(one.ratio(epoch)) for epoch in range(one.epochs)]
    by_epoch = f", by epoch {', '.join(each)}" if len(each) > 1 else ""
    return (
        f"gradients of activations are {_short(one.ratio())} times those of attention{by_epoch} ({medians}, medians "
        f"over blocks of the mean |gradient| of {one.epochs * one.updates} updates of {one.batch} images)"
    )


def _drops(found: Observations, removal: Removal, after: str) -> str | None:
    drops = {kind: found.drops(removal, kind) for kind in KINDS}
    first, last = (
        " and ".join(f"{each[end]:.2f} without {kind}" for kind, each in drops.items() if each) for end in (0, -1)
    )
    if not first:
        return None
    return f"points lost of {percent(found.dense)}, medians over blocks: {first}; after {after} {last}"
