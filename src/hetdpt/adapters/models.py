"""Models by name, and what a model was built from, so that it can be rebuilt. Only this module knows the libraries."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.allowed import LARGEST, require_allowed, settings_of
from hetdpt.adapters.checkpoints import load_weights
from hetdpt.adapters.guard import few_modules, guarded, guarded_directory, require_own_weights
from hetdpt.adapters.huggingface import find_class, import_transformers, is_hf, require_images, set_argument, silent
from hetdpt.core.errors import HetDPTError, ModelError, first_line
from hetdpt.core.gates import Removed
from hetdpt.store.atomic import parse_json

BASE = "_hetdpt_base"
SIZE = "_hetdpt_size"
HF_PREFIX = "hf:"
# timm's wrappers that return feature maps, and the argument that requests each.
FEATURE_NETS = {f"Feature{name.title()}Net": name for name in ("getter", "list", "dict", "hook")}


@dataclass(frozen=True)
class Base:
    """What a model was built from: a timm architecture or a transformers class, and its arguments (plain JSON).

    >>> Base("timm", "vit_tiny_patch16_224", {"num_classes": 10}).name
    'vit_tiny_patch16_224'
    """

    library: str
    """``timm`` or ``transformers``."""
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``timm.create_model``, or the dictionary of the transformers config."""

    @classmethod
    def from_dict(cls, values: Any) -> Base:
        is_base = isinstance(values, dict) and set(values) == {"library", "name", "arguments"}
        if not is_base or not isinstance(values["name"], str) or not isinstance(values["arguments"], dict):
            raise ModelError(f"a base has a library, a name and arguments, not {values!r}")
        return cls(**values)


def create(
    name: str,
    *,
    weights: str | Path | None = None,
    pretrained: bool = False,
    num_classes: int | None = None,
    img_size: int | None = None,
    is_empty: bool = False,
) -> nn.Module:
    """Return the model called ``name``, in eval mode: a timm name, or ``hf:`` and a hub name, directory or model type.

    ``weights`` is a checkpoint file that must fit exactly; ``pretrained`` downloads the library's own weights;
    ``is_empty`` makes only the structure, without weights (parameters on the meta device).
    """
    is_empty = is_empty and not (weights or pretrained)
    if name.startswith(HF_PREFIX):
        model = _create_hf(name.removeprefix(HF_PREFIX), pretrained, is_empty, num_classes, img_size)
    else:
        arguments = {"num_classes": num_classes, "img_size": img_size}
        base = Base("timm", name, {key: value for key, value in arguments.items() if value is not None})
        model = build(base, pretrained=pretrained, is_empty=is_empty)
    if img_size is not None:
        _check_divisible(model, img_size)
    require_images(model)
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def build(base: Base, *, pretrained: bool = False, is_empty: bool = False) -> nn.Module:
    """Return a new model built from ``base``; ``is_empty`` leaves its parameters on the meta device."""
    from accelerate import init_empty_weights

    if base.library not in ("timm", "transformers"):
        raise ModelError(f"models come from timm or transformers, not from {base.library!r}")
    try:
        with init_empty_weights() if is_empty else nullcontext():
            model = _build_timm(base, pretrained) if base.library == "timm" else _build_hf(base)
    except HetDPTError:
        raise
    except Exception as error:  # whatever a constructor raises on arguments it does not take
        if is_empty and isinstance(error, RuntimeError):  # one that computes with its parameters
            return build(base)
        shown = reprlib.repr(base.arguments)
        raise ModelError(f"{base.name} cannot be built with {shown}: {first_line(error)}") from error
    vars(model)[BASE] = base
    return model.eval()


def rebuild(base: Base, *, is_empty: bool = False) -> nn.Module:
    """Return a new model built from ``base``, which may come from an untrusted file: see ``allowed`` and ``guard``."""
    if base.library == "timm":
        _require_in_timm(base.name)
    require_allowed(base)
    with guarded(), few_modules():
        return build(base, is_empty=is_empty)


def base_of(model: nn.Module) -> Base:
    """Return what ``model`` was built from, as far as the model shows; ``ModelError`` where it does not."""
    base: Base | None = vars(model).get(BASE)
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and config.get("architecture") and (base is None or base.library == "timm"):
        known = base or Base("timm", config["architecture"])
        shown = _timm_arguments(model, config, known)
        if "drop_path_rate" in known.arguments:  # it shows a lower rate once the branches of the last block are removed
            shown.pop("drop_path_rate", None)
        return Base("timm", known.name, {**known.arguments, **shown})
    if is_hf(model):
        return Base("transformers", type(model).__name__, _hf_arguments(model.config))
    raise ModelError(
        f"{type(model).__name__} does not show how it was built; expected a model of timm or transformers; "
        "pass base=hetdpt.Base(library, name, arguments)"
    )


def input_size_of(model: nn.Module) -> tuple[int, int, int]:
    """Return the image size (C, H, W) that ``model`` was built for or resized to (``set_size_``)."""
    require_images(model)
    network = _network(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, height, width = config.get("input_size", (3, None, None))
    hf_config = getattr(model, "config", None)
    embed = getattr(network, "patch_embed", None)
    for owner in (embed, network, hf_config, getattr(hf_config, "vision_config", None)):
        size = getattr(owner, "img_size", None) or getattr(owner, "image_size", None)
        if isinstance(size, int | tuple | list):
            height, width = (size, size) if isinstance(size, int) else size
            channels = getattr(owner, "num_channels", channels)
            break
    else:
        base: Base | None = vars(model).get(BASE)
        side = base.arguments.get("img_size") if base else None
        height, width = (side, side) if isinstance(side, int) else (height, width)
    channels = _channels(network) or channels
    height, width = vars(model).get(SIZE, (height, width))
    if height is None or width is None:
        raise ModelError(
            f"{type(model).__name__} does not have an image size, as a vision model would; "
            "from Python, pass input_size=(3, height, width)"
        )
    return channels, height, width


def set_size_(model: nn.Module, height: int, width: int) -> None:
    """Make ``model`` take images of that size, by its library's own means; no image is run to check it.

    Position embeddings are interpolated, by timm once, by transformers whenever the model runs; windows keep their
    size. For a model that has neither, only the size is recorded.
    """
    network: Any = _network(model)
    for side in (height, width):
        _check_divisible(network, side)
    if callable(getattr(network, "set_input_size", None)):
        base = base_of(model)
        _set_timm_size(network, (height, width))
        vars(model)[BASE] = replace(base, arguments={**base.arguments, "img_size": [height, width]})
        return
    if is_hf(model):
        set_argument(model, "interpolate_pos_encoding")
    vars(model)[SIZE] = (height, width)


def _set_timm_size(network: Any, size: tuple[int, int]) -> None:
    options: dict[str, Any] = {"img_size": size}
    if "window_size" in signature(network.set_input_size).parameters:
        windows = [vars(module)["window_size"] for module in network.modules() if "window_size" in vars(module)]
        options["window_size"] = max(windows)  # where maps are smaller than that, so are windows
    is_learning = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    removed = [module for module in network.modules() if isinstance(module, Removed)]
    for module in removed:  # blocks call this method of their attention, even if it was removed
        vars(module)["set_window_size"] = lambda *_, **__: None
    try:
        network.set_input_size(**options)
    finally:
        for module in removed:
            del vars(module)["set_window_size"]
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(is_learning.get(name, True))


def _network(model: nn.Module) -> nn.Module:
    """Return the model inside timm's wrapper that returns feature maps, or the model itself."""
    return model.get_submodule("model") if feature_class_of(model) == "getter" else model


def feature_class_of(model: nn.Module) -> str | None:
    """Return timm's name for the kind of feature-map wrapper that ``model`` is; None if it is not one."""
    is_wrapper = type(model).__module__ == "timm.models._features"
    return FEATURE_NETS.get(type(model).__name__) if is_wrapper else None


def num_classes_of(model: nn.Module) -> int:
    """Return the number of classes of the head of ``model``; ``ModelError`` if it has no head."""
    if is_hf(model):  # a bare tower has config.num_labels too
        config: Any = model.config
        classes = config.num_labels if "ForImageClassification" in type(model).__name__ else 0
    else:
        classes = getattr(model, "num_classes", 0)
    if not isinstance(classes, int) or classes < 1:
        raise ModelError(
            f"{type(model).__name__} has no classification head; expected a classifier, "
            "such as a timm model with num_classes above 0"
        )
    return classes


def unfuse_(model: nn.Module) -> nn.Module:
    """Make attention run as two products and a softmax instead of one fused operator; it computes the same."""
    for module in model.modules():
        if vars(module).get("fused_attn"):  # timm
            vars(module)["fused_attn"] = False
        config: Any = vars(module).get("config")
        if getattr(config, "_attn_implementation", None) == "sdpa":  # transformers
            config._attn_implementation = "eager"
    return model


def fused(module: nn.Module) -> nn.Module:
    """Return ``module``, or a copy of it whose attention runs as one fused operator where it does not yet.

    The copy shares the children and tensors.
    """
    config: Any = vars(module).get("config")
    implementation = getattr(config, "_attn_implementation", None)
    changes: dict[str, Any] = {}
    if vars(module).get("fused_attn") is False:  # timm
        changes["fused_attn"] = True
    if implementation not in (None, "sdpa"):  # transformers
        changes["config"] = config = copy(config)
        config._attn_implementation = "sdpa"
    if not changes:
        return module
    twin = copy(module)
    vars(twin).update(changes)
    return twin


def with_modules(
    block: nn.Module, replacements: Iterable[tuple[str, nn.Module]] = (), attention: str = ""
) -> nn.Module:
    """Return a copy of ``block`` with some modules replaced and its attention, if given, as a fused operator.

    The copy shares all other modules; the block itself is not changed.
    """
    changes = [*replacements]
    if attention:
        inside = block.get_submodule(attention).named_modules(prefix=attention)
        changes += [(path, other) for path, module in inside if (other := fused(module)) is not module]
    if not changes:
        return block
    changed = _twin(block)
    for path, module in changes:
        _set(changed, path, module)
    return changed


def _twin(module: nn.Module) -> nn.Module:
    twin = copy(module)
    vars(twin)["_modules"] = dict(module._modules)
    return twin


def _set(twin: nn.Module, path: str, module: nn.Module) -> None:
    """Put ``module`` at ``path`` of a twin; the modules above it are copied."""
    *way, leaf = path.split(".")
    for name in way:
        child = twin._modules[name]
        assert child is not None
        twin._modules[name] = child = _twin(child)
        twin = child
    twin._modules[leaf] = module


def _build_timm(base: Base, pretrained: bool) -> nn.Module:
    import timm

    _require_in_timm(base.name)
    return timm.create_model(base.name, pretrained=pretrained, **base.arguments)


def _require_in_timm(name: str) -> None:
    import timm

    known = name.partition(".")[0]
    if not timm.is_model(known):
        near = difflib.get_close_matches(known, timm.list_models(), 3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists them"
        raise ModelError(
            f"timm has no model called {name!r}; {hint} (models of HuggingFace start with hf:, "
            "saved ones are directories)"
        )


def _timm_arguments(model: nn.Module, config: dict[str, Any], known: Base) -> dict[str, Any]:
    """Return the arguments of a timm model that can be read from it and may differ from its architecture's defaults."""
    arguments: dict[str, Any] = {}
    if kind := feature_class_of(model):
        info: Any = model.feature_info
        arguments |= {"features_only": True, "feature_cls": kind, "out_indices": list(info.out_indices)}
    model = _network(model)
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int):
        arguments["num_classes"] = classes
    embed = getattr(model, "patch_embed", None)
    size = getattr(embed, "img_size", None)
    is_usual = "img_size" not in known.arguments and tuple(size or ()) == tuple(config.get("input_size", ())[1:])
    if size is not None and not is_usual:
        arguments["img_size"] = list(size)
    channels = _channels(model)
    if channels not in (None, config.get("input_size", (3,))[0]):
        arguments["in_chans"] = channels
    if getattr(model, "dynamic_img_size", False):
        arguments["dynamic_img_size"] = True
    rates = [vars(module)["drop_prob"] for module in model.modules() if type(module).__name__ == "DropPath"]
    if rates:  # they grow from block to block up to drop_path_rate
        arguments["drop_path_rate"] = float(max(rates))
    return arguments


def _channels(model: nn.Module) -> int | None:
    """Return the image channels of the first layer, where that is timm's plain patch embedding."""
    embed = getattr(model, "patch_embed", None)
    is_plain = type(embed).__module__ == "timm.layers.patch_embed" and type(embed).__name__ == "PatchEmbed"
    return int(embed.proj.in_channels) if is_plain else None  # type: ignore[union-attr]


def _build_hf(base: Base) -> nn.Module:
    model_class = find_class(base.name)
    model: nn.Module = model_class(model_class.config_class.from_dict(base.arguments))
    return model


def _hf_arguments(config: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(json.dumps(settings_of(config), default=str))  # plain JSON
    if config._attn_implementation == "eager":  # others compute the same, and need not be available later
        arguments["attn_implementation"] = "eager"
    return arguments


def _create_hf(name: str, pretrained: bool, is_empty: bool, num_classes: int | None, img_size: int | None) -> nn.Module:
    transformers = import_transformers()
    changes = {"num_labels": num_classes, "image_size": img_size}
    changes = {key: value for key, value in changes.items() if value is not None}
    if name in transformers.CONFIG_MAPPING:  # a model type such as "vit": its default configuration
        config = transformers.AutoConfig.for_model(name, **changes)
        return build(_hf_base(transformers, config), is_empty=is_empty)
    is_local = Path(name).is_dir()
    with guarded_directory(name), few_modules():
        if is_local:
            require_own_weights(Path(name))
            _require_few_labels(Path(name) / "config.json")
        base = _hf_base(transformers, _hf_config(transformers, name, changes))
        require_allowed(base)
        if pretrained or is_local:
            return _load_hf(transformers, name, base, num_classes, img_size)
        return build(base, is_empty=is_empty)


def _load_hf(transformers: Any, name: str, base: Base, num_classes: int | None, img_size: int | None) -> nn.Module:
    """Return the model of a hub name or directory with its weights, built exactly as ``base`` says."""
    model_class = getattr(transformers, base.name)
    given = {"num_classes": num_classes, "img_size": img_size}
    sizes = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
    try:
        with silent(transformers):
            config = model_class.config_class.from_dict(base.arguments)
            model: nn.Module = model_class.from_pretrained(name, config=config)
            return model
    except HetDPTError:
        raise
    except Exception as error:  # missing, damaged or of other shapes; transformers and safetensors have many classes
        if sizes:
            raise ModelError(f"the weights of hf:{name} do not fit {sizes}; leave those options out") from None
        raise ModelError(f"hf:{name} cannot be loaded: {first_line(error)}") from None


def _hf_config(transformers: Any, name: str, changes: dict[str, Any]) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **changes)
    except HetDPTError:
        raise
    except Exception as error:  # transformers has many classes for values of a wrong type
        near = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING), 3)
        hint = f" (did you mean hf:{near[0]}?)" if near else ""
        raise ModelError(
            f"hf:{name} is neither a directory with a config.json, nor a model type{hint}, nor available from "
            f"the hub: {first_line(error)}"
        ) from None


def _require_few_labels(file: Path) -> None:
    """Raise ``ModelError`` where transformers would generate more class names than fit in memory."""
    try:
        values = parse_json(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {first_line(error)}") from None
    inner = [each for each in values.values() if isinstance(each, dict)] if isinstance(values, dict) else []
    for each in (values, *inner):
        labels = each.get("num_labels", 0) if isinstance(each, dict) else 0
        if not isinstance(labels, int) or not 0 <= labels <= LARGEST:
            raise ModelError(f"{file} has num_labels={reprlib.repr(labels)}; expected a number up to {LARGEST}")


def _hf_base(transformers: Any, config: Any) -> Base:
    """Return the base of a model with ``config``; where it has several parts (CLIP, SigLIP), of its vision tower."""
    tower = getattr(config, "vision_config", None)
    config = tower if isinstance(tower, transformers.PreTrainedConfig) else config
    return Base("transformers", _hf_class(transformers, config), _hf_arguments(config))


def _hf_class(transformers: Any, config: Any) -> str:
    named = config.architectures[0] if isinstance(config.architectures, list) and config.architectures else None
    if isinstance(named, str) and hasattr(transformers, named):
        return named
    classifiers = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    plain = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    found = classifiers.get(config.model_type) or plain.get(config.model_type)
    found = found[0] if isinstance(found, tuple | list) else found
    tower = f"{type(config).__name__.removesuffix('Config')}Model"  # for a vision_config without its own entry
    found = found or (tower if hasattr(transformers, tower) else None)
    if not found:
        raise ModelError(f"transformers has no image classifier for model type {config.model_type!r}")
    return str(found)


def _check_divisible(model: nn.Module, img_size: int) -> None:
    embed, config = getattr(model, "patch_embed", None), getattr(model, "config", None)
    patch = getattr(embed, "patch_size", None) or getattr(config, "patch_size", None)
    side = patch[0] if isinstance(patch, tuple | list) else patch
    if isinstance(side, int) and img_size % side:
        low = img_size // side * side
        near = f"{low} or {low + side}" if low else f"{side}"
        raise ModelError(f"image size {img_size} is not a multiple of the patch size {side}; use {near}")
