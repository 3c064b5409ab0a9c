"""Residual branches of a traced model, found by structure alone, so that a family needs no entry here.

* A branch is ``out = x + f(x)`` where nothing outside reads the inside of ``f``.
* Attention is a matrix product of two values that both come from the image.

:mod:`hetdpt.adapters.anatomy` reads what is inside a branch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from hetdpt.adapters.trace import IMAGE, Call, Node, Trace

ADDITIONS = {"add", "add_"}
MULTIPLICATIONS = {"mul", "mul_"}
RESHAPES = {"view", "unsqueeze", "reshape", "_to_copy"}
PRODUCTS = {"bmm", "baddbmm", "mm", "matmul", "einsum"}


@dataclass(frozen=True)
class Branch:
    """``out = x + f(x)``: the node of the sum, of ``x``, of the last node of ``f``, and all nodes of ``f``."""

    out: Node
    stream: Node
    end: int
    interior: frozenset[int]

    @property
    def owner(self) -> str:
        """Path of the module whose ``forward`` adds the branch to the stream."""
        return self.out.owner


@dataclass(frozen=True)
class Inside:
    """A module that runs entirely inside a branch, once per forward pass, and so may be replaced."""

    call: Call
    is_effective: bool
    """False for modules that are the identity in evaluation: dropout, drop path, identity."""

    @property
    def path(self) -> str:
        return self.call.path

    def holds(self, path: str) -> bool:
        """Whether ``path`` is this module or inside it."""
        return f"{path}.".startswith(f"{self.path}.")

    @property
    def keeps_shape(self) -> bool:
        given, made = self.call.input, self.call.output
        return given is not None and made is not None and given.shape == made.shape


class Reading:
    """A trace with indices for fast queries."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.nodes = trace.nodes
        self.outputs = trace.outputs
        # outer before inner, also where both ran the same nodes
        self.calls = sorted(trace.calls, key=lambda call: (call.start, -call.stop, len(call.path)))
        self.consumers = trace.consumers()
        self.times_called = Counter(call.path for call in trace.calls)
        self.modules = dict(model.named_modules())
        self.parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.times_read = Counter(name for node in trace.nodes for name in node.parameters)

    @cached_property
    def branches(self) -> list[Branch]:
        """Return every closed residual branch, in order of execution."""
        found = []
        for node in self.nodes:
            if node.op in ADDITIONS and len(node.inputs) == 2:
                sides = (node.inputs, node.inputs[::-1])
                found += [b for stream, end in sides if (b := self.branch(node, stream, end))][:1]
        return found

    def branch(self, out: Node, stream: int, end: int) -> Branch | None:
        """Return ``out = stream + end`` as a branch if ``end`` depends on nothing but ``stream``."""
        is_sum = stream > IMAGE and self.nodes[stream].shape == out.shape == self.nodes[end].shape
        interior = self.between(stream, end) if is_sum else frozenset[int]()
        readers = {reader for node in interior for reader in self.consumers[node]}
        is_closed = bool(interior) and readers <= interior | {out.index}
        return Branch(out, self.nodes[stream], end, interior) if is_closed else None

    def between(self, stream: int, end: int) -> frozenset[int]:
        """Return the nodes on the way from ``stream`` to ``end``; none where ``end`` has another source."""
        seen: set[int] = set()
        todo = [end]
        while todo:
            index = todo.pop()
            if index < stream:
                return frozenset()
            if index not in seen and index != stream:
                seen.add(index)
                todo += self.sources(index)
        return frozenset(seen)

    def sources(self, index: int) -> list[int]:
        """Return the operands of a node that depend on the image."""
        return [i for i in self.nodes[index].inputs if self.nodes[i].is_derived]

    def factor(self, index: int) -> tuple[str, tuple[int, ...]] | None:
        """Return the parameter that a node multiplies by and the shape it has there: the mark of LayerScale.

        None where the factor is anything but one parameter, at most reshaped, that nothing else reads.
        """
        node = self.nodes[index]
        names, inputs, shape = node.parameters, node.inputs, None
        constants = [i for i in inputs if not self.nodes[i].is_derived]
        while len(constants) == 1 and not names and self.nodes[constants[0]].op in RESHAPES:
            shape = shape or self.nodes[constants[0]].shape
            names, inputs = self.nodes[constants[0]].parameters, self.nodes[constants[0]].inputs
            constants = list(inputs)
        is_factor = node.op in MULTIPLICATIONS and len(names) == 1 and not constants and len(self.sources(index)) == 1
        if not is_factor or self.times_read[names[0]] != 1 or names[0] not in self.parameters:
            return None
        return names[0], shape or self.parameters[names[0]]

    def is_product(self, index: int) -> bool:
        """Whether both factors of a matrix product depend on the image: the mark of attention."""
        op = self.nodes[index].op
        is_fused = op.startswith("_scaled_dot_product")
        return is_fused or (op in PRODUCTS and len(self.sources(index)) >= 2)

    def ran_in(self, call: Call) -> list[int]:
        """Return the nodes of a call that depend on the image."""
        return [i for i in range(call.start, call.stop) if self.nodes[i].is_derived]

    def inside(self, branch: Branch) -> list[Inside]:
        """Return the largest replaceable modules of ``branch``, in order of execution."""
        found: list[Inside] = []
        for call in self.calls:
            ran = self.ran_in(call)
            is_within = branch.interior.issuperset(ran) if ran else call.input_node in branch.interior
            is_once = self.times_called[call.path] == 1
            is_part = any(other.holds(call.path) for other in found)
            if is_within and is_once and not is_part:
                found.append(Inside(call, is_effective=bool(ran)))
        return found
