"""The run of ``hetdpt demo``: its settings, and the 12-block ViT included in hetdpt that it starts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hetdpt.adapters.models import Base, build
from hetdpt.adapters.preprocessing import PREPROCESSING, Preprocessing
from hetdpt.core.progress import StageProgress
from hetdpt.core.randomness import seeded
from hetdpt.data.augmentation import Augmentation
from hetdpt.data.sources import open_data
from hetdpt.data.subset import hold_out
from hetdpt.export.saved import DEMO, save
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import Execution
from hetdpt.flow.recipes import quick
from hetdpt.training.config import TrainConfig
from hetdpt.training.objective import Distillation
from hetdpt.training.recover import RecoverConfig, recover

SIDE = 24  # pixels
THREADS = 2  # of the training, on any machine: another number adds up in another order
# A digit stays itself when it is moved, stretched and cropped a little, but not when left and right change places.
VIEWS = Augmentation(auto_augment=None, color_jitter=0.0, erasing=0.0, scale=(0.7, 1.0), hflip=0.0, repeats=1)


def demo_training() -> RecoverConfig:
    """Return the settings that the included model was trained with."""
    training = TrainConfig(
        epochs=100,
        batch_size=64,
        lr=2e-3,
        lr_batch=None,
        final_lr=0.01,
        warmup_epochs=5,
        weight_decay=0.05,
        clip_grad=1.0,
        mixup=0.0,
        cutmix=0.0,
        ema_decay=0.0,
        precision="float32",
    )
    return RecoverConfig(training=training, augmentation=VIEWS, distillation=Distillation(kind="none"), drop_path=0.0)


def demo_config(out: Path) -> RunConfig:
    """Return the settings of the demo run, which takes minutes on two cores."""
    light = {"training.batch_size": 64, "augmentation.scale": VIEWS.scale, "augmentation.hflip": VIEWS.hflip}
    row = quick()
    return RunConfig(
        model=DEMO,
        data=DEMO,
        out=out,
        layers=11,  # as many as leave one attention layer to attention-only
        class_token="share",  # in so small a model, FFNs of class tokens alone take more time than they save
        compare=("attention-only", "activation-only", "random"),
        images=64,
        rounds=(9, 10, 4),
        collection=row.collection.with_settings({**light, "training.lr": 1e-4, "per_class": 20}),
        search=row.search.with_settings({**light, "training.epochs": 3, "training.lr": 1e-4}),
        recovery=row.config.with_settings({**light, "training.epochs": 8}),
    )


def train_model(
    directory: Path, config: RecoverConfig | None = None, *, progress: StageProgress | None = None
) -> float:
    """Train the demo model from scratch on the CPU, save it to ``directory`` and return its accuracy in percent.

    It has not seen the training images on which a run measures samples of accuracy (``hold_out``), and is the model
    after the last epoch. The settings were found while looking at the validation images, so their accuracy flatters it
    a little. The same processor and version of torch give the same bits; others add up in another order, which gives
    other weights, of about the same accuracy.
    """
    config = config or demo_training()
    model, data, accuracy = _untrained(config.training.seed), open_data(DEMO), 0.0
    data = replace(hold_out(data), val=data.val)
    with _threads(THREADS):
        watch = Execution(progress=progress).watcher("training the dense model")
        for epoch in recover(model, None, data, config, device="cpu", watch=watch):
            assert epoch.last is not None
            accuracy = epoch.last
    save(model, directory, overwrite=True)
    return accuracy


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _untrained(seed: int) -> nn.Module:
    sizes = {
        "img_size": SIDE,
        "patch_size": 4,
        "embed_dim": 48,
        "depth": 12,
        "num_heads": 3,
        "mlp_ratio": 8,
        "weight_init": "jax",
    }
    with seeded(seed):
        model = build(Base("timm", "vit_tiny_patch16_224", {**sizes, "num_classes": 10}))
    half = (0.5, 0.5, 0.5)
    vars(model)[PREPROCESSING] = Preprocessing(input_size=(3, SIDE, SIDE), mean=half, std=half)
    return model
