"""Ready-made settings, as functions. No logic here, and no number without its source.

An accuracy is one that the paper prints. What the paper and its release leave out is called "not printed"; then the
default of the stage's config is used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hetdpt.core.errors import TrainError
from hetdpt.selection.schedule import stage_ends
from hetdpt.selection.select import usual_search
from hetdpt.training.config import TrainConfig
from hetdpt.training.recover import RecoverConfig

IMAGENET = "the folder of ImageNet-1k, with train/ and val/"
EIGHT = "8 NVIDIA A100 GPUs with 128 images on each (paper, experiment setup)"
EPOCHS = "the number of epochs is not printed, the default is used"
DEIT_EPOCHS = f"{EPOCHS} (400 are printed for the figure that compares with removing one kind of layer)"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a recovery and of the stages before it, what they are for, and the accuracy to expect."""

    config: RecoverConfig
    """Settings of the final fine-tuning."""
    collection: RecoverConfig
    """Settings of the brief fine-tuning of each sample of accuracy."""
    search: RecoverConfig
    """Settings of the training that learns importances."""
    model: str
    """The dense model, by its name in timm: the student before pruning, and the teacher."""
    data: str
    """What to give as DATA, or a description of the folder."""
    plan: str | None
    """The paper's plan that the accuracy belongs to; None where the paper does not print the removed layers."""
    processes: int
    """How many processes ``config`` is meant for, one for each GPU."""
    accuracy: str
    """Top-1 accuracy to expect, and where that is printed."""
    hours: str
    """How long it takes, and where that is printed."""
    hardware: str
    """On which machine."""
    removal: str = "plain"
    """What replaces removed layers if the plan does not say: ``plain`` as in the paper."""
    candidates: Literal["all", "te"] = "te"
    """As in ``SelectConfig``; ``te`` as in the paper."""
    explores: bool = False
    """As in ``SelectConfig``; not so in the paper."""
    importance: Literal["obs", "taylor"] = "taylor"
    """As in ``WidthConfig``; ``taylor`` as in the paper."""


def quick() -> Recipe:
    """Return settings for some hundred to some thousand images, on one GPU or CPU; ours, not the paper's.

    The student learns the hidden states and answers of its teacher on the views that it sees itself, and no labels
    (docs/training.md). The learning rate is found for the model at hand, and epochs are measured on training images
    that are held out. There is no time to fill a moving average or to profit from strong augmentation.
    """
    settings = {
        "training.epochs": 10,
        "training.lr": None,
        "training.schedule": "cosine",
        "training.final_lr": 0.01,
        "training.weight_decay": 0.0,
        "distillation.alpha": 1.0,
        "distillation.hidden": 1000.0,
        "augmentation.scale": (0.25, 1.0),
        "hold_out": 0.1,
    }
    one_epoch = {"training.epochs": 1, "training.lr": 5e-5, "training.schedule": "cosine", "training.final_lr": 0.05}
    return Recipe(
        config=usual_search().with_settings(settings),
        collection=usual_search().with_settings(one_epoch),
        search=usual_search(),
        model="vit_tiny_patch16_224",
        data="any folder with train/ and val/, or with images alone",
        plan=None,
        processes=1,
        accuracy="not printed: these settings are ours, and the accuracy depends on the model, the plan and the data",
        hours="not printed (ours); 0.07 an epoch of 3,000 images with ViT-Tiny on a CPU core in bfloat16 (measured)",
        hardware="one GPU, or a CPU",
        removal="calibrated",
        candidates="all",
        explores=True,
        importance="obs",
    )


def brief() -> Recipe:
    """Return how a model without one more layer is trained, as a step of ``hetdpt collect``: one epoch, small steps.

    Keeping what the model knows matters more than learning, hence the low learning rate.
    """
    row = quick()
    hours = "not printed (ours); minutes for each step of hetdpt collect with ViT-Tiny and 2,000 images on a CPU"
    return replace(row, config=row.collection, hours=hours)


def search() -> Recipe:
    """Return how weights train in a short search for layers: gently, on light views; ours, not the paper's."""
    hours = "not printed (ours); minutes for ViT-Tiny and 2,000 images on a CPU"
    row = quick()
    return replace(row, config=row.search, hours=hours)


def deit_small_imagenet() -> Recipe:
    """Return the release's settings for DeiT-S without 8 layers.

    The paper's pruned rows have the costs of the two-head model (reference.json), so that is the model here.

    >>> deit_small_imagenet().plan
    'paper/deit_small-8'
    """
    return _imagenet(
        layers=8,
        model="deit_small_distilled_patch16_224",
        plan="paper/deit_small-8",
        accuracy="79.7 % on ImageNet-1k, printed in the paper's tables (79.6 % in its text); dense DeiT-S 79.8 %",
        hours=f"not printed; about 7 if time scales with MACs (our estimate from DeiT-B's 28); {DEIT_EPOCHS}",
    )


def deit_base_imagenet() -> Recipe:
    """Return the release's settings for DeiT-B without 10 layers.

    The paper's pruned rows have the costs of the two-head model (reference.json), so that is the model here.
    """
    return _imagenet(
        layers=10,
        model="deit_base_distilled_patch16_224",
        plan="paper/deit_base-10",
        accuracy="81.8 % on ImageNet-1k (82.1 % with paper/deit_base-8), printed in the paper's tables; "
        "dense DeiT-B 81.8 %",
        hours="about 28 for the fine-tuning on 8 GPUs, roughly 30 with the pruning, printed in the paper; "
        f"{DEIT_EPOCHS}",
    )


def swin_small_imagenet() -> Recipe:
    """Return the paper's ImageNet settings, the release's where it prints none, for Swin-S without 10 layers.

    The weights are those trained on ImageNet-1k alone; timm's default has seen ImageNet-22k.
    """
    return _imagenet(
        layers=10,
        model="swin_small_patch4_window7_224.ms_in1k",
        plan=None,
        accuracy="82.4 % on ImageNet-1k without 10 layers, printed in the paper's tables; which layers is not printed; "
        "dense Swin-S 83.2 %",
        hours=f"not printed; about 14 if time scales with MACs (our estimate from DeiT-B's 28); {EPOCHS}",
    )


def swin_base_imagenet() -> Recipe:
    """Return the paper's ImageNet settings, the release's where it prints none, for Swin-B.

    The weights are those trained on ImageNet-1k alone; timm's default has seen ImageNet-22k. The search is as long as
    that for Swin-S.
    """
    return _imagenet(
        layers=10,
        model="swin_base_patch4_window7_224.ms_in1k",
        plan=None,
        accuracy="82.9 % on ImageNet-1k at 9.8 G MACs, printed in the paper's tables; how many and which layers "
        "were removed is not printed; dense Swin-B 83.5 %",
        hours=f"not printed; about 25 if time scales with MACs (our estimate from DeiT-B's 28); {EPOCHS}",
    )


def cifar100() -> Recipe:
    """Return the paper's CIFAR-100 settings: SGD at a fixed learning rate of 0.1, 384 images per GPU, 224x224.

    For a DeiT-B that was recovered on ImageNet and then given 100 classes. Momentum and weight decay are not printed.
    Momentum is the default, weight decay is 0: the default of 0.08 is AdamW's, and under SGD at this learning rate
    it alone would shrink the weights to less than a thousandth within an epoch. Whether a teacher was used is not
    printed; without one the labels alone count. A search has the optimizer of the release, as on ImageNet.
    """
    training = TrainConfig(
        optimizer="sgd", lr=0.1, lr_batch=None, schedule="constant", warmup_epochs=0, batch_size=384, weight_decay=0.0
    )
    config = RecoverConfig(training=training)
    return Recipe(
        config=config,
        collection=_briefly(config),
        search=_search_for(10).with_settings({"training.batch_size": 384}),
        model="deit_base_distilled_patch16_224",
        data="torch/cifar100",
        plan="paper/deit_base-10",
        processes=1,
        accuracy="90.2 % on CIFAR-100 by fine-tuning (90.4 % with paper/deit_base-8), printed in the paper's transfer "
        "table; dense DeiT-B 90.5 %; momentum and weight decay are not printed",
        hours=f"not printed; {EPOCHS}",
        hardware="NVIDIA A100 GPUs with 384 images on each (paper, experiment setup); how many is not printed, 1 here",
    )


def cifar100_transfer() -> Recipe:
    """Return the paper's CIFAR-100 settings for a fresh head on a model that is done: no teacher, nothing mixed.

    Printed are SGD, a fixed learning rate of 0.1, 384 images per GPU and 224x224; momentum is the default. Epochs,
    augmentation and the norm of gradients are not printed and so are ours: 10, crops of half the image or more, half of
    them flipped, and 1 at most, without which this rate can end in nothing learnt (docs/transfer.md). For weight decay
    see ``cifar100``; a moving average, smoothing and dropped paths are left out.

    >>> cifar100_transfer().config.distillation.kind
    'none'
    """
    settings = {
        "training.epochs": 10,
        "training.clip_grad": 1.0,
        "training.mixup": 0.0,
        "training.cutmix": 0.0,
        "training.smoothing": 0.0,
        "training.ema_decay": 0.0,
        "distillation.kind": "none",
        "drop_path": 0.0,
    }
    row = cifar100()
    config = replace(row.config.with_settings(settings), augmentation=usual_search().augmentation)
    hours = "not printed, nor is the number of epochs; 10 are ours"
    return replace(row, config=config, collection=_briefly(config), hours=hours)


def dinov2_giant_cifar100() -> Recipe:
    """Return the paper's CIFAR-100 settings for DINOv2-giant, the one dataset on which the paper has it; under FSDP.

    Build it with ``img_size=224`` and ``num_classes=100``; its new head has to be trained before it can teach. FSDP
    keeps no moving average of weights. For momentum, weight decay and a teacher see ``cifar100``.
    """
    settings = {"training.ema_decay": 0.0, "training.batch_size": 48, "training.accumulate": 8}
    config = cifar100().config.with_settings(settings)
    return Recipe(
        config=config,
        collection=_briefly(config),
        search=_search_for(15).with_settings(settings),
        model="vit_giant_patch14_dinov2",
        data="torch/cifar100",
        plan=None,
        processes=8,
        accuracy="94.85 % on CIFAR-100 without 15 layers, dense 94.91 %, printed in the paper's table",
        hours=f"not printed; {EPOCHS}",
        hardware="NVIDIA A100 GPUs (paper, experiment setup), under FSDP; how many is not printed, 8 here; the paper's "
        "384 images per GPU are 48 in each of 8 passes here",
    )


def _imagenet(*, layers: int, model: str, plan: str | None, accuracy: str, hours: str) -> Recipe:
    config = RecoverConfig()
    return Recipe(
        config=config,
        collection=_briefly(config),
        search=_search_for(layers),
        model=model,
        data=IMAGENET,
        plan=plan,
        processes=8,
        accuracy=accuracy,
        hours=hours,
        hardware=EIGHT,
    )


def _briefly(config: RecoverConfig) -> RecoverConfig:
    """Return the fine-tuning of a sample: the recipe's own with the paper's 10 epochs."""
    return config.with_settings({"training.epochs": 10})


def _search_for(layers: int) -> RecoverConfig:
    """Return the release's search for ``layers`` layers (docs/method.md): a fixed learning rate, stages of 3, 5, 7, ...

    >>> _search_for(8).training.epochs
    80
    """
    training = TrainConfig(epochs=stage_ends(layers)[-1], lr=1e-5, lr_batch=None, schedule="constant")
    return RecoverConfig(training=training)


RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__: make
    for make in (
        quick,
        brief,
        search,
        deit_small_imagenet,
        deit_base_imagenet,
        swin_small_imagenet,
        swin_base_imagenet,
        cifar100,
        cifar100_transfer,
        dinov2_giant_cifar100,
    )
}


def recipe(name: str) -> Recipe:
    """Return the recipe of that name.

    >>> recipe("quick").processes
    1
    """
    if name not in RECIPES:
        (nearest,) = difflib.get_close_matches(name, RECIPES, 1, cutoff=0)
        raise TrainError(f"there is no recipe {name!r}; did you mean {nearest}? Available: {', '.join(RECIPES)}")
    return RECIPES[name]()
