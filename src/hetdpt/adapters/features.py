"""The feature maps of a model after its blocks or stages, as its library returns them. Changes no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hetdpt.adapters.huggingface import is_hf, takes, with_argument
from hetdpt.adapters.models import feature_class_of
from hetdpt.core.errors import DataError, ModelError


def feature_maps(model: nn.Module, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
    """Return the maps (B, C, h, w) that ``model`` has of ``images`` (B, C, H, W) after ``layers``, in their order.

    A layer is a block of a plain ViT and a stage of a model that has stages, counted from 0 or, if negative, from the
    last; None means all of them. A model that returns maps itself (timm's ``features_only``, the backbone
    classes of transformers) has no others. The last map is normalised as the model's head sees it, where the library
    can do that; timm's plain ViTs normalise every map that way.

    >>> import timm, torch
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> [tuple(one.shape) for one in feature_maps(model, torch.zeros(1, 3, 224, 224), (0, -1))]
    [(1, 192, 14, 14), (1, 192, 14, 14)]
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"expected a batch of images (B, C, H, W), but got {got}")
    if answers_with_maps(model):
        return _chosen(_own_maps(model, images), layers)
    if is_hf(model):
        return _chosen(_hf_maps(model, images), layers)
    _require_maps(model)
    return _timm_maps(model, images, layers)


def answers_with_maps(model: nn.Module) -> bool:
    """Whether the class of ``model`` returns feature maps: timm's wrappers, or a backbone of transformers."""
    if is_hf(model):
        from transformers.backbone_utils import BackboneMixin

        return isinstance(model, BackboneMixin)
    return feature_class_of(model) is not None


def feature_net(model: Any, layers: Sequence[int] | int = 3) -> Any:
    """Return timm's wrapper around ``model`` that returns the maps of ``layers``, or of that many last ones.

    What the last of them does not need is taken out of ``model``.
    """
    from timm.models._features import FeatureGetterNet

    if is_hf(model):
        raise ModelError(
            f"features_only is for timm models, but {type(model).__name__} is of transformers; get its maps with "
            "hetdpt.adapters.features.feature_maps(model, images)"
        )
    _require_maps(model)
    last = range(-layers, 0) if isinstance(layers, int) else layers
    net: Any = FeatureGetterNet(model, tuple(_numbers(last, len(model.feature_info))))
    net.pretrained_cfg = model.pretrained_cfg
    return net


def _require_maps(model: nn.Module) -> None:
    if not callable(getattr(type(model), "forward_intermediates", None)):
        raise ModelError(
            f"{type(model).__name__} has no feature maps; expected a timm model with forward_intermediates, or a "
            "transformers model with hidden states"
        )


def _timm_maps(model: Any, images: Tensor, layers: Sequence[int] | None) -> list[Tensor]:
    numbers = _numbers(layers, len(model.feature_info))
    indices = sorted(set(numbers))
    options = {"indices": indices, "stop_early": True, "intermediates_only": True}
    try:
        maps = model.forward_intermediates(images, norm=True, **options)
    except AssertionError:  # this family cannot normalise its maps
        maps = model.forward_intermediates(images, norm=False, **options)
    return [maps[indices.index(number)] for number in numbers]


def _numbers(layers: Sequence[int] | None, count: int) -> list[int]:
    """Return the numbers of the requested layers among ``count``, from 0."""
    requested = range(count) if layers is None else layers
    if not requested:
        raise ModelError("no layers were given; request the maps of at least one layer")
    for layer in requested:
        if not isinstance(layer, int) or not -count <= layer < count:
            raise ModelError(f"this model has maps of layers 0-{count - 1}, not of layer {layer!r}")
    return [layer % count for layer in requested]


def _hf_maps(model: Any, images: Tensor) -> list[Tensor]:
    tower = model.base_model if takes(model.base_model, "pixel_values") else model
    with with_argument(tower, "output_hidden_states_before_downsampling"):
        answer = tower(images, output_hidden_states=True)
    states = list(getattr(answer, "reshaped_hidden_states", None) or answer.hidden_states)[1:]
    if states[-1].ndim == 4:
        height, width = states[-1].shape[-2:]
    else:
        patch = tower.config.patch_size
        sides = (patch, patch) if isinstance(patch, int) else patch
        height, width = images.shape[-2] // sides[0], images.shape[-1] // sides[1]
    states[-1] = answer.last_hidden_state
    return [state if state.ndim == 4 else _map(state, height, width) for state in states]


def _map(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return tokens (B, N, C) as a map (B, C, h, w), without the tokens before the patches."""
    if tokens.shape[1] < height * width:
        raise ModelError(
            f"a map of {height} x {width} has a token for each patch, but this model has {tokens.shape[1]} tokens; "
            "if it reduces them, call restore_tokens_(model) first"
        )
    patches = tokens[:, tokens.shape[1] - height * width :].transpose(1, 2)
    return patches.reshape(len(tokens), -1, height, width)


def _own_maps(model: Any, images: Tensor) -> list[Tensor]:
    answer: Any = model(images)
    if is_hf(model):
        return list(answer.feature_maps)
    maps = answer.values() if isinstance(answer, dict) else answer
    if model.output_fmt == "NHWC":
        maps = [one.permute(0, 3, 1, 2).contiguous() for one in maps]
    return list(maps)


def _chosen(maps: list[Tensor], layers: Sequence[int] | None) -> list[Tensor]:
    return [maps[number] for number in _numbers(layers, len(maps))]
