"""A model and its variants on the same images, each variant run only from the first module in which it differs.

A variant is a copy of the model with some of its modules replaced. The outputs of the modules that finish before the
first of them are cached in the pass of the model itself, so no ``forward`` is copied and no model family is known. No
site, no plan and no entropy is known here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only

from hetdpt.adapters.heads import logits_of
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.modules import clone, tensors_in

K = TypeVar("K")
"""The key of a variant."""
ProbeName = Literal["logits", "feature"]
PROBES = ("logits", "feature")
MEMORY = 1 << 30
"""Bytes of outputs that may be cached for one batch."""


class Probe:
    """Reads the output of a model or, with ``heads`` (paths of linear layers), their inputs."""

    def __init__(self, heads: tuple[str, ...] = ()) -> None:
        self.heads = heads

    @classmethod
    def of(cls, name: ProbeName, model: nn.Module, images: Tensor, purpose: str) -> Probe:
        """Return the probe called ``name``; ``purpose`` names its use in error messages."""
        if name not in PROBES:
            raise DataError(f"the probe of {purpose} is one of {', '.join(PROBES)}, not {name!r}")
        return cls(heads_of(model, images[:1]) if name == "feature" else ())

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return F (B, C) for ``images`` (B, C, H, W)."""
        given: list[Tensor] = []
        with ExitStack() as stack:
            for path in self.heads:
                head = model.get_submodule(path)
                stack.callback(head.register_forward_pre_hook(lambda _, args: given.append(args[0])).remove)
            answer = model(images)
        return torch.cat([values.reshape(len(images), -1) for values in given or [_logits(answer)]], 1)


def _logits(answer: Any) -> Tensor:
    """Return the logits in an output, or its first tensor if there are none."""
    try:
        return logits_of(answer)
    except ModelError:
        if not (tensors := tensors_in(answer)):
            raise
        return tensors[0]


def heads_of(model: nn.Module, images: Tensor) -> tuple[str, ...]:
    """Return the paths of the linear layers whose outputs make the logits; ``ModelError`` if there are none.

    They are the first linear layers on every path back from the logits. A residual stream leads past every linear
    layer to the image, which tells a model without a head from one with a head.
    """
    makers: dict[Node | None, str] = {}
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear):

                def keep(_: nn.Module, args: Any, output: Tensor, path: str = path) -> None:
                    makers[output.grad_fn] = path

                stack.callback(module.register_forward_hook(keep).remove)
        image = images.clone().requires_grad_().clone()
        answer = _logits(model(image))
    met, seen = _ways_back([answer.grad_fn], makers)
    if not met or image.grad_fn in seen:
        raise ModelError(
            f"probe 'feature' reads the input of the linear layers that compute the logits, but "
            f"{type(model).__name__} has none at its end; use probe 'logits', which reads the output of any model"
        )
    return tuple(dict.fromkeys(makers[node] for node in makers if node in met))


def _ways_back(ends: Iterable[Node | None], stops: Iterable[Node | None]) -> tuple[set[Node], set[Node]]:
    """Return the nodes among ``stops`` that are first on the paths back from ``ends``, and all nodes up to them."""
    stops, met, seen, todo = set(stops), set[Node](), set[Node](), [*ends]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in stops:
            met.add(node)
        else:
            todo += [source for source, _ in node.next_functions]
    return met, seen


@dataclass(frozen=True)
class CutPoint:
    """A moment of a pass: the (outermost) modules that had finished, and those whose outputs are read afterwards."""

    moment: int
    finished: frozenset[str]
    read: frozenset[str]


class ModuleTimeline:
    """When each module of a model ran, and what the probe was computed from, as recorded by autograd in one pass."""

    def __init__(self, model: nn.Module, probe: Probe, images: Tensor) -> None:
        self.clock = 0
        self.starts: dict[str, int] = {}
        self.stops: dict[str, int] = {}
        self.calls = Counter[str]()
        self.given: list[tuple[int, Node | None]] = []
        """The inputs of modules, and when; a variant may read them where the model does not."""
        self.makers: defaultdict[Node, set[str]] = defaultdict(set)
        self.unseen: set[str] = set()
        """Modules with an output that has no gradient: what reads it is not known."""
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            for path, module in model.named_modules():
                stack.enter_context(module.register_forward_pre_hook(partial(self._begin, path), with_kwargs=True))
                stack.enter_context(module.register_forward_hook(partial(self._end, path), with_kwargs=True))
            self.end = probe(model, images.clone().requires_grad_().clone()).grad_fn

    def _begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.starts.setdefault(path, self.clock)
        self.given += [(self.clock, value.grad_fn) for value in tensors_in(args, kwargs)]
        self.clock += 1

    def _end(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.calls[path] += 1
        given = {id(value) for value in tensors_in(args, kwargs)}
        answers = tensors_in(output)
        if all(id(answer) in given for answer in answers):  # dropout, identity: nothing to cache
            return
        self.stops[path] = self.clock
        self.clock += 1
        for answer in answers:
            if answer.grad_fn is None:
                self.unseen.add(path)
            else:
                self.makers[answer.grad_fn].add(path)

    def cut_before(self, paths: Iterable[str]) -> CutPoint:
        """Return the moment at which the first of the modules at ``paths`` starts.

        Modules that finished before it cannot depend on it. A module that runs twice is not counted as finished.
        """
        moment = min(map(self._start, paths))
        done = {path for path, stop in self.stops.items() if stop < moment and self.calls[path] == 1}
        finished = frozenset(path for path in done if done.isdisjoint(_above(path)))
        nodes = {node for node, makers in self.makers.items() if not makers.isdisjoint(finished)}
        met, _ = _ways_back([self.end, *(node for time, node in self.given if time >= moment)], nodes)
        read = {path for node in met for path in self.makers[node]} | self.unseen
        return CutPoint(moment, finished, finished & read)

    def _start(self, path: str) -> int:
        """Return when the module at ``path`` starts or, if it never runs, the one around it, which may read it."""
        return next(self.starts[place] for place in (path, *_above(path)) if place in self.starts)


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


class CachedModule(nn.Module):
    """Replaces a module that has run already: returns the cached output, whatever its input.

    An output that nothing reads is cached as a shape only and returned full of NaN, which would show if it were read.
    """

    def __init__(self, module: nn.Module, answers: dict[str, Any], path: str, is_read: bool) -> None:
        super().__init__()
        self.module = (module,)  # a tuple, so that it is no child
        self.answers, self.path, self.is_read = answers, path, is_read

    def forward(self, *_: Any, **__: Any) -> Any:
        return tree_map_only(Tensor, torch.clone if self.is_read else _blank, self.answers[self.path])

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module itself: a model may ask its patch embedding for the grid."""
        return getattr(vars(self)["module"][0], name)


def _blank(values: Tensor) -> Tensor:
    """Return NaN in the shape of ``values``, in the memory of one number; integers are returned unchanged."""
    return values.new_full((), nan).expand(values.shape) if values.is_floating_point() else values.clone()


class CachedVariants(Generic[K]):
    """A model and its variants, run on the same images with a cache of the modules that they share.

    The model runs in full and caches the outputs of its modules; a variant reads the outputs of those that finished
    before the first module in which it differs, and runs in full if no difference is found. That works for any model,
    in any order and with any connections of its modules, as long as modules can be replaced and autograd
    records what reads what. Each starting point of variants is tried on one image, and skipped if the output is not
    bit-equal.
    """

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, variants: Mapping[K, nn.Module], probe: Probe, images: Tensor, memory: int
    ) -> None:
        """``variants`` are copies (``clone``) of ``model`` with modules replaced, in eval mode; they are not changed.

        ``images`` are the first batch. ``memory`` (bytes) bounds the cache for a batch of that size.
        """
        self.model, self.probe = clone(model), probe
        self.kept: dict[str, Any] = {}
        self.variants = {key: clone(variant) for key, variant in variants.items()}
        self.starts_at: dict[K, CutPoint] = {}
        self.is_kept: dict[str, bool] = {}
        """Modules whose outputs are cached: in full, or only their shapes."""
        sample = images[-1:]
        trial = clone(self.model)
        cuts = self._cuts(sample)
        self._keep(cuts.values())
        for path in self.is_kept:
            self.model.get_submodule(path).register_forward_hook(partial(self._note, path))
        whole = probe(self.model, sample)
        affordable = self._affordable(cuts.values(), memory // len(images))
        # the latest first, so that what a cut point reads from the cache has not run in the trials before it
        holding = [cut for cut in reversed(affordable) if self._holds(cut, trial, sample, whole)]
        for key, cut in cuts.items():
            earlier = next((other for other in holding if other.moment <= cut.moment), None)
            if earlier:
                self.starts_at[key] = earlier
                _put(self.variants[key], self._cached(self.variants[key], earlier))
        self._keep(self.starts_at.values())
        self.kept.clear()

    @torch.no_grad()
    def answers(self, images: Tensor) -> Iterator[tuple[K | None, Tensor]]:
        """Yield the probe (B, C) of the model, under None, then that of every variant, in the order given."""
        try:
            yield None, self.probe(self.model, images)
            for key, variant in self.variants.items():
                yield key, self.probe(variant, images)
        finally:
            self.kept.clear()

    def _cuts(self, sample: Tensor) -> dict[K, CutPoint]:
        """Return where each variant starts to differ; empty for a model that cannot run under autograd."""
        before = _members(self.model)  # as it is before it runs, like the variants
        try:
            course = ModuleTimeline(self.model, self.probe, sample)
        except RuntimeError:  # views changed in place, say
            return {}
        changed = {key: _changed(before, _members(variant)) for key, variant in self.variants.items()}
        return {key: course.cut_before(paths) for key, paths in changed.items() if paths}

    def _keep(self, cuts: Iterable[CutPoint]) -> None:
        cuts = list(cuts)
        read = frozenset[str]().union(*(cut.read for cut in cuts))
        self.is_kept = {path: path in read for cut in cuts for path in cut.finished}

    def _note(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Cache a copy of an output, which the model may later change in place."""
        if path in self.is_kept:
            self.kept[path] = tree_map_only(Tensor, torch.clone if self.is_kept[path] else _blank, output)

    def _affordable(self, cuts: Iterable[CutPoint], memory: int) -> list[CutPoint]:
        """Return every cut point or every second, third, ... one, so that the cache of an image fits in ``memory``."""
        found = sorted({cut.moment: cut for cut in cuts}.values(), key=lambda cut: cut.moment)
        for stride in range(1, len(found) + 1):
            paths = {path for cut in found[::stride] for path in cut.read}
            if sum(value.nbytes for path in paths for value in tensors_in(self.kept[path])) <= memory:
                return found[::stride]
        return []

    def _holds(self, cut: CutPoint, trial: nn.Module, sample: Tensor, whole: Tensor) -> bool:
        """Whether the model returns ``whole``, bit by bit, if the modules finished before ``cut`` are cached.

        They must not have run on ``sample`` in ``trial``, or a module that keeps something of its last pass where
        autograd cannot see it would seem harmless.
        """
        modules = {path: trial.get_submodule(path) for path in cut.finished}
        _put(trial, self._cached(trial, cut))
        try:
            return torch.equal(self.probe(trial, sample), whole)
        except Exception:  # a model may do anything with modules that are replaced
            return False
        finally:
            _put(trial, modules)

    def _cached(self, model: nn.Module, cut: CutPoint) -> dict[str, nn.Module]:
        return {
            path: CachedModule(model.get_submodule(path), self.kept, path, path in cut.read) for path in cut.finished
        }


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        model.set_submodule(path, module)


def _members(model: nn.Module) -> dict[str, Any]:
    """Return what identifies each module, by path, also if one module has two paths."""
    return {path: _traits(module) for path, module in model.named_modules(remove_duplicate=False)}


def _traits(module: nn.Module) -> tuple[Any, ...]:
    """Return what a copy shares with its original: class, settings, the same tensors, hooks."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    tensors = [id(tensor) for held in (module._parameters, module._buffers) for tensor in held.values()]
    return type(module), settings, tensors, [*module._forward_pre_hooks], [*module._forward_hooks]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the paths at which a variant differs from the model; for a new module, that of the one it was put in."""
    new = {next(place for place in _above(path) if place in before) for path in after.keys() - before.keys()}
    return new | {path for path in before if before[path] != after.get(path)}
