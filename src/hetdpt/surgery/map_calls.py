"""Methods of timm's models that make images of the tokens of blocks: refused while blocks do not have all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from hetdpt.core.errors import ModelError
from hetdpt.surgery.record import require_record

MAP_CALLS = ("forward_intermediates", "get_intermediate_layers")
REDUCED = "a model that reduces tokens does not have them all; call restore_tokens_(model) before"
TRIMMED = "a model that is trimmed, or has a tail, does not have them all; call untrim_(model) before, and use no tail"


@dataclass(frozen=True)
class _Refusal:
    """Replaces a method that would mistake the remaining tokens for all of them."""

    name: str
    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(f"{self.name} reshapes all tokens of a block to images, but {self.why}")


def guard_maps_(model: nn.Module) -> None:
    """Let ``MAP_CALLS`` be refused if by the record of ``model`` tokens are missing, and work otherwise."""
    record = require_record(model)
    why = REDUCED if record.tokens is not None else TRIMMED if record.leaves_out_tokens else None
    for module in model.modules():
        for name in MAP_CALLS:
            if isinstance(vars(module).get(name), _Refusal):
                del vars(module)[name]
            if why and getattr(type(module), name, None) is not None:
                vars(module)[name] = _Refusal(name, why)
