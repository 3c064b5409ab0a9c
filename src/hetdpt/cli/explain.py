"""The command explain: what each attention layer saw of an image, and how alike neighbouring layers are in that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hetdpt.cli.options import (
    Classes,
    DataRoot,
    Device,
    ImgSize,
    Json,
    Model,
    Overwrite,
    Pretrained,
    Quiet,
    Weights,
    read_plan,
    with_removal,
)
from hetdpt.cli.show import note_random_weights, print_, print_json, progress, table
from hetdpt.core.errors import PlanError
from hetdpt.report.relevance import answer_words, class_words, verdict


def explain(
    model: Model,
    image: Annotated[list[Path], typer.Option(help="An image, or a folder of images; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Figure to write, .png or .svg; the numbers go beside it, as .json.")],
    target: Annotated[
        str | None, typer.Option("--class", help="Number or name of the class; the most probable one by default.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Layers to mark: a JSON file, or a plan such as paper/deit_base-10.")
    ] = None,
    removal: Annotated[
        str | None, typer.Option(help="What takes their place: calibrated where there is --data, else plain.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Images, without labels, to fit calibrated removal on.")] = None,
    data_root: DataRoot = None,
    calibration: Annotated[int, typer.Option(min=1, help="How many of them to use.")] = 256,
    first: Annotated[int, typer.Option(min=1, help="Images to take of a folder, by name.")] = 8,
    drawn: Annotated[int, typer.Option(min=1, help="Images to draw, the first ones; numbers are of all.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 8,
    weights: Weights = None,
    pretrained: Pretrained = False,
    num_classes: Classes = None,
    img_size: ImgSize = None,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw what each attention layer saw of images, removed layers framed; say how alike neighbouring layers are."""
    from hetdpt.core.modules import find_device
    from hetdpt.core.randomness import seeded
    from hetdpt.export.saved import open_model
    from hetdpt.studies.explain import ExplainConfig, explain_into, numbers_beside, require_places

    require_places(out, overwrite, [*image, *([Path(plan)] if plan else [])])
    if plan is None and (data or removal):
        raise PlanError("--data and --removal say what takes the place of layers, but none goes; add --plan")
    config = ExplainConfig(
        target=target,
        plan=with_removal(read_plan(plan), removal, "calibrated" if data else "plain") if plan else None,
        data=data,
        root=data_root,
        calibration=calibration,
        first=first,
        drawn=drawn,
        batch_size=batch_size,
        name=model,
        overwrite=overwrite,
    )
    with seeded(0):  # random weights too are the same each time
        network = open_model(model, weights=weights, pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    with progress("explaining", quiet or as_json) as move:
        values = explain_into(out, network.to(find_device(device)), image, config, move).record()
    if as_json:
        return print_json(figure=str(out), **values)
    _print(values)
    note_random_weights(model, weights, pretrained)
    typer.echo(f"written to {out} and {numbers_beside(out)}")


def _print(values: dict[str, Any]) -> None:
    images = values["images"]
    print_(_answers(images))
    print_(_likeness(values))
    if values["rows"] == "windows":
        typer.echo("the blocks cut windows: maps are means over the rows of each, and there is none of the whole model")
    for measure, found in values["contrast"].items():
        if found:
            typer.echo(verdict(measure, found, len(images)))


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
