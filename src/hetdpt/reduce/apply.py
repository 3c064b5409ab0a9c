"""A whole plan applied to a model: layers removed, branches made narrower, patches stopped early, tokens reduced.

Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from hetdpt.core.modules import Peeked, clone, require_more_than_once
from hetdpt.core.plan import Plan
from hetdpt.core.progress import StepProgress
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.inner import PURPOSE, cut_branch_, inner_count, narrow_branches_, require_narrower
from hetdpt.surgery.calibrate import remove_
from hetdpt.surgery.fit_tail import fit_tail_
from hetdpt.surgery.record import InputSize, record_of
from hetdpt.surgery.remove import place_


def apply_(
    model: nn.Module, plan: Plan, batches: Iterable[Tensor], *, progress: StepProgress | None = None
) -> nn.Module:
    """Apply ``plan`` to ``model``, with all that has to be fitted fitted on ``batches``, and return the model.

    Layers are replaced first, then branches are made narrower, then the tail is fitted to what is left, and last
    tokens are reduced: what is fitted is fitted on all of them. A plan that does not fit raises before anything is
    changed.
    """
    if plan.narrower or plan.tokens:
        require_more_than_once(batches, "once for each part of the plan")
        require_applicable(model, plan, Peeked(batches, model, PURPOSE).size)
    layers = replace(plan.without_narrower(), tokens=None)
    if not layers.is_empty or record_of(model) is None:
        remove_(model, layers, batches, progress=progress)
    if plan.narrower:
        narrow_branches_(model, plan.narrower, batches)
        fit_tail_(model, batches)
    return reduce_tokens_(model, plan.tokens) if plan.tokens else model


def require_applicable(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> None:
    """Raise ``PlanError`` if ``plan`` cannot be applied to ``model``, which is not changed."""
    placed(model, plan, input_size)


def placed(model: nn.Module, plan: Plan, input_size: InputSize | None = None) -> nn.Module:
    """Return a copy of ``model`` with the modules that ``apply_`` would leave, in which nothing is fitted."""
    found = place_(clone(model), replace(plan.without_narrower(), tokens=None, fits=()), input_size)
    require_narrower(found, plan.narrower)
    for move in plan.narrower:
        if move.count < inner_count(found, move):
            cut_branch_(found, move)
    return reduce_tokens_(found, plan.tokens) if plan.tokens else found


class Refits:
    """The models that ``apply_`` makes of ``dense``, for one plan after another.

    What a plan has in common with the one or two before it is not fitted again: its layers, if all of them are the
    same, and then the narrower blocks up to the first that differs. The models are bit-equal to those of ``apply_``.

    ``dense`` has a record, and is not changed.
    """

    def __init__(self, dense: nn.Module, batches: Iterable[Tensor]) -> None:
        self.dense, self.batches = dense, batches
        self._latest: dict[Hashable, nn.Module] = {}
        self._earlier: dict[Hashable, nn.Module] = {}

    def __call__(self, plan: Plan) -> nn.Module:
        """Return the model of ``plan``, which is not to be changed."""
        known, self._earlier = {**self._earlier, **self._latest}, self._latest
        self._latest = {}
        layers = replace(plan.without_narrower(), tokens=None)
        found = self._keep(layers, known) or self._put(layers, apply_(clone(self.dense), layers, self.batches))
        for end, move in enumerate(plan.narrower, 1):
            part = (layers, plan.narrower[:end])
            narrower = self._keep(part, known)
            found = narrower or self._put(part, narrow_branches_(clone(found), [move], self.batches))
        return self._keep(whole := ("whole", plan), known) or self._put(whole, self._finished(found, plan))

    def _finished(self, model: nn.Module, plan: Plan) -> nn.Module:
        """Return ``model`` with what follows when all layers and blocks are done."""
        found = fit_tail_(clone(model), self.batches) if plan.narrower else clone(model)
        return reduce_tokens_(found, plan.tokens) if plan.tokens else found

    def _keep(self, part: Hashable, known: Mapping[Hashable, nn.Module]) -> nn.Module | None:
        if part in known:
            self._latest[part] = known[part]
        return known.get(part)

    def _put(self, part: Hashable, model: nn.Module) -> nn.Module:
        self._latest[part] = model
        return model
