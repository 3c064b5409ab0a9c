"""The command oneshot: a faster model from a few hundred images, without labels and without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import goal_options, option, tail_length
from hetdpt.cli.options import DeviceOptions, ImageOptions, ModelOptions, OutputOptions, OverwriteOptions, config_of
from hetdpt.cli.show import epoch_line, print_, print_costs, print_json, print_speed, table
from hetdpt.core.errors import TrainError
from hetdpt.core.format import percent, times
from hetdpt.core.plan import Site
from hetdpt.core.styles import CLASS_TOKEN_KEEPS

if TYPE_CHECKING:
    from hetdpt.flow.oneshot import OneShotRecovery, OneShotResult, OneShotStep
    from hetdpt.training.recover import RecoverConfig
    from hetdpt.training.trainer import Epoch


class OneShotOptions(ModelOptions, ImageOptions, DeviceOptions, OverwriteOptions, OutputOptions):
    out: Path
    """Directory to write; the same command resumes an interrupted run."""
    goals: dict[str, Any] = goal_options("layers", "speedup")
    removal: Any = option("OneShotConfig.removal")
    class_token: Any = option("OneShotConfig.class_token")
    kind: Any = option("OneShotConfig.kind")
    tail: Any = option("OneShotConfig.tail", type=tail_length)
    trim: Any = option("OneShotConfig.trim")
    recover: bool = option(default=False, panel="Training")
    """Then train the model on all these images with the dense model as its teacher; no labels."""
    epochs: Any = option("RecoverConfig.training.epochs", least=1, shows_default=False, panel="Training")
    minutes: Any = option("RecoverConfig.training.minutes", panel="Training")
    changes: list[str] = option(flag="--set", default=[], panel="Training")
    """Any other setting of that training, such as training.lr=1e-4; may be repeated."""

    def recovery(self) -> RecoverConfig | None:
        """Return the settings of the training: those of the recipe quick; None without --recover."""
        given = self.settings("RecoverConfig")
        if not self.recover:
            if given or self.changes:
                raise TrainError("--epochs, --minutes and --set are settings of a training; add --recover")
            return None
        return config_of("quick", {"training.seed": self.seed, **given}, self.changes)


def oneshot(options: OneShotOptions) -> None:
    """Remove what does the least damage, with fitted replacements; no labels, no training."""
    from hetdpt.core.modules import find_device
    from hetdpt.export.saved import RECIPE
    from hetdpt.flow.execution import Execution
    from hetdpt.flow.oneshot import OneShotStep, oneshot_into, oneshot_recovered_into, partial_of, recovery_of
    from hetdpt.flow.unlabelled import PREDICTING, labelled_by, note_on
    from hetdpt.selection.goal import OneShotConfig
    from hetdpt.store.atomic import require_new
    from hetdpt.store.run_directory import Run

    recovery = options.recovery()
    config, out = OneShotConfig(**options.goals, **options.settings("OneShotConfig")), options.out
    require_new(out, options.overwrite, RECIPE)
    source = options.open_source()
    network = options.open_model(options.seed).to(find_device(options.device))
    with options.live() as display:
        batches, judge = options.read(source, network, display.say)
        for begun in (partial_of(out), recovery_of(out)):
            if Run(begun).is_begun:
                display.say(f"resuming {begun}")

        def watch(step: OneShotStep | Epoch) -> None:
            if isinstance(step, OneShotStep):
                return display.say(_line(step, "speedup" in options.goals))
            display.say(epoch_line(step, "agreement"))

        words: dict[str, Any] = {"overwrite": options.overwrite, "watch": watch}
        if recovery is None:
            found = oneshot_into(out, network, batches, judge, config, progress=display.step, **words)
        else:
            predicting = display.counter(PREDICTING)
            reading: dict[str, Any] = {"seed": options.seed, "workers": options.workers, "progress": predicting}
            data = labelled_by(network, source, options.data, **reading)
            display.say(note_on(data))
            place = Execution(device=options.device, workers=options.workers, progress=display.step)
            found = oneshot_recovered_into(out, network, batches, judge, data, config, recovery, place, **words)
    if options.as_json:
        return print_json(directory=str(out), **json.loads(found.to_json()))
    _print(found, out)
    options.note_random_weights()


def _line(step: OneShotStep, is_speedup: bool) -> str:
    text = f"{', '.join(step.moves)}, damage {step.damage:.3g}"
    if is_speedup:
        return f"{step.number}: {text}, {step.reached:.3f}x of {step.wanted:g}x by the time of each layer"
    return f"{step.number}/{step.wanted:.0f}: {text}"


def _choices(found: OneShotResult) -> Any:
    """Return the layers that were chosen, or the rounds of the search, as a table."""
    if found.rounds and found.layer_ms is not None:
        rows = table("removed, round by round", "speedup by layers", "damage so far", "removed")
        rows.columns[-1].justify = "left"
        for point in found.rounds:
            rows.add_row(times(found.layer_ms / point.cost), f"{point.damage:.4g}", ", ".join(point.moves))
        return rows
    fits = {(fit.kind, fit.block): fit for fit in found.plan.fits}
    rows = table("removed, in this order", "layer", "path", "style", "R^2", "damage so far")
    for choice in found.choices:
        move, about = choice.move, ("-", "-", "-")
        if isinstance(move, Site):
            fit = fits.get((move.kind, move.block))
            about = move.path, found.plan.style_of(move).name, f"{fit.r2:.3f}" if fit else "-"
        rows.add_row(str(move), *about, f"{choice.damage:.4g}")
    return rows


def _print(found: OneShotResult, out: Path) -> None:
    print_(_choices(found))
    print_costs(found.costs)
    print_speed(found.speed, found.costs)
    measured = found.speed.speedup["pruned"].value
    if found.wanted_speedup is not None and measured < found.wanted_speedup:
        click.echo(f"note: the goal was a speedup of {found.wanted_speedup:g}, but {measured:.3f} was reached")
    for note in found.notes:
        click.echo(note)
    if found.plan.activation and found.plan.class_token == "keep":
        click.echo(CLASS_TOKEN_KEEPS)
    click.echo(f"damage {found.damage:.4g} {found.damage_unit} on {found.images['judge']} images")
    if found.recovery is not None:
        _print_recovery(found.recovery, found.damage_unit)
    click.echo(f"saved to {out} after {found.seconds:.0f} s; load it with hetdpt.load({str(out)!r})")


def _print_recovery(found: OneShotRecovery, unit: str) -> None:
    click.echo(
        f"recovered in {found.epochs} epochs on {found.trained_on} images, {found.seconds:.0f} s: damage "
        f"{found.damage_before:.4g} -> {found.damage_after:.4g} {unit}, agreement with the dense model "
        f"{percent(found.agreement_before)} -> {percent(found.agreement_after)} of {found.images} other images"
    )
    if not found.best_epoch:
        click.echo(f"warning: training did not help on {found.measured_on}; the model from before training is kept")
