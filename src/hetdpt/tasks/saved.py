"""``save_task`` and ``load_task``: a detector or segmenter as a directory, its backbone a saved model in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from hetdpt.adapters.checkpoints import check_fit
from hetdpt.adapters.guard import few_modules
from hetdpt.core.errors import FileError, first_line
from hetdpt.export.saved import load, read_tensors, require_sealed, save, write_tensors
from hetdpt.store.atomic import new_directory, read_sealed_json, sha256, write_sealed_json
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.model import TaskModel
from hetdpt.tasks.table import TASKS

TASK, HEAD, BACKBONE = "task.json", "head.safetensors", "backbone"
FORMAT = 1
_OF_BACKBONE = "backbone.model."


def save_task(
    model: TaskModel, directory: str | Path, *, overwrite: bool = False, notes: Mapping[str, str] | None = None
) -> Path:
    """Write ``model``, which is on the CPU, to ``directory`` and return its path; it appears only when complete.

    ``notes`` are additional text files by name; ``load_task`` does not read them.
    """
    target = Path(directory)
    with new_directory(target, TASK, overwrite) as scratch:
        save(model.backbone.model, scratch / BACKBONE)
        write_tensors(_own(model), scratch / HEAD, target)
        values = {
            "format": FORMAT,
            "task": model.task,
            "classes": list(model.classes),
            "pyramid": model.backbone.channels[0],
            "config": asdict(model.config),
            "weights": {"file": HEAD, "sha256": sha256(scratch / HEAD)},
        }
        write_sealed_json(scratch / TASK, values)
        for name, text in (notes or {}).items():
            (scratch / name).write_text(text, encoding="utf-8")
    return target


def load_task(directory: str | Path) -> TaskModel:
    """Return the detector or segmenter saved in ``directory``, in eval mode on the CPU; damaged files are refused."""
    source = Path(directory)
    values = read_sealed_json(source / TASK)
    if values.get("format") != FORMAT or values.get("task") not in [*TASKS]:
        raise FileError(f"{source / TASK} was written by a version that this one does not read; save the model again")
    weights = source / HEAD
    require_sealed(weights, values)
    state, row = read_tensors(weights), TASKS[values["task"]]
    config, inner = _config(row.config, values, source), load(source / BACKBONE)
    try:
        with few_modules():
            model = row.model(Backbone(inner, width=values["pyramid"]), values["classes"], config)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise FileError(f"no {values['task']} can be built from {source / TASK}: {first_line(error)}") from None
    check_fit(_own(model), state, str(weights))
    model.load_state_dict(state, strict=False)
    return model.eval()


def _own(model: TaskModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_OF_BACKBONE)}


def _config(kind: type[Any], values: dict[str, Any], source: Path) -> Any:
    try:
        return TypeAdapter(kind).validate_python(values.get("config"))
    except ValidationError as error:
        raise FileError(f"{source / TASK} has settings that this version does not know: {first_line(error)}") from None
