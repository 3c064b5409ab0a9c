"""FFNs inside residual branches: Linear - activation - Linear, and gated ones (SwiGLU)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hetdpt.adapters.branches import MULTIPLICATIONS, Branch, Inside, Reading
from hetdpt.adapters.trace import Call

# Operations that map zero to zero: only these may be between a branch's last module and the residual sum.
ZERO_TO_ZERO = MULTIPLICATIONS | {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "roll", "slice", "clone", "expand", "squeeze"),
    *("unsqueeze", "select", "constant_pad_nd", "index", "_to_copy", "alias", "detach"),
}


# Operations of a gated FFN, which treats every token separately.
TOKENWISE = MULTIPLICATIONS | {
    *("addmm", "mm", "view", "_unsafe_view", "split", "slice", "clone", "add", "silu", "gelu", "relu", "sigmoid"),
    *("native_layer_norm", "split_with_sizes", "_to_copy", "clamp"),
}


@dataclass(frozen=True)
class Ffn:
    """Paths of ``second(activation(first(z)))`` and of what may be folded into the merged layer."""

    first: str
    activation: str
    second: str
    between: tuple[str, ...]
    """Dropouts on the hidden features."""
    norm: str | None
    """The LayerNorm whose output only ``first`` reads."""
    scale: str | None
    """The LayerScale parameter that multiplies the output of ``second``."""
    is_end: bool
    """Whether the branch adds the (scaled) output of ``second`` to the stream."""
    core: str | None = None
    """The module of the branch that computes this FFN and nothing else; None if there is none.

    ``nn.Sequential`` does not count: it would call whatever is added to it.
    """


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is one matrix: Linear, or a 1 x 1 convolution that only mixes channels."""
    if type(module) is nn.Conv2d:
        is_pointwise = module.kernel_size == module.stride == module.dilation == (1, 1) and module.groups == 1
        return is_pointwise and module.padding in ((0, 0), "valid", "same")
    return type(module) is nn.Linear


def calls_of(reading: Reading, branch: Branch) -> list[Call]:
    """Return the calls inside ``branch`` of modules that are called once."""
    return [
        call
        for call in reading.calls
        if (ran := reading.ran_in(call)) and branch.interior.issuperset(ran) and reading.times_called[call.path] == 1
    ]


def linears_of(reading: Reading, branch: Branch) -> list[Call]:
    return [call for call in calls_of(reading, branch) if is_linear(reading.modules[call.path])]


def find_ffn(reading: Reading, branch: Branch, second: Call) -> Ffn | None:
    """Return the FFN that ends with ``second``: another linear layer and one activation lead to it and nowhere else."""
    for activation in calls_of(reading, branch):
        if not (_leads_only_to(reading, activation, second) and _is_elementwise(reading, activation)):
            continue
        for first in linears_of(reading, branch):
            if _leads_only_to(reading, first, activation) and _is_only_way_out(reading, branch, second):
                return _with_neighbours(reading, branch, first, activation, second)
    return None


def is_gated(reading: Reading, core: Inside) -> bool:
    """Whether a module multiplies two of its values and treats every token separately."""
    ran = reading.ran_in(core.call)
    multiplies = any(reading.nodes[i].op in MULTIPLICATIONS and len(reading.sources(i)) >= 2 for i in ran)
    return multiplies and {reading.nodes[i].op for i in ran} <= TOKENWISE


def _is_elementwise(reading: Reading, call: Call) -> bool:
    """Whether a module works on every value separately: a GELU does, a norm or a linear layer does not."""
    ran = [reading.nodes[i] for i in reading.ran_in(call)]
    keeps_shape = call.output is not None and all(node.shape == call.output.shape for node in ran)
    is_layer = any("norm" in node.op or node.op in ("addmm", "mm", "bmm", "convolution") for node in ran)
    return keeps_shape and not is_layer


def _leads_only_to(reading: Reading, one: Call, two: Call) -> bool:
    """Whether the output of ``one`` is the input of ``two`` and nothing else reads it."""
    node = one.output_node
    is_read = node is not None and node == two.input_node
    return is_read and all(two.start <= reader < two.stop for reader in reading.consumers[node or 0])


def _is_only_way_out(reading: Reading, branch: Branch, second: Call) -> bool:
    """Whether the branch passes on only the output of ``second``, possibly scaled or normalised."""
    return second.output_node == branch.end or bool(reading.between(second.output_node or 0, branch.end))


def _with_neighbours(reading: Reading, branch: Branch, first: Call, activation: Call, second: Call) -> Ffn:
    hidden = {first.output_node, activation.output_node}
    dropouts = [c for c in reading.calls if c.start == c.stop <= second.start and c.input_node in hidden]
    norms = [c.path for c in calls_of(reading, branch) if _leads_only_to(reading, c, first)]
    norms = [path for path in norms if isinstance(reading.modules[path], nn.LayerNorm)]
    scale = _scale(reading, second)
    end = reading.consumers[second.output_node or 0][0] if scale else second.output_node
    return Ffn(
        first=first.path,
        activation=activation.path,
        second=second.path,
        between=tuple(c.path for c in dropouts if reading.times_called[c.path] == 1),
        norm=norms[0] if norms else None,
        scale=scale,
        is_end=end == branch.end,
    )


def _scale(reading: Reading, second: Call) -> str | None:
    """Return the parameter that scales each output feature of ``second`` directly after it; None without one."""
    readers = reading.consumers[second.output_node or 0]
    factor = reading.factor(readers[0]) if len(readers) == 1 else None
    if factor is None or second.output is None:
        return None
    name, shape = factor
    weight = reading.modules[second.path].weight
    axis = -1 if weight.ndim == 2 else 1
    aligned = [1] * len(second.output.shape)
    aligned[axis] = weight.shape[0]
    padded = (1,) * (len(aligned) - len(shape)) + shape
    return name if padded == tuple(aligned) else None
