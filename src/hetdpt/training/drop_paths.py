"""Drop path (stochastic depth) for any model, pruned or not, while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from hetdpt.adapters.anatomy import Handle, Survey
from hetdpt.core.gates import first_tensor, per_image, replacement_class
from hetdpt.core.plan import Plan
from hetdpt.surgery.record import parts_of, record_of, survey_of


@contextmanager
def drop_paths(model: nn.Module, rate: float, found: Survey | None = None) -> Iterator[None]:
    """Skip branches at random while ``model`` trains: that of block l for an image with probability rate * l / (L - 1).

    A model that was built with drop path uses its own modules. ``found`` is the survey of the model, if known.
    """
    record, found = record_of(model), found or survey_of(model)
    constant = [h for h in found.handles if record and record.plan.removes(h.site) and _is_constant(h, record.plan)]
    chances = {block: rate * block / max(found.anatomy.blocks - 1, 1) for block in range(found.anatomy.blocks)}
    owners = {handle.owner: chances[handle.site.block] for handle in found.handles}
    inside = [(module, chance) for path, chance in owners.items() for module in model.get_submodule(path).modules()]
    own = [(module, chance) for module, chance in inside if "drop_prob" in vars(module)]
    before = [vars(module)["drop_prob"] for module, _ in own]
    drop = _DropPath()
    hooks: list[RemovableHandle] = []
    if rate and not own:
        hooks.append(model.register_forward_pre_hook(drop.begin, with_kwargs=True))
        for handle in (h for h in found.handles if h.parts and h not in constant):
            end = model.get_submodule(parts_of(handle).gate)
            hooks.append(end.register_forward_hook(partial(drop, chances[handle.site.block], handle.images_at)))
    try:
        for module, chance in own:
            vars(module)["drop_prob"] = chance
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for (module, _), chance in zip(own, before, strict=True):
            vars(module)["drop_prob"] = chance


def _is_constant(handle: Handle, plan: Plan) -> bool:
    """Whether what is left of a branch does not depend on the image."""
    return not replacement_class(plan.style_of(handle.site)).uses_input


class _DropPath:
    """Zeroes the branch of some images and scales that of the others, so that the mean stays."""

    images = 1

    def begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.images = len(first_tensor((*args, *kwargs.values())))

    def __call__(self, chance: float, images_at: int, module: nn.Module, _: Any, output: Any) -> Any:
        branch = output[0] if isinstance(output, tuple) else output  # (B, ...), or (B * windows, ...)
        kept = per_image(F.dropout(branch.new_ones(self.images), chance, module.training), branch, images_at)
        return (branch * kept, *output[1:]) if isinstance(output, tuple) else branch * kept
