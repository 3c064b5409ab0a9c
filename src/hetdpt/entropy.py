"""Transfer entropy: what a layer adds to the spread of a model's answers, found without labels and without training.

H(F) = sum_j log sigma_j(F) over the channels j of a probe F, and TE(S) = |H(dense) - H(S removed)| (NOSE, CVPR 2024,
which the paper takes it from). The scan over all layers runs every variant of the model only from the removed layer
on: what had finished before it is recalled from the pass of the unchanged model, so no ``forward`` is copied and no
family is known. Nothing is trained, chosen for good or written here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf, isfinite, nan
from operator import length_hint
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from hetdpt.adapters.heads import logits_of
from hetdpt.errors import DataError, ModelError, PlanError, first_line
from hetdpt.modules import clone, memory_advice
from hetdpt.plan import Kind, Plan, Site
from hetdpt.surgery import prune_, record_of, why_not_removable

Removal = str | tuple[str, str]
ProbeName = Literal["logits", "feature"]
PROBES = ("logits", "feature")
Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""
MEMORY = 1 << 30


def transfer_entropy(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    sites: Iterable[Site] | None = None,
    removal: Removal = "plain",
    probe: ProbeName = "logits",
    signed: bool = False,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> dict[Site, float]:
    """Return TE of each site by itself, in order of execution: TE = |H(dense) - H(site removed)|, in nats.

    ``batches`` are images (B, C, H, W), prepared as the model wants them; they are iterated once. ``sites`` default to
    all that ``removal`` can remove; a model pruned already keeps the removal it was pruned with. The probe ``logits``
    is what the model answers (where it has no head, the first tensor of the answer, each of its numbers a channel);
    ``feature`` is what goes into the linear layers that make the logits, side by side where there are two heads.
    ``signed`` leaves H(dense) - H(site removed) as it is. A removal after which answers are not finite has TE
    infinity.

    ``memory`` (bytes) bounds what is kept of one batch to be recalled; with less of it more is computed again, with 0
    everything. The values do not depend on it. ``progress`` is called with (forward passes done, in all); in all is 0
    where ``batches`` do not say how many they are.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    >>> _ = nn.init.zeros_(model.blocks[0].attn.proj.weight)
    >>> for site, value in transfer_entropy(model, [torch.randn(4, 3, 32, 32)]).items():
    ...     print(site.path, "is inert" if value == 0 else "counts")
    blocks.0.attn is inert
    blocks.0.mlp.act counts
    blocks.1.attn counts
    blocks.1.mlp.act counts
    """
    stream = _checked(batches, model)
    first = next(stream)
    base = _ready(model, removal, first)
    scan = Scan(base, _removable(base, sites), Probe.of(probe, base, first), first, memory)
    dense, without = _entropies(scan, chain([first], stream), progress, length_hint(batches))
    return {site: _transfer(dense, entropy, signed) for site, entropy in without.items()}


def greedy_order(
    model: nn.Module,
    batches: Iterable[Tensor],
    count: int,
    kind: Kind | None = None,
    *,
    removal: Removal = "plain",
    probe: ProbeName = "logits",
    signed: bool = False,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> dict[Site, float]:
    """Return ``count`` sites in the order in which to remove them, each with the TE of it and all before it.

    Every step takes the site s with the least TE(S + s), S being what went before; on a tie the one that runs first.
    TE is relative to ``model`` as given. ``kind`` restricts the choice. ``batches`` are iterated ``count`` times and
    should give the same images each time. ``progress`` is called with (sites chosen, count); for the rest see
    ``transfer_entropy``.
    """
    if iter(batches) is batches:
        raise DataError(
            "greedy_order goes over the images once for each site, but came an iterator that can be read only once; "
            "give a list of batches or a loader"
        )
    first = next(_checked(batches, model))
    pruned = _ready(model, removal, first)
    looked_at = Probe.of(probe, pruned, first)
    left = [site for site in _removable(pruned) if kind in (None, site.kind)]
    if len(left) < count:
        what = f"{kind} sites" if kind else "sites"
        raise PlanError(f"asked for {count} {what}, but this model has {len(left)} to be removed; ask for fewer")
    order: dict[Site, float] = {}
    dense = nan
    for step in range(count):
        scan = Scan(pruned, left, looked_at, first, memory)
        entropy, without = _entropies(scan, _checked(batches, model))
        dense = dense if step else entropy
        values = {site: _transfer(dense, value, signed) for site, value in without.items()}
        least = min(values, key=values.__getitem__)
        order[least] = values[least]
        left.remove(least)
        pruned = _without(pruned, least)
        if progress:
            progress(step + 1, count)
    return order


class Spread:
    """The variance of each channel over a stream of samples, in float64, whatever the sizes of the batches.

    Batches are merged as Chan, Golub and LeVeque (1983) do. Values count from the first sample, so that a channel that
    never changes has variance 0 exactly. Memory does not grow with the number of samples.

    >>> spread = Spread()
    >>> spread.add(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> spread.add(torch.tensor([[8.0, 5.0]]))
    >>> spread.variance.tolist() == [torch.tensor([1.0, 3.0, 8.0]).double().var(correction=0).item(), 0]
    True
    """

    def __init__(self) -> None:
        self.count = 0
        self.origin = self.mean = self.squares = torch.zeros(0)

    def add(self, values: Tensor) -> None:
        """Take in ``values`` (B, C)."""
        values = values.detach().cpu().double()  # float64 on the CPU: some devices have none
        if not self.count:
            self.origin = values[0].clone()
            self.mean = self.squares = torch.zeros_like(self.origin)
        deviations = values - self.origin
        mean = deviations.mean(0)
        total = self.count + len(values)
        shift = mean - self.mean
        between = shift.square() * (self.count * len(values) / total)
        self.squares = self.squares + (deviations - mean).square().sum(0) + between
        self.mean = self.mean + shift * (len(values) / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """(C,), float64, divided by the number of samples."""
        return self.squares / self.count

    @property
    def entropy(self) -> float:
        """H = sum_j log sigma_j; channels with sigma = 0 are left out."""
        variance = self.variance
        return variance[variance != 0].log().sum().item() / 2


class Probe:
    """What is looked at: the answer of a model, or what its ``heads`` (paths of linear layers) are given."""

    def __init__(self, heads: tuple[str, ...] = ()) -> None:
        self.heads = heads

    @classmethod
    def of(cls, name: ProbeName, model: nn.Module, images: Tensor) -> Probe:
        if name not in PROBES:
            raise DataError(f"the probe of transfer entropy is one of {', '.join(PROBES)}, not {name!r}")
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
    """Return the logits in an answer, or its first tensor where there are none."""
    try:
        return logits_of(answer)
    except ModelError:
        if not (tensors := _tensors(answer)):
            raise
        return tensors[0]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def heads_of(model: nn.Module, images: Tensor) -> tuple[str, ...]:
    """Return the paths of the linear layers whose outputs make the logits; ``ModelError`` if there are none.

    They are the first that one meets on every way back from the logits. A residual stream leads past every linear
    layer to the image, so a model without a head is told from one with a head.
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
    met, seen = _ways_back(answer.grad_fn, makers)
    if not met or image.grad_fn in seen:
        raise ModelError(
            f"probe 'feature' is what goes into the linear layers that make the logits, but {type(model).__name__} "
            "has none at its end; use probe 'logits', which is the answer of any model"
        )
    return tuple(dict.fromkeys(makers[node] for node in makers if node in met))


def _ways_back(end: Node | None, stops: Iterable[Node | None]) -> tuple[set[Node], set[Node]]:
    """Return the nodes among ``stops`` that one meets on the ways back from ``end``, and all nodes up to them."""
    stops, met, seen, todo = set(stops), set[Node](), set[Node](), [end]
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
class Cut:
    """A moment of a pass: which modules had finished, the outermost ones, and whose answers are read afterwards."""

    moment: int
    finished: frozenset[str]
    read: frozenset[str]


class Course:
    """When each module of a model ran, and what the probe was computed from, as autograd saw it in one pass."""

    def __init__(self, model: nn.Module, probe: Probe, images: Tensor) -> None:
        self.clock = 0
        self.starts: dict[str, int] = {}
        self.stops: dict[str, int] = {}
        self.calls = Counter[str]()
        self.makers: defaultdict[Node, set[str]] = defaultdict(set)
        self.unseen: set[str] = set()
        """Modules with an answer that has no gradient: who reads it is not known."""
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            for path, module in model.named_modules():
                begin = module.register_forward_pre_hook(partial(self._begin, path))
                end = module.register_forward_hook(partial(self._end, path), with_kwargs=True)
                stack.callback(begin.remove)
                stack.callback(end.remove)
            self.end = probe(model, images.clone().requires_grad_().clone()).grad_fn

    def _begin(self, path: str, module: nn.Module, args: Any) -> None:
        self.starts.setdefault(path, self.clock)
        self.clock += 1

    def _end(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.calls[path] += 1
        given = {id(value) for value in _tensors((args, kwargs))}
        answers = _tensors(output)
        if all(id(answer) in given for answer in answers):  # dropout, identity: nothing to be saved
            return
        self.stops[path] = self.clock
        self.clock += 1
        for answer in answers:
            if answer.grad_fn is None:
                self.unseen.add(path)
            else:
                self.makers[answer.grad_fn].add(path)

    def cut_before(self, paths: Iterable[str]) -> Cut:
        """Return the moment at which the first of the modules at ``paths`` starts.

        Whatever finished before it cannot depend on it. A module that runs twice is none of the finished ones.
        """
        moment = min(self.starts[path] for path in paths if path in self.starts)
        done = {path for path, stop in self.stops.items() if stop < moment and self.calls[path] == 1}
        finished = frozenset(path for path in done if done.isdisjoint(_above(path)))
        nodes = {node for node, makers in self.makers.items() if not makers.isdisjoint(finished)}
        met, _ = _ways_back(self.end, nodes)
        read = {path for node in met for path in self.makers[node]} | self.unseen
        return Cut(moment, finished, finished & read)


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


class Recall(nn.Module):
    """Stands for a module that has run already: answers what it answered then, whatever it is given.

    An answer that nobody reads has its shape alone and is full of NaN, which would show if somebody did.
    """

    def __init__(self, module: nn.Module, answers: dict[str, Any], path: str, is_read: bool) -> None:
        super().__init__()
        self.module = (module,)  # a tuple, so that it is no child
        self.answers, self.path, self.is_read = answers, path, is_read

    def forward(self, *_: Any, **__: Any) -> Any:
        return tree_map_only(Tensor, torch.clone if self.is_read else _blank, self.answers[self.path])

    def __getattr__(self, name: str) -> Any:
        """Return what the module itself would: a model may ask its patch embedding for the grid."""
        return getattr(vars(self)["module"][0], name)


def _blank(values: Tensor) -> Tensor:
    """Return NaN in the shape of ``values``, in the memory of one number; integers as they are."""
    return values.new_full((), nan).expand(values.shape) if values.is_floating_point() else values.clone()


class Scan:
    """A model and its variants, each without one site, side by side on the same images.

    The model runs in full and leaves what its modules answered; a variant recalls the answers of all that finished
    before its site. That holds for any model, in whatever order and with whatever connections its modules run. What it
    takes from a model is that its modules can be stood for, and that autograd shows who reads whom; each moment from
    which variants are to start is tried on one image, and left out where the answer is not the same bit by bit.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, sites: Iterable[Site], probe: Probe, images: Tensor, memory: int) -> None:
        """``model`` must know its sites (``prune_``) and be in eval mode; ``images`` are the first batch."""
        self.model, self.probe = clone(model), probe
        self.kept: dict[str, Any] = {}
        self.variants = {site: _without(model, site) for site in sites}
        self.recalled: dict[Site, Cut] = {}
        self.is_kept: dict[str, bool] = {}
        """Modules whose answers are kept: whole, or their shapes alone."""
        sample = images[-1:]
        trial = clone(self.model)
        cuts = self._cuts(sample)
        self._keep(cuts.values())
        for path in self.is_kept:
            self.model.get_submodule(path).register_forward_hook(partial(self._note, path))
        whole = probe(self.model, sample)
        affordable = self._affordable(cuts.values(), memory // len(images))
        # the latest first, so that what a cut recalls has not run in the trials before it
        holding = [cut for cut in reversed(affordable) if self._holds(cut, trial, sample, whole)]
        for site, cut in cuts.items():
            earlier = next((other for other in holding if other.moment <= cut.moment), None)
            if earlier:
                self.recalled[site] = earlier
                _put(self.variants[site], self._recalls(self.variants[site], earlier))
        self._keep(self.recalled.values())
        self.kept.clear()

    @torch.no_grad()
    def answers(self, images: Tensor) -> Iterator[tuple[Site | None, Tensor]]:
        """Yield the probe (B, C) of the model, under None, then that of every variant."""
        try:
            yield None, self.probe(self.model, images)
            for site, variant in self.variants.items():
                yield site, self.probe(variant, images)
        finally:
            self.kept.clear()

    def _cuts(self, sample: Tensor) -> dict[Site, Cut]:
        """Return where each variant starts to differ; nothing for a model that cannot run under autograd."""
        try:
            course = Course(self.model, self.probe, sample)
        except RuntimeError:  # views changed in place, say
            return {}
        before = _members(self.model)
        changed = {site: _changed(before, _members(variant)) for site, variant in self.variants.items()}
        return {site: course.cut_before(paths) for site, paths in changed.items()}

    def _keep(self, cuts: Iterable[Cut]) -> None:
        cuts = list(cuts)
        read = frozenset[str]().union(*(cut.read for cut in cuts))
        self.is_kept = {path: path in read for cut in cuts for path in cut.finished}

    def _note(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Keep a copy of an answer, which the model may go on to change in place."""
        if path in self.is_kept:
            self.kept[path] = tree_map_only(Tensor, torch.clone if self.is_kept[path] else _blank, output)

    def _affordable(self, cuts: Iterable[Cut], memory: int) -> list[Cut]:
        """Return every cut or every second, third, ... one, so that what they keep of an image fits in ``memory``."""
        found = sorted({cut.moment: cut for cut in cuts}.values(), key=lambda cut: cut.moment)
        for stride in range(1, len(found) + 1):
            paths = {path for cut in found[::stride] for path in cut.read}
            if sum(value.nbytes for path in paths for value in _tensors(self.kept[path])) <= memory:
                return found[::stride]
        return []

    def _holds(self, cut: Cut, trial: nn.Module, sample: Tensor, whole: Tensor) -> bool:
        """Whether the model answers ``whole``, bit by bit, if it recalls what finished before ``cut``.

        What is recalled must not have run on ``sample`` in ``trial``, or a module that keeps something of its last
        pass where autograd cannot see it would seem harmless.
        """
        modules = {path: trial.get_submodule(path) for path in cut.finished}
        _put(trial, self._recalls(trial, cut))
        try:
            return torch.equal(self.probe(trial, sample), whole)
        except Exception:  # whatever a model makes of modules that are not what they seem
            return False
        finally:
            _put(trial, modules)

    def _recalls(self, model: nn.Module, cut: Cut) -> dict[str, nn.Module]:
        return {path: Recall(model.get_submodule(path), self.kept, path, path in cut.read) for path in cut.finished}


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        model.set_submodule(path, module)


def _without(model: nn.Module, site: Site) -> nn.Module:
    """Return a copy of ``model`` that has lost one site, by the removal that the model knows."""
    record = record_of(model)
    assert record is not None
    plan = Plan(**{site.kind: (site.block,)}, removal=record.plan.removal)  # type: ignore[arg-type]
    return prune_(clone(model), plan)


def _members(model: nn.Module) -> dict[str, Any]:
    """Return what surgery changes, by path: the class of each module and the tensors it holds itself."""
    return {
        path: (type(module), *map(id, module._parameters.values()), *map(id, module._buffers.values()))
        for path, module in model.named_modules()
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [path for path in before if before[path] != after.get(path)]


def _entropies(
    scan: Scan, stream: Iterable[Tensor], progress: Progress | None = None, batches: int = 0
) -> tuple[float, dict[Site, float]]:
    """Return H of the model, and H without each of the sites."""
    spreads: dict[Site | None, Spread] = {site: Spread() for site in (None, *scan.variants)}
    done = 0
    for images in stream:
        with memory_advice(f"{len(images)} images at once do not fit in memory; give smaller batches or memory=0"):
            for site, values in scan.answers(images):
                spreads[site].add(values)
                done += 1
                if progress:
                    progress(done, batches * len(spreads))
    dense = _entropy_of_dense(spreads[None])
    return dense, {site: spreads[site].entropy for site in scan.variants}


def _entropy_of_dense(spread: Spread) -> float:
    if spread.count < 2:
        raise DataError("transfer entropy is a spread over images, but there is one image only; give two or more")
    if not spread.squares.any():
        raise DataError(f"the model answers the same to all {spread.count} images; give images that differ")
    if not isfinite(spread.entropy):
        raise ModelError("the model answers with values that are not finite; check its weights, or use float32")
    return spread.entropy


def _transfer(dense: float, entropy: float, signed: bool) -> float:
    if not isfinite(entropy):
        return inf
    return dense - entropy if signed else abs(dense - entropy)


def _checked(batches: Iterable[Tensor], model: nn.Module) -> Iterator[Tensor]:
    """Yield the images on the device and in the dtype of ``model``; ``DataError`` says what is wrong with them."""
    weight = next(model.parameters())
    if weight.is_meta:
        raise ModelError("this model has no weights (its parameters are on the meta device); load them first")
    first: Tensor | None = None
    for images in batches:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            raise DataError(
                f"batches are float tensors of images (B, C, H, W), but one is {_spell(images)}; give images alone, "
                "prepared for the model, such as [images]"
            )
        if not len(images):
            continue
        first = images if first is None else first
        if images.shape[1:] != first.shape[1:]:
            raise DataError(f"images must be of one size, but came {_size(first)} and {_size(images)}; resize them")
        yield images.to(weight)
    if first is None:
        raise DataError("transfer entropy needs images, but the batches are empty; an iterator can be read only once")


def _spell(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _size(images: Tensor) -> str:
    return " x ".join(str(side) for side in images.shape[1:])


@torch.no_grad()
def _ready(model: nn.Module, removal: Removal, images: Tensor) -> nn.Module:
    """Return a copy of ``model`` in eval mode that knows its sites and its removal."""
    record = record_of(model)
    plan = Plan(removal=record.plan.removal if record and len(record.plan) else removal)
    base = clone(model).eval()
    try:
        base(images[:1])
    except Exception as error:  # whatever a model raises on images it does not take
        raise DataError(
            f"{type(model).__name__} does not take images of {_size(images)}: {first_line(error)}; "
            "prepare them in the size the model is made for"
        ) from error
    channels, height, width = images.shape[1:]
    return prune_(base, plan, (channels, height, width))


def _removable(model: nn.Module, asked: Iterable[Site] | None = None) -> list[Site]:
    """Return the sites asked for, or all that can be removed; ``PlanError`` says why one cannot."""
    record = record_of(model)
    assert record is not None
    left = {handle.site: handle for handle in record.survey.handles if not record.plan.removes(handle.site)}
    if asked is None:
        return [site for site, handle in left.items() if why_not_removable(handle, record.plan) is None]
    asked = list(asked)
    for site in asked:
        if site not in left:
            raise PlanError(
                f"{site.kind} {site.block} at {site.path} is no site of this model, or is removed already; "
                "hetdpt.sites(model) lists what is left"
            )
        if why := why_not_removable(left[site], record.plan):
            raise PlanError(why)
    return [site for site in left if site in asked]
