"""The command collect: samples of how accuracy depends on the layers removed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import DataOptions, ModelOptions, OutputOptions, TrainingOptions, WorkOptions
from hetdpt.cli.show import by_others, print_, print_json, table
from hetdpt.core.format import percent, split_text

if TYPE_CHECKING:
    from hetdpt.flow.collection.work import SampleDone


class CollectOptions(ModelOptions, DataOptions, TrainingOptions, WorkOptions, OutputOptions):
    out: Path
    """Run directory; processes that share it share the work, and an interrupted one is resumed."""
    chain: str | None = None
    """Collect only one chain: attention, activation or interleaved."""
    rounds: Any = option("CollectConfig.rounds")
    removal: Any = option("CollectConfig.removal", shows_default=False)
    images: Any = option("CollectConfig.images", least=2)
    recipe: str = option(panel="Training", default="brief")
    """Recipe that sets the defaults; hetdpt recipes lists them."""
    epochs: Any = option("RecoverConfig.training.epochs", least=0, shows_default=False, panel="Training")
    """Epochs of the fine-tuning after each removal, 0 for none."""
    batch: Any = option("RunConfig.batch", least=1, panel="Device")


def collect(options: CollectOptions) -> None:
    """Sample accuracy: remove a layer, fine-tune briefly, evaluate, repeat; hetdpt predict uses the samples."""
    from hetdpt.flow.collection.collect import collect_into
    from hetdpt.selection.predictor.polynomial import FEWEST
    from hetdpt.selection.predictor.samples import CollectConfig

    # Without fine-tuning the epochs are those of the recipe, for a longer run if there is one.
    fine_tuning = options.recovery() if options.epochs != 0 else replace(options, epochs=None).recovery()
    given = {"removal": options.usual_removal, **options.settings("CollectConfig")}
    config = CollectConfig(recovery=fine_tuning, fine_tunes=options.epochs != 0, **given)
    data, network = options.open_data(), options.open_model(fine_tuning.training.seed)
    found: list[SampleDone] = []
    with options.live() as display:
        place = options.execution(display, batch=options.batch)
        for done in collect_into(options.out, network, data, config, place, chain=options.chain):  # type: ignore[arg-type]
            found.append(done)
            display.say(_line(done))
    if options.as_json:
        return print_json(directory=str(options.out), samples=[_record(done) for done in found])
    _print(found)
    options.note_random_weights()
    hint = f"; hetdpt predict {options.out} --layers 4 splits a budget" if len(found) >= FEWEST else ""
    click.echo(f"written to {options.out}{hint}")


def _line(done: SampleDone) -> str:
    step = done.result
    if not step.kinds:
        return f"dense: accuracy {percent(step.accuracy)}"
    removed = ", ".join(f"{pick.site} (TE {pick.te:.3g})" for pick in step.picks)
    worse = ", worse after the fine-tuning, so kept from before it" if step.is_start else ""
    change = f"{step.before:.2f} -> {percent(step.accuracy)}{worse}{by_others(done.is_own)}"
    return f"{done.subject.chain} {split_text(step.budget)}: without {removed} {change}"


def _record(done: SampleDone) -> dict[str, Any]:
    return {"key": done.subject.key, "chain": done.subject.chain, "is_own": done.is_own, **asdict(done.result)}


def _print(found: list[SampleDone]) -> None:
    rows = table("samples", "attention removed", "activation removed", "before", "accuracy", "layer", "seconds")
    for done in found:
        step = done.result
        layers = " ".join(str(pick.site) for pick in step.picks)
        counts = str(step.budget.attention), str(step.budget.activation)
        rows.add_row(*counts, f"{step.before:.2f}", f"{step.accuracy:.2f}", layers, f"{step.seconds:.0f}")
    print_(rows)
