"""The attention maps of a model as it runs, in the autograd graph of its output.

They are recorded in a copy that shares the weights, in which attention runs as two products and a softmax even where
it is one fused operator. The model itself is not changed, and no ``forward`` is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hetdpt.adapters.anatomy import Handle
from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone, tensors_in

SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class ForwardRecord:
    """What was recorded of one forward pass, all of it in the autograd graph."""

    answer: Any
    maps: tuple[Tensor, ...]
    """The map of each attention: (B, heads, N, N), or (B windows, heads, N, N); rows sum to 1."""
    end: Tensor
    """The output of the block of the last of them."""
    grid: tuple[int, int] | None
    """Rows and columns of the output of the last convolution before the first of them."""


def look(model: nn.Module, handles: Sequence[Handle], images: Tensor) -> ForwardRecord:
    """Return the output for ``images`` (B, C, H, W) and the attention maps of ``handles``; ``ModelError`` without any.

    Gradients reach the maps even where no weight requires them.
    """
    probe = differentiable(model)
    watch, grids, ends = MapWatch(), list[tuple[int, int]](), list[Tensor]()

    def convolved(_: nn.Module, args: Any, output: Tensor) -> None:
        if not watch.maps:
            grids.append((output.shape[-2], output.shape[-1]))

    def ended(_: nn.Module, args: Any, output: Any) -> None:
        ends.append(tensors_in(output)[0])

    for module in probe.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(convolved)
    for handle in handles:
        attention = probe.get_submodule(handle.site.path)
        attention.register_forward_pre_hook(partial(watch.begin, handle.site.path))
        attention.register_forward_hook(watch.end)
    probe.get_submodule(handles[-1].owner).register_forward_hook(ended)
    with torch.enable_grad(), watch:
        answer = probe(images.detach().requires_grad_())
    for handle in handles:
        if len(watch.maps.get(handle.site.path, ())) != 1:
            raise ModelError(
                f"{handle.site.path} was expected to compute one softmax, or one call of torch's fused operator, but "
                f"has {len(watch.maps.get(handle.site.path, ()))}; relevance is not defined for it"
            )
    maps = tuple(watch.maps[handle.site.path][0] for handle in handles)
    return ForwardRecord(answer, maps, ends[0], grids[-1] if grids else None)


def differentiable(model: nn.Module) -> nn.Module:
    """Return a copy that shares the weights, in eval mode, without gradient checkpointing."""
    probe = clone(model).eval()
    for module in probe.modules():
        if vars(module).get("grad_checkpointing"):  # timm applies it in eval mode as well
            vars(module)["grad_checkpointing"] = False
    return probe


class MapWatch(TorchFunctionMode):
    """Records the attention maps of modules that report when they begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.now: str | None = None
        self.maps: dict[str, list[Tensor]] = {}

    def begin(self, path: str, *_: Any) -> None:
        self.now = path

    def end(self, *_: Any) -> None:
        self.now = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.now is not None and func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.now is not None and func in SOFTMAXES:
            self.keep(result)
        return result

    def keep(self, attention: Tensor) -> Tensor:
        assert self.now is not None
        self.maps.setdefault(self.now, []).append(attention)
        return attention

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return softmax(scale q k + mask) v, as torch's fused operator does in eval mode."""
        query, key, value, attn_mask, _, is_causal, scale, enable_gqa = fused_arguments(*args, **kwargs)
        if is_causal or enable_gqa:
            raise ModelError(f"{self.now} is causal or shares keys between heads; relevance is not defined for it")
        return self.keep(attention_map(query, key, attn_mask, scale)) @ value


def attention_map(query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Return softmax(scale q k + mask), (B, heads, queries, keys), as torch's fused operator computes it."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    is_fused: bool = True,
) -> Tensor:
    """Return softmax(scale q k + mask) v, by torch's fused operator or as two products.

    The operator is called by a name that is not intercepted again when torch.compile runs what it traced in a mode.
    """
    if is_fused:
        attended: Tensor = torch.ops.aten.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
        return attended
    return F.dropout(attention_map(query, key, mask, scale), dropout, training=dropout > 0) @ value


def fused_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None, bool]:
    """Return all arguments of ``F.scaled_dot_product_attention``, however it was called."""
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
