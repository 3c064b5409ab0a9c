"""The removable layers of a model: its sites, and for each the modules that surgery changes.

An attention site is a residual branch with attention in it; an activation site is Linear - activation - Linear (or
1 x 1 convolutions) in one; a gated FFN (SwiGLU) multiplies two values instead and is marked. Nothing here changes a
model, and no family is known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from hetdpt.adapters.branches import ADDITIONS, Branch, Inside, Reading
from hetdpt.adapters.ffn import ZERO_TO_ZERO, Ffn, calls_of, find_ffn, is_gated, linears_of
from hetdpt.adapters.huggingface import require_images, vision_tower_of
from hetdpt.adapters.trace import Call, Node, Ref, Trace, trace
from hetdpt.core.errors import ModelError
from hetdpt.core.gates import Extras, OnDemand
from hetdpt.core.plan import Anatomy, Kind, Site


@dataclass(frozen=True)
class Layout:
    """The layout of a branch's values at some place: their shape without the images, and which axis has the channels.

    >>> Layout((196, 192), 1).width, Layout((64, 14, 14), 0).with_width(32).shape
    (192, (32, 14, 14))
    """

    shape: tuple[int, ...]
    axis: int

    @property
    def width(self) -> int:
        return self.shape[self.axis]

    def with_width(self, width: int) -> Layout:
        return replace(self, shape=tuple(width if axis == self.axis else side for axis, side in enumerate(self.shape)))


@dataclass(frozen=True)
class Parts:
    """Paths of the modules of a branch that is removed as a whole: entry (norm), core, exits (LayerScale, ...)."""

    entry: tuple[str, ...]
    core: str
    exits: tuple[str, ...]
    gate: str
    """The last module that computes anything: masking its output masks the branch."""
    parameters: tuple[str, ...]
    """LayerScale parameters of the branch that belong to the block itself."""
    scales: tuple[str, ...]
    """Those of them that multiply the gate's output."""
    early: tuple[str, ...]
    """Those of them that multiply the core's input."""
    tail: tuple[str, ...]
    """Other operations between the gate and the sum."""
    extras: Extras
    """What the core returns after its tensor (:class:`hetdpt.core.gates.Removed`). No tuple: None."""
    core_layout: Layout
    gate_layout: Layout
    is_direct: bool
    """Whether the layout stays the same from the stream to the gate: no windows are cut, nothing is rolled."""


@dataclass(frozen=True)
class Handle:
    """A site and where its parts are."""

    site: Site
    owner: str
    """The module that adds the branch to the stream: the block."""
    parts: Parts | None
    """None where the branch cannot be removed as a whole, which only matters to the removal ``drop`` of an FFN."""
    ffn: Ffn | None = None
    bias: str | None = None
    """The parameter that is added to the stream directly before this branch and read by no other branch before it: if
    the branch adds the same for all images, that can be added to this parameter instead."""
    images_at: int = 0
    """Which axis of the stream has the images: 1 where tokens come first, (N, B, D)."""


@dataclass(frozen=True)
class Survey:
    """The sites of one model."""

    handles: tuple[Handle, ...]
    refusals: tuple[str, ...]
    """One sentence for each attention or FFN that is not offered as a site."""
    anatomy: Anatomy
    input_size: tuple[int, int, int]

    @property
    def first_anatomy(self) -> Anatomy:
        """The anatomy as early plans have it: its width is W where the last attention returns maps (C, H, W)."""
        last = self.handles[-1]
        if last.ffn or last.parts is None:
            return self.anatomy
        return replace(self.anatomy, width=last.parts.core_layout.shape[-1])

    def with_layouts(self, change: Callable[[str, Layout], Layout]) -> Survey:
        """Return the survey with changed layouts; ``change`` gets the path of a module and the layout of its output."""

        def changed(parts: Parts) -> Parts:
            core, gate = change(parts.core, parts.core_layout), change(parts.gate, parts.gate_layout)
            return replace(parts, core_layout=core, gate_layout=gate)

        return replace(
            self, handles=tuple(replace(one, parts=one.parts and changed(one.parts)) for one in self.handles)
        )


class RefusedError(Exception):
    """Why one branch is not a site."""


def survey(model: nn.Module, input_size: tuple[int, int, int]) -> Survey:
    """Return the sites of ``model`` in order of execution; ``ModelError`` if it has none."""
    reading = Reading(model, _traced(model, input_size))
    handles: list[Handle] = []
    refusals: list[str] = []
    numbering = Numbering()
    branches = _elementary(reading)
    tokens_first = _tokens_first(model, input_size, [branch.out for branch, _ in branches])
    for branch, kind in branches:
        block = numbering.block_of(branch.owner, kind)
        try:
            _require_no_nesting(reading, branch.owner)
            handle = _attention(reading, branch, block) if kind == "attention" else _activation(reading, branch, block)
        except RefusedError as why:
            refusals.append(f"{kind} in {branch.owner or 'the model'}: {why}")
        else:
            handles.append(replace(handle, images_at=int(branch.out.index in tokens_first)))
    refusals += [*_nested(reading, branches), *_stray_attention(reading, branches)]
    if not handles:
        raise ModelError(_nothing_found(model, refusals))
    offered = [tuple(h.site.block for h in handles if h.site.kind == kind) for kind in ("attention", "activation")]
    anatomy = Anatomy(numbering.blocks, _width(reading, handles[-1]), *offered)
    return Survey(tuple(handles), tuple(refusals), anatomy, input_size)


def _traced(model: nn.Module, input_size: tuple[int, int, int]) -> Trace:
    require_images(model)
    try:
        return trace(model, input_size)
    except ModelError as error:
        if tower := vision_tower_of(model):
            raise ModelError(f"{error}; it takes text too: use its vision tower, model.{tower}") from error
        raise


def _tokens_first(model: nn.Module, input_size: tuple[int, int, int], streams: list[Node]) -> set[int]:
    """Return which of the streams, given those for two images, have the images after the tokens: (N, B, D).

    A third image distinguishes them from windows of two tokens, (B * windows, 2, D).
    """
    likely = [node.index for node in streams if len(node.shape) == 3 and node.shape[1] == 2 != node.shape[0]]
    nodes = trace(model, input_size, images=3).nodes if likely else []
    return {node.index for node in nodes if node.index in likely and node.shape[1:2] == (3,)}


def _width(reading: Reading, handle: Handle) -> int:
    """Return how many channels the stream has at a site."""
    if handle.ffn:
        width: int = reading.modules[handle.ffn.first].weight.shape[1]
        return width
    assert handle.parts is not None
    return handle.parts.core_layout.width


def _nothing_found(model: nn.Module, refusals: list[str]) -> str:
    found = "; ".join(refusals[:3]) or "neither"
    return (
        f"{type(model).__name__} has no removable layers: looked for residual branches around attention and around "
        f"Linear - activation - Linear, found {found}; give a vision transformer of timm or HuggingFace"
    )


class Numbering:
    """Counts blocks: a block is an attention and an FFN, mostly but not always in one module."""

    def __init__(self) -> None:
        self.blocks = 0
        self.owner = ""
        self.kinds: set[Kind] = set()

    def block_of(self, owner: str, kind: Kind) -> int:
        is_same_module = owner == self.owner and kind not in self.kinds
        is_sibling = owner.rpartition(".")[0] == self.owner.rpartition(".")[0]
        is_second_half = is_sibling and kind == "activation" and self.kinds == {"attention"}
        if not self.blocks or not (is_same_module or is_second_half):
            self.blocks += 1
            self.kinds = set()
        self.owner = owner
        self.kinds.add(kind)
        return self.blocks - 1


def _elementary(reading: Reading) -> list[tuple[Branch, Kind]]:
    """Return the innermost branches that contain attention or linear layers of an FFN, in order of execution."""
    found: list[tuple[Branch, Kind]] = []
    taken: set[int] = set()
    for branch in sorted(reading.branches, key=lambda b: len(b.interior)):
        has_attention = any(reading.is_product(i) for i in branch.interior)
        linears = linears_of(reading, branch)
        layers = {type(reading.modules[call.path]) for call in linears}
        is_ffn = len(linears) >= 2 and (nn.Linear in layers or any(find_ffn(reading, branch, call) for call in linears))
        if (has_attention or is_ffn) and taken.isdisjoint(branch.interior):
            found.append((branch, "attention" if has_attention else "activation"))
            taken |= branch.interior
    return sorted(found, key=lambda pair: pair[0].out.index)


def _nested(reading: Reading, branches: list[tuple[Branch, Kind]]) -> list[str]:
    """Return a sentence for each FFN that is not offered because its branch contains another branch."""
    taken = {i for branch, _ in branches for i in branch.interior}
    inner = [
        branch.owner
        for branch in reading.branches
        if not taken.isdisjoint(branch.interior)
        and any(call.start not in taken and find_ffn(reading, branch, call) for call in linears_of(reading, branch))
    ]
    return [
        f"activation in {owner or 'the model'}: its residual branch holds another one" for owner in dict.fromkeys(inner)
    ]


def _stray_attention(reading: Reading, branches: list[tuple[Branch, Kind]]) -> list[str]:
    """Return a sentence for each module whose attention does not have its own residual branch."""
    branched = {i for branch, kind in branches if kind == "attention" for i in branch.interior}
    products = [node for node in reading.nodes if reading.is_product(node.index) and node.index not in branched]
    owners = dict.fromkeys(node.owner or "the model" for node in products)
    return [f"attention in {owner}: not in a residual branch of its own that keeps the shape" for owner in owners]


def _require_no_nesting(reading: Reading, owner: str) -> None:
    """Refuse a layer to which ``nn.TransformerEncoder`` may pass nested tensors: tokens without padding."""
    around = [module for path, module in reading.modules.items() if not path or f"{owner}.".startswith(f"{path}.")]
    may_nest = any(isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor for module in around)
    given = [call.arguments for call in reading.calls if call.path == owner]  # tokens, a mask, is_causal, padding
    if may_nest and any(isinstance(padding, Ref) for arguments in given for padding in arguments[3:]):
        raise RefusedError(
            "its tokens have a padding mask, for which torch makes nested tensors; build nn.TransformerEncoder with "
            "enable_nested_tensor=False"
        )


def _attention(reading: Reading, branch: Branch, block: int) -> Handle:
    inside = reading.inside(branch)
    holders = [m for m in inside if any(reading.is_product(i) for i in reading.ran_in(m.call))]
    if len(holders) != 1:
        holds = "the block itself computes it" if not holders else f"{len(holders)} modules of the branch hold it"
        raise RefusedError(f"{holds}, and exactly one module must, to be replaced")
    site = Site("attention", block, holders[0].path)
    parts = _parts(reading, branch, inside, holders[0])
    return Handle(site, branch.owner, parts, bias=_bias_before(reading, branch))


def _activation(reading: Reading, branch: Branch, block: int) -> Handle:
    inside = reading.inside(branch)
    linears = linears_of(reading, branch)
    ffns = [ffn for second in linears if (ffn := find_ffn(reading, branch, second))]
    if ffns:
        core = next(m for m in inside if m.holds(ffns[-1].second))
        try:
            parts = _parts(reading, branch, inside, core)
        except RefusedError:
            parts = None
        ends = {call.path: call for call in linears}
        nodes = ends[ffns[-1].first].input_node, ends[ffns[-1].second].output_node
        is_alone = nodes == (core.call.input_node, core.call.output_node)
        is_alone = is_alone and not isinstance(reading.modules[core.path], nn.Sequential)
        ffn = replace(ffns[-1], core=core.path if is_alone else None)
        return Handle(Site("activation", block, ffn.activation), branch.owner, parts, ffn)
    holders = [m for m in inside if any(m.holds(call.path) for call in linears)]
    if len(holders) == 1 and is_gated(reading, holders[0]):
        site = Site("activation", block, holders[0].path, is_gated=True)
        return Handle(site, branch.owner, _parts(reading, branch, inside, holders[0]))
    layers = [reading.modules[call.path] for call in calls_of(reading, branch)]
    names = " - ".join(type(layer).__name__ for layer in layers if not any(layer.children()))
    raise RefusedError(f"looked for Linear - activation - Linear as the only way out, or a gated FFN; found {names}")


def _parts(reading: Reading, branch: Branch, inside: list[Inside], core: Inside) -> Parts:
    """Return the modules to remove with the whole branch; ``RefusedError`` where shapes would not match."""
    entry, exits = inside[: inside.index(core)], inside[inside.index(core) + 1 :]
    changing = next((m for m in (*entry, core, *exits) if not m.keeps_shape), None)
    if changing:
        shapes = [ref.shape if isinstance(ref, Ref) else None for ref in (changing.call.input, changing.call.output)]
        raise RefusedError(f"{changing.path} turns {shapes[0]} into {shapes[1]}, so that nothing fits in its place")
    last = next(m for m in (*reversed(exits), core) if m.is_effective)
    loose = [i for i in branch.interior if not any(m.call.start <= i < m.call.stop for m in inside)]
    after = {reading.nodes[i].op for i in loose if i >= last.call.stop}
    if after - ZERO_TO_ZERO:
        raise RefusedError(f"its output is still changed by {', '.join(sorted(after - ZERO_TO_ZERO))} before the sum")
    if branch.out.op == "add_" and branch.out.inputs[0] == branch.end:
        raise RefusedError("the stream is added into its output in place, so that it cannot be replaced")
    factors = {i: factor[0] for i in loose if (factor := reading.factor(i))}
    inner = {m.path for m in inside}
    return Parts(
        entry=tuple(m.path for m in entry),
        core=core.path,
        exits=tuple(m.path for m in exits),
        gate=last.path,
        parameters=tuple(factors.values()),
        scales=tuple(name for i, name in factors.items() if i >= last.call.stop),
        early=tuple(name for i, name in factors.items() if i < core.call.start),
        tail=tuple(reading.nodes[i].op for i in sorted(loose) if i >= last.call.stop and i not in factors),
        extras=_extras(core.call, reading.modules[core.path]),
        core_layout=_layout(reading, core.call, inner),
        gate_layout=_layout(reading, last.call, inner),
        is_direct=all(i >= last.call.stop or i in factors for i in loose),
    )


def _layout(reading: Reading, call: Call, inside: set[str]) -> Layout:
    """Return the layout of a call's output; in feature maps (B, ., ., .) parameters show where the channels are."""
    assert call.output is not None
    shape = call.output.shape[1:]
    if len(shape) < 3:
        return Layout(shape, len(shape) - 1)
    modules = [m for path, m in reading.modules.items() if any(f"{path}.".startswith(f"{part}.") for part in inside)]
    sizes = {p.shape[0] for module in modules for p in module.parameters(recurse=False) if p.ndim == 1}
    is_first, is_last = shape[0] in sizes, shape[-1] in sizes
    if is_first == is_last:
        is_first = any(isinstance(module, nn.Conv2d) for module in modules)
    return Layout(shape, 0 if is_first else len(shape) - 1)


def _bias_before(reading: Reading, branch: Branch) -> str | None:
    """Return the last parameter before ``branch``: the bias of an FFN's last layer, or a position embedding."""
    stream = branch.stream
    is_private = branch.interior.issuperset(set(reading.consumers[stream.index]) - {branch.out.index})
    if not is_private or stream.index in reading.outputs:
        return None
    before = next((other for other in reading.branches if other.out == stream), None)
    if before is not None:
        ffns = [ffn for call in linears_of(reading, before) if (ffn := find_ffn(reading, before, call))]
        has_bias = bool(ffns) and f"{ffns[-1].second}.bias" in reading.parameters
        return f"{ffns[-1].second}.bias" if has_bias and ffns[-1].is_end else None
    is_sum = stream.op in ADDITIONS and len(stream.parameters) == 1 and len(reading.sources(stream.index)) == 1
    if not is_sum or reading.times_read[stream.parameters[0]] != 1:
        return None
    sides = (1,) * len(stream.shape) + reading.parameters[stream.parameters[0]]
    fits = all(side == full for side, full in zip(sides[-len(stream.shape) + 1 :], stream.shape[1:], strict=True))
    return stream.parameters[0] if fits else None


def _extras(core: Call, module: nn.Module) -> Extras:
    """Return how to refill the tuple the core returns when it no longer runs."""
    if not core.is_tuple:
        return None
    number = core.number_of(module, "output_attentions")
    if len(core.results) == 1 and number is not None:  # a map follows, if it is requested
        return (OnDemand(number),)
    numbers: list[int | None] = []
    for value in core.results[1:]:
        same = [i for i, argument in enumerate(core.arguments) if _is_same(argument, value)]
        if value is not None and not isinstance(value, Ref) and not same:
            raise RefusedError(f"{core.path} also returns {value!r}, which cannot be known without running it")
        numbers.append(same[0] if same and value is not None else None)
    return tuple(numbers)


def _is_same(argument: object, value: object) -> bool:
    if isinstance(argument, tuple | list) and isinstance(value, tuple | list):
        return list(argument) == list(value)
    return argument == value
