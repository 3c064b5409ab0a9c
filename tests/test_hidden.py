"""Hidden states as a target: the formula written out, over families and kinds of students; training with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, by_label, named
from test_training import PLAIN, SHORT, Memory, a_batch, numbers, tiny, two_headed, weights
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.heads import logits_of
from hetdpt.core.errors import TrainError
from hetdpt.core.plan import Plan
from hetdpt.core.randomness import seeded
from hetdpt.core.tokens import Tokens
from hetdpt.data.augmentation import Augmentation
from hetdpt.data.views import Batch
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.choice import Ratios
from hetdpt.reduce.width.narrow import WidthConfig, narrow_
from hetdpt.surgery.calibrate import remove_
from hetdpt.surgery.record import RECORD, require_record
from hetdpt.surgery.remove import prune_
from hetdpt.surgery.tail import trim_
from hetdpt.training.hidden import HiddenLoss
from hetdpt.training.objective import Distillation, Objective
from hetdpt.training.recover import RecoverConfig, recover

WIDTH = WidthConfig(importance="l2", refits=False)
HIDDEN = Distillation(kind="soft", alpha=1.0, hidden=5.0)
LEARNING = replace(SHORT, distillation=HIDDEN)
PREFIX = {
    "vit_tiny_patch16_224": 1,
    "deit_tiny_distilled_patch16_224": 2,
    "vit_medium_patch16_reg4_gap_256": 4,
    "vit_small_patch16_dinov3": 5,
    "swin_tiny_patch4_window7_224": 0,
    "hf ViTForImageClassification": 1,
    "hf SwinForImageClassification": 0,
    "hf Dinov2WithRegistersForImageClassification": 5,
}
"""Class, distillation and register tokens before the patches of a model, by its family."""


# The formula, written once more: streams by the names of blocks, LayerNorm and cosine by their definitions.


def lively(model: nn.Module) -> nn.Module:
    """Return ``model`` with weights so large that every layer counts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    names = {"Block", "EvaBlock", "SwinTransformerBlock", "ViTLayer", "SwinLayer", "Dinov2WithRegistersLayer"}
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which every block of the next forward pass adds its stream."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        while isinstance(output, tuple):
            output = output[0]
        seen.append(output.flatten(1, -2))

    hooks = [block.register_forward_hook(keep) for block in blocks_of(model)]
    yield seen
    for hook in hooks:
        hook.remove()


def streams(model: nn.Module, images: Tensor) -> list[Tensor]:
    with watched(model) as seen:
        model(images)
    return seen


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of each pair of tokens, less their means and divided by their deviations."""
    pair = [
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() for x in (one, other)
    ]
    return (pair[0] * pair[1]).sum(-1) / (pair[0].norm(dim=-1) * pair[1].norm(dim=-1))


def by_hand(student: list[Tensor], teacher: list[Tensor], prefix: int, only: dict[int, int] | None = None) -> Tensor:
    """Return the loss; ``only`` says of some blocks that so many tokens of them are compared."""
    total = torch.zeros(())
    for number, (ours, theirs) in enumerate(zip(student, teacher, strict=True)):
        count = (only or {}).get(number, theirs.shape[1])
        assert number in (only or {}) or ours.shape == theirs.shape
        found = cosines(ours[:, :count], theirs[:, :count])
        if prefix == 0 or count <= prefix:
            total = total + (1 - found.mean())
        else:
            total = total + 0.5 * (1 - found[:, :prefix].mean()) + 0.5 * (1 - found[:, prefix:].mean())
    return total / len(student)


def hidden_loss(student: nn.Module, teacher: nn.Module, images: Tensor) -> Tensor:
    loss = HiddenLoss(student, teacher)
    with loss.student.watch(len(images)) as ours, loss.teacher.watch(len(images)) as theirs:
        student(images)
        teacher(images)
    return loss(ours, loss.targets(theirs))


def assert_by_hand(
    student: nn.Module, teacher: nn.Module, images: Tensor, prefix: int, only: dict[int, int] | None = None
) -> None:
    found = hidden_loss(student, teacher, images)
    expected = by_hand(streams(student, images), streams(teacher, images), prefix, only)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # float32, in another order
    assert found > 1e-3, "student and teacher were to differ"


@pytest.mark.parametrize("family", [named(label) for label in PREFIX], ids=by_label)
def test_the_formula_over_families(family: Family) -> None:
    teacher = family.build()
    student = prune_(deepcopy(teacher), family.plan(hetdpt.sites(teacher, family.size)), family.size)
    assert hidden_loss(deepcopy(teacher), teacher, family.images()).abs() < 1e-6
    assert_by_hand(student, teacher, family.images(), PREFIX[family.label])


def test_the_loss_is_that_of_logits_and_lambda_times_that_of_streams() -> None:
    teacher, batch = tiny(), a_batch()
    student = prune_(deepcopy(teacher), Plan(attention=(0,), activation=(1,)))
    losses = []
    for weight in (0.0, 3.0):
        objective = Objective(student, PLAIN, replace(HIDDEN, hidden=weight), deepcopy(teacher))
        losses.append(objective(batch).detach())
    p, q = teacher(batch.images).log_softmax(1), student(batch.images).log_softmax(1)
    divergence = (p.exp() * (p - q)).sum(1).mean()
    streams_apart = by_hand(streams(student, batch.images), streams(teacher, batch.images), 1)
    torch.testing.assert_close(losses[0], divergence, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(losses[1] - losses[0], 3 * streams_apart, rtol=1e-5, atol=1e-6)


# Only what the student computes too.


def test_trimmed_blocks_are_compared_by_their_class_tokens() -> None:
    teacher, images = lively(tiny()), a_batch().images
    student = trim_(prune_(deepcopy(teacher), Plan(attention=(2,))))
    assert [stream.shape[1] for stream in streams(student, images)] == [17, 1, 1]
    assert_by_hand(student, teacher, images, 1, {1: 1, 2: 1})
    assert_by_hand(student, trim_(deepcopy(teacher)), images, 1, {1: 1, 2: 1})


@pytest.mark.parametrize(("build", "kept"), [(tiny, 1), (two_headed, 2)])
def test_tail_blocks_are_compared_by_their_class_tokens(build: Any, kept: int) -> None:
    teacher, images = lively(build()), a_batch().images
    blocks = len(blocks_of(teacher))
    plan = Plan(attention=(0,), tail=blocks - 1, removal="calibrated")
    student = remove_(deepcopy(teacher), plan, [images])
    only = dict.fromkeys(range(blocks - plan.tail, blocks), kept)
    assert_by_hand(student, teacher, images, kept, only)


def test_merged_tokens_are_not_compared() -> None:
    teacher, images = lively(tiny()), a_batch().images
    student = reduce_tokens_(deepcopy(teacher), Tokens("tome", 2))
    assert [stream.shape[1] for stream in streams(student, images)] == [15, 13, 11]
    assert_by_hand(student, teacher, images, 1, dict.fromkeys(range(3), 1))


def test_a_mean_of_tokens_is_no_stream() -> None:
    teacher, images = lively(tiny(global_pool="avg", class_token=False)), a_batch().images
    student = trim_(prune_(deepcopy(teacher), Plan(attention=(0,))))
    ours, theirs = streams(student, images)[:2], streams(teacher, images)[:2]
    torch.testing.assert_close(hidden_loss(student, teacher, images), by_hand(ours, theirs, 0))
    assert sorted(HiddenLoss(student, teacher).student.last) == [0, 1]
    assert sorted(HiddenLoss(student, teacher).teacher.last) == [0, 1, 2]


def test_students_that_share_no_tokens_are_refused() -> None:
    loss = HiddenLoss(tiny(global_pool="avg", class_token=False), tiny(global_pool="avg", class_token=False))
    with pytest.raises(TrainError, match="computes no tokens that its teacher computes; set distillation.hidden to 0"):
        loss({0: torch.ones(2, 14, 32)}, {0: torch.ones(2, 16, 32)})
    with pytest.raises(TrainError, match="the student has 3 blocks and the teacher 2; use the model that was pruned"):
        HiddenLoss(tiny(), tiny(depth=2))


# Fewer channels.


def saved_tiny(folder: Path) -> nn.Module:
    """Return ``tiny`` as it is loaded: with the sizes that it is built from again when it is saved."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
    base = hetdpt.Base("timm", "vit_tiny_patch16_224", sizes)
    return hetdpt.load(hetdpt.save(lively(tiny()), folder / "dense", base=base))


def test_a_narrowed_stream_is_compared_by_the_channels_it_has(tmp_path: Path) -> None:
    teacher, images = saved_tiny(tmp_path), a_batch().images
    first = narrow_(deepcopy(teacher), Ratios(embedding=0.25), WIDTH)
    twice = narrow_(prune_(deepcopy(first), Plan(attention=(1,))), Ratios(embedding=0.25), WIDTH)
    loaded = hetdpt.load(hetdpt.save(deepcopy(twice), tmp_path / "narrow"))
    for student, width in ((first, 24), (twice, 18), (loaded, 18)):
        channels = require_record(student).channels
        assert channels is not None
        assert len(channels) == width
        theirs = [stream[..., list(channels)] for stream in streams(teacher, images)]
        expected = by_hand(streams(student, images), theirs, 1)
        torch.testing.assert_close(hidden_loss(student, teacher, images), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden_loss(loaded, teacher, images), hidden_loss(twice, teacher, images))
    kept = require_record(first).channels
    assert kept is not None
    places = [kept.index(channel) for channel in require_record(twice).channels or ()]
    between = [stream[..., places] for stream in streams(first, images)]
    expected = by_hand(streams(twice, images), between, 1)
    torch.testing.assert_close(hidden_loss(twice, first, images), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TrainError, match="has channel [0-9]+ of the stream, which the teacher has not"):
        HiddenLoss(first, twice)


def test_channels_are_those_whose_embedding_is_the_same() -> None:
    """Without a refit a kept channel has the weights of the original: the patch embedding says which it is."""
    teacher = tiny()
    student = narrow_(deepcopy(teacher), Ratios(embedding=0.25), WIDTH)
    rows = teacher.patch_embed.proj.weight.detach().flatten(1)
    found = [int((rows - row).abs().sum(1).argmin()) for row in student.patch_embed.proj.weight.detach().flatten(1)]
    assert tuple(found) == require_record(student).channels


def test_a_narrower_stream_of_unknown_channels_is_refused() -> None:
    teacher = tiny()
    student = narrow_(deepcopy(teacher), Ratios(embedding=0.25), WIDTH)
    vars(student)[RECORD] = replace(require_record(student), channels=None)  # as in models saved before
    with pytest.raises(TrainError, match="has 24 channels and that of the teacher 32, and which of them were kept is"):
        hidden_loss(student, teacher, a_batch().images)


# Gradients.


@pytest.mark.parametrize("label", PREFIX)
def test_gradients_reach_the_whole_student_and_nothing_of_the_teacher(label: str) -> None:
    family = named(label)
    teacher = family.build()
    student = prune_(deepcopy(teacher), family.plan(hetdpt.sites(teacher, family.size)), family.size)
    objective = Objective(student, PLAIN, HIDDEN, teacher)
    objective.model.train()
    objective(Batch(family.images(), torch.zeros(2, dtype=torch.int64), torch.arange(2))).backward()
    idle = [name for name, one in student.named_parameters() if one.grad is None or not one.grad.abs().max() > 0]
    # the bias of keys shifts all scores of a query alike, so that its gradient is rounding or exactly 0
    assert not [name for name in idle if not name.endswith(("mask_token", "key.bias", "k_proj.bias"))]
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_streams_alone_have_gradients() -> None:
    """Without the logits: every block learns from its own stream, the head learns nothing."""
    teacher, images = tiny(), a_batch().images
    student = prune_(deepcopy(teacher), Plan(attention=(1,), activation=(2,))).train()
    hidden_loss(student, teacher, images).backward()
    idle = {name for name, parameter in student.named_parameters() if parameter.grad is None}
    assert idle == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_without_labels_both_heads_learn_the_teacher_by_their_mean() -> None:
    teacher, student, batch = two_headed(), prune_(two_headed(), Plan(attention=(0,))), a_batch()
    objective = Objective(student, PLAIN, Distillation(kind="soft", alpha=1.0), teacher)
    objective.model.train()
    loss = objective(batch)
    loss.backward()
    assert student.head.weight.grad.abs().max() > 0
    assert student.head_dist.weight.grad.abs().max() > 0
    objective.close()
    p, q = logits_of(teacher(batch.images)).log_softmax(1), student.eval()(batch.images).log_softmax(1)
    assert loss.item() == pytest.approx((p.exp() * (p - q)).sum(1).mean().item(), rel=1e-4)


# Training.


def learned(config: RecoverConfig, plan: Plan, **more: Any) -> tuple[nn.Module, list[Any]]:
    dense = tiny()
    student = prune_(deepcopy(dense), plan)
    return student, list(recover(student, dense, "demo", config, **more))


def test_weight_0_is_bit_equal_to_training_without_and_another_is_not() -> None:
    found = [learned(replace(SHORT, distillation=one), Plan(attention=(1,)))[0] for one in (
        Distillation(kind="soft", alpha=0.9), Distillation(kind="soft", alpha=0.9, hidden=0.0),
        Distillation(kind="soft", alpha=0.9, hidden=1.0),
    )]  # fmt: skip
    assert torch.equal(weights(found[0]), weights(found[1]))
    assert not torch.equal(weights(found[0]), weights(found[2]))
    with pytest.raises(TrainError, match="hidden is -1.0; it must be 0 or more"):
        Distillation(hidden=-1.0)


def test_it_brings_the_streams_nearer() -> None:
    dense = lively(tiny())
    student = prune_(deepcopy(dense), Plan(attention=(1,)))
    config = replace(LEARNING, training=replace(PLAIN, epochs=6))
    losses = [epoch.loss for epoch in recover(student, dense, "demo", config)][1:]
    assert losses[-1] < 0.5 * losses[0]


def test_training_sees_the_last_stream_of_a_teacher_that_averages_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tiny(global_pool="avg", class_token=False)
    seen: list[list[int]] = []
    call = HiddenLoss.__call__

    def spy(self: HiddenLoss, student: Any, targets: Any) -> Tensor:
        seen.append(sorted(targets))
        return call(self, student, targets)

    monkeypatch.setattr(HiddenLoss, "__call__", spy)
    list(recover(prune_(deepcopy(dense), Plan(attention=(1,))), dense, "demo", LEARNING))
    assert seen == [[0, 1, 2]] * 4


@pytest.mark.parametrize("is_cached", [False, True])
def test_resumed_training_ends_bit_equal(is_cached: bool) -> None:
    views = Augmentation(repeats=1, views=2) if is_cached else Augmentation(repeats=1)
    config = replace(LEARNING, augmentation=views, drop_path=0.3, cache_teacher=is_cached)
    keeper = Memory()
    whole, expected = learned(config, Plan(attention=(1,)), keeper=keeper)
    for stop in (1, 3):
        torch.manual_seed(stop)
        again, found = learned(config, Plan(attention=(1,)), keeper=Memory(keeper.states[:stop]))
        assert torch.equal(weights(whole), weights(again))
        assert numbers(found) == numbers(expected)[-len(found) :]


def test_mixed_batches_are_asked_about_as_they_are() -> None:
    """Teacher and student see the same mixed images; with mix_prob 0 none is mixed, with a half about half."""
    teacher, student, batch = tiny(), tiny(seed=1), a_batch()
    shown: list[Tensor] = []
    for model in (teacher, student):
        model.register_forward_pre_hook(lambda module, args: shown.append(args[0].clone()))
    mixed = {}
    for probability in (0.0, 0.5, 1.0):
        objective = Objective(student, replace(PLAIN, mixup=0.8, mix_prob=probability), HIDDEN, teacher)
        count = 0
        for draw in range(40):
            shown.clear()
            with seeded(draw):
                objective(replace(batch, images=batch.images.clone()))
            assert len(shown) == 2
            assert torch.equal(*shown)
            count += not torch.equal(shown[0], batch.images)
        mixed[probability] = count
    assert mixed[0.0] == 0
    assert 10 < mixed[0.5] < 30
    assert mixed[1.0] == 40
