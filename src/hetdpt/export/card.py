"""The model card of a saved model."""

from __future__ import annotations

from torch import nn

from hetdpt.adapters.models import Base
from hetdpt.core.plan import Plan
from hetdpt.core.styles import CLASS_TOKEN_KEEPS
from hetdpt.export.runtimes import EXPORTS
from hetdpt.measurement.costs import count_macs, count_params
from hetdpt.surgery.record import record_of

CARD = """---
library_name: hetdpt
pipeline_tag: image-classification
tags: [vision-transformer, depth-pruning, hetdpt]
---

# {name}, {count} layers removed

{about}

| layer | removed in blocks |
|---|---|
| attention | {attention} |
| FFN activation | {activation} |

{params:,} parameters, {macs:,} MACs per image of {size} (linear layers, convolutions and attention products).

```python
import hetdpt

model = hetdpt.load("path/to/this/directory")
```

{exports}
"""


def model_card(model: nn.Module, base: Base, plan: Plan, input_size: tuple[int, int, int]) -> str:
    """Return a README in the hub's form: what was removed, what remains, how to load it."""
    record = record_of(model)
    about = [f"{base.name} ({base.library}) after pruning with hetdpt, removal `{plan.removal}`."]
    if plan.activation and plan.class_token == "keep":
        about.append(CLASS_TOKEN_KEEPS)
    if record and record.is_narrowed:
        about.append("Its width is reduced as well: heads, hidden features or channels.")
    if plan.tail > 1:
        about.append(f"In its last {plan.tail} blocks only the class token is updated; patches give keys and values.")
    elif record and record.is_trimmed:
        about.append("It is trimmed: tokens that its head does not read are not computed after the last attention.")
    if record and record.tokens:
        about.append(f"Its blocks reduce tokens at run time ({record.tokens.method}, r = {record.tokens.r}).")
    export = "`hetdpt export path/to/this/directory --out {}` writes it for {}."
    return CARD.format(
        name=base.name,
        count=len(plan),
        about="\n".join(about),
        attention=", ".join(map(str, plan.attention)) or "none",
        activation=", ".join(map(str, plan.activation)) or "none",
        params=count_params(model),
        macs=count_macs(model, input_size),
        size=" x ".join(map(str, input_size)),
        exports="\n".join(export.format(row.file, row.runner) for row in EXPORTS.values()),
    )
