"""``resize_``: a model, pruned or not, made to take images of another size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hetdpt.adapters.anatomy import Survey
from hetdpt.adapters.models import input_size_of, set_size_
from hetdpt.adapters.preprocessing import PREPROCESSING
from hetdpt.adapters.trace import dry_run, trace
from hetdpt.core.errors import ModelError, first_line
from hetdpt.core.modules import clone
from hetdpt.core.styles import STYLES
from hetdpt.surgery.arrange import arrange_, with_all_tokens
from hetdpt.surgery.record import RECORD, InputSize, Record, record_of, refuse_gated, with_layout


def resize_(model: nn.Module, size: int | tuple[int, int]) -> nn.Module:
    """Make ``model``, pruned or not, take images of ``size``, a side or (height, width), for good.

    ``ModelError`` says why it cannot, and nothing has changed. The record of a pruned model is updated to the new size.

    >>> import hetdpt, timm
    >>> model = hetdpt.prune_(timm.create_model("vit_tiny_patch16_224", depth=2), hetdpt.Plan(attention=(0,)))
    >>> resize_(model, (96, 160))(torch.zeros(1, 3, 96, 160)).shape
    torch.Size([1, 1000])
    """
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ModelError(f"an image size is a side in pixels or a pair (height, width), not {size!r}")
    height, width = sides
    channels, *before = input_size_of(model)
    if before == [height, width]:
        return model
    record = record_of(model)
    _require_any_size(model, record)
    probe = with_all_tokens(model) if record else clone(model)
    set_size_(probe, height, width)
    _require_takes(probe, (channels, height, width))
    set_size_(model, height, width)
    if record:
        resized = replace(record, survey=resurvey(probe, record.survey, (channels, height, width)), layout=None)
        vars(model)[RECORD] = with_layout(probe, resized) if record.layout else resized
        arrange_(model)
    if wants := vars(model).get(PREPROCESSING):
        vars(model)[PREPROCESSING] = replace(wants, input_size=(channels, height, width))
    return model


def _require_any_size(model: nn.Module, record: Record | None) -> None:
    """Refuse models with changes that depend on the number of tokens."""
    refuse_gated(model)
    if record and record.tokens is not None:
        raise ModelError(
            "this model reduces its tokens, which depends on how many it has; call restore_tokens_(model), change the "
            "image size, then reduce them again"
        )
    fixed = [style for style in record.plan.fitted if STYLES[style].is_per_position] if record else []
    if fixed:
        raise ModelError(
            f"layers of this model were replaced by values for each position in the image (removal style "
            f"{fixed[0]!r}), so the image size cannot change; calibrate the model at the new size, or use style "
            "'constant'"
        )


def _require_takes(model: nn.Module, size: InputSize) -> None:
    try:
        dry_run(model, (2, *size), lambda *_: torch.no_grad())
    except ModelError as error:
        why = first_line(error.__cause__ or error).rstrip(".")
        raise ModelError(
            f"{type(model).__name__} does not take images of {size[1]} x {size[2]}: {why}; set the size when it is "
            "built (img_size, image_size)"
        ) from None


def resurvey(model: nn.Module, found: Survey, size: InputSize) -> Survey:
    """Return ``found`` with the shapes that ``model``, which may be pruned, has on images of ``size``."""
    calls = trace(model, size).calls
    shapes = {call.path: call.output.shape[1:] for call in calls if call.output}
    return replace(found.with_layouts(lambda path, layout: replace(layout, shape=shapes[path])), input_size=size)
