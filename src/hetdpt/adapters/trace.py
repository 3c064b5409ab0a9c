"""The forward pass of a model as a graph of operations, each with the module that ran it.

The model runs once on fake tensors: no arithmetic, no memory, any device (also ``meta``), any dtype. Nothing here
knows what an attention layer is; :mod:`hetdpt.adapters.branches` reads the graph.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetdpt.core.errors import HetDPTError, ModelError, first_line
from hetdpt.core.modules import WRONG_SIZE, clone

Watch = Callable[[nn.Module, dict[str, Tensor], Tensor], AbstractContextManager[object]]
NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What torch raises if a model cannot run on tensors without values."""
IMAGE = 0  # index of the node that stands for the model's input


@dataclass(frozen=True)
class Node:
    """One operation. ``inputs`` are the nodes it reads, one per operand; constants and parameters are not nodes."""

    index: int
    op: str
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    owner: str
    """Path of the innermost module whose ``forward`` ran it."""
    is_derived: bool
    """Whether its value depends on the image."""


@dataclass(frozen=True)
class Ref:
    """A tensor in a call: the node that made it (None for constants) and its shape."""

    node: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of one module: nodes ``start`` (inclusive) to ``stop`` (exclusive) ran inside it."""

    path: str
    start: int
    stop: int
    arguments: tuple[Any, ...]
    """Positional, then keyword: a ``Ref`` for a tensor, the value itself otherwise."""
    results: tuple[Any, ...]
    is_tuple: bool
    """Whether the module returned ``results`` as a tuple or as a single value."""
    keywords: tuple[str, ...] = ()
    """Names of the last of the ``arguments``."""

    def number_of(self, module: nn.Module, name: str) -> int | None:
        """Return the index among ``arguments`` of the argument ``name`` of ``module``."""
        positional = len(self.arguments) - len(self.keywords)
        _, *names = inspect.signature(type(module).forward).parameters  # without self
        named = [*names[:positional], *self.keywords]
        return named.index(name) if name in named else None

    @property
    def input(self) -> Ref | None:
        """The first tensor among the arguments."""
        return next((value for value in self.arguments if isinstance(value, Ref)), None)

    @property
    def output(self) -> Ref | None:
        """The first tensor among the results."""
        return next((value for value in self.results if isinstance(value, Ref)), None)

    @property
    def input_node(self) -> int | None:
        return self.input.node if self.input else None

    @property
    def output_node(self) -> int | None:
        return self.output.node if self.output else None


@dataclass
class Trace:
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: frozenset[int] = frozenset()
    """Nodes that the model returns, at any depth of its output."""
    attentions: tuple[int | None, ...] = ()
    """Nodes of the attention maps that it returns."""

    def consumers(self) -> list[list[int]]:
        """Return for each node the nodes that read it."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for source in set(node.inputs):
                readers[source].append(node.index)
        return readers


class _TraceRecorder(TorchDispatchMode):
    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        self.trace = Trace()
        self.parameters = parameters
        self.maker: dict[int, int] = {}
        self.alive: defaultdict[int, list[Tensor]] = defaultdict(list)
        """All tensors by their memory; kept alive so that their ids stay unique during the trace."""
        self.stack: list[str] = [""]

    def add(self, op: str, sources: list[Any], results: list[Any]) -> None:
        tensors = [t for t in sources if isinstance(t, Tensor)]
        inputs = tuple(self.maker[id(t)] for t in tensors if id(t) in self.maker)
        names = tuple(self.parameters[id(t)] for t in tensors if id(t) in self.parameters)
        outputs = [t for t in results if isinstance(t, Tensor)]
        if not outputs:  # queries such as "which device?"
            return
        index = len(self.trace.nodes)
        is_derived = index == IMAGE or any(self.trace.nodes[i].is_derived for i in inputs)
        shape = tuple(outputs[0].shape)
        self.trace.nodes.append(Node(index, op, inputs, names, shape, self.stack[-1], is_derived))
        for tensor in outputs:
            self.maker[id(tensor)] = index
            self.alive[_memory(tensor)].append(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        made = tree_leaves(results)
        self.add(func.overloadpacket.__name__, tree_leaves((args, kwargs)), made)
        if func._schema.is_mutable and made and isinstance(made[0], Tensor):  # writing to a part changes the whole
            self.maker |= {id(tensor): self.maker[id(made[0])] for tensor in self.alive[_memory(made[0])]}
        return results

    def ref(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.maker.get(id(value)), tuple(value.shape))
        return value


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _watch(recorder: _TraceRecorder, path: str, module: nn.Module) -> list[Any]:
    opened: list[tuple[int, tuple[Any, ...]]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = tuple(recorder.ref(v) for v in (*args, *kwargs.values()))
        opened.append((len(recorder.trace.nodes), arguments))
        recorder.stack.append(path)

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        recorder.stack.pop()
        start, arguments = opened.pop()
        values = output if isinstance(output, tuple) else (output,)
        results = tuple(recorder.ref(v) for v in values)
        stop = len(recorder.trace.nodes)
        if not path:
            leaves = [recorder.ref(leaf) for leaf in tree_leaves(output)]
            recorder.trace.outputs = frozenset(leaf.node for leaf in leaves if isinstance(leaf, Ref) and leaf.node)
            maps = [recorder.ref(leaf) for leaf in getattr(output, "attentions", None) or ()]
            recorder.trace.attentions = tuple(leaf.node if isinstance(leaf, Ref) else None for leaf in maps)
        is_tuple = isinstance(output, tuple)
        recorder.trace.calls.append(Call(path, start, stop, arguments, results, is_tuple, tuple(kwargs)))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def dry_run(model: nn.Module, shape: tuple[int, ...], watch: Watch) -> None:
    """Run ``model`` once on images of ``shape`` (B, C, H, W), in eval mode, without arithmetic or memory.

    ``watch`` gets the copy of the model that runs, stand-ins of its parameters and buffers by name, and the images; it
    returns a context to run in. Models whose control flow looks at values cannot run on fake tensors; they run on
    real zeros. ``ModelError`` says why the model fails on such images.
    """
    copy = clone(model).eval()  # some models cache results; fake tensors must not stay in them
    try:
        # inference mode hands operators to a dispatch mode undecomposed
        with torch.inference_mode(False), _silent_fakes(model), FakeTensorMode(allow_non_fake_inputs=True):
            _run_on_stand_ins(copy, shape, watch)
    except NEED_VALUES:
        _run_on_stand_ins(clone(model).eval(), shape, watch)


@contextmanager
def _silent_fakes(model: nn.Module) -> Iterator[None]:
    """Keep torch from logging failures that are reported anyway, and fake tensors out of the libraries' caches."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
        for cache in _caches(model):
            cache.cache_clear()


def _caches(model: nn.Module) -> Iterator[_lru_cache_wrapper[Any]]:
    """Return the cached functions and methods in the modules of ``model``'s classes, bare or inside a decorator.

    They are found through the globals of the methods, because a class's module need not have been imported.
    """
    members = [vars(cls) for cls in {type(module) for module in model.modules()}]
    methods = [value for place in members for value in place.values() if isinstance(value, FunctionType)]
    seen = {id(method.__globals__): method.__globals__ for method in methods}
    for value in [value for place in (*members, *seen.values()) for value in place.values()]:
        cells = value.__closure__ or () if isinstance(value, FunctionType) else ()
        inner = [cell.cell_contents for cell in cells if cell != CellType()]
        yield from (function for function in (value, *inner) if isinstance(function, _lru_cache_wrapper))


@torch.no_grad()
def _run_on_stand_ins(model: nn.Module, shape: tuple[int, ...], watch: Watch) -> None:
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    stand_ins = {name: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for name, t in tensors.items()}
    images = torch.zeros(shape, dtype=dtype, device="cpu")
    with _no_fast_path(), watch(model, stand_ins, images):
        try:
            torch.func.functional_call(model, stand_ins, (images,))
        except (HetDPTError, *NEED_VALUES):
            raise
        except Exception as error:  # whatever a model raises
            raise _refusal(model, shape, error) from error


def _refusal(model: nn.Module, shape: tuple[int, ...], error: Exception) -> ModelError:
    name, size, why = type(model).__name__, " x ".join(str(side) for side in shape[1:]), first_line(error)
    if isinstance(error, WRONG_SIZE):
        return ModelError(f"{name} does not take images of {size}: {why}; for another size, pass input_size=(C, H, W)")
    return ModelError(
        f"{name} was expected to run as model(images), but fails on images of {size} with {type(error).__name__}: {why}"
    )


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Make ``nn.MultiheadAttention`` compute separate products instead of one opaque operator."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def trace(model: nn.Module, input_size: tuple[int, int, int], images: int = 2) -> Trace:
    """Return the graph of one forward pass on that many ``images`` of ``input_size`` (C, H, W)."""
    traces = []

    @contextmanager
    def record(copy: nn.Module, stand_ins: dict[str, Tensor], given: Tensor) -> Iterator[None]:
        recorder = _TraceRecorder({id(t): name for name, t in stand_ins.items()})
        recorder.add("image", [], [given])
        with ExitStack() as stack:
            for path, module in copy.named_modules():
                for hook in _watch(recorder, path, module):
                    stack.callback(hook.remove)
            stack.enter_context(recorder)
            yield
        traces.append(recorder.trace)

    dry_run(model, (images, *input_size), record)
    return traces[0]
