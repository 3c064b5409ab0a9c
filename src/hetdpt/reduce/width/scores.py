"""Which parts of the width of a model can be removed, and their scores, by Torch-Pruning.

Its dependency graph says which entries of which tensors are removed together, its group importance what they are worth
(Fang et al., 2023; group Taylor as in Isomorphic Pruning, Fang et al., 2024). Its pruner is not used: that ranks,
counts and cuts in one step, with dictionaries that leak from one pruner to the next, and a block that would lose all
its heads keeps them while they are counted as removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch_pruning as tp
from torch import Tensor, nn

from hetdpt.adapters.attention import Attention, attention_at
from hetdpt.adapters.ffn import Ffn
from hetdpt.adapters.models import unfuse_
from hetdpt.core.errors import ModelError, PlanError
from hetdpt.core.fold import is_cheaper_folded
from hetdpt.core.gates import Gate
from hetdpt.core.modules import clone, random_images, tensors_in
from hetdpt.core.plan import Plan
from hetdpt.reduce.width.shapes import STREAM_SIZES, Place
from hetdpt.surgery.record import record_of, require_record
from hetdpt.surgery.remove import place_

Importance = Literal["obs", "taylor", "l2", "random"]
LAYERS = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention)
"""Layers whose parameters the graph knows; all others are assumed to have their channels last."""


@dataclass(frozen=True)
class Channels:
    """The channels of the residual stream, which all blocks share: every tensor that has an axis for them."""

    scores: Tensor
    """(D,)"""
    places: tuple[Place, ...]
    attributes: tuple[tuple[str, str], ...]
    """Path and name of attributes whose value is D."""
    norms: tuple[str, ...]
    """Norms over it that have no parameters."""


class Hidden(NamedTuple):
    """The features between the two layers of an FFN."""

    ffn: Ffn
    kind: tuple[str, ...]
    """The layers and operations that share them; features are compared among FFNs of one kind (isomorphic)."""
    scores: Tensor
    """(H,)"""


class Heads(NamedTuple):
    """The heads of an attention, and the dimensions of each."""

    attention: Attention
    scores: Tensor
    """(heads, head_dim)"""


@dataclass(frozen=True)
class Narrowable:
    """Everything that can be made narrower in a model."""

    stream: Channels | None
    """None if something else depends on it; ``why_no_stream`` says what."""
    hidden: tuple[Hidden, ...]
    heads: tuple[Heads, ...]
    why_no_stream: str = ""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: its stream, and by block those of its remaining FFNs and attention layers."""

    embedding: int
    hidden: tuple[int, ...]
    heads: tuple[int, ...]
    head_dims: tuple[int, ...]


def sizes_of(model: nn.Module) -> Sizes:
    """Return the sizes of ``model``."""
    copy = clone(model)
    if record_of(copy) is None:
        place_(copy, Plan())
    attentions, root = attentions_of(copy), _roots(copy)
    return Sizes(
        copy.get_parameter(f"{root[0]}.weight").shape[1] if root else 0,
        tuple(len(copy.get_parameter(f"{ffn.first}.weight")) for ffn in ffns_of(copy)),
        tuple(attention.heads for attention in attentions),
        tuple(attention.head_dim for attention in attentions),
    )


def require_narrowable(model: nn.Module) -> None:
    """Raise, before anything is changed, if a layer of a model with a record has sizes that cannot be changed."""
    record = require_record(model)
    if any(isinstance(module, Gate) for module in model.modules()):
        raise PlanError("this model has gates on its layers; call restore_(model) before making it narrower")
    if record.tokens is not None:
        raise PlanError("this model reduces tokens already; make it narrower first, then reduce its tokens")
    for attention in attentions_of(model):
        for norm in attention.norms:
            if getattr(model.get_submodule(norm), "weight", None) is None:
                raise ModelError(f"{norm} has no weight to absorb a change of scale; keep the width of this model")
    for handle in record.left:
        is_ffn = handle.site.kind == "activation"
        if is_ffn and (handle.ffn is None or not isinstance(model.get_submodule(handle.ffn.first), nn.Linear)):
            raise ModelError(
                f"the FFN at {handle.site.path} is not Linear - activation - Linear; width pruning supports ViT, "
                "DeiT, DINOv2, CLIP and SigLIP, or remove that FFN first with removal=('skip', 'drop')"
            )


def attentions_of(model: nn.Module) -> list[Attention]:
    """Return the remaining attention layers of a model with a record; ``ModelError`` if one is of an unknown class."""
    left = [handle for handle in require_record(model).left if handle.site.kind == "attention"]
    return [attention_at(model, handle.parts.core) for handle in left if handle.parts]


def ffns_of(model: nn.Module) -> list[Ffn]:
    """Return the FFNs of a model with a record whose hidden features can be removed.

    One without its activation is not among them if it is worth merging: merged it has no hidden features, so removing
    some would cost rank and save nothing.
    """
    record = require_record(model)
    pairs = [(handle.site, handle.ffn) for handle in record.survey.handles if handle.ffn]
    return [ffn for site, ffn in pairs if not record.plan.removes(site) or _stays_two(model, ffn)]


def _stays_two(model: nn.Module, ffn: Ffn) -> bool:
    """Whether an FFN without its activation has two layers that are not worth merging."""
    there = dict(model.named_modules())
    first, second = there.get(ffn.first), there.get(ffn.second)
    return isinstance(first, nn.Linear) and isinstance(second, nn.Linear) and not is_cheaper_folded(first, second)


@contextmanager
def gradients(model: nn.Module) -> Iterator[None]:
    """Clear the gradients of all parameters inside the context, and restore them afterwards."""
    before = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.grad = None
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, grad, learns in before:
            parameter.grad = grad
            parameter.requires_grad_(learns)


def score(model: nn.Module, importance: Importance, seed: int = 0) -> Narrowable:
    """Return what can be made narrower in a model with a record, with scores; ``taylor`` reads its gradients.

    For ``obs`` they are those of ``l2``, which ``reduce.width.errors`` replaces. Call it inside ``gradients``,
    which building the graph needs as well.
    """
    record = require_record(model)
    copy = unfuse_(clone(model)).eval()
    graph = _Graph(copy, random_images(copy, record.survey.input_size, 1))
    scorer = _scorer(copy, importance, seed)
    heads = []
    for attention in attentions_of(copy):
        group = graph.group(attention.out, is_output=False)
        heads.append(Heads(attention, scorer(group).view(attention.heads, attention.head_dim)))
    hidden = []
    for ffn in ffns_of(copy):
        group = graph.group(ffn.first, is_output=True)
        hidden.append(Hidden(ffn, graph.kind(group), scorer(group)))
    stream, why_not = _stream(copy, graph, _scorer(copy, importance, seed, has_norms=True))
    return Narrowable(stream, tuple(hidden), tuple(heads), why_not)


class _Graph:
    """Torch-Pruning's graph of one model, by paths."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model = model
        wrapped = {id(p) for module in model.modules() if isinstance(module, LAYERS) for p in module.parameters()}
        self.loose = {name: p for name, p in model.named_parameters() if id(p) not in wrapped and p.ndim}
        try:
            with torch.enable_grad():
                self.graph = tp.DependencyGraph().build_dependency(
                    model,
                    images,
                    output_transform=_tensors,
                    unwrapped_parameters=[(parameter, parameter.ndim - 1) for parameter in self.loose.values()],
                    customized_pruners={},
                    ignored_layers=[],
                    ignored_params=[],
                    verbose=False,
                )
        except Exception as error:  # whatever the graph of an unusual model raises
            raise ModelError(f"Torch-Pruning cannot follow the sizes of {type(model).__name__}: {error}") from error
        self.names = {module: path for path, module in model.named_modules()}

    def group(self, path: str, is_output: bool) -> Any:
        """Return the group of tensors that share all outputs, or inputs, of a linear layer."""
        layer = self.model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        prune = tp.prune_linear_out_channels if is_output else tp.prune_linear_in_channels
        return self.graph.get_pruning_group(layer, prune, list(range(layer.weight.shape[0 if is_output else 1])))

    def kind(self, group: Any) -> tuple[str, ...]:
        """Return the layers and operations of a group by class, and whether they lose inputs or outputs."""
        return tuple(f"{type(dep.target.module).__name__} {self.is_output(dep)}" for dep, _ in group)

    def is_output(self, dep: Any) -> bool:
        return bool(self.graph.is_out_channel_pruning_fn(dep.handler))

    def unseen(self) -> dict[str, nn.Parameter]:
        """Return the loose parameters that the output does not depend on, such as a token for masked images."""
        seen = {id(module) for module in self.graph.module2node}
        return {name: parameter for name, parameter in self.loose.items() if id(parameter) not in seen}


def _tensors(answer: Any) -> list[Tensor]:
    plain = tuple(answer.values()) if isinstance(answer, dict) else answer  # transformers returns dictionaries
    return [tensor for tensor in tensors_in(plain) if tensor.requires_grad]


Scorer = Callable[[Any], Tensor]


def _scorer(model: nn.Module, importance: Importance, seed: int, has_norms: bool = False) -> Scorer:
    """Return a function that scores each root entry of a group; weights of norms count only with ``has_norms``."""
    if importance == "random":
        generator = torch.Generator().manual_seed(seed)
        return lambda group: torch.rand(len(group[0].idxs), generator=generator, dtype=torch.float64)
    if importance == "taylor":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    method = tp.importance.GroupTaylorImportance if importance == "taylor" else tp.importance.GroupMagnitudeImportance
    layers = [nn.Linear, nn.Conv2d, nn.LayerNorm] if has_norms else [nn.Linear]
    scorer = method(target_types=layers)
    return lambda group: scorer(group).double().cpu().nan_to_num()


def _stream(model: nn.Module, graph: _Graph, scorer: Scorer) -> tuple[Channels | None, str]:
    """Return the residual stream, or why it cannot be narrowed."""
    record = require_record(model)
    if ties := [why for why in record.survey.refusals if why.startswith("attention")]:
        return None, f"{ties[0]}, and it is as wide as the stream"
    roots = _roots(model)
    if not roots:
        return None, "no attention and no FFN is left in it"
    group = graph.group(roots[0], is_output=False)
    width, places, norms = len(group[0].idxs), list[Place](), list[str]()
    for dep, indices in group:
        target = dep.target.module
        if not isinstance(target, nn.Module | nn.Parameter) or type(target).__module__.startswith("torch_pruning"):
            continue
        if list(indices) != list(range(width)):
            return None, f"{graph.names.get(target, 'a parameter')} mixes it with something else"
        if isinstance(target, nn.LayerNorm) and not target.elementwise_affine:
            norms.append(graph.names[target])
        places += _places(graph, target, graph.is_output(dep))
    places += [(name, p.ndim - 1) for name, p in graph.unseen().items() if p.shape[-1] == width]
    attributes = tuple(
        (path, name)
        for path, module in model.named_modules()
        for name in STREAM_SIZES
        if vars(module).get(name) == width
    )
    return Channels(scorer(group), tuple(dict.fromkeys(places)), attributes, tuple(norms)), ""


def _roots(model: nn.Module) -> list[str]:
    """Return linear layers whose input is the stream."""
    there = dict(model.named_modules())
    ffns = [handle.ffn for handle in require_record(model).survey.handles if handle.ffn]
    left = [ffn.first for ffn in ffns if isinstance(there.get(ffn.first), nn.Linear)]
    return [*(attention.queries[0] for attention in attentions_of(model)), *left]


def _places(graph: _Graph, target: Any, is_output: bool) -> list[Place]:
    """Return the axes of the parameters of a layer, or of a parameter by itself, that have the stream's channels."""
    if isinstance(target, nn.Parameter):
        name = next(name for name, parameter in graph.loose.items() if parameter is target)
        return [(name, target.ndim - 1)]
    path = graph.names[target]
    if isinstance(target, nn.Linear | nn.Conv2d) and not is_output:
        return [(f"{path}.weight", 1)]
    axis = 1 if isinstance(target, nn.Embedding) else 0
    own = dict(target.named_parameters(recurse=False))
    return [(f"{path}.{name}", axis) for name in own]
