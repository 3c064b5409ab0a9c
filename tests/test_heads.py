"""Fewer heads, and heads of fewer dimensions, in single blocks, and plans that have them beside everything else."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import named
from test_features import ROUNDING, answers, distance
from test_training import SHORT, tiny
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.attention import Attention, attention_at
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import FewerDims, FewerHeads, Plan, Site, Styled
from hetdpt.core.tokens import Tokens
from hetdpt.reduce.apply import apply_
from hetdpt.reduce.width.dims import turn_heads_
from hetdpt.reduce.width.inner import (
    cut_branch_,
    dim_counts,
    head_counts,
    inner_moments,
    leave_,
    narrow_branches_,
    with_narrower,
)
from hetdpt.selection.moves import offered, variants
from hetdpt.surgery.calibrate import with_tail
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready, ready_for
from hetdpt.surgery.tail import trim_to_class_token_

KEEP = ("constant", "calibrated-keep")
NARROWABLE = (
    "vit_tiny_patch16_224",
    "hf ViTForImageClassification",
    "hf Dinov2ForImageClassification",
    "hf CLIPVisionModel",
    "hf SiglipVisionModel",
)
WHOLE = Plan(
    attention=(0,),
    removal=KEEP,
    tail=2,
    features=((0, 64), (1, 96)),
    heads=((1, 3), (2, 2), (3, 1)),
    head_dims=((1, 6), (3, 4)),
)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def four_headed() -> nn.Module:
    return ready(tiny(depth=4, num_heads=4), "plain")


def planted(useless: int) -> nn.Module:
    """Return a model in whose second block the output of one head is not read."""
    model = four_headed()
    with torch.no_grad():
        model.get_submodule("blocks.1.attn.proj").weight[:, 8 * useless : 8 * useless + 8] = 0  # type: ignore[operator, union-attr, index]
    return model


@pytest.mark.parametrize("useless", range(4))
def test_a_useless_head_is_removed_first(useless: int, images: Tensor) -> None:
    model = planted(useless)
    narrow = narrow_branches_(deepcopy(model), [FewerHeads(1, 3)], [images])
    rows = model.get_submodule("blocks.1.attn.qkv").weight.view(3, 4, 8, 32)  # type: ignore[operator, union-attr]
    kept = [head for head in range(4) if head != useless]
    assert torch.equal(narrow.get_submodule("blocks.1.attn.qkv").weight.view(3, 3, 8, 32), rows[:, kept])  # type: ignore[operator, union-attr]
    assert distance(answers(narrow, images), answers(model, images)) < ROUNDING
    assert head_counts(narrow) == {0: 4, 1: 3, 2: 4, 3: 4}


@pytest.mark.parametrize("name", NARROWABLE)
def test_a_narrow_attention_is_the_wide_one_with_heads_of_zero_and_another_projection(name: str) -> None:
    family = named(name)
    given = family.images(8).double()
    model = ready_for(given, family.build().double(), "plain")
    block, count = next((block, count) for block, count in head_counts(model).items() if count > 1)
    move = FewerHeads(block, count - 1)
    moments = inner_moments(model, [move], [given])
    narrow = leave_(deepcopy(model), move, moments)
    path = require_record(model).attentions[block].site.path
    wide, left = attention_at(model, path), attention_at(narrow, path)
    assert (left.heads, left.head_dim) == (count - 1, wide.head_dim)
    rows, start = model.get_parameter(f"{wide.values[0]}.weight"), wide.values[1]
    own = narrow.get_parameter(f"{left.values[0]}.weight")[left.values[1] :][: left.heads * left.head_dim]
    kept = [int((rows[start : start + count * wide.head_dim] == row).all(1).nonzero()) for row in own]
    with torch.no_grad():
        model.get_parameter(f"{wide.out}.weight").zero_()[:, kept] = narrow.get_parameter(f"{left.out}.weight")
        model.get_parameter(f"{wide.out}.bias").copy_(narrow.get_parameter(f"{left.out}.bias"))
    assert distance(_tensor(narrow, given), _tensor(model, given)) < 1e-12


def _tensor(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.eval()(images)
    return found if isinstance(found, Tensor) else found[0]


def low_rank(rank: int) -> nn.Module:
    """Return a model in whose second block each head needs no more than ``rank`` dimensions."""
    model = four_headed().double()
    weight = model.get_parameter("blocks.1.attn.qkv.weight")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for head in weight.view(12, 8, 32):
            turn = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q[:, :rank]
            head.copy_(turn @ turn.T @ head)
    return model


def attention(model: nn.Module) -> Attention:
    return attention_at(model, "blocks.1.attn")


def test_dimensions_that_are_not_needed_cost_nothing_however_they_are_turned(images: Tensor) -> None:
    model = low_rank(3)
    given = images.double()
    narrow = narrow_branches_(deepcopy(model), [FewerDims(1, 3)], [given])
    assert (attention(narrow).heads, attention(narrow).head_dim) == (4, 3)
    assert dim_counts(narrow) == {0: 8, 1: 3, 2: 8, 3: 8}
    assert distance(answers(narrow, given), answers(model, given)) < 1e-4  # the ridge of 1e-6
    less = narrow_branches_(deepcopy(model), [FewerDims(1, 2)], [given])
    assert distance(answers(less, given), answers(model, given)) > 1e-3


def test_heads_are_turned_without_a_change(images: Tensor) -> None:
    model, move = four_headed().double(), FewerDims(1, 8)
    given = inner_moments(model, [move], [images.double()])
    turned = deepcopy(model)
    turn_heads_(turned, attention(turned), 8, given)
    assert not torch.allclose(
        turned.get_parameter("blocks.1.attn.qkv.weight"), model.get_parameter("blocks.1.attn.qkv.weight")
    )
    assert distance(answers(turned, images.double()), answers(model, images.double())) < 1e-4


def test_small_heads_are_the_turned_ones_with_dimensions_of_zero(images: Tensor) -> None:
    model, move = four_headed().double(), FewerDims(1, 5)
    given = inner_moments(model, [move], [images.double()])
    narrow = leave_(deepcopy(model), move, given)
    turn_heads_(model, attention(model), 5, given)
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.qkv.weight")[:32] *= (8 / 5) ** 0.5  # its scale is that of 8 dimensions
        model.get_parameter("blocks.1.attn.qkv.bias")[:32] *= (8 / 5) ** 0.5
    assert distance(answers(narrow, images.double()), answers(model, images.double())) < 1e-12


def test_turned_heads_are_nearer_than_heads_cut_as_they_are(images: Tensor) -> None:
    model = four_headed()
    fitted = narrow_branches_(deepcopy(model), [FewerDims(1, 4)], [images])
    plain = cut_branch_(deepcopy(model), FewerDims(1, 4))
    assert distance(answers(fitted, images), answers(model, images)) < distance(
        answers(plain, images), answers(model, images)
    )


@pytest.mark.parametrize("name", NARROWABLE)
def test_every_narrowable_attention_may_have_smaller_heads(name: str) -> None:
    family = named(name)
    images = family.images(8)
    model = ready_for(images, family.build(), "plain")
    moves = offered(model, model, ["head_dims"])
    assert moves
    for variant in variants(model, moves[:1], [images]).values():
        small = attention_at(variant, require_record(variant).attentions[0].site.path)
        assert small.head_dim < attention_at(model, small.path).head_dim
        assert 0 < distance(_tensor(variant, images), _tensor(model, images)) < 0.5


def test_heads_with_norms_keep_their_dimensions() -> None:
    model = ready(tiny(qk_norm=True), "plain")
    assert dim_counts(model) == {}
    assert head_counts(model) == {0: 2, 1: 2, 2: 2}


def test_attention_of_other_classes_offers_no_heads() -> None:
    family = named("hf Swinv2ForImageClassification")
    model = ready_for(family.images(2), family.build(), "calibrated")
    assert offered(model, model, ["heads"]) == []


def test_a_whole_plan_is_applied_saved_and_loaded(tmp_path: Path) -> None:
    family = named("hf ViTForImageClassification")
    images = family.images(24)
    dense = family.build()
    counts = {block: count - 1 for block, count in head_counts(ready_for(images, dense, "plain")).items()}
    plan = Plan(removal=KEEP, tail=2, heads=tuple(counts.items()), head_dims=((0, 4), (2, 6)))
    pruned = apply_(dense, plan, [images, images])
    found = require_record(pruned).plan
    assert replace(found, fits=()) == replace(plan, anatomy=found.anatomy)
    merged = hetdpt.merge_(deepcopy(pruned))
    assert distance(_tensor(merged, images), _tensor(pruned, images)) < ROUNDING
    loaded = hetdpt.load(hetdpt.save(merged, tmp_path / "saved"))
    assert torch.equal(_tensor(loaded, images), _tensor(merged, images))
    assert require_record(loaded).plan == found
    assert Plan.from_json(found.to_json()) == found


def test_the_maps_of_a_tail_lose_the_rows_of_the_heads(images: Tensor) -> None:
    """Without a fit a tail whose maps lose a useless head answers as before."""
    model = with_tail(trim_to_class_token_(planted(2)), 3, [images])  # its second block is the stop
    longer = with_tail(trim_to_class_token_(planted(2)), 4, [images])  # its second block has a map
    for tailed in (model, longer):
        before = answers(tailed, images)
        narrow = narrow_branches_(deepcopy(tailed), [FewerHeads(1, 3)], [images])
        assert distance(answers(narrow, images), before) < ROUNDING
        assert hetdpt.count_params(narrow) < hetdpt.count_params(tailed)


def test_the_maps_of_a_tail_are_turned_with_the_heads(images: Tensor) -> None:
    given = images.double()
    tailed = with_tail(trim_to_class_token_(low_rank(3)), 4, [given])
    narrow = narrow_branches_(deepcopy(tailed), [FewerDims(1, 3)], [given])
    assert distance(answers(narrow, given), answers(tailed, given)) < 1e-3  # maps are not of rank 3


def test_a_block_with_fewer_heads_can_be_changed_further(images: Tensor) -> None:
    model = trim_to_class_token_(ready_for(images, tiny(depth=4, num_heads=4), KEEP))
    narrow = apply_(deepcopy(model), Plan(removal=KEEP, heads=((1, 2), (2, 3), (3, 1))), [images, images])
    site = Site("attention", 1, "blocks.1.attn")
    moves = [
        Styled(site, "linear"),
        *offered(narrow, model, ["tail", "heads", "head_dims", "tokens"]),
    ]
    assert FewerHeads(1, 1) in moves
    for move, variant in variants(narrow, moves, [images]).items():
        assert distance(answers(variant, images), answers(narrow, images)) < 2, move
    removed = variants(narrow, moves[:1], [images])[moves[0]]
    assert require_record(removed).plan.heads == ((2, 3), (3, 1))
    long = with_tail(narrow, 4, [images])
    again = apply_(deepcopy(long), Plan(removal=KEEP, heads=((2, 1),)), [images, images])
    assert require_record(again).plan.heads == ((1, 2), (2, 1), (3, 1))
    assert answers(again, images).isfinite().all()


def test_it_is_trained_like_any_student(images: Tensor) -> None:
    dense = tiny(depth=4, num_heads=4)
    student = apply_(deepcopy(dense), WHOLE, [images, images])
    config = SHORT.with_settings({"distillation.hidden": 1.0, "distillation.alpha": 1.0})
    *_, last = hetdpt.recover(student, dense, "demo", config)
    assert last.loss is not None
    assert head_counts(student) == {1: 3, 2: 2, 3: 1}
    assert dim_counts(student) == {1: 6, 2: 8, 3: 4}


def test_tokens_are_merged_where_there_are_fewer_heads(images: Tensor) -> None:
    plan = replace(WHOLE, tokens=Tokens("tome", 2))
    merging = apply_(tiny(depth=4, num_heads=4), plan, [images, images])
    assert answers(merging, images).isfinite().all()
    assert require_record(merging).plan.heads == WHOLE.heads


def test_moves_are_fitted_as_if_each_were_the_only_one(images: Tensor) -> None:
    model = four_headed()
    moves = [FewerHeads(block, 3) for block in range(3)]
    for move, variant in with_narrower(model, moves, [images]).items():
        alone = narrow_branches_(deepcopy(model), [move], [images])
        assert torch.equal(answers(variant, images), answers(alone, images))


def test_a_plan_without_the_attention_has_no_heads_of_it() -> None:
    assert Plan(attention=(1,), heads=((0, 2), (1, 3))).heads == ((0, 2),)
    with pytest.raises(PlanError, match=r"heads of a plan is a list of \(block, count\), not \(\(1, 0\),\)"):
        Plan(heads=((1, 0),))


def test_what_cannot_be_done_is_said(images: Tensor) -> None:
    with pytest.raises(PlanError, match="leaves 2 heads in block 0, which is fitted on images"):
        hetdpt.prune_(tiny(), Plan(heads=((0, 2),)))
    with pytest.raises(PlanError, match="the plan leaves heads of 20 dimensions in block 1, but there are 16"):
        hetdpt.apply_(tiny(), Plan(head_dims=((1, 20),)), [images])
    with pytest.raises(PlanError, match="the plan leaves 3 heads in block 1, but there are 2"):
        hetdpt.apply_(tiny(), Plan(heads=((1, 3),)), [images])
    with pytest.raises(
        PlanError, match="block 1 has no attention whose heads can be removed; blocks that have one: 0, 2"
    ):
        narrow_branches_(hetdpt.prune_(tiny(), Plan(attention=(1,))), [FewerHeads(1, 1)], [images])
