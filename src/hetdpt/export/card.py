"""The model card that a saved model carries."""

from __future__ import annotations

from torch import nn

from hetdpt.adapters.models import Base
from hetdpt.core.plan import Plan
from hetdpt.export.runtimes import EXPORTS
from hetdpt.measurement.costs import count_macs, count_params
from hetdpt.surgery.record import record_of

LESS_WIDTH = "Its width is reduced as well: heads, hidden features or channels."


def model_card(model: nn.Module, base: Base, plan: Plan, input_size: tuple[int, int, int]) -> str:
    """Return a README in the hub's form: what was removed, what is left, how to load it."""
    record = record_of(model)
    also = [LESS_WIDTH] if record and record.is_narrowed else []
    if record and record.tokens:
        also.append(f"Its blocks reduce tokens at run time ({record.tokens.method}, r = {record.tokens.r}).")
    removed = [f"| {kind} | {', '.join(map(str, blocks)) or 'none'} |" for kind, blocks in _removed(plan).items()]
    size = " x ".join(str(side) for side in input_size)
    return "\n".join(
        (
            "---",
            "library_name: hetdpt",
            "pipeline_tag: image-classification",
            "tags: [vision-transformer, depth-pruning, hetdpt]",
            "---",
            "",
            f"# {base.name}, {len(plan)} layers removed",
            "",
            f"{base.name} ({base.library}) after pruning with hetdpt, removal `{plan.removal}`.",
            *also,
            "",
            "| layer | removed in blocks |",
            "|---|---|",
            *removed,
            "",
            f"{count_params(model):,} parameters, {count_macs(model, input_size):,} MACs per image of {size} (linear "
            "layers, convolutions and attention products).",
            "",
            "```python",
            "import hetdpt",
            "",
            'model = hetdpt.load("path/to/this/directory")',
            "```",
            "",
            *(
                f"`hetdpt export path/to/this/directory --out {row.file}` writes it for {row.runner}."
                for row in EXPORTS.values()
            ),
            "",
        )
    )


def _removed(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {"attention": plan.attention, "FFN activation": plan.activation}
