"""The forward pass of a block that computes only the tokens which are kept, and of a layer that runs on their mean.

A block runs as it is, on fewer tokens; no ``forward`` is copied and no path changes. Keys and values of patches are
added where attention calls torch's fused operator. Between blocks they travel with the tokens, in place of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hetdpt.adapters.attention import keys_values, split_heads
from hetdpt.adapters.maps import attend, fused_arguments
from hetdpt.adapters.models import with_modules
from hetdpt.core.gates import Behind, Gate

STEP = "tail"
"""The name of the module that says how a block, or a layer, runs on fewer tokens; a child of it."""


class TailStream(NamedTuple):
    """What a block of a tail returns in place of tokens."""

    tokens: Tensor
    """Those that are kept: (B, kept, D)."""
    keys_values: Tensor
    """Of patches, for all blocks to come: (B, patches, columns)."""
    sizes: Tensor | None
    """Of all tokens where tokens were merged: (B, N)."""


class TailStep(nn.Module):
    """How one block runs on the tokens that are kept; a child of the block."""

    def __init__(self, kept: int, is_last: bool) -> None:
        super().__init__()
        self.kept, self.is_last = kept, is_last
        self.attention = ""
        """The path of the attention in the block; empty if it has none."""
        self.entry: tuple[str, ...] = ()
        """The modules between the stream and the attention."""
        self.rope: str | None = None
        self.columns: tuple[int, int] | None = None
        """Its part of the maps; None if its keys and values are exact."""
        self.maps: nn.Linear | None = None
        """Keys and values of patches in all later blocks; only in the first."""
        self.fused_attn = True  # a name that unfuse_ knows: False if attention has to run as two products

    def extra_repr(self) -> str:
        keys = "" if not self.attention else ", keys of patches " + ("exact" if self.columns is None else "mapped")
        return f"{self.kept} token{'s' if self.kept > 1 else ''} kept{keys}"


class MeanStep(nn.Module):
    """Lets a linear layer run on the mean of the tokens; a child of the layer."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        """The first token of those that the head averages."""

    def extra_repr(self) -> str:
        return f"on the mean of tokens from {self.first} on"


class _KeysOfPatches(TorchFunctionMode):
    """Adds keys and values of patches to those of the tokens that are kept, in the one attention that runs inside."""

    def __init__(self, step: TailStep, of_patches: Callable[[], tuple[Tensor, Tensor]], sizes: Tensor | None) -> None:
        super().__init__()
        self.step, self.of_patches, self.sizes = step, of_patches, sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        query, key, value, mask, dropout, _, scale, _ = fused_arguments(*args, **kwargs)
        keys, values = self.of_patches()
        key, value = torch.cat([key, keys.to(key.dtype)], -2), torch.cat([value, values.to(value.dtype)], -2)
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., : query.shape[-2], :]  # of all tokens to all tokens
        if self.sizes is not None:
            mask = self.sizes.log().to(query.dtype)[:, None, None]
        return attend(query, key, value, mask, dropout, scale, self.step.fused_attn)


def run_kept(block: nn.Module, *args: Any, token_sizes: Tensor | None = None, **kwargs: Any) -> Any:
    """Run a block on the tokens that are kept; called in place of its ``forward``, which it calls in turn.

    ``token_sizes`` (B, N) are given where tokens were merged before.
    """
    step = block._modules[STEP]
    assert isinstance(step, TailStep)
    stream = _stream_in(args, kwargs)
    patches: Tensor | None = None
    flat: Tensor | None = None
    if isinstance(stream, TailStream):
        tokens, flat, token_sizes = stream
    else:
        tokens, patches = stream[:, : step.kept], stream[:, step.kept :]
        flat = None if step.maps is None else step.maps(base_of(patches))
    rope = kwargs.get(step.rope) if step.rope else None
    if rope is not None:
        kwargs = {**kwargs, step.rope: rope[..., :0, :]}  # type: ignore[dict-item]  # none of the kept tokens has one
    args = tuple(tokens if value is stream else value for value in args)
    kwargs = {name: tokens if value is stream else value for name, value in kwargs.items()}
    if not step.attention:
        result = type(block).forward(block, *args, **kwargs)
    else:
        with _KeysOfPatches(step, partial(_of_patches, block, step, patches, flat, rope), token_sizes):
            result = type(block).forward(with_modules(block, attention=step.attention), *args, **kwargs)
    if step.is_last:
        return result
    assert flat is not None
    if isinstance(result, tuple):
        return TailStream(result[0], flat, token_sizes), *result[1:]
    return TailStream(result, flat, token_sizes)


def base_of(patches: Tensor) -> Tensor:
    """Return what the maps of a tail take: the stream of patches, normed without weights."""
    return F.layer_norm(patches, patches.shape[-1:])


def _stream_in(args: Any, kwargs: Any) -> Tensor | TailStream:
    given = (*args, *kwargs.values())
    return next(value for value in given if isinstance(value, Tensor | TailStream))


def _of_patches(
    block: nn.Module, step: TailStep, patches: Tensor | None, flat: Tensor | None, rope: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return keys and values of patches, (B, heads, patches, head_dim)."""
    attention = unwrapped(block.get_submodule(step.attention))
    if step.columns is not None:
        assert flat is not None
        return split_heads(attention, flat[..., slice(*step.columns)], rope)
    assert patches is not None
    for path in step.entry:
        patches = unwrapped(block.get_submodule(path))(patches)
    return split_heads(attention, keys_values(attention, patches), rope)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside gates."""
    while isinstance(module, Gate | Behind):
        module = module.inner
    return module


def run_on_mean(layer: nn.Module, tokens: Tensor) -> Tensor:
    """Run a linear layer on the mean of the tokens that the head averages; every token gets the same."""
    step = layer._modules[STEP]
    assert isinstance(step, MeanStep)
    mean = tokens[:, step.first :].mean(1, keepdim=True)
    result: Tensor = type(layer).forward(layer, mean)
    return result.expand(*tokens.shape[:-1], result.shape[-1])


def connect_(block: nn.Module) -> None:
    """Let ``block`` run on the tokens that its step keeps, if it has one; one that reduces tokens does so itself."""
    if isinstance(block._modules.get(STEP), TailStep) and "forward" not in vars(block):
        vars(block)["forward"] = partial(run_kept, block)


def disconnect_(module: nn.Module) -> None:
    """Let a block, or a layer, that has a step run on all tokens again."""
    del module._modules[STEP]
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func in (run_kept, run_on_mean):
        del vars(module)["forward"]
