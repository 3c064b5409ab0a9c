"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetdpt.errors import PlanError
from hetdpt.plan import Plan
from hetdpt.published import PREFIX, published_plan

Model = Annotated[
    str, typer.Argument(help="A timm name, hf:NAME (hub name, directory or model type), or a saved directory.")
]
PlanName = Annotated[
    str, typer.Option("--plan", help="A JSON file, or a plan of the paper such as paper/deit_base-10.")
]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint (.safetensors or .pth) that fits the model exactly.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the library's own weights.")]
Classes = Annotated[int | None, typer.Option("--num-classes", min=1, help="Number of classes of the head.")]
ImgSize = Annotated[int | None, typer.Option("--img-size", min=1, help="Side of the images in pixels.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images per batch: 256 on a GPU, 8 on a CPU by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps: the fastest there is by default.")]
Runs = Annotated[int, typer.Option(min=1, help="Rounds in which each model runs once.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def read_plan(name: str) -> Plan:
    if name.startswith(PREFIX):
        return published_plan(name)
    try:
        plan = Plan.from_json(Path(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the plan {name} cannot be read: {error}; give a JSON file or a name such as paper/deit_base-10"
        ) from None
    if not len(plan):
        raise PlanError(f"the plan {name} removes nothing; list block numbers under 'attention' or 'activation'")
    return plan
