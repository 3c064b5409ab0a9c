"""``trim_`` and ``untrim_``: tokens that no output depends on are not computed (docs/tokens_are_not_alike.md).

Which models can be trimmed, and which can have a tail, is decided here; ``surgery.arrange`` does it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hetdpt.adapters.heads import answer_tensors
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.modules import clone, evaluating, random_images
from hetdpt.core.plan import Plan
from hetdpt.surgery.arrange import arrange_, require_arrangeable
from hetdpt.surgery.record import RECORD, InputSize, Record, layout_of, record_of, survey_of, with_layout


def trim_(model: nn.Module, input_size: InputSize | None = None) -> nn.Module:
    """Leave out what no output depends on: after the last attention, all tokens but those that the head reads.

    In the block of the last attention only keys and values see all tokens. Outputs stay the same up to rounding. Where
    the head averages tokens, the last linear layer of the last FFN runs after the mean instead. ``ModelError`` if the
    output depends on patches in another way; ``untrim_`` undoes it, and trimming twice changes nothing.

    >>> import hetdpt, timm
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> before = hetdpt.count_macs(model)
    >>> round(before / hetdpt.count_macs(trim_(model)), 3)
    1.075
    """
    record = record_of(model) or Record(survey_of(model, input_size), Plan())
    if record.is_trimmed:
        return model
    record = replace(with_layout(model, record), is_trimmed=True)
    require_trimmable(record)
    require_arrangeable(model, record)
    vars(probe := clone(model))[RECORD] = record
    _require_same_answers(model, arrange_(probe), record.survey.input_size)
    vars(model)[RECORD] = record
    return arrange_(model)


def untrim_(model: nn.Module) -> nn.Module:
    """Compute all tokens again; outputs are bit-equal to those before ``trim_``. The tail of a plan stays."""
    record = record_of(model)
    if record is None or not record.is_trimmed:
        return model
    vars(model)[RECORD] = replace(record, is_trimmed=False)
    return arrange_(model)


def trim_if_possible_(model: nn.Module, input_size: InputSize | None = None) -> str | None:
    """Trim ``model`` if that is possible; return why it is not, as a sentence for the user, or None."""
    try:
        trim_(model, input_size)
    except ModelError as error:
        return f"not trimmed: {error}"
    return None


def require_trimmable(record: Record) -> None:
    layout = layout_of(record)
    if layout.read is None and layout.mean_from is None:
        raise ModelError(
            "this model cannot be trimmed: its output depends on patches of its last block, not only on the class "
            "token or on the plain mean of tokens"
        )
    if record.tokens is not None and (layout.is_patch_read or record.tokens.sparsity < 1):
        raise ModelError(
            "this model cannot be trimmed: how it reduces tokens depends on tokens that would not be computed; call "
            "restore_tokens_(model) first"
        )


def require_tail(record: Record, plan: Plan) -> None:
    """Raise ``PlanError`` unless patches of the last blocks are read by their attention alone."""
    if layout_of(record).read is None:
        raise PlanError(
            f"this model cannot have a tail of {plan.tail}: its output depends on patches of its last block, and a "
            "tail needs a head that reads the class token alone; use tail=0"
        )
    if plan.has_stream_gelu:
        raise PlanError(
            "removal 'authors' puts a GELU on the stream of patches, which a tail does not have; use 'norm'"
        )


def is_tail_possible(model: nn.Module) -> bool:
    """Whether ``model`` can have a tail; False also for one that is not trimmed."""
    record = record_of(model)
    if record is None or not record.is_trimmed or record.plan.has_stream_gelu:
        return False
    return layout_of(record).read is not None


def trim_to_class_token_(model: nn.Module, input_size: InputSize | None = None) -> nn.Module:
    """Trim ``model`` if its head reads the class token, and tokens beside it, alone, so that it can have a tail."""
    trim_if_possible_(model, input_size)
    return model if is_tail_possible(model) else untrim_(model)


@torch.no_grad()
def _require_same_answers(model: nn.Module, trimmed: nn.Module, size: InputSize) -> None:
    """Raise ``ModelError`` unless both models return the same for a random image, as far as they have weights."""
    weight = next(model.parameters())
    if weight.is_meta:
        return
    images, tolerance = random_images(model, size, 1), 10 * torch.finfo(weight.dtype).eps ** 0.75
    with evaluating(model, trimmed):
        pairs = zip(*(answer_tensors(one(images)) for one in (model, trimmed)), strict=True)
    for one, other in pairs:
        if not (one - other).abs().max() <= tolerance * one.abs().max().clamp(min=torch.finfo(weight.dtype).tiny):
            raise ModelError("this model cannot be trimmed: its output would change; hetdpt.sites shows its layers")
