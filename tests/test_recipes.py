"""The recipes: one contract for all of them, and the numbers of their sources."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import timm

from hetdpt.core.errors import TrainError
from hetdpt.core.published import published_plan
from hetdpt.flow.recipes import RECIPES, cifar100, cifar100_transfer, dinov2_giant_cifar100, quick, recipe
from hetdpt.training.recover import RecoverConfig

REFERENCE = json.loads((Path(__file__).parents[1] / "benchmarks" / "reference" / "reference.json").read_text())
DEIT = ("deit_small_imagenet", "deit_base_imagenet")
SWIN = ("swin_small_imagenet", "swin_base_imagenet")

PAPER = {  # how many layers a search takes
    "deit_small_imagenet": 8,
    "deit_base_imagenet": 10,
    "swin_small_imagenet": 10,
    "swin_base_imagenet": 10,
    "cifar100": 10,
    "cifar100_transfer": 10,
    "dinov2_giant_cifar100": 15,
}

every_recipe = pytest.mark.parametrize("name", RECIPES)
every_deit = pytest.mark.parametrize("name", DEIT)


@every_recipe
def test_a_recipe_is_a_frozen_value_and_the_same_every_time(name: str) -> None:
    made = recipe(name)
    assert made == RECIPES[name]()
    assert RECIPES[name].__name__ == name
    with pytest.raises(FrozenInstanceError):
        made.processes = 2  # type: ignore[misc]


@every_recipe
def test_its_model_and_the_weights_of_it_are_known_to_timm(name: str) -> None:
    model = recipe(name).model
    assert timm.is_model(model)
    assert timm.get_pretrained_cfg(model, allow_unregistered=False) is not None


@every_recipe
def test_its_plan_is_one_of_the_paper_and_made_for_its_model(name: str) -> None:
    made = recipe(name)
    if made.plan is None:
        return
    plan, size = published_plan(made.plan), made.model.removesuffix("_distilled_patch16_224")
    assert made.plan.startswith(f"paper/{size}-")
    rows = [row for row in REFERENCE["costs"] if row["model"] == made.model]
    assert [list(plan.attention), list(plan.activation)] in [[row["attention"], row["activation"]] for row in rows]


@every_recipe
def test_its_texts_say_something_and_are_of_one_line(name: str) -> None:
    made = recipe(name)
    for field in fields(made):
        text = getattr(made, field.name)
        if isinstance(text, str):
            assert text.strip() == text != ""
            assert "\n" not in text


@every_recipe
def test_its_accuracy_has_a_source(name: str) -> None:
    accuracy = recipe(name).accuracy
    assert "printed" in accuracy
    assert bool(re.search(r"\d %", accuracy)) or accuracy.startswith("not printed")


@every_recipe
def test_its_learning_rate_is_above_zero_and_its_processes_too(name: str) -> None:
    made = recipe(name)
    assert made.processes >= 1
    assert made.config.training.lr is None or made.config.training.peak_lr(made.processes) > 0


@every_deit
def test_deit_has_the_settings_of_the_release_number_by_number(name: str) -> None:
    made = recipe(name)
    training, augmentation, distillation = made.config.training, made.config.augmentation, made.config.distillation
    assert (training.optimizer, training.schedule, training.weight_decay) == ("adamw", "cosine", 0.08)
    assert (training.lr, training.lr_batch, training.batch_size) == (5e-5, 512, 128)
    assert (training.warmup_updates(1251), training.mixup, training.cutmix) == (10 * 1251, 0.8, 1.0)
    assert training.smoothing == 0.1
    assert (training.ema_decay, training.accumulate, training.clip_grad) == (0.99996, 1, None)
    assert (augmentation.auto_augment, augmentation.erasing) == ("rand-m9-mstd0.5-inc1", 0.25)
    assert augmentation.repeats > 1
    assert (distillation.kind, distillation.alpha) == ("hard", 0.5)
    assert made.config.drop_path == 0.1


@every_deit
def test_deit_goes_from_1e_4_to_1e_5_on_its_eight_processes(name: str) -> None:
    made = recipe(name)
    peak = made.config.training.peak_lr(made.processes)
    assert made.processes == 8
    assert peak == pytest.approx(1e-4, rel=1e-12)  # one float64 rounding per product
    assert peak * made.config.training.final_lr == pytest.approx(1e-5, rel=1e-12)


@every_deit
def test_deit_expects_what_the_paper_prints_for_its_plan(name: str) -> None:
    made = recipe(name)
    assert made.plan is not None
    model, layers = made.plan.removeprefix("paper/").split("-")
    printed = REFERENCE["paper_plans"][model][layers]["hetdpt"][2]
    assert made.accuracy.startswith(f"{printed} %")


def test_deit_base_states_the_hours_of_the_paper() -> None:
    assert "about 28 for the fine-tuning on 8 GPUs" in recipe("deit_base_imagenet").hours


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"deit_base_imagenet"}))
def test_the_hours_of_all_others_are_not_printed(name: str) -> None:
    assert recipe(name).hours.startswith("not printed")


@pytest.mark.parametrize("name", SWIN)
def test_swin_starts_from_weights_of_imagenet_1k_alone(name: str) -> None:
    assert recipe(name).model.endswith(".ms_in1k")  # timm's default has seen ImageNet-22k
    assert recipe(name).config == RecoverConfig()


def test_cifar100_is_sgd_at_a_fixed_rate_whatever_the_number_of_gpus() -> None:
    made = cifar100()
    training = made.config.training
    assert (training.optimizer, training.schedule, training.batch_size) == ("sgd", "constant", 384)
    assert training.warmup_updates(130) == 0
    assert training.peak_lr(1) == training.peak_lr(8) == 0.1
    wants = timm.get_pretrained_cfg(made.model)
    assert wants is not None
    assert wants.input_size == (3, 224, 224)
    assert made.accuracy.startswith(f"{REFERENCE['paper_transfer']['cifar100']['HetDPT 10'][0]} %")
    assert "momentum and weight decay are not printed" in made.accuracy


def test_transfer_differs_from_cifar100_in_what_the_paper_does_not_print() -> None:
    training, paper = cifar100_transfer().config.training, cifar100().config.training
    assert not training.mixes
    assert training.smoothing == training.ema_decay == cifar100_transfer().config.drop_path == 0
    assert cifar100_transfer().config.distillation.kind == "none"
    assert cifar100_transfer().config.augmentation == quick().search.augmentation
    for name in ("optimizer", "lr", "lr_batch", "schedule", "momentum", "weight_decay", "batch_size"):
        assert getattr(training, name) == getattr(paper, name), name


def test_dinov2_giant_sees_as_many_images_per_gpu_as_cifar100_says() -> None:
    made = dinov2_giant_cifar100()
    assert made.model == REFERENCE["dinov2_giant"]["model"]
    training, paper = made.config.training, cifar100().config.training
    assert training.batch_size * training.accumulate == paper.batch_size
    changed = replace(training, batch_size=paper.batch_size, accumulate=1, ema_decay=paper.ema_decay)
    assert changed == paper
    assert training.ema_decay == 0, "FSDP keeps no moving average"


@every_recipe
def test_its_search_has_a_fixed_rate_whatever_the_number_of_gpus(name: str) -> None:
    made = recipe(name)
    assert made.search.training.schedule == "constant"
    assert made.search.training.lr == made.search.training.peak_lr(8) == 1e-5


@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_paper_samples_with_ten_epochs_and_searches_in_stages_of_3_5_7_epochs(name: str) -> None:
    made, layers = recipe(name), PAPER[name]
    assert made.collection == made.config.with_settings({"training.epochs": 10})
    assert made.search.training.epochs == sum(3 + 2 * stage for stage in range(layers))
    assert (made.removal, made.candidates, made.explores) == ("plain", "te", False)
    assert made.plan is None or len(published_plan(made.plan)) == layers
    in_all = made.search.training.batch_size * made.search.training.accumulate
    assert in_all == made.config.training.batch_size * made.config.training.accumulate


def test_brief_and_search_are_parts_of_quick() -> None:
    assert recipe("brief").config == quick().collection
    assert recipe("search").config == quick().search
    assert quick().collection.training.epochs == 1


def test_quick_finds_its_rate_and_uses_no_labels() -> None:
    made = quick().config
    assert made.training.lr is None
    assert not made.distillation.needs_labels
    assert made.distillation.hidden > 0
    assert made.hold_out > 0


def test_quick_is_light() -> None:
    made = quick()
    training, augmentation = made.config.training, made.config.augmentation
    assert not training.mixes
    assert training.smoothing == training.ema_decay == augmentation.erasing == augmentation.color_jitter == 0
    assert augmentation.auto_augment is None
    assert training.lr_batch is None
    assert made.config.distillation.kind == "soft"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("deit_smal_imagenet", "deit_small_imagenet"), ("cifar10", "cifar100"), ("dinov2_giant", "dinov2_giant_cifar100")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TrainError, match=f"^there is no recipe '{name}'; did you mean {nearest}\\? Available: quick, "):
        recipe(name)


def test_a_name_near_to_nothing_is_answered_too() -> None:
    with pytest.raises(TrainError, match="Available: quick, brief, search, deit_small_imagenet, .*_giant_cifar100$"):
        recipe("")
