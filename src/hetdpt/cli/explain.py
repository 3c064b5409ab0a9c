"""The command explain: what each attention layer attends to in an image, and how similar neighbouring layers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hetdpt.cli.command import option
from hetdpt.cli.options import DeviceOptions, ModelOptions, OutputOptions, OverwriteOptions, read_plan, with_removal
from hetdpt.cli.show import print_, print_json, table
from hetdpt.core.errors import PlanError
from hetdpt.report.relevance import answer_words, class_words, verdict

CONFIG = "hetdpt.studies.explain.ExplainConfig"


class ExplainOptions(ModelOptions, DeviceOptions, OverwriteOptions, OutputOptions):
    image: list[Path] = option(is_required=True)
    """An image, or a folder of images; may be repeated."""
    out: Path
    """Figure to write, .png or .svg; the numbers are written beside it, as .json."""
    target: Any = option(f"{CONFIG}.target", flag="--class")
    plan: str | None = None
    """Layers to mark: a JSON file, or a plan such as paper/deit_base-10."""
    removal: Any = option("RunConfig.removal", shows_default=False)
    """What replaces them: calibrated if there is --data, else plain."""
    data: Any = option(f"{CONFIG}.data")
    data_root: Any = option("RunConfig.data_root")
    calibration: Any = option(f"{CONFIG}.calibration", least=1)
    first: Any = option(f"{CONFIG}.first", least=1)
    drawn: Any = option(f"{CONFIG}.drawn", least=1)
    batch_size: Any = option(f"{CONFIG}.batch_size", least=1)


def explain(options: ExplainOptions) -> None:
    """Draw what each attention layer attends to in images, with removed layers framed."""
    from hetdpt.core.modules import find_device
    from hetdpt.studies.explain import ExplainConfig, explain_into, numbers_beside, require_places

    out, plan = options.out, options.plan
    require_places(out, options.overwrite, [*options.image, *([Path(plan)] if plan else [])])
    if plan is None and (options.data or options.removal):
        raise PlanError("--data and --removal say what replaces the layers of a plan; add --plan")
    usual = "calibrated" if options.data else "plain"
    config = ExplainConfig(
        plan=with_removal(read_plan(plan), options.removal, usual) if plan else None,
        root=options.data_root,
        name=options.model,
        overwrite=options.overwrite,
        **options.settings("ExplainConfig"),
    )
    network = options.open_model().to(find_device(options.device))
    with options.live() as display:
        values = explain_into(out, network, options.image, config, display.counter("explaining")).record()
    if options.as_json:
        return print_json(figure=str(out), **values)
    _print(values)
    options.note_random_weights()
    click.echo(f"written to {out} and {numbers_beside(out)}")


def _print(values: dict[str, Any]) -> None:
    images = values["images"]
    print_(_answers(images))
    print_(_likeness(values))
    if values["rows"] == "windows":
        click.echo(
            "the blocks cut windows: maps are means over the rows of each, and there is no map of the whole model"
        )
    for measure, found in values["contrast"].items():
        if found:
            click.echo(verdict(measure, found, len(images)))


def _answers(images: list[dict[str, Any]]) -> Any:
    has_plan = any(one["pruned"] for one in images)
    rows = table("images", "file", "class", "probability", "answer", *(["pruned: probability", "answer"] * has_plan))
    for one in images:
        cells = [class_words(one), f"{one['probability']:.3f}", answer_words(one)]
        if one["pruned"]:
            cells += [f"{one['pruned']['probability']:.3f}", answer_words(one["pruned"])]
        rows.add_row(one["file"], *cells)
    return rows


def _likeness(values: dict[str, Any]) -> Any:
    lines = table(f"likeness of each attention's map to its neighbours', mean over {len(values['images'])} images",
                  "block", "attention", "cosine", "rank correlation", "cosine to next", "rank to next")  # fmt: skip
    after = {pair["blocks"][0]: pair for pair in values["pairs"]}
    for layer in values["layers"]:
        following = after.get(layer["block"], {})
        cells = [layer["cosine"], layer["rank"], following.get("cosine"), following.get("rank")]
        state = "REMOVED" if layer["is_removed"] else "kept"
        lines.add_row(str(layer["block"]), state, *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    return lines
