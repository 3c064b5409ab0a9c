"""What a file may say about how a model is built: which classes, which arguments, which values. Nothing is built here.

A saved model may come from anyone. Constructors of timm and transformers take names of files, of repositories and of
other models among their arguments, so only what is listed here reaches them.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import sys
from collections.abc import Collection
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from hetdpt.adapters.huggingface import find_class, import_transformers
from hetdpt.core.errors import ModelError

if TYPE_CHECKING:
    from hetdpt.adapters.models import Base

FAMILIES = {
    "aimv2", "altclip", "beit", "blip", "blip_2", "chinese_clip", "clip", "clipseg", "convnext", "convnextv2", "cvt",
    "data2vec", "deit", "depth_anything", "dinov2", "dinov2_with_registers", "dinov3_convnext", "dinov3_vit", "donut",
    "dpt", "focalnet", "glpn", "groupvit", "hiera", "ijepa", "levit", "metaclip_2", "mlcd", "mobilevit", "mobilevitv2",
    "owlv2", "owlvit", "pixio", "poolformer", "pvt", "pvt_v2", "segformer", "siglip", "siglip2", "swiftformer", "swin",
    "swin2sr", "swinv2", "vit", "vit_mae", "vit_msn", "vitdet", "vitpose_backbone", "yolos",
}  # fmt: skip
"""Packages of ``transformers.models`` whose image models are built. None of them opens files or builds other models,
except from a nested config, which has to be of one of these packages in turn."""
TIMM_COMMON = {"num_classes", "in_chans", "img_size", "drop_path_rate", "features_only", "feature_cls", "out_indices"}
"""Arguments of ``timm.create_model`` that do not depend on the class of the model."""
LABELS = {"id2label", "label2id"}
"""Where any text may stand: names of classes."""
ATTENTION = ("eager", "sdpa")
"""How attention may be computed; transformers would download other implementations."""
WORD = re.compile(r"[\w.+-]{0,64}", re.ASCII)
LARGEST, LONGEST, DEEPEST = 2**20, 1000, 4
"""The largest number, the longest list and the most lists inside of each other; larger ones can exhaust a machine."""


def require_allowed(base: Base) -> None:
    """Raise ``ModelError`` unless a model may be built as ``base`` says, whoever wrote it."""
    if base.library == "timm":
        _require_plain(base.name, base.arguments, timm_names(base.name))
    elif base.library == "transformers":
        _require_config(base.name, model_class(base.name).config_class, base.arguments)
    else:
        raise ModelError(f"models come from timm or transformers, not from {base.library!r}")


@cache
def timm_names(name: str) -> frozenset[str]:
    """Return the arguments that timm's model ``name`` may be given: those of the classes it can be made of."""
    import timm

    entry_point = timm.model_entrypoint(name.partition(".")[0])
    if not entry_point.__module__.startswith("timm.models."):
        raise ModelError(f"{name} cannot be built from a file: it is not one of timm's own models")
    names = set(TIMM_COMMON)
    for kind in vars(sys.modules[entry_point.__module__]).values():
        if isinstance(kind, type) and kind.__module__.startswith("timm.models."):
            found = set(signature(kind).parameters)
            names |= found if "num_classes" in found or dataclasses.is_dataclass(kind) else set()
    return frozenset(names - set(signature(timm.create_model).parameters))


def model_class(name: str) -> Any:
    """Return the class of transformers called ``name``, an image model of ``FAMILIES``."""
    found = find_class(name)
    if _family(found) not in FAMILIES or found.main_input_name != "pixel_values":
        raise ModelError(
            f"{name} is not among the classes of transformers that are built from a file; image models such as "
            "ViTForImageClassification are (hetdpt.adapters.allowed.FAMILIES)"
        )
    return found


def _family(kind: type) -> str:
    """Return the package of ``transformers.models`` that defines a class.

    >>> from transformers import ViTConfig
    >>> _family(ViTConfig)
    'vit'
    """
    match = re.match(r"transformers\.models\.(\w+)\.", kind.__module__)
    return match[1] if match else ""


@cache
def _names(config_class: Any) -> frozenset[str]:
    """Return the settings that configs of a class have; what begins with an underscore is not one."""
    names = {*signature(config_class).parameters, *config_class().to_dict(), *config_class.attribute_map}
    known = {name for name in names if not name.startswith("_")}
    return frozenset({*known, "attn_implementation", "num_labels"})


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of a transformers config that differ from its defaults, without what a file may not say."""
    return _known(config, config.to_diff_dict())


def _known(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = _names(config.__class__)
    inner = {name: getattr(config, name) for name in config.sub_configs if values.get(name) is not None}
    known = {name: value for name, value in values.items() if name in names}
    return known | {name: _known(each, values[name]) for name, each in inner.items()}


def _require_config(owner: str, config_class: Any, values: dict[str, Any]) -> None:
    """Raise unless ``values`` are settings of ``config_class``, nested ones those of a class of ``FAMILIES``."""
    plain = {name: value for name, value in values.items() if name in LABELS or not isinstance(value, dict)}
    _require_plain(owner, plain, _names(config_class))
    for name in values.keys() - plain.keys():
        if inner := config_class.sub_configs.get(name):
            _require_config(f"{name} of {owner}", _inner_class(owner, name, inner, values[name]), values[name])
        elif isinstance(config_class().to_dict().get(name), dict):  # a table of its own, as of rotary positions
            _require_plain(owner, values[name], values[name])
        else:
            raise _refusal(owner, name, values[name])


def _inner_class(owner: str, name: str, config_class: Any, values: dict[str, Any]) -> Any:
    """Return the class of a config inside of another, which its ``model_type`` names where any may stand there."""
    transformers = import_transformers()
    if config_class is transformers.AutoConfig:
        kind = values.get("model_type")
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise _refusal(owner, f"{name}.model_type", kind)
        config_class = transformers.CONFIG_MAPPING[kind]
    if _family(config_class) not in FAMILIES:
        raise _refusal(owner, name, values)
    return config_class


def _require_plain(owner: str, values: dict[str, Any], names: Collection[str]) -> None:
    for name, value in values.items():
        is_text = name in LABELS and _is_labels(value)
        is_known = name in names and (is_text or _is_plain(value))
        if not is_known or (name == "attn_implementation" and value not in ATTENTION):
            raise _refusal(owner, name, value)


def _is_plain(value: Any, depth: int = DEEPEST) -> bool:
    """Whether ``value`` is a number, a boolean, nothing, a short word, or a list of them, and not too large."""
    if isinstance(value, list | tuple):
        return depth > 0 and len(value) <= LONGEST and all(_is_plain(each, depth - 1) for each in value)
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= LARGEST)


def _is_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str | int) for pair in value.items() for each in pair)


def _refusal(owner: str, name: str, value: Any) -> ModelError:
    return ModelError(
        f"{owner} cannot be built from a file with {name}={reprlib.repr(value)}; a file may only set the model's own "
        "options, to numbers and short words"
    )
