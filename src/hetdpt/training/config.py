"""The settings of the training loop in one frozen value. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from hetdpt.core.errors import TrainError

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
SCHEDULES = ("cosine", "constant", "poly", "step")
FEW = 20  # updates of warm-up, if a tenth of all is less


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of the training loop; the defaults are those of the paper's release (docs/training.md).

    >>> TrainConfig(batch_size=128).peak_lr(processes=8)
    0.0001
    >>> TrainConfig(epochs=2).warmup_updates(50), TrainConfig(epochs=2).warmup_updates(500)
    (20, 100)
    """

    epochs: int = 300
    """Passes over the training images."""
    minutes: float | None = None
    """Minutes that the training may take; ``epochs`` is then found from the time of an update on this device."""
    batch_size: int = 128
    """Images per forward pass of each process."""
    accumulate: int = 1
    """Forward passes per update of the weights."""
    optimizer: str = "adamw"
    """An optimizer of timm, such as adamw, sgd or lamb."""
    lr: float | None = 5e-5
    """Peak learning rate, for ``lr_batch`` images per update. None: found by a short probe, for any number of them."""
    lr_batch: int | None = 512
    """Images per update that ``lr`` is meant for; it is scaled to the real number. None: ``lr`` is used as it is."""
    final_lr: float = 0.1
    """Learning rate at the end of the schedule, as a fraction of the peak; 1e-5 with the release's 1,024 images."""
    schedule: str = "cosine"
    """cosine, poly, step or constant."""
    warmup_epochs: float | None = None
    """Epochs of warm-up. None: a tenth of all updates, at most those of 10 epochs, and in a short training 20 updates
    or a fifth of all; no warm-up for a constant schedule."""
    decay_epochs: float = 30.0
    """Epochs between two steps of the schedule ``step``, each of which divides the learning rate by ten."""
    weight_decay: float = 0.08
    """Weight decay; not applied to biases, norms and what the model exempts."""
    layer_decay: float | None = None
    """Learning rate of each layer, as a fraction of that of the layer after it."""
    backbone_lr: float = 1.0
    """Learning rate of parameters whose names begin with ``backbone.``, as a fraction of that of the others; the
    feature pyramid of a detector or segmenter on a plain ViT is among them."""
    momentum: float = 0.9
    """Momentum of SGD and similar optimizers; the Adam family keeps its betas of 0.9 and 0.999."""
    clip_grad: float | None = None
    """Largest norm of the gradient; it is clipped to that."""
    mixup: float = 0.8
    """Alpha of mixup; 0 disables it."""
    cutmix: float = 1.0
    """Alpha of CutMix; 0 disables it."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed."""
    smoothing: float = 0.1
    """Label smoothing."""
    ema_decay: float = 0.99996
    """Decay of the moving average of the weights; 0 disables it."""
    ema_warmup: bool = False
    """Whether the decay grows to ``ema_decay`` from a small value, for runs too short to fill the average."""
    precision: str = "auto"
    """auto (bfloat16 or float16 on a GPU, else float32), float32, bfloat16 or float16."""
    seed: int = 0
    """Seed of the order of images, their augmentation, mixing and drop path."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be 1 or more")
        _require(self.lr is None or self.lr > 0, f"lr is {self.lr}; it must be above 0")
        _require(self.decay_epochs > 0, f"decay_epochs is {self.decay_epochs}; it must be above 0")
        _require(self.schedule in SCHEDULES, f"schedule is {self.schedule!r}; choose from {', '.join(SCHEDULES)}")
        _require(self.precision in PRECISIONS, f"precision is {self.precision!r}; choose from {', '.join(PRECISIONS)}")
        for name in ("final_lr", "momentum", "mix_prob", "smoothing", "ema_decay"):
            _require(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        _require(self.smoothing < 1, f"smoothing is {self.smoothing}; it must be below 1")
        _require(
            self.backbone_lr == 1 or self.layer_decay is None,
            "backbone_lr and layer_decay both set the learning rate of layers; give one of them",
        )
        for name in ("weight_decay", "mixup", "cutmix", "seed", "backbone_lr"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it cannot be negative")
        for name in ("minutes", "clip_grad", "layer_decay", "lr_batch"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} is {value}; it must be above 0, or left out")
        warmup = self.warmup_epochs or 0.0
        _require(
            0 <= warmup < self.epochs,
            f"warmup_epochs is {warmup}, but training has {self.epochs} epochs; it must be fewer",
        )
        _require(
            not (warmup and self.minutes),
            f"warmup_epochs is {warmup}, but with minutes the number of epochs is not known yet; leave one of them out",
        )
        _require(
            not (self.mixes and self.batch_size % 2),
            f"batch_size is {self.batch_size}, but mixup and CutMix pair images; use an even number",
        )

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_prob > 0

    @property
    def is_open(self) -> bool:
        """Whether the number of epochs or the learning rate has to be found first."""
        return self.minutes is not None or self.lr is None

    def warmup_updates(self, steps: int) -> int:
        """Return how many updates are warm-up, if an epoch has ``steps``."""
        if self.warmup_epochs is not None:
            return round(self.warmup_epochs * steps)
        if self.schedule == "constant":
            return 0
        usual = round(min(10, self.epochs / 10) * steps)
        return max(usual, min(FEW, self.epochs * steps // 5))

    def images_per_update(self, processes: int = 1) -> int:
        """Return how many images ``processes`` processes see per update of the weights."""
        return self.batch_size * self.accumulate * processes

    def peak_lr(self, processes: int = 1) -> float:
        """Return the peak learning rate, for the images per update of ``processes`` processes."""
        if self.lr is None:
            raise TrainError("the learning rate is not set, and only the recovery of a classifier finds one; give --lr")
        if self.lr_batch is None:
            return self.lr
        return self.lr * self.images_per_update(processes) / self.lr_batch


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise TrainError(sentence)
