"""A pruned model as timm's ``features_only`` model: without a head and without blocks after the last requested map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from hetdpt.adapters.anatomy import survey
from hetdpt.adapters.features import feature_net
from hetdpt.adapters.models import BASE, SIZE, base_of, build
from hetdpt.adapters.preprocessing import PREPROCESSING
from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone
from hetdpt.surgery.gate import gates_of
from hetdpt.surgery.record import RECORD, Record, record_of
from hetdpt.surgery.resize import resurvey


def as_features(model: nn.Module, layers: Sequence[int] | int = 3) -> nn.Module:
    """Return timm's wrapper around a copy of ``model`` that returns the maps of ``layers``, not normalised.

    ``layers`` are numbers of blocks or stages, or how many of the last ones. The copy shares the weights; it can be
    pruned further, merged and saved like any model.
    """
    if gates_of(model):
        raise ModelError("this model has gates on its layers; call restore_(model) first")
    net = feature_net(clone(model), layers)
    base = base_of(model)
    arguments = {"features_only": True, "feature_cls": "getter", "out_indices": list(net.out_indices)}
    vars(net)[BASE] = replace(base, arguments={**base.arguments, **arguments})
    vars(net).update({name: vars(model)[name] for name in (SIZE, PREPROCESSING) if name in vars(model)})
    if record := record_of(model):
        is_plain = len(net.model.feature_info) == record.survey.anatomy.blocks
        _require_whole(record, net.out_indices if is_plain else ())
        vars(net)[RECORD] = _shortened(record, net)
    return net  # type: ignore[no-any-return]


def _require_whole(record: Record, blocks: Sequence[int]) -> None:
    """Raise ``ModelError`` if maps of ``blocks`` include a constant that belongs to the next block."""
    for block in blocks:
        if block + 1 in record.folded_constants:
            raise ModelError(
                f"merging moved the replacement of attention {block + 1} into block {block}, which changes its map; "
                "merge with fold_constants=False before saving"
            )


def _shortened(record: Record, net: nn.Module) -> Record:
    """Return the record of ``net``: that of the model, limited to the blocks of ``net``."""
    size = record.survey.input_size
    dense = survey(build(base_of(net), is_empty=True), size)
    end = dense.anatomy.blocks
    paths = [f"model.{handle.site.path}" for handle in record.survey.handles if handle.site.block < end]
    if paths != [handle.site.path for handle in dense.handles]:
        raise ModelError(
            f"rebuilt from {base_of(net).name}, this model has other layers than before; make it with hetdpt.create, "
            "or get its maps with forward_intermediates"
        )
    found = resurvey(net, dense, size)

    def left(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(block for block in blocks if block < end)

    plan = replace(
        record.plan,
        attention=left(record.plan.attention),
        activation=left(record.plan.activation),
        anatomy=found.anatomy,
        fits=tuple(fit for fit in record.plan.fits if fit.block < end),
    )
    return replace(
        record,
        survey=found,
        plan=plan,
        merged=left(record.merged),
        folded_norms=left(record.folded_norms),
        folded_constants=left(record.folded_constants),
    )
