"""The values that stages exchange: frozen, comparable, with a JSON round trip. No torch here.

Methods of selection return a ``Plan``, surgery applies one, and a user may write one by hand.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral
from typing import Any, ClassVar, Literal, get_args

from hetdpt.core.errors import PlanError
from hetdpt.core.styles import PRESETS, STYLES, ClassToken, ClassTokenChoice, Style, styles_for
from hetdpt.core.tokens import Tokens

Kind = Literal["attention", "activation"]
KINDS: tuple[Kind, Kind] = ("attention", "activation")
Removal = str | tuple[str, str]
"""A name from ``PRESETS``, or an explicit (attention style, activation style)."""


@dataclass(frozen=True)
class Site:
    """One removable layer of a model.

    >>> Site("attention", 3, "blocks.3.attn").block
    3
    """

    kind: Kind
    block: int
    path: str
    """The path of its module in the model, such as ``blocks.3.attn``."""
    is_gated: bool = False
    """Whether it is the activation of a gated FFN (SwiGLU), which has no exact linear form."""

    def __str__(self) -> str:
        return f"{self.kind} {self.block}"


@dataclass(frozen=True)
class Tail:
    """A tail of this many blocks: one more than before, or the first.

    >>> print(Tail(3), Site("attention", 3, "blocks.3.attn"), sep=", ")
    tail of 3, attention 3
    """

    length: int

    def __str__(self) -> str:
        return f"tail of {self.length}"


@dataclass(frozen=True)
class FewerFeatures:
    """The FFN of a block with this many hidden features, fewer than before.

    >>> print(FewerFeatures(3, 576))
    576 features in block 3
    """

    block: int
    count: int
    kind: ClassVar[Kind] = "activation"
    """The kind of layer that it makes narrower."""

    def __str__(self) -> str:
        return f"{self.count} features in block {self.block}"


@dataclass(frozen=True)
class FewerHeads:
    """The attention of a block with this many heads, fewer than before.

    >>> print(FewerHeads(3, 2), FewerHeads(4, 1), sep=", ")
    2 heads in block 3, 1 head in block 4
    """

    block: int
    count: int
    kind: ClassVar[Kind] = "attention"
    """The kind of layer that it makes narrower."""

    def __str__(self) -> str:
        return f"{self.count} head{'s' if self.count > 1 else ''} in block {self.block}"


@dataclass(frozen=True)
class FewerDims:
    """The heads of the attention of a block with this many dimensions each, fewer than before.

    >>> print(FewerDims(3, 48))
    heads of 48 dimensions in block 3
    """

    block: int
    count: int
    kind: ClassVar[Kind] = "attention"
    """The kind of layer that it makes narrower."""

    def __str__(self) -> str:
        return f"heads of {self.count} dimensions in block {self.block}"


@dataclass(frozen=True)
class Styled:
    """One removable layer, removed in a style of its own.

    >>> print(Styled(Site("attention", 3, "blocks.3.attn"), "linear"))
    attention 3 (linear)
    """

    site: Site
    style: str

    def __str__(self) -> str:
        return f"{self.site} ({self.style})"


@dataclass(frozen=True)
class FewerTokens:
    """More tokens merged in every block with attention than before.

    >>> print(FewerTokens(Tokens("tome", 8)))
    tome with r = 8
    """

    tokens: Tokens

    def __str__(self) -> str:
        return f"{self.tokens.method} with r = {self.tokens.r}"


Move = Site | Tail
"""What a plan may have more than another: one more layer removed, or a longer tail."""
Narrower = FewerFeatures | FewerHeads | FewerDims
"""One branch that is narrower than before."""
NARROWER: dict[str, type[Narrower]] = {"heads": FewerHeads, "head_dims": FewerDims, "features": FewerFeatures}
"""Fields of a plan that make branches narrower, in the order in which a block is fitted."""
FrontierMove = Styled | Tail | Narrower | FewerTokens
"""The same for a frontier: one more layer removed in some style, a longer tail, a narrower branch, or fewer tokens."""


@dataclass(frozen=True)
class Budget:
    """How many layers of each kind are removed."""

    attention: int
    activation: int

    @property
    def layers(self) -> int:
        """Layers of both kinds."""
        return self.attention + self.activation


@dataclass(frozen=True)
class Sample:
    """One observed point of the accuracy surface; accuracy in percent."""

    budget: Budget
    accuracy: float


@dataclass(frozen=True)
class Measurement:
    """A number that knows how it was obtained.

    >>> print(Measurement("throughput", 41.7, "img/s", "cpu", "float32", 8, spread=0.4))
    throughput 41.7 ± 0.4 img/s (cpu, float32, batch 8)
    """

    name: str
    value: float
    unit: str
    device: str
    dtype: str
    batch: int
    spread: float = 0.0
    """Half the interquartile range of the runs, in the same unit."""
    runs: int = 1

    def __str__(self) -> str:
        where = f"({self.device}, {self.dtype}, batch {self.batch})"
        return f"{self.name} {self.value:.4g} ± {self.spread:.2g} {self.unit} {where}"


@dataclass(frozen=True)
class Anatomy:
    """The structure of the model that a plan was made for: its blocks, its width, and which blocks have which sites."""

    blocks: int
    width: int
    """Channels of the residual stream in the last block."""
    attention: tuple[int, ...]
    activation: tuple[int, ...]

    def __str__(self) -> str:
        counts = f"{len(self.attention)} attention and {len(self.activation)} activation sites"
        return f"{self.blocks} blocks of width {self.width} with {counts}"


@dataclass(frozen=True)
class Fit:
    """How well the replacement of one removed layer was fitted, or the inputs of attention in one block of a tail."""

    kind: Kind | Literal["tail"]
    block: int
    style: str
    r2: float
    """1 - E || y - r(x) ||^2 / E || y ||^2 for a layer y and its replacement r, on images r was not fitted on.

    0 is as bad as skipping the layer, 1 is perfect.
    """
    ridge: float | None = None
    """The ridge that was best on held-out images; None for constants."""


@dataclass(frozen=True)
class Plan:
    """Which layers are removed, and how.

    Indices are blocks, counted from 0; they are sorted and must not repeat.

    >>> plan = Plan(attention=(10, 1), activation=(8,))
    >>> plan.attention, len(plan), plan.styles
    ((1, 10), 3, ('skip', 'identity'))
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    attention: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    removal: Removal = "plain"
    anatomy: Anatomy | None = None
    """The model it was made for; None fits any model that has these sites."""
    fits: tuple[Fit, ...] = field(default=(), compare=False)
    """How well fitted replacements fit, in the order in which they were fitted."""
    tail: int = 0
    """In how many of the last blocks patches are not updated, but only the class token and those beside it.

    1 changes no answer; beyond, keys and values of patches are linear maps that are fitted on images.
    """
    site_styles: tuple[tuple[Kind, int, str], ...] = ()
    """(kind, block, style) of the layers that are removed in another style than ``removal`` says."""
    features: tuple[tuple[int, int], ...] = ()
    """(block, count) of the FFNs that keep only so many of their hidden features."""
    heads: tuple[tuple[int, int], ...] = ()
    """(block, count) of the attention layers that keep only so many of their heads."""
    head_dims: tuple[tuple[int, int], ...] = ()
    """(block, count) of the attention layers whose heads keep only so many dimensions."""
    tokens: Tokens | None = None
    """How blocks reduce tokens, if they do."""

    def __post_init__(self) -> None:
        for kind in KINDS:
            object.__setattr__(self, kind, _blocks(kind, getattr(self, kind)))
        object.__setattr__(self, "removal", _removal(self.removal))
        if not _is_block(self.tail):
            raise PlanError(f"tail of a plan is how many of the last blocks it has, such as 2, not {self.tail!r}")
        object.__setattr__(self, "tail", int(self.tail))
        object.__setattr__(self, "site_styles", self._settled_styles())
        for name in NARROWER:
            object.__setattr__(self, name, self._settled_counts(name))
        if not isinstance(self.tokens, Tokens | None):
            raise PlanError(f"tokens of a plan is null or an object with method and r, not {self.tokens!r}")

    def _settled_styles(self) -> tuple[tuple[Kind, int, str], ...]:
        """Return ``site_styles`` sorted, without those that ``removal`` says anyway."""
        found = {(kind, block): style for kind, block, style in _site_styles(self.site_styles)}
        for (kind, block), style in found.items():
            if kind not in KINDS or style not in styles_for(kind) or block not in getattr(self, kind):
                raise PlanError(
                    f"site_styles of a plan has {kind!r}, {block!r}, {style!r}; expected a kind and a block that the "
                    "plan removes, and a style for that kind (docs/oneshot.md)"
                )
        own = dict(zip(KINDS, self.styles, strict=True))
        return tuple(sorted((kind, block, style) for (kind, block), style in found.items() if style != own[kind]))

    def _settled_counts(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return a field of ``NARROWER`` sorted, without blocks that have none because that layer is removed."""
        found, removed = dict(_counts(name, getattr(self, name))), getattr(self, NARROWER[name].kind)
        return tuple(sorted((block, count) for block, count in found.items() if block not in removed))

    def __len__(self) -> int:
        return len(self.attention) + len(self.activation)

    @property
    def styles(self) -> tuple[str, str]:
        """(attention style, activation style)."""
        return PRESETS[self.removal].styles if isinstance(self.removal, str) else self.removal

    @property
    def has_stream_gelu(self) -> bool:
        """Whether a GELU follows every block of which both layers are removed (preset ``authors``)."""
        return isinstance(self.removal, str) and PRESETS[self.removal].has_stream_gelu

    @property
    def class_token(self) -> ClassToken:
        """Whether the class token keeps its FFN where patches lose their activation (see ``with_class_token``)."""
        kept = [style for _, _, style in self.site_styles if STYLES[style].class_token == "keep"]
        return "keep" if kept else self.style_of("activation").class_token

    @property
    def budget(self) -> Budget:
        return Budget(len(self.attention), len(self.activation))

    def plus(self, *moves: Move | FrontierMove) -> Plan:
        """Return the plan that has ``moves`` too: more layers removed, a longer tail, narrower branches, fewer tokens.

        >>> plan = Plan(attention=(3,)).plus(Site("attention", 1, "blocks.1.attn"), Tail(2), FewerFeatures(0, 64))
        >>> plan.attention, plan.tail, plan.features
        ((1, 3), 2, ((0, 64),))
        """
        styled = {move.site: move.style for move in moves if isinstance(move, Styled)}
        sites = [*(move for move in moves if isinstance(move, Site)), *styled]
        more = {kind: tuple(site.block for site in sites if site.kind == kind) for kind in KINDS}
        attention, activation = ((*getattr(self, kind), *more[kind]) for kind in KINDS)
        tail = max(self.tail, *(move.length for move in moves if isinstance(move, Tail)), 0)
        narrower: dict[str, Any] = {
            name: (*getattr(self, name), *((move.block, move.count) for move in moves if isinstance(move, kind)))
            for name, kind in NARROWER.items()
        }
        styles = (*self.site_styles, *((site.kind, site.block, style) for site, style in styled.items()))
        tokens = [move.tokens for move in moves if isinstance(move, FewerTokens)]
        return replace(
            self,
            tokens=tokens[-1] if tokens else self.tokens,
            attention=attention,
            activation=activation,
            tail=tail,
            site_styles=styles,
            **narrower,
        )

    def removes(self, site: Site) -> bool:
        """Whether this plan removes ``site``."""
        return site.block in getattr(self, site.kind)

    def style_of(self, what: Kind | Site) -> Style:
        """Return the row of the style in which a layer is removed, or layers of a kind unless ``site_styles`` differ.

        >>> plan = Plan(attention=(1, 2), site_styles=(("attention", 2, "norm"),))
        >>> plan.style_of("attention").name, plan.style_of(Site("attention", 2, "blocks.2.attn")).name
        ('skip', 'norm')
        """
        if not isinstance(what, Site):
            return STYLES[self.styles[KINDS.index(what)]]
        own = [style for kind, block, style in self.site_styles if (kind, block) == (what.kind, what.block)]
        return STYLES[own[0]] if own else self.style_of(what.kind)

    def with_style(self, site: Site, style: str) -> Plan:
        """Return the plan that also removes ``site``, in this style."""
        if not self.removes(site):
            return self.plus(Styled(site, style))
        return replace(self, site_styles=(*self.site_styles, (site.kind, site.block, style)))

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not len(self) and not self.tail and not self.narrower and self.tokens is None

    @property
    def narrower(self) -> tuple[Narrower, ...]:
        """The branches that are narrower, in order of execution.

        >>> [str(move) for move in Plan(features=((0, 64), (1, 32)), heads=((1, 2),)).narrower]
        ['64 features in block 0', '2 heads in block 1', '32 features in block 1']
        """
        moves: list[Narrower] = [kind(*row) for name, kind in NARROWER.items() for row in getattr(self, name)]
        return tuple(sorted(moves, key=lambda move: move.block))  # stable: attention comes first

    @property
    def narrowed(self) -> int:
        """How many layers are narrower; an attention of fewer and smaller heads is one.

        >>> Plan(features=((1, 32),), heads=((1, 2),), head_dims=((1, 48),)).narrowed
        2
        """
        return len({(move.kind, move.block) for move in self.narrower})

    def without_narrower(self) -> Plan:
        """Return the plan with all branches as wide as they were."""
        none: dict[str, Any] = dict.fromkeys(NARROWER, ())
        return replace(self, **none)

    @property
    def fitted(self) -> tuple[str, ...]:
        """The styles of its removed layers that are fitted on images."""
        sites = [Site(kind, block, "") for kind in KINDS for block in getattr(self, kind)]
        names = dict.fromkeys(self.style_of(site).name for site in sites)
        return tuple(name for name in names if STYLES[name].fit)

    @property
    def needs_images(self) -> bool:
        """Whether something of it is fitted on images."""
        return bool(self.fitted) or self.tail > 1 or bool(self.narrower)

    @property
    def is_any_fitted(self) -> bool:
        """Whether one of its styles is fitted on images, even if it removes no such layer."""
        return any(STYLES[name].fit for name in (*self.styles, *self.fitted))

    def check(self, anatomy: Anatomy) -> None:
        """Raise ``PlanError`` unless every site of the plan exists in a model of this ``anatomy``."""
        if self.anatomy not in (None, anatomy):
            raise PlanError(
                f"the plan was made for a model with {self.anatomy}, but this one has {anatomy}; "
                "make a plan for this model, or delete 'anatomy' from the plan to apply it anyway"
            )
        if self.tail > anatomy.blocks:
            raise PlanError(
                f"the plan has a tail of {self.tail} blocks but this model has {anatomy.blocks} blocks; "
                f"give a tail of at most {anatomy.blocks}"
            )
        for kind in KINDS:
            offered = getattr(anatomy, kind)
            for block in getattr(self, kind):
                if block >= anatomy.blocks:
                    raise PlanError(
                        f"the plan removes {kind} {block} but this model has blocks 0-{anatomy.blocks - 1}; "
                        "was it made for a deeper model?"
                    )
                if block not in offered:
                    raise PlanError(
                        f"the plan removes {kind} {block} but block {block} of this model has no {kind} site; "
                        f"blocks that have one: {_spell(offered)}"
                    )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan written in ``text``; ``PlanError`` says what is wrong with it."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"a plan is a JSON object, but got invalid JSON ({error}); see Plan.to_json") from None
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Any) -> Plan:
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict):
            raise PlanError(f"a plan is a JSON object with keys {_spell(sorted(known))}, not {type(values).__name__}")
        if unknown := set(values) - known:
            raise PlanError(f"a plan has the keys {_spell(sorted(known))}, not {_spell(sorted(unknown))}")
        removal = values.get("removal", "plain")
        return cls(
            attention=values.get("attention", ()),
            activation=values.get("activation", ()),
            removal=tuple(removal) if isinstance(removal, list) else removal,
            tail=values.get("tail", 0),
            site_styles=_site_styles(values.get("site_styles", ())),
            **{name: _counts(name, values.get(name, ())) for name in NARROWER},
            tokens=_tokens(values.get("tokens")),
            anatomy=_anatomy(values.get("anatomy")),
            fits=_fits(values.get("fits", ())),
        )


def with_class_token(removal: Removal, class_token: ClassToken) -> Removal:
    """Return ``removal`` with the activation style in which the class token keeps its FFN, or shares that of patches.

    >>> with_class_token("calibrated", "keep"), with_class_token(("constant", "calibrated-keep"), "share")
    (('constant', 'calibrated-keep'), 'calibrated')
    """
    plan = Plan(removal=removal)
    if plan.class_token == class_token:
        return plan.removal
    attention, activation = plan.styles
    name = activation.removesuffix("-keep") if class_token == "share" else f"{activation}-keep"
    if name not in STYLES or plan.has_stream_gelu:
        able = [f"{style.name!r}" for style in STYLES.values() if f"{style.name}-keep" in STYLES]
        raise PlanError(
            f"the class token can keep its FFN with activation style {' or '.join(able)}, not with removal "
            f"{removal!r}; use class_token 'share'"
        )
    named = [preset for preset, row in PRESETS.items() if row.styles == (attention, name) and not row.has_stream_gelu]
    return named[0] if named else (attention, name)


def require_class_token(choice: object, removal: Removal) -> None:
    """Raise ``PlanError`` unless ``choice`` is one that ``removal`` has styles for, or ``auto``."""
    if choice not in get_args(ClassTokenChoice):
        raise PlanError(f"class_token is {choice!r}; expected {' or '.join(get_args(ClassTokenChoice))}")
    if choice != "auto":
        with_class_token(removal, choice)  # type: ignore[arg-type]


def _spell(values: Any) -> str:
    return ", ".join(str(value) for value in values) or "none"


def _is_block(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, Integral) and int(value) >= 0  # numpy's integers too


def _blocks(kind: str, blocks: Any) -> tuple[int, ...]:
    if not isinstance(blocks, Collection) or not all(_is_block(block) for block in blocks):
        raise PlanError(
            f"{kind} of a plan lists block numbers counted from 0, such as (1, 10), not {reprlib.repr(blocks)}"
        )
    twice = sorted(block for block, count in Counter(blocks).items() if count > 1)
    if twice:
        raise PlanError(f"the plan lists {kind} {_spell(twice)} more than once; name every block once")
    return tuple(sorted(int(block) for block in blocks))


def _removal(removal: object) -> Removal:
    if isinstance(removal, str) and removal in PRESETS:
        return removal
    if isinstance(removal, tuple) and len(removal) == 2:
        attention, activation = removal
        if attention in styles_for("attention") and activation in styles_for("activation"):
            return attention, activation
    raise PlanError(
        f"removal is one of {_spell(PRESETS)} or a pair (attention style of {_spell(styles_for('attention'))}; "
        f"activation style of {_spell(styles_for('activation'))}), not {removal!r}"
    )


def _site_styles(values: Any) -> tuple[tuple[Kind, int, str], ...]:
    """Return rows of ``Plan.site_styles`` as tuples; ``PlanError`` if they are something else."""
    if not isinstance(values, list | tuple) or not all(map(_is_site_style, values)):
        raise PlanError(f"site_styles of a plan is a list of (kind, block, style), not {reprlib.repr(values)}")
    return tuple((kind, int(block), style) for kind, block, style in values)


def _is_site_style(row: Any) -> bool:
    if not isinstance(row, list | tuple) or len(row) != 3:
        return False
    return isinstance(row[0], str) and _is_block(row[1]) and isinstance(row[2], str)


def _counts(name: str, values: Any) -> tuple[tuple[int, int], ...]:
    """Return rows of a field of ``NARROWER`` as tuples; ``PlanError`` if they are something else."""
    is_list = isinstance(values, list | tuple) and all(isinstance(row, list | tuple) for row in values)
    if not is_list or not all(len(row) == 2 and all(map(_is_block, row)) and row[1] > 0 for row in values):
        raise PlanError(f"{name} of a plan is a list of (block, count), not {reprlib.repr(values)}")
    return tuple((int(block), int(count)) for block, count in values)


def _tokens(values: Any) -> Tokens | None:
    try:
        return None if values is None else Tokens.from_dict(values)
    except (TypeError, ValueError):
        raise PlanError(
            f"tokens of a plan is null or an object with method and r, not {reprlib.repr(values)}"
        ) from None


def _fits(values: Any) -> tuple[Fit, ...]:
    known = {field.name for field in fields(Fit)}
    if not isinstance(values, list | tuple) or not all(isinstance(fit, dict) and set(fit) == known for fit in values):
        raise PlanError(f"fits of a plan is a list of objects with the keys {_spell(sorted(known))}, not {values!r}")
    for fit in values:
        numbers = fit["r2"], 0.0 if fit["ridge"] is None else fit["ridge"]
        style = STYLES.get(fit["style"]) if isinstance(fit["style"], str) else None
        is_style = fit["style"] == fit["kind"] == "tail" or (
            fit["kind"] in KINDS and style is not None and style.fit is not None
        )
        is_fit = is_style and _is_block(fit["block"])
        if not is_fit or not all(isinstance(number, int | float) for number in numbers):
            raise PlanError(f"fits of a plan have a kind, a block, a fitted style and numbers, not {fit!r}")
    return tuple(Fit(**fit) for fit in values)


def _anatomy(values: Any) -> Anatomy | None:
    if values is None:
        return None
    known = [field.name for field in fields(Anatomy)]
    if not isinstance(values, dict) or set(values) != set(known):
        raise PlanError(f"anatomy of a plan is null or an object with the keys {_spell(known)}, not {values!r}")
    sites = {kind: _blocks(kind, values[kind]) for kind in KINDS}
    if not _is_block(values["blocks"]) or not _is_block(values["width"]):
        raise PlanError(f"blocks and width of a plan's anatomy are whole numbers, not {values!r}")
    return Anatomy(values["blocks"], values["width"], **sites)
