"""The loop: losses by hand, an improvement that is learned, states that continue bit for bit, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.heads import Classifier, logits_of, pair_of
from hetdpt.core.errors import HetDPTError, ModelError, TrainError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.data.augmentation import Augmentation
from hetdpt.data.sources import open_data
from hetdpt.data.views import Batch
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.remove import prune_
from hetdpt.tasks.annotated import AnnotatedBatch
from hetdpt.training.config import TrainConfig
from hetdpt.training.drop_paths import drop_paths
from hetdpt.training.objective import Distillation, Objective, OwnLoss
from hetdpt.training.processes import start
from hetdpt.training.recover import RecoverConfig, recover
from hetdpt.training.trainer import Epoch, Trainer

PLAIN = TrainConfig(epochs=2, batch_size=16, lr=1e-3, lr_batch=None, mixup=0, cutmix=0, smoothing=0, ema_decay=0)
SHORT = RecoverConfig(
    training=PLAIN,
    augmentation=Augmentation.plain(),
    distillation=Distillation(kind="soft", alpha=0.9),
    drop_path=0.0,
    per_class=4,
)


def tiny(name: str = "vit_tiny_patch16_224", seed: int = 0, **arguments: Any) -> nn.Module:
    """Return a small ViT for the demo images, the same at every call."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(name, **{**sizes, **arguments})
    return model.eval()


def two_headed() -> nn.Module:
    return tiny("deit_tiny_distilled_patch16_224", seed=1, depth=2)


def a_batch(count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    targets = torch.randint(10, (count,), generator=generator)
    return Batch(images, targets, torch.arange(count), ())


def numbers(epochs: list[Epoch]) -> list[tuple[Any, ...]]:
    return [(e.number, e.loss, e.last, e.best, e.ema, e.lr, e.update) for e in epochs]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().flatten().float() for tensor in model.state_dict().values()])


class Memory:
    """A keeper that keeps every state, after every update."""

    def __init__(self, states: list[dict[str, Any]] | None = None) -> None:
        self.states = states or []

    def latest(self) -> dict[str, Any] | None:
        return self.states[-1] if self.states else None

    def is_due(self) -> bool:
        return True

    def keep(self, state: dict[str, Any]) -> None:
        self.states.append(deepcopy(state))


# Losses, each against the formula written out.


def loss_of(distillation: Distillation, student: nn.Module, teacher: nn.Module, **changes: Any) -> Tensor:
    objective = Objective(student, replace(PLAIN, **changes), distillation, deepcopy(teacher))
    student.train()
    try:
        return objective(a_batch()).detach()
    finally:
        objective.close()
        student.eval()


def test_no_distillation_is_cross_entropy() -> None:
    student, batch = tiny(), a_batch()
    expected = F.cross_entropy(student(batch.images), batch.targets)
    assert loss_of(Distillation(kind="none"), student, tiny()) == pytest.approx(expected.item(), rel=1e-6)


def test_smoothing_spreads_a_tenth_over_all_classes() -> None:
    student, batch = tiny(), a_batch()
    wanted = 0.9 * F.one_hot(batch.targets, 10) + 0.1 / 10
    expected = -(wanted * student(batch.images).log_softmax(1)).sum(1).mean()
    found = loss_of(Distillation(kind="none"), student, tiny(), smoothing=0.1)
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_hard_distillation_by_hand() -> None:
    student, teacher, batch = tiny(), tiny(depth=2), a_batch()
    logits = student(batch.images)
    named = teacher(batch.images).argmax(1)
    expected = 0.5 * F.cross_entropy(logits, batch.targets) + 0.5 * F.cross_entropy(logits, named)
    assert loss_of(Distillation(kind="hard"), student, teacher) == pytest.approx(expected.item(), rel=1e-6)


def test_soft_distillation_by_hand() -> None:
    student, teacher, batch = tiny(), tiny(depth=2), a_batch()
    logits, alpha, temperature = student(batch.images), 0.7, 3.0
    p = (teacher(batch.images) / temperature).softmax(1)
    q = (logits / temperature).softmax(1)
    divergence = (p * (p / q).log()).sum(1).mean() * temperature**2
    expected = (1 - alpha) * F.cross_entropy(logits, batch.targets) + alpha * divergence
    found = loss_of(Distillation(kind="soft", alpha=alpha, temperature=temperature), student, teacher)
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_two_heads_learn_each_from_its_own_master() -> None:
    student, teacher, batch = two_headed(), two_headed(), a_batch()
    with torch.no_grad():
        teacher.head.bias += torch.randn(10, generator=torch.Generator().manual_seed(3))
    named = teacher(batch.images).argmax(1)
    student.set_distilled_training(True)
    main, other = student.train()(batch.images)
    expected = 0.5 * F.cross_entropy(main, batch.targets) + 0.5 * F.cross_entropy(other, named)
    assert loss_of(Distillation(kind="hard"), student, teacher) == pytest.approx(expected.item(), rel=1e-6)
    assert isinstance(student.train()(batch.images), Tensor)  # after training it answers as before


def test_a_teacher_with_other_mean_and_std_sees_the_images_its_own_way() -> None:
    student, teacher, batch = tiny(), tiny(depth=2), a_batch()
    teacher.pretrained_cfg = {**teacher.pretrained_cfg, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)))
    own = (batch.images * 0.5 + 0.5 - mean) / std  # this ViT has mean = std = 0.5
    logits = student(batch.images)
    named = teacher(own).argmax(1)
    expected = 0.5 * F.cross_entropy(logits, batch.targets) + 0.5 * F.cross_entropy(logits, named)
    assert loss_of(Distillation(kind="hard"), student, teacher) == pytest.approx(expected.item(), rel=1e-5)


def test_answers_of_huggingface_and_of_two_heads() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.DeiTConfig(**sizes, intermediate_size=32, num_labels=5)
    model = transformers.DeiTForImageClassificationWithTeacher(config).eval()
    images = torch.randn(2, 3, 16, 16)
    answer = model(images)
    torch.testing.assert_close(Classifier(model)(images), answer.logits)
    torch.testing.assert_close(pair_of(answer), (answer.cls_logits, answer.distillation_logits))
    torch.testing.assert_close(logits_of((images, images)), images)
    with pytest.raises(ModelError, match="expected logits of an image classifier, but this model returns list"):
        logits_of([images])


# What is learned.


@pytest.mark.slow
def test_recovery_learns_what_pruning_lost() -> None:
    dense = tiny()
    teach = replace(PLAIN, epochs=12, batch_size=32, lr=2e-3)
    taught = RecoverConfig(training=teach, augmentation=Augmentation.plain(), drop_path=0.0)
    trained = list(recover(dense, None, "demo", taught))
    student = prune_(deepcopy(dense), Plan(attention=(1,), activation=(2,)))
    config = replace(SHORT, training=replace(PLAIN, epochs=3, batch_size=32), per_class=None)
    epochs = list(recover(student, dense, "demo", config))
    assert trained[-1].best > 80  # a teacher worth the name
    assert epochs[0].last < trained[-1].last - 5, "the plan was to cost something"
    assert epochs[-1].last > epochs[0].last + 5, "recovery was to bring it back"
    assert epochs[-1].best == max(epoch.last for epoch in epochs)
    assert [epoch.number for epoch in epochs] == [0, 1, 2, 3]


def test_the_teacher_is_left_alone_even_if_it_shares_weights() -> None:
    dense = tiny()
    before = weights(dense).clone()
    student = prune_(clone(dense), Plan(attention=(1,)))
    frozen = deepcopy(dense)
    epochs = recover(student, dense, "demo", SHORT)
    alone = list(recover(prune_(deepcopy(frozen), Plan(attention=(1,))), frozen, "demo", SHORT))
    assert numbers(list(epochs)) == numbers(alone), "a teacher that learned along would answer otherwise"
    assert torch.equal(weights(frozen), before)
    assert all(parameter.requires_grad for parameter in dense.parameters())


def test_the_average_is_evaluated_and_is_the_average() -> None:
    config = replace(SHORT, training=replace(PLAIN, ema_decay=0.5))
    model = tiny()
    average, decay, seen = weights(model).clone(), 0.5, []
    keeper = Memory()
    for epoch in recover(model, None, "demo", config, keeper=keeper):
        seen.append(epoch)
    for number, state in enumerate(state for state in keeper.states if state["position"]["step"]):
        now = torch.cat([tensor.flatten() for tensor in state["model"].values()])
        average = now if number == 0 else decay * average + (1 - decay) * now  # timm begins with the first update
    torch.testing.assert_close(weights(seen[-1].average), average)
    assert not torch.equal(weights(seen[-1].average), weights(model))
    assert all(epoch.ema is not None for epoch in seen)


def test_merged_training_has_fewer_weights_and_starts_from_the_same_function() -> None:
    dense = tiny()
    plan = Plan(activation=(0, 1))
    apart, merged = (prune_(deepcopy(dense), plan) for _ in range(2))
    first = next(iter(recover(apart, dense, "demo", SHORT)))
    second = next(iter(recover(merged, dense, "demo", replace(SHORT, train_merged=True))))
    assert weights(merged).numel() < weights(apart).numel()
    assert first.last == second.last


def test_cached_answers_train_as_the_teacher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tiny()
    config = replace(SHORT, augmentation=Augmentation.plain(views=1))
    results = []
    for cached in (False, True):
        student = prune_(deepcopy(dense), Plan(attention=(0, 2)))
        teacher, asked = hetdpt.trim_(deepcopy(dense)), []
        teacher.pretrained_cfg = {**teacher.pretrained_cfg, "mean": (0.4, 0.5, 0.6)}  # it sees images its own way
        monkeypatch.setattr(type(teacher), "__deepcopy__", lambda self, memo: self, raising=False)
        teacher.register_forward_hook(lambda module, args, output, asked=asked: asked.append(len(output)))
        epochs = list(recover(student, teacher, "demo", replace(config, cache_teacher=cached)))
        monkeypatch.undo()
        results.append((sum(asked), numbers(epochs), weights(student)))
    assert [asked for asked, *_ in results] == [64, 41], (
        "32 of 40 images in each of two epochs; a first one for shapes, then each once"
    )
    # the teacher saw the images in other batches, and Adam makes much of the rounding of small gradients
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-3, atol=1e-5)


def test_accumulated_batches_equal_one_large_batch() -> None:
    students = [tiny(), tiny()]
    for student, size, group in zip(students, (16, 4), (1, 4), strict=True):
        training = replace(PLAIN, batch_size=size, accumulate=group)
        list(recover(student, None, "demo", replace(SHORT, training=training)))
    torch.testing.assert_close(weights(students[0]), weights(students[1]), rtol=1e-3, atol=2e-5)  # sums in other orders


# States.


@pytest.mark.parametrize("stop", [0, 1, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (2, 4)), 3])
def test_going_on_from_any_state_ends_bit_equal(stop: int) -> None:
    """Everything random is on: mixing, drop path, augmentation, moving average; two updates an epoch."""
    training = replace(PLAIN, mixup=0.8, cutmix=1.0, ema_decay=0.9, smoothing=0.1)
    config = RecoverConfig(training=training, distillation=Distillation(kind="hard"), drop_path=0.3, per_class=4)
    dense, plan = tiny(), Plan(attention=(1,))
    whole = prune_(deepcopy(dense), plan)
    keeper = Memory()
    expected = list(recover(whole, dense, "demo", config, keeper=keeper))
    assert len(keeper.states) == 4
    again = prune_(deepcopy(dense), plan)
    torch.manual_seed(1234 + stop)  # another process has other generators
    found = list(recover(again, dense, "demo", config, keeper=Memory(keeper.states[:stop])))
    assert torch.equal(weights(whole), weights(again))
    assert torch.equal(weights(expected[-1].average), weights(found[-1].average))
    assert numbers(found) == numbers(expected)[len(expected) - len(found) :]
    assert [e.number for e in found] == [[0, 1, 2], [1, 2], [1, 2], [2], [2]][stop]


def test_training_leaves_the_generators_of_the_caller_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(recover(tiny(), None, "demo", replace(SHORT, training=replace(PLAIN, mixup=0.8))))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_trains_the_same_and_another_does_not() -> None:
    models = [tiny() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        list(recover(model, None, "demo", replace(SHORT, training=replace(PLAIN, seed=seed))))
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert not torch.equal(weights(models[0]), weights(models[2]))


# Weight decay, layer decay, schedules, drop path.


def test_the_learning_rate_rises_and_falls() -> None:
    rates = []
    training = replace(PLAIN, epochs=5, warmup_epochs=1.0, final_lr=0.1)
    list(recover(tiny(), None, "demo", replace(SHORT, training=training), watch=lambda now: rates.append(now.lr)))
    assert rates[0] < rates[1] < rates[2] == pytest.approx(1e-3, rel=0.1)  # two updates an epoch
    assert all(later < earlier for earlier, later in pairwise(rates[2:]))
    assert 1e-4 < rates[-1] < 1.3e-4  # one update before the end of the cosine


def test_a_constant_learning_rate_is_constant() -> None:
    rates = set()
    training = replace(PLAIN, schedule="constant", optimizer="sgd", lr=0.1)
    list(recover(tiny(), None, "demo", replace(SHORT, training=training), watch=lambda now: rates.add(now.lr)))
    assert rates == {0.1}


@pytest.mark.parametrize("schedule", ["cosine", "constant", "step", "poly"])
def test_layer_decay_and_exempt_parameters(schedule: str) -> None:
    keeper = Memory()
    training = replace(PLAIN, epochs=1, layer_decay=0.5, weight_decay=0.1, schedule=schedule)
    list(recover(tiny(), None, "demo", replace(SHORT, training=training), keeper=keeper))
    groups = keeper.states[-1]["optimizer"]["param_groups"]
    assert len({group["lr_scale"] for group in groups}) >= 4  # stem, three blocks, head
    assert len({round(group["lr"] / group["lr_scale"], 12) for group in groups}) == 1, "each layer its part"
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def test_drop_path_drops_whole_images_in_training_only() -> None:
    model = tiny()
    images = a_batch(64).images
    dense = model(images)
    with drop_paths(model, 0.9), torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.equal(model(images), dense)
        changed = (model.train()(images) - dense).abs().amax(1) > 1e-6
        first = model.blocks[0](torch.ones(64, 17, 32))
    assert changed.float().mean() > 0.5
    assert torch.equal(first, model.eval().blocks[0](torch.ones(64, 17, 32)))  # the first block has rate 0
    assert torch.equal(model.train()(images), dense), "the hooks are gone"


def test_drop_path_keeps_the_windows_of_an_image_together() -> None:
    swin = {"img_size": 32, "patch_size": 2, "depths": (2,), "embed_dim": 16, "num_heads": (2,), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=10, drop_path_rate=0.0, **swin).train()
    rows = []
    model.layers[0].blocks[1].drop_path1.register_forward_hook(lambda *seen: rows.append(seen[2]))
    with drop_paths(model, 0.5), torch.random.fork_rng():
        torch.manual_seed(0)
        model(torch.randn(16, 3, 32, 32))
    is_zero = rows[-1].abs().flatten(1) == 0
    assert torch.equal(is_zero.all(1), is_zero.any(1)), "a whole image or none of it"
    assert 0 < is_zero.all(1).sum() < 16


def test_a_branch_that_is_gone_is_not_dropped() -> None:
    model = prune_(tiny(depth=1), Plan(attention=(0,), activation=(0,)))
    expected = merge_(model)(a_batch().images)
    with drop_paths(model, 0.5):
        assert torch.equal(model.train()(a_batch().images), expected), "the only block left has rate 0"


# What is refused, and in which words.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epochs": 0}, "epochs is 0; it must be 1 or more"),
        ({"lr": 0.0}, "lr is 0.0; it must be above 0"),
        ({"decay_epochs": 0.0}, "decay_epochs is 0.0; it must be above 0"),
        ({"decay_epochs": -1.0, "schedule": "step"}, "decay_epochs is -1.0; it must be above 0"),
        ({"decay_epochs": float("nan")}, "decay_epochs is nan; it must be above 0"),
        ({"schedule": "sine"}, "choose from cosine, constant"),
        ({"precision": "int8"}, "choose from auto, float32"),
        ({"ema_decay": 1.5}, "ema_decay is 1.5; it must be between 0 and 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it cannot be negative"),
        ({"warmup_epochs": 2.0, "epochs": 2}, "warmup_epochs is 2.0, but training has 2 epochs"),
        ({"batch_size": 15, "mixup": 0.8}, "batch_size is 15, but mixup and CutMix pair images; use an even number"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainError, match=text):
        replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_teacher": True}, "cache_teacher needs fixed views"),
        ({"drop_path": 1.0}, "drop_path is 1.0; expected a probability below 1"),
    ],
)
def test_contradictions_of_recovery_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainError, match=text):
        replace(SHORT, **changes)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "medium"}, "choose from none, hard, soft"),
        ({"alpha": 2.0}, "alpha is 2.0"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
    ],
)
def test_contradictions_of_distillation_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainError, match=text):
        Distillation(**arguments)


def test_settings_by_name() -> None:
    config = SHORT.with_settings({"training.batch_size": 7, "training.mixup": 0.0, "drop_path": 0.2})
    assert (config.training.batch_size, config.drop_path) == (7, 0.2)
    with pytest.raises(TrainError, match="unknown setting training.weightdecay; did you mean training.weight_decay"):
        SHORT.with_settings({"training.weightdecay": 1})


def test_students_and_teachers_must_fit() -> None:
    with pytest.raises(TrainError, match="the student has 10 classes but the teacher has 12"):
        next(iter(recover(tiny(), tiny(num_classes=12), "demo", SHORT)))
    with pytest.raises(TrainError, match="the student takes images of .3, 16, 16. but the teacher of .3, 32, 32."):
        next(iter(recover(tiny(), tiny(img_size=32), "demo", SHORT)))
    with pytest.raises(HetDPTError, match="10 classes but the model's head has 12"):
        next(iter(recover(tiny(num_classes=12), None, "demo", SHORT)))
    with pytest.raises(TrainError, match="hard distillation needs a teacher"):
        Objective(tiny(), PLAIN, Distillation(kind="hard"))


def test_a_loss_that_is_no_number_stops_with_step_rate_and_advice() -> None:
    training = replace(PLAIN, lr=1e30, clip_grad=None, epochs=4)
    with pytest.raises(TrainError, match=r"not finite at update \d+ \(epoch \d, learning rate \d.*lower --lr"):
        list(recover(tiny(), None, "demo", replace(SHORT, training=training)))


def test_data_without_images_to_train_on_are_refused() -> None:
    with pytest.raises(TrainError, match="needs the splits train and val; open the data with both"):
        next(iter(recover(tiny(), None, open_data("demo", splits=("val",)), SHORT)))


def test_half_precision_is_measured_as_it_is_and_trained_in_float32() -> None:
    student = tiny().half()
    assert hetdpt.evaluate(student, "demo", per_class=1).count == 10
    list(recover(student, tiny().half(), "demo", SHORT))
    assert next(student.parameters()).dtype == torch.float32


def test_more_accumulation_than_batches_is_refused() -> None:
    with pytest.raises(TrainError, match="one epoch has 2 batches but an update takes 3"):
        list(recover(tiny(), None, "demo", replace(SHORT, training=replace(PLAIN, accumulate=3))))


def test_an_epoch_is_json() -> None:
    epoch = next(iter(recover(tiny(), None, "demo", SHORT)))
    record = json.loads(json.dumps(epoch.record()))
    assert record["number"] == 0
    assert not {"student", "average"} & record.keys()


def test_progress_knows_the_end() -> None:
    seen = []
    list(islice(recover(tiny(), None, "demo", SHORT, watch=seen.append), 3))
    assert [(now.epoch, now.update, now.updates) for now in seen] == [(1, 1, 4), (1, 2, 4), (2, 3, 4), (2, 4, 4)]
    assert seen[-1].seconds_left == 0
    assert seen[0].seconds_left > 0
    assert hetdpt.recover is recover


# Losses of the model's own, and a backbone that learns more slowly.


class Sum(nn.Module):
    """A model whose loss is the sum of what it is made of, so that every gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, images: Tensor, targets: Any) -> Tensor:
        assert [target["boxes"].item() for target in targets] == images[:, 0, 0, 0].tolist()
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


class Ones:
    """Two batches of two images each, every one with what is known of it."""

    def __len__(self) -> int:
        return 2

    def epoch(self, number: int, start: int = 0) -> Iterator[AnnotatedBatch]:
        for batch in range(start, 2):
            values = torch.tensor([2.0 * batch, 2.0 * batch + 1])
            targets = tuple({"boxes": value} for value in values)
            yield AnnotatedBatch(values[:, None, None, None].expand(2, 3, 4, 4), targets, torch.arange(2))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_backbone_takes_its_part_of_every_step(weight_decay: float) -> None:
    model = Sum()
    before = deepcopy(model)
    rates = {"lr": 0.1, "backbone_lr": 0.25, "momentum": 0.0, "optimizer": "momentum", "schedule": "constant"}
    config = replace(PLAIN, epochs=1, batch_size=2, weight_decay=weight_decay, **rates)
    trainer = Trainer(start(device="cpu"), OwnLoss(model), Ones(), config)
    assert [epoch.number for epoch in trainer.epochs()] == [0, 1]
    for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True):
        rate = 0.025 if name.startswith("backbone.") else 0.1
        expected = old.detach()
        for _ in range(2):
            decay = weight_decay if new.ndim > 1 else 0.0  # biases are exempt
            expected = expected - rate * (1 + decay * expected)
        torch.testing.assert_close(new.detach(), expected, rtol=0, atol=1e-6)  # float32 rounding of two steps


def test_a_slow_backbone_and_layer_decay_are_refused_together() -> None:
    with pytest.raises(TrainError, match="backbone_lr and layer_decay both set the learning rate of layers; give one"):
        TrainConfig(backbone_lr=0.5, layer_decay=0.9)
