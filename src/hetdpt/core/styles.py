"""What "removed" means: one row per removal style, and the presets, which are pairs of them. No torch here.

Surgery, calibration, ``scan``, error messages, docs/oneshot.md and the contract tests follow this table. A new style is
a row here and, unless a module of ``core.gates`` computes it already, a module there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hetdpt.core.plan import Kind


ClassToken = Literal["share", "keep"]
ClassTokenChoice = Literal["auto", "keep", "share"]
"""``auto`` is ``keep`` where activations are replaced by fitted layers and the head reads class tokens alone."""
CLASS_TOKEN_KEEPS = "The class token keeps the FFNs whose activation is removed: that saves time, not parameters."


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to remove a layer.

    D is the width of the residual stream, N the number of tokens, z = norm(x) what the branch is given.
    """

    name: str
    kind: Kind
    computes: str
    """What the model computes in place of ``x + A(z)`` or ``x + fc2(G(fc1(z)))``."""
    module: str
    """The class of ``core.gates`` that replaces the layer."""
    removes: Literal["layer", "branch", "ffn", "patches"]
    """The attention or activation alone; its whole residual branch; or an FFN, which becomes a single linear layer,
    for all tokens or for ``patches``."""
    fit: str | None = None
    """How its values are fitted on images; None if there is nothing to fit."""
    parameters: str
    """How many parameters are left in the branch of a ViT, after merging."""
    macs: str
    """How many multiply-accumulates per token, class tokens that keep their FFN aside, are left in the branch."""
    merge: Literal["bias", "pair"] | None = None
    """What ``merge_`` folds: the constant into the bias before it, or the two linear layers of the FFN into one."""
    costs_like: str | None = None
    """A style with the same costs, so that ``scan`` measures only one of the two."""
    is_per_position: bool = False
    """Whether it has values for each token. The images then have to come before the tokens, and their size is fixed."""
    allows_gated: bool = True
    """Whether it removes the activation of a gated FFN (SwiGLU) too."""
    is_last_resort: bool = False
    """Whether ``scan`` shows it only for layers that not every style can remove."""
    class_token: ClassToken = "share"
    """Whether class, distillation and register tokens keep the FFN whose activation patches lose, or share its fate."""


_ROWS = (
    Style(
        name="skip", kind="attention", computes="x",
        module="Zero", removes="branch", parameters="0", macs="0",
    ),
    Style(
        name="norm", kind="attention", computes="x + z",
        module="Pass", removes="layer", parameters="2 D", macs="0",
    ),
    Style(
        name="constant", kind="attention", computes="x + c", fit="mean",
        module="Constant", removes="branch", parameters="D", macs="0", merge="bias", costs_like="skip",
    ),
    Style(
        name="position", kind="attention", computes="x + c, another c for each token", fit="mean per position",
        module="ConstantPerPosition", removes="branch", parameters="N D", macs="0", merge="bias", costs_like="skip",
        is_per_position=True,
    ),
    Style(
        name="linear", kind="attention", computes="x + W z + b", fit="least squares",
        module="Mapped", removes="branch", parameters="D² + 3 D", macs="D²",
    ),
    Style(
        name="identity", kind="activation", computes="x + fc2(fc1(z))",
        module="Pass", removes="layer", parameters="D² + 3 D", macs="D²", merge="pair", allows_gated=False,
    ),
    Style(
        name="calibrated", kind="activation", computes="x + W z + b", fit="least squares",
        module="Mapped", removes="ffn", parameters="D² + 3 D", macs="D²", merge="pair",
    ),
    Style(
        name="identity-keep", kind="activation", computes="x + fc2(fc1(z)) for patches",
        module="PatchPass", removes="layer", parameters="9 D² + 8 D", macs="D²", merge="pair", allows_gated=False,
        class_token="keep",
    ),
    Style(
        name="calibrated-keep", kind="activation", computes="x + W z + b for patches", fit="least squares",
        module="PatchMap", removes="patches", parameters="9 D² + 8 D", macs="D²", class_token="keep",
    ),
    Style(
        name="drop", kind="activation", computes="x",
        module="Zero", removes="branch", parameters="0", macs="0", is_last_resort=True,
    ),
)  # fmt: skip
STYLES: dict[str, Style] = {style.name: style for style in _ROWS}


@dataclass(frozen=True)
class Preset:
    """A pair of styles that has a name."""

    attention: str
    activation: str
    has_stream_gelu: bool = False
    """Whether a GELU follows every block of which both layers are removed, as in the release of the paper."""

    @property
    def styles(self) -> tuple[str, str]:
        return self.attention, self.activation


PRESETS: dict[str, Preset] = {
    "plain": Preset("skip", "identity"),
    "norm": Preset("norm", "identity"),
    "authors": Preset("norm", "identity", has_stream_gelu=True),
    "calibrated": Preset("constant", "calibrated"),
}


def styles_for(kind: Kind) -> tuple[str, ...]:
    """Return the names of the styles that remove layers of ``kind``.

    >>> styles_for("activation")
    ('identity', 'calibrated', 'identity-keep', 'calibrated-keep', 'drop')
    """
    return tuple(style.name for style in STYLES.values() if style.kind == kind)
