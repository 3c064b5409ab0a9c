"""How a model's images are preprocessed, as its library specifies. Changes no image."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.guard import guarded_directory
from hetdpt.adapters.huggingface import import_transformers, is_hf, silent
from hetdpt.adapters.models import input_size_of
from hetdpt.core.errors import ModelError, first_line

PREPROCESSING = "_hetdpt_preprocessing"
# The numbers that PIL gives to its filters, which transformers stores, and their names in timm.
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
MOST_PIXELS = 2**25
"""Limit for the input, and for an image before it is cropped."""
LEAST_CROP = 0.001
"""With less, the image that is cropped would be a thousand times as large as the crop."""
PROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image becomes an input: resized, center-cropped, scaled to 0..1, normalised.

    >>> half = (0.5, 0.5, 0.5)
    >>> Preprocessing(input_size=(3, 224, 224), mean=half, std=half, crop_pct=0.875).resized_to
    (256, 256)
    """

    input_size: tuple[int, int, int]
    """Channels, height and width of the input."""
    mean: tuple[float, ...]
    """Subtracted from each channel."""
    std: tuple[float, ...]
    """Each channel is then divided by it."""
    interpolation: str = "bicubic"
    """The filter of the resizing, as PIL calls it."""
    crop_pct: float = 1.0
    """Side of the crop over the side that the image is resized to before."""
    crop_mode: str = "center"
    """What is resized: the shorter side (``center``), both (``squash``), or the longer, with a border (``border``)."""

    def __post_init__(self) -> None:
        channels, height, width = self.input_size
        if not all(isinstance(side, int) and side > 0 for side in (height, width)) or height * width > MOST_PIXELS:
            raise ModelError(f"image sides are whole pixels, at most {MOST_PIXELS} in all, not {height} x {width}")
        if channels not in (1, 3):
            raise ModelError(f"images have 1 or 3 channels, but the model takes {channels}")
        if not len(self.mean) == len(self.std) == channels:
            raise ModelError(
                f"expected a mean and a std for each of {channels} channels, but got {self.mean} and {self.std}"
            )
        if not all(math.isfinite(value) for value in (*self.mean, *self.std, self.crop_pct)):
            raise ModelError(f"mean, std and crop_pct must be finite, not {self.mean}, {self.std}, {self.crop_pct}")
        if min(self.std) <= 0 or self.crop_pct < LEAST_CROP:
            raise ModelError(
                f"std must be above 0 and crop_pct at least {LEAST_CROP}, not {self.std} and {self.crop_pct}"
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ModelError(f"interpolation is one of {', '.join(INTERPOLATIONS)}, not {self.interpolation!r}")
        if self.crop_mode not in ("center", "squash", "border"):
            raise ModelError(f"crop_mode is center, squash or border, not {self.crop_mode!r}")

    @property
    def resized_to(self) -> tuple[int, int]:
        """Height and width before the crop, as timm computes them."""
        _, height, width = self.input_size
        return math.floor(height / self.crop_pct), math.floor(width / self.crop_pct)

    @classmethod
    def from_dict(cls, values: Any) -> Preprocessing:
        """Return the preprocessing that ``dataclasses.asdict`` was applied to, also after a JSON round trip."""
        try:
            known: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
            return cls(**known)
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ModelError(
                f"a preprocessing cannot be read from {reprlib.repr(values)}: {first_line(error)}"
            ) from None


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """Return how the images of ``model`` are preprocessed.

    In this order: what was recorded on the model, the configuration of timm, the image processor saved with the weights
    of a transformers model, the default processor of its model type. The size is always the model's own.
    """
    noted: Preprocessing | None = vars(model).get(PREPROCESSING)
    if noted is not None:
        return noted
    size = input_size_of(model)
    if not is_hf(model):
        return _of_timm(model, size)
    processor = _processor(model)
    try:
        return _of_processor(processor, size)
    except (TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{type(processor).__name__} has settings that cannot be used: {first_line(error)}") from None


def _of_timm(model: nn.Module, size: tuple[int, int, int]) -> Preprocessing:
    from timm.data.config import resolve_model_data_config

    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        raise ModelError(
            f"{type(model).__name__} does not specify its preprocessing, as a model of timm or transformers would; "
            "from Python, pass a Preprocessing"
        )
    config = resolve_model_data_config(model)
    return Preprocessing(
        input_size=size,
        mean=_for_channels(config["mean"], size[0]),
        std=_for_channels(config["std"], size[0]),
        interpolation=config["interpolation"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
    )


def _of_processor(processor: Any, size: tuple[int, int, int]) -> Preprocessing:
    if getattr(processor, "do_flip_channel_order", None):
        raise ModelError(f"{type(processor).__name__} expects BGR images; only RGB is supported")
    is_normalised = bool(getattr(processor, "do_normalize", None))
    if processor.resample is None or (is_normalised and None in (processor.image_mean, processor.image_std)):
        raise ModelError(
            f"{type(processor).__name__} does not resize all images to one size, or normalises each separately, "
            "which a Preprocessing cannot represent; from Python, pass the Preprocessing to use"
        )
    crop_mode, crop_pct = _crop(processor)
    return Preprocessing(
        input_size=size,
        mean=_for_channels(processor.image_mean if is_normalised else (0.0, 0.0, 0.0), size[0]),
        std=_for_channels(processor.image_std if is_normalised else (1.0, 1.0, 1.0), size[0]),
        interpolation=dict(enumerate(INTERPOLATIONS)).get(int(processor.resample), str(processor.resample)),
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )


def _crop(processor: Any) -> tuple[str, float]:
    """Return crop mode and crop_pct of an image processor, which specifies both in pixels."""
    size: Any = getattr(processor, "size", None)
    crop: Any = getattr(processor, "crop_size", None)
    shortest = getattr(size, "shortest_edge", None)
    is_cropped = bool(getattr(processor, "do_center_crop", None)) and crop is not None
    named: float | None = getattr(processor, "crop_pct", None)
    if named is not None:  # ConvNext and PoolFormer; the first squashes large images (transformers, its `resize`)
        is_squashed = not is_cropped and shortest is not None and shortest >= 384
        return ("squash", 1.0) if is_squashed else ("center", named)
    mode, side = ("squash", getattr(size, "height", None)) if shortest is None else ("center", shortest)
    if not is_cropped or side is None:
        return mode, 1.0
    cropped = crop.height or crop.shortest_edge
    ratio = cropped / side
    is_exact = math.floor(cropped / ratio) == side
    return mode, ratio if is_exact else math.nextafter(ratio, 0)


def _processor(model: nn.Module) -> Any:
    transformers = import_transformers()
    config: Any = model.config
    name = config.name_or_path
    try:
        with silent(transformers), guarded_directory(name):
            if name and _has_processor(transformers, name):
                return transformers.AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
            return _default_processor(transformers, config.model_type)()
    except ModelError:
        raise
    except Exception as error:  # the hub cannot be reached, or a file is damaged; many classes
        raise ModelError(f"the image processor of hf:{name or config.model_type} fails: {first_line(error)}") from None


def _has_processor(transformers: Any, name: str) -> bool:
    """Whether a directory or hub repository has an image processor; ``OSError`` if that cannot be determined."""
    if Path(name).is_dir():
        return (Path(name) / PROCESSOR_FILE).is_file()
    try:
        return bool(transformers.utils.cached_file(name, PROCESSOR_FILE))
    except OSError as error:
        if "does not appear to have a file named" in str(error):  # transformers has no exception class for it
            return False
        raise


def _default_processor(transformers: Any, model_type: str) -> Any:
    """Return the image processor class of a model type, or of the type it is a part or variant of.

    ``clip_vision_model`` is a part of ``clip``, ``dinov2_with_registers`` a variant of ``dinov2``.
    """
    known = transformers.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    near = [name for name in known if known[name] and f"{model_type}_".startswith(f"{name}_")]
    if not near:
        raise ModelError(f"transformers has no image processor for model type {model_type!r}")
    classes = known[max(near, key=len)]
    return getattr(transformers, classes.get("pil") or classes["torchvision"])


def _for_channels(values: Any, channels: int) -> tuple[float, ...]:
    """Return a number for each channel; for grey images the average of red, green and blue."""
    numbers = tuple(float(value) for value in (values if isinstance(values, list | tuple) else (values,) * 3))
    return (sum(numbers) / len(numbers),) if channels == 1 else numbers
