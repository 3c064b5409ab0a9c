"""The forward pass of a block that reduces tokens.

A block x + attention, then x + FFN runs in two halves, each the block itself without the other branch, and tokens are
removed between them. No ``forward`` is copied, no path changes: keys are read where attention calls torch's fused
operator. The state of the tokens exists for one forward pass, in the thread that runs it, and not on the model.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hetdpt.adapters.layout import TokenLayout
from hetdpt.adapters.maps import attend, attention_map, fused_arguments
from hetdpt.adapters.models import with_modules
from hetdpt.core.errors import ModelError
from hetdpt.core.modules import tensors_in
from hetdpt.core.tokens import GTP_OPTIONS, Tokens
from hetdpt.reduce.tokens.methods import AttentionRecord, TokenMethod, TokenStream
from hetdpt.surgery.kept import STEP as TAIL
from hetdpt.surgery.kept import TailStep, run_kept

STEP = "tokens"
"""The name of a block's ``TokenStep``."""
Replacements = tuple[tuple[str, nn.Module], ...]


class TokenStep(nn.Module):
    """How one block reduces its tokens; a child of the block without parameters, so that it is printed."""

    def __init__(
        self, block: str, tokens: Tokens, method: TokenMethod, layout: TokenLayout, count: int, attention: str = ""
    ) -> None:
        super().__init__()
        self.block, self.tokens, self.method = block, tokens, method
        self.layout, self.count = layout, count
        self.attention = attention
        """The path of the attention in the block; empty if it has none."""
        self.is_first = self.is_last = False
        self.without_ffn: Replacements = ()
        self.without_attention: Replacements = ()
        self.fused_attn = True  # a name that unfuse_ knows: False if attention has to run as two products

    def extra_repr(self) -> str:
        places = ", then all positions restored" if self.is_last and self.layout.is_patch_read else ""
        options = GTP_OPTIONS if self.tokens.method == "gtp" else ()
        shown = "".join(f", {name}={getattr(self.tokens, name)}" for name in options)
        return f"{self.tokens.method}: {self.count} removed{places}{shown}"


class _CurrentPass(threading.local):
    stream: TokenStream | None = None


_CURRENT = _CurrentPass()


class _AttentionWatch(TorchFunctionMode):
    """Records the one attention that runs inside, and makes it account for the sizes of tokens (ToMe, Eq. 1)."""

    def __init__(self, step: TokenStep, stream: TokenStream, count: int) -> None:
        super().__init__()
        self.step, self.stream = step, stream
        self.needs_map = step.method.needs_map and count > 0
        self.seen: AttentionRecord | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return softmax(q k + log s) v, s the sizes of tokens; as long as all are 1, what torch's operator does."""
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = fused_arguments(*args, **kwargs)
        if attn_mask is not None or is_causal:
            raise _refused(self.step, "its attention has a bias or a mask, which depends on positions in the image")
        batch, n = self.stream.tokens.shape[:2]
        if self.seen or enable_gqa or any((t.shape[0], t.shape[-2]) != (batch, n) for t in (query, key, value)):
            raise _refused(self.step, "its attention is not one of all tokens to all tokens")
        self.seen = AttentionRecord(self.stream.tokens, key, None)
        sizes = self.stream.sizes
        bias = None if sizes is None else sizes.log().to(query.dtype)[:, None, None]  # (B, 1, 1, n)
        if not self.needs_map:
            return attend(query, key, value, bias, dropout_p, scale, self.step.fused_attn)
        attention = attention_map(query, key, bias, scale)  # (B, heads, n, n)
        self.seen = replace(self.seen, map=attention)
        kept = sparse(attention, self.step.tokens.sparsity)
        return F.dropout(kept, dropout_p, training=dropout_p > 0) @ value


def sparse(attention: Tensor, part: float) -> Tensor:
    """Return the map (B, heads, n, n) with all but the largest ``part`` of the entries of each head set to 0 (GTP)."""
    if part == 1:
        return attention
    entries = attention.detach().flatten(-2)
    kept = entries.topk(max(int(part * entries.shape[-1]), 1), dim=-1, sorted=False).indices
    mask = torch.zeros_like(entries).scatter(-1, kept, torch.ones_like(kept, dtype=entries.dtype))
    return attention * mask.view_as(attention)


def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block of a model that reduces tokens; called in place of its ``forward``, which it calls in turn."""
    step = block._modules[STEP]
    assert isinstance(step, TokenStep)
    before, _CURRENT.stream = _CURRENT.stream, None  # nothing is left after an error
    args, kwargs = _only_tokens(step, args, kwargs)
    stream = _entering(step, before, tensors_in(args, kwargs)[0])
    if isinstance(block._modules.get(TAIL), TailStep):
        return run_kept(block, *args, token_sizes=stream.sizes, **kwargs)
    count = min(step.count, (stream.tokens.shape[1] - stream.protected) // 2)
    if step.attention and (count or stream.sizes is not None):
        result, stream = _reduced(block, step, stream, count, args, kwargs)
    else:
        result = type(block).forward(block, *args, **kwargs)
    stream = replace(stream, tokens=_tensor(result))
    if not step.is_last:
        _CURRENT.stream = stream
        return result
    restored = stream.put_back()
    return (restored, *result[1:]) if isinstance(result, tuple) else restored


def _only_tokens(step: TokenStep, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a block with its tokens as the only tensor."""
    tokens, *others = tensors_in(args, kwargs)
    if not others:
        return args, kwargs
    if not torch.compiler.is_exporting():  # when transformers passes a mask that hides nothing
        raise _refused(step, "it takes other inputs than tokens, such as a mask")
    alone: tuple[Any, Any] = tree_map_only(Tensor, lambda tensor: tensor if tensor is tokens else None, (args, kwargs))
    return alone


def _replaced(args: Any, kwargs: Any, tokens: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a block, the only tensor of which are its tokens, with other ``tokens``."""
    given = (tokens if isinstance(value, Tensor) else value for value in args)
    return (*given,), {name: tokens if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def _entering(step: TokenStep, before: TokenStream | None, tokens: Tensor) -> TokenStream:
    """Return the tokens that are the input of a block, with their state."""
    layout = step.layout
    if step.is_first:
        count = tokens.shape[1] if layout.is_patch_read else 0
        places = torch.arange(count, device=tokens.device).expand(tokens.shape[0], -1) if count else None
        return TokenStream(tokens, layout.protected, layout.grid, places=places)
    if before is None or before.tokens.shape != tokens.shape:
        raise ModelError(
            "the blocks of a model that reduces tokens depend on each other, so they have to run in order, from the "
            "first, and without checkpoints; call the whole model, or restore_tokens_(model) first"
        )
    return replace(before, tokens=tokens)


def _reduced(
    block: nn.Module, step: TokenStep, stream: TokenStream, count: int, args: Any, kwargs: Any
) -> tuple[Any, TokenStream]:
    """Return the output of a block with attention, and its tokens, with ``count`` removed between attention and FFN."""
    half = with_modules(block, step.without_ffn if count else (), step.attention)
    with _AttentionWatch(step, stream, count) as watch:
        result = type(block).forward(half, *args, **kwargs)
    if watch.seen is None:
        raise _refused(step, "its attention does not call torch's scaled_dot_product_attention")
    if not count:
        return result, stream
    middle = replace(stream, tokens=_tensor(result))
    stream = step.method.reduce(middle, watch.seen, count, step.tokens)
    args, kwargs = _replaced(args, kwargs, stream.tokens)
    return type(block).forward(with_modules(block, step.without_attention), *args, **kwargs), stream


def _refused(step: TokenStep, why: str) -> ModelError:
    return ModelError(f"{step.block} cannot reduce tokens: {why}")


def _tensor(result: Any) -> Tensor:
    tensor = result[0] if isinstance(result, tuple) else result
    assert isinstance(tensor, Tensor)
    return tensor
