"""The layers of multi-head attention and the attributes that hold its sizes, as a table of classes.

Finding a site needs no such table; narrowing attention does, because its ``forward`` reads these attributes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hetdpt.core.errors import ModelError


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
_VIT = Names(*("q_proj", "k_proj", "v_proj", "o_proj"), *("num_attention_heads", "head_dim", "scaling"))
_CLIP = Names(*("q_proj", "k_proj", "v_proj", "out_proj"), *("num_heads", "head_dim", "scale"))
NAMES = {
    "timm.layers.attention.Attention": _TIMM,
    "timm.models.vision_transformer.Attention": _TIMM,  # where it was before
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
    kind = f"{type(module).__module__}.{type(module).__name__}"
    names = NAMES.get(kind)
    if names is None:
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
