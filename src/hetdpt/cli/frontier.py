"""The command frontier: the least damage at every speed, without labels and without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.live import Display
from hetdpt.cli.options import DeviceOptions, ImageOptions, ModelOptions, OutputOptions
from hetdpt.cli.show import print_, print_json, table
from hetdpt.core.errors import HetDPTError, first_line
from hetdpt.core.format import counted, percent, times

if TYPE_CHECKING:
    from torch import nn

    from hetdpt.flow.frontier_accuracy import Validation
    from hetdpt.report.frontier import Words
    from hetdpt.results import FrontierPoint, FrontierResult


class FrontierOptions(ModelOptions, ImageOptions, DeviceOptions, OutputOptions):
    out: Path
    """Run directory; the same command resumes an interrupted run, or shares a running one."""
    speedup: Any = option("FrontierConfig.speedup", least=1)
    moves: Any = option("FrontierConfig.moves")
    accuracy_images: int = option(least=0, default=1000, panel="Data")
    """Validation images to measure the accuracy of each point on, if the data has labels; 0 measures none."""

    def open_validation(self, network: nn.Module, display: Display) -> Validation | None:
        """Return the validation images; None, and a line that says why, if accuracy cannot be measured on them."""
        from hetdpt.data.images import is_unlabelled
        from hetdpt.flow.execution import Execution
        from hetdpt.flow.frontier_accuracy import Validation, open_validation

        if not self.accuracy_images or is_unlabelled(self.data, self.data_root):
            return None
        try:
            data = open_validation(self.data, network, self.accuracy_images, **self.place)
        except HetDPTError as error:
            display.say(f"accuracy is not measured: {first_line(error)}")
            return None
        execution = Execution(workers=self.workers, progress=display.step, note=display.say)
        return Validation(data=data, batch_size=self.batch_size, execution=execution)

    @property
    def words(self) -> Words:
        """How commands name this model and these images."""
        from hetdpt.report.frontier import Words

        model = {"weights": self.weights, "num-classes": self.num_classes, "img-size": self.img_size}
        data = ("--data", self.data, *_words({"data-root": self.data_root}))
        images = self.images if self.images != type(self).images else None
        return Words(
            (str(self.model), *_words(model), *(["--pretrained"] if self.pretrained else [])),
            (*data, *_words({"images": images})),
            (*data, *_words({"calibration-images": images})),
        )


def _words(given: dict[str, Any]) -> list[str]:
    """Return options as words of a command line, without those that are None."""
    return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


def frontier(options: FrontierOptions) -> None:
    """Find the least damage at every speed, by all that can be removed; no labels, no training."""
    from hetdpt.core.modules import find_device
    from hetdpt.flow.frontier import FrontierConfig, frontier_into, is_begun
    from hetdpt.flow.frontier_accuracy import with_accuracy
    from hetdpt.report.frontier import values_of, write_frontier

    config = FrontierConfig(**options.settings("FrontierConfig"))
    source = options.open_source()
    network = options.open_model(options.seed).to(find_device(options.device))
    with options.live() as display:
        batches, judge = options.read(source, network, display.say)
        validation = options.open_validation(network, display)
        if is_begun(options.out):
            display.say(f"resuming {options.out}")

        def watch(point: FrontierPoint, speedup: float) -> None:
            display.say(f"{times(speedup)}, damage {point.damage:.3g}: {', '.join(point.moves)}")

        def watch_accuracy(point: FrontierPoint, speedup: float) -> None:
            display.say(f"{times(speedup)}, accuracy {percent(point.accuracy.top1 if point.accuracy else None)}")

        found = frontier_into(options.out, network, batches, judge, config, watch=watch, progress=display.step)
        files = write_frontier(options.out, found, options.words)
        if validation and found.points:
            found = with_accuracy(options.out, found, network, batches, validation, watch=watch_accuracy)
            write_frontier(options.out, found, options.words)
    if options.as_json:
        return print_json(directory=str(options.out), files=files, **values_of(found))
    _print(found, options, config.speedup)
    click.echo(f"written to {options.out}: {', '.join(files)}")
    options.note_random_weights()


def _print(found: FrontierResult, options: FrontierOptions, wanted: float) -> None:
    from hetdpt.report.frontier import commands

    dense = found.dense_accuracy
    columns = ["speedup", "damage", *(["accuracy"] if dense else []), "attention", "activation", "tail", "width"]
    rows = table("the least damage at every speed", *columns, "tokens")
    for point in found.points:
        plan, accuracy = point.plan, [percent(point.accuracy.top1)] if point.accuracy else []
        kept = f"{counted(plan.narrowed, 'layer')} narrowed" if plan.narrower else "-"
        blocks = (" ".join(map(str, getattr(plan, kind))) or "-" for kind in ("attention", "activation"))
        tokens = f"{plan.tokens.method} {plan.tokens.r}" if plan.tokens else "-"
        speed = times(found.speedup(point))
        rows.add_row(speed, f"{point.damage:.4g}", *accuracy, *blocks, str(plan.tail or "-"), kept, tokens)
    print_(rows)
    click.echo(f"speedups by the times of single layers ({found.measured}); damage on {found.images['judge']} images")
    if dense:
        images = f"{dense.count:,} validation images, dense {percent(dense.top1)}"
        click.echo(f"the accuracy is that of the model that apply saves, on {images}")
    if not found.points:
        return click.echo("note: nothing can be removed from this model")
    if found.speedup(found.points[-1]) < wanted:
        click.echo(f"note: {times(wanted)} was not reached; nothing more can be removed")
    apply, _ = commands(options.out, found, len(found.points) - 1, options.words)
    click.echo(f"to use a point: {apply.text}")
