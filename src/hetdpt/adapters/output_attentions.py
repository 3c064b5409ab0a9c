"""``output_attentions`` of pruned models of transformers: the maps of the remaining layers keep their positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from hetdpt.adapters.anatomy import Survey
from hetdpt.adapters.huggingface import is_hf
from hetdpt.adapters.trace import trace
from hetdpt.core.errors import ModelError
from hetdpt.core.gates import is_removed
from hetdpt.core.modules import clone


class KeepPlaces:
    """Forward hook that puts None into ``attentions`` for each layer that is removed or whose gate is closed."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths
        """The layer of each map of the dense model; empty for one that cannot be removed."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        config: Any = module.config
        is_plain = isinstance(output, tuple) and kwargs.get("output_attentions", config.output_attentions)
        maps = getattr(output, "attentions", None) or ()
        removed = [bool(path) and is_removed(module.get_submodule(path)) for path in self.paths]
        if not any(removed) or not (is_plain or maps):
            return
        if is_plain or len(maps) not in (len(removed), removed.count(False)):
            raise ModelError(
                f"attention layers of {type(module).__name__} were removed, and its attention maps cannot be "
                "matched to the others; call it without output_attentions, or without return_dict=False"
            )
        if len(maps) < len(removed):
            rest = iter(maps)
            output["attentions"] = tuple(None if is_removed else next(rest) for is_removed in removed)


def keep_places_(model: nn.Module, found: Survey) -> None:
    """Make a model of transformers, and each part of it that can run alone, return as many attention maps as before."""
    paths = _paths(model, found) if is_hf(model) else ()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if any(paths) and is_hf(module) and all(path.startswith(prefix) for path in paths if path):
            hook = KeepPlaces(tuple(path.removeprefix(prefix) for path in paths))
            module.register_forward_hook(hook, with_kwargs=True)


def _paths(model: nn.Module, found: Survey) -> tuple[str, ...]:
    """Return the path of the attention of each map, in the order of the dense model; empty for one that is no site."""
    probe = clone(model)
    for module in probe.modules():
        if is_hf(module):
            config: Any = module.config
            config._attn_implementation, config.output_attentions, config.output_hidden_states = "eager", True, True
    try:
        seen = trace(probe, found.input_size)
    except ModelError:  # it does not return any
        return ()
    cores = {handle.parts.core for handle in found.handles if handle.site.kind == "attention" and handle.parts}
    calls = [call for call in seen.calls if call.path in cores]
    return tuple(
        next((call.path for call in calls if node is not None and call.start <= node < call.stop), "")
        for node in seen.attentions
    )
