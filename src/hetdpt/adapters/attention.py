"""The layers of multi-head attention and the attributes that hold its sizes, as a table of classes.

Finding a site needs no such table. Narrowing attention does, because its ``forward`` reads these attributes, and so do
keys and values of tokens that ask nothing themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetdpt.core.errors import ModelError
from hetdpt.core.fold import exact


@dataclass(frozen=True)
class Names:
    """The names of the parts of one class of attention; q, k and v may be one layer."""

    queries: str
    keys: str
    values: str
    out: str
    heads: str
    head_dim: str
    scale: str
    width: str | None = None
    """heads * head_dim, where the class has it."""
    norms: tuple[str, ...] = ()
    """Norms of the queries and of the keys, each over the dimensions of one head."""
    foreign: tuple[str, ...] = ()
    """Parts that most models do not use and that couple dimensions in ways hetdpt does not handle."""
    biases: tuple[str, str] | None = None
    """The biases of keys and of values, where they are not those of the layers."""
    rope: str | None = None
    """The argument of its block that has the rotary embedding of the patches."""
    is_narrowable: bool = True

    @property
    def sizes(self) -> tuple[str, ...]:
        """The attributes that change with the sizes."""
        return (self.heads, self.head_dim, self.scale, *((self.width,) if self.width else ()))


_TIMM = Names(
    *("qkv", "qkv", "qkv", "proj"),
    *("num_heads", "head_dim", "scale", "attn_dim"),
    norms=("q_norm", "k_norm"),
    foreign=("norm", "gate"),
)
_BIASES = ("k_bias", "v_bias")
_BEIT = Names(
    *("qkv", "qkv", "qkv", "proj"), *("num_heads", "", "scale"), biases=_BIASES, is_narrowable=False
)  # fmt: skip
_ROPE = Names(
    *("qkv", "qkv", "qkv", "proj"),
    *("num_heads", "head_dim", "scale"),
    norms=("q_norm", "k_norm"),
    biases=_BIASES,
    rope="rope",
    is_narrowable=False,
)
_VIT = Names(*("q_proj", "k_proj", "v_proj", "o_proj"), *("num_attention_heads", "head_dim", "scaling"))
_CLIP = Names(*("q_proj", "k_proj", "v_proj", "out_proj"), *("num_heads", "head_dim", "scale"))
NAMES = {
    "timm.layers.attention.Attention": _TIMM,
    "timm.models.vision_transformer.Attention": _TIMM,  # where it was before
    "timm.models.beit.Attention": _BEIT,
    "timm.models.eva.EvaAttention": _ROPE,
    "timm.layers.attention.AttentionRope": _ROPE,
    "transformers.models.vit.modeling_vit.ViTAttention": _VIT,
    "transformers.models.deit.modeling_deit.DeiTAttention": _VIT,
    "transformers.models.dinov2.modeling_dinov2.Dinov2Attention": _VIT,
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention": _VIT,
    "transformers.models.clip.modeling_clip.CLIPAttention": _CLIP,
    "transformers.models.siglip.modeling_siglip.SiglipAttention": _CLIP,
}


@dataclass(frozen=True)
class Attention:
    """One multi-head attention: its sizes and where they are stored."""

    path: str
    heads: int
    head_dim: int
    queries: tuple[str, int]
    """The layer that computes them, and its first row that does; head after head."""
    keys: tuple[str, int]
    values: tuple[str, int]
    out: str
    norms: tuple[str, ...]
    """Paths of the norms of queries and keys that are not the identity."""
    names: Names

    def attributes(self, heads: int, head_dim: int) -> dict[str, float]:
        """Return the attributes that the module has with these sizes."""
        values = (heads, head_dim, head_dim**-0.5, heads * head_dim)
        return dict(zip(self.names.sizes, values, strict=False))  # the last only where the class has it


def attention_at(model: nn.Module, path: str) -> Attention:
    """Return the layers and sizes of the attention at ``path``; ``ModelError`` if its class is not in ``NAMES``."""
    module = model.get_submodule(path)
    kind, names = _kind(module), NAMES.get(_kind(module))
    if names is None or not names.is_narrowable:
        raise ModelError(
            f"{path} is {kind}, whose heads hetdpt cannot narrow; it can for "
            "ViT, DeiT and DINOv2 of timm and HuggingFace, and the vision towers of CLIP and SigLIP"
        )
    parts = dict(module.named_children())
    if extra := [name for name in names.foreign if not isinstance(parts.get(name), nn.Identity | None)]:
        raise ModelError(f"{path} has its own {extra[0]}, which hetdpt cannot narrow; keep its width")
    layers = [f"{path}.{name}" for name in (names.queries, names.keys, names.values)]
    is_one = layers[0] == layers[1]
    rows = len(model.get_parameter(f"{layers[0]}.weight")) // (3 if is_one else 1)
    queries, keys, values = ((layer, number * rows if is_one else 0) for number, layer in enumerate(layers))
    heads = int(vars(module)[names.heads])
    norms = tuple(f"{path}.{name}" for name in names.norms if not isinstance(parts.get(name), nn.Identity | None))
    return Attention(path, heads, rows // heads, queries, keys, values, f"{path}.{names.out}", norms, names)


def _kind(attention: nn.Module) -> str:
    return f"{type(attention).__module__}.{type(attention).__name__}"


def why_no_keys(attention: nn.Module) -> str | None:
    """Return why keys and values cannot be computed for other tokens than queries; None if they can."""
    names = NAMES.get(_kind(attention))
    if names is None:
        return f"its class, {_kind(attention)}, is not known"
    if vars(attention).get("num_kv_groups", 1) > 1:
        return "its heads share keys"
    layers = _layers(attention, names)
    other = next((layer for layer in layers if type(layer) is not nn.Linear), None)
    return None if other is None else f"its layers are {type(other).__name__}, not linear"


def rope_of(attention: nn.Module) -> str | None:
    """Return the argument of its block that has the rotary embedding of the patches; None if it takes none."""
    return NAMES[_kind(attention)].rope


def keys_values(attention: nn.Module, z: Tensor) -> Tensor:
    """Return the keys, then the values, of tokens ``z`` (B, N, D) by its own weights: (B, N, 2 * heads * head_dim)."""
    parts = [F.linear(z, *layer) for layer in _projections(attention)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def key_value_matrix(attention: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the matrix and the bias by which ``keys_values`` maps tokens, in float64."""
    parts = _projections(attention)
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts]
    return exact(torch.cat([weight for weight, _ in parts])), exact(torch.cat(biases))


def split_heads(attention: nn.Module, flat: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what ``keys_values`` returned, or a map in its place, as keys and values (B, heads, N, head_dim).

    Keys are normed and rotated as the attention itself does it with those of patches.
    """
    names = NAMES[_kind(attention)]
    heads = int(vars(attention)[names.heads])
    keys, values = flat.unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    norm = attention._modules.get(names.norms[1]) if names.norms else None
    keys = keys if norm is None else norm(keys)
    if rope is not None:
        from timm.layers import apply_rot_embed_cat

        keys = apply_rot_embed_cat(keys, rope, half=vars(attention).get("rotate_half", False)).type_as(values)
    return keys, values


def _layers(attention: nn.Module, names: Names) -> list[nn.Linear]:
    """Return the layers that compute keys and values: one that computes queries too, or two."""
    is_one = names.queries == names.keys
    if is_one and (fused := attention._modules.get(names.keys)) is not None:
        return [fused]  # type: ignore[list-item]
    pair = ("k_proj", "v_proj") if is_one else (names.keys, names.values)
    return [attention.get_submodule(name) for name in pair]  # type: ignore[misc]


def _projections(attention: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Return the weight and the bias of keys and of values; one pair for both if they are rows of one layer."""
    names = NAMES[_kind(attention)]
    layers = _layers(attention, names)
    if len(layers) == 2:
        return [(layer.weight, layer.bias) for layer in layers]
    [layer] = layers
    rows = len(layer.weight) // 3
    found = [getattr(attention, name, None) for name in names.biases or ()]
    own = [bias.to(layer.weight.device) for bias in found if bias is not None]  # a buffer is not on the meta device
    bias = torch.cat(own) if own else None if layer.bias is None else layer.bias[rows:]
    return [(layer.weight[rows:], bias)]
