"""How a model is trained: every number of the loop in one frozen value. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from hetdpt.core.errors import TrainError

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
SCHEDULES = ("cosine", "constant", "poly", "step")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of the training loop; the defaults are those of the paper's release (docs/training.md).

    >>> TrainConfig(batch_size=128).peak_lr(processes=8)
    0.0001
    >>> TrainConfig(epochs=2).warmup
    0.2
    """

    epochs: int = 300
    """Passes over the training images."""
    batch_size: int = 128
    """Images per process and forward pass."""
    accumulate: int = 1
    """Forward passes per update of the weights."""
    optimizer: str = "adamw"
    """A name known to timm, such as adamw, sgd, lamb."""
    lr: float = 5e-5
    """Learning rate at its peak, for ``lr_batch`` images per update."""
    lr_batch: int | None = 512
    """Images per update that ``lr`` is meant for; it grows and shrinks with the real number. None: ``lr`` as it is."""
    final_lr: float = 0.1
    """Where a schedule ends, as a part of the peak: 1e-5 at the release's 1,024 images per update."""
    schedule: str = "cosine"
    """cosine, poly, step or constant."""
    warmup_epochs: float | None = None
    """Epochs of a rising learning rate. None: a tenth of all, at most 10; none where it is constant."""
    decay_epochs: float = 30.0
    """Epochs between two steps of the schedule ``step``, each of which divides by ten."""
    weight_decay: float = 0.08
    """Not applied to biases and norms, nor to what the model exempts."""
    layer_decay: float | None = None
    """Learning rate of each layer as a part of that of the layer after it."""
    backbone_lr: float = 1.0
    """Learning rate of parameters whose names begin with ``backbone.``, as a part of that of the others; the pyramid
    that a detector or segmenter has on a plain ViT is among them."""
    momentum: float = 0.9
    """Of SGD and its kin; the Adam family keeps its betas of 0.9 and 0.999."""
    clip_grad: float | None = None
    """Largest norm of the gradient."""
    mixup: float = 0.8
    """Alpha of mixup, 0 for none."""
    cutmix: float = 1.0
    """Alpha of CutMix, 0 for none."""
    smoothing: float = 0.1
    """Label smoothing."""
    ema_decay: float = 0.99996
    """Of the moving average of the weights, 0 for none."""
    ema_warmup: bool = False
    """Let the average begin short and grow to ``ema_decay``, for runs too short to fill it."""
    precision: str = "auto"
    """auto (bfloat16 or float16 on a GPU, else float32), float32, bfloat16 or float16."""
    seed: int = 0
    """Decides the order of images, their augmentation, mixing and dropped paths."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("lr", "decay_epochs"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be above 0")
        _require(self.schedule in SCHEDULES, f"schedule is {self.schedule!r}; choose from {', '.join(SCHEDULES)}")
        _require(self.precision in PRECISIONS, f"precision is {self.precision!r}; choose from {', '.join(PRECISIONS)}")
        for name in ("final_lr", "momentum", "smoothing", "ema_decay"):
            _require(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; it lies between 0 and 1")
        _require(self.smoothing < 1, f"smoothing is {self.smoothing}; it must be below 1, or no label is left")
        _require(
            self.backbone_lr == 1 or self.layer_decay is None,
            "backbone_lr and layer_decay both say how fast a layer learns; leave one out",
        )
        for name in ("weight_decay", "mixup", "cutmix", "seed", "backbone_lr"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it cannot be negative")
        for name in ("clip_grad", "layer_decay", "lr_batch"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} is {value}; it must be above 0, or left out")
        _require(
            0 <= self.warmup < self.epochs,
            f"warmup_epochs is {self.warmup_epochs} of {self.epochs} epochs; the rate would not reach its peak",
        )
        _require(
            not (self.mixes and self.batch_size % 2),
            f"mixup and CutMix pair images, so batch_size must be even, not {self.batch_size}",
        )

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def warmup(self) -> float:
        """Epochs of a rising learning rate."""
        if self.warmup_epochs is not None:
            return self.warmup_epochs
        return 0.0 if self.schedule == "constant" else min(10.0, self.epochs / 10)

    def images_per_update(self, processes: int = 1) -> int:
        """Return how many images ``processes`` processes see between two changes of the weights."""
        return self.batch_size * self.accumulate * processes

    def peak_lr(self, processes: int = 1) -> float:
        """Return the learning rate at its peak, for the images of one update on ``processes`` processes."""
        if self.lr_batch is None:
            return self.lr
        return self.lr * self.images_per_update(processes) / self.lr_batch


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise TrainError(sentence)
