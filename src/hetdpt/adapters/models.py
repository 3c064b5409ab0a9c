"""Models by name, and from what a model was built, so that it can be built again. The libraries are known only here."""

from __future__ import annotations

import difflib
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.errors import FileError, HetDPTError, ModelError

BASE = "_hetdpt_base"
HF_PREFIX = "hf:"


@dataclass(frozen=True)
class Base:
    """From what a model was built: a timm architecture or a transformers class, and its arguments (plain JSON).

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
    weights: Path | None = None,
    pretrained: bool = False,
    num_classes: int | None = None,
    img_size: int | None = None,
    is_empty: bool = False,
) -> nn.Module:
    """Return the model called ``name``, in eval mode: a timm name, or ``hf:`` and a hub name, directory or model type.

    ``weights`` is a checkpoint file that must fit exactly; ``pretrained`` asks the library for its own weights;
    ``is_empty`` wants no weights at all (parameters on the meta device), only the structure.
    """
    is_empty = is_empty and not (weights or pretrained)
    if name.startswith(HF_PREFIX):
        base, model = _create_hf(name.removeprefix(HF_PREFIX), pretrained, num_classes, img_size)
    else:
        arguments = {"num_classes": num_classes, "img_size": img_size}
        base = Base("timm", name, {key: value for key, value in arguments.items() if value is not None})
        model = build(base, pretrained=pretrained, is_empty=is_empty)
    if img_size is not None:
        _check_divisible(model, img_size)
    vars(model)[BASE] = base
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def build(base: Base, *, pretrained: bool = False, is_empty: bool = False) -> nn.Module:
    """Return a new model as ``base`` says; ``is_empty`` leaves its parameters on the meta device."""
    from accelerate import init_empty_weights

    builders = {"timm": _build_timm, "transformers": _build_hf}
    if base.library not in builders:
        raise ModelError(f"models come from {' or '.join(builders)}, not from {base.library!r}")
    try:
        with init_empty_weights() if is_empty else nullcontext():
            model = builders[base.library](base, pretrained)
    except HetDPTError:
        raise
    except Exception as error:  # whatever a constructor raises on arguments it does not take
        if is_empty:  # or one that computes with its parameters, which needs real ones
            return build(base)
        raise ModelError(f"{base.name} cannot be built with {base.arguments}: {first_line(error)}") from error
    vars(model)[BASE] = base
    return model.eval()


def base_of(model: nn.Module) -> Base:
    """Return from what ``model`` was built, as far as it tells; ``ModelError`` where it does not."""
    base: Base | None = vars(model).get(BASE)
    if base is not None:
        return base
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and config.get("architecture"):
        return Base("timm", config["architecture"], _timm_arguments(model, config))
    if _is_hf(model):
        return Base("transformers", type(model).__name__, _plain(model.config.to_diff_dict()))  # type: ignore
    raise ModelError(
        f"{type(model).__name__} does not say how it was built: a model of timm or transformers was expected; "
        "pass base=hetdpt.Base(library, name, arguments)"
    )


def input_size_of(model: nn.Module) -> tuple[int, int, int]:
    """Return the image size (C, H, W) that ``model`` was made for."""
    embed = getattr(model, "patch_embed", None)
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, height, width = config.get("input_size", (3, None, None))
    hf_config = getattr(model, "config", None)
    for owner in (embed, model, hf_config, getattr(hf_config, "vision_config", None)):
        size = getattr(owner, "img_size", None) or getattr(owner, "image_size", None)
        if isinstance(size, int | tuple | list):
            height, width = (size, size) if isinstance(size, int) else size
            channels = getattr(owner, "num_channels", channels)
            break
    asked = base_of(model).arguments.get("img_size") if BASE in vars(model) else None
    if isinstance(asked, int):
        height = width = asked
    if height is None or width is None:
        raise ModelError(
            f"{type(model).__name__} does not say its image size, as a vision model would; "
            "from Python, pass input_size=(3, height, width)"
        )
    return channels, height, width


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load a checkpoint (safetensors, or a torch file without code) that fits ``model`` exactly."""
    from timm.models import load_state_dict

    if not path.is_file():
        raise FileError(f"the checkpoint {path} does not exist; give a .safetensors or .pth file")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, on a pickle it goes on to refuse
            state = load_state_dict(str(path), weights_only=True)
    except Exception as error:  # what torch and timm raise on a file that is no checkpoint is of many classes
        why = first_line(error)
        if isinstance(error.__cause__ or error, pickle.UnpicklingError):
            why = "it holds other objects than tensors, which could run code"
        elif isinstance(error, KeyError | AttributeError | TypeError):
            why = "it is no dictionary of tensors"
        raise FileError(f"the checkpoint {path} cannot be read: {why}; give a whole file with a state dict") from None
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise FileError(f"the checkpoint {path} holds other things than tensors by name; save its state_dict alone")
    check_fit(model.state_dict(), state, str(path))
    model.load_state_dict(state)
    return model


def check_fit(expected: dict[str, Any], given: dict[str, Any], name: str) -> None:
    """Raise ``FileError`` naming the first tensor of ``given`` that is missing, unknown or of another shape."""
    for key in expected:
        if key not in given:
            raise FileError(f"{name} does not fit the model: {key} is missing; was it saved from another model?")
        shapes = tuple(expected[key].shape), tuple(given[key].shape)
        if shapes[0] != shapes[1]:
            raise FileError(
                f"{name} does not fit the model: {key} should be {shapes[0]} and is {shapes[1]}; "
                "check the model's name, number of classes and image size"
            )
    if unknown := [key for key in given if key not in expected]:
        raise FileError(f"{name} does not fit the model: it has {unknown[0]}, which the model lacks")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and each one back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def unfuse_(model: nn.Module) -> nn.Module:
    """Make attention run as two products and a softmax instead of one fused operator; the function stays the same."""
    for module in model.modules():
        if vars(module).get("fused_attn"):  # timm
            vars(module)["fused_attn"] = False
        config: Any = vars(module).get("config")
        if getattr(config, "_attn_implementation", None) == "sdpa":  # transformers
            config._attn_implementation = "eager"
    return model


def timm_config(model: nn.Module, recipe: dict[str, Any]) -> str:
    """Return the ``config.json`` with which timm builds a saved model through the entry point ``hetdpt``."""
    shown = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std", "num_classes")
    config = {key: value for key, value in (getattr(model, "pretrained_cfg", None) or {}).items() if key in shown}
    config["num_classes"] = getattr(model, "num_classes", config.get("num_classes"))
    values = {
        "architecture": "hetdpt",
        "num_classes": config["num_classes"],
        "model_args": {"recipe": recipe},
        "pretrained_cfg": config,
    }
    return json.dumps(values, indent=1) + "\n"


def register_with_timm(entry_point: Callable[..., nn.Module]) -> None:
    """Make ``entry_point`` known to ``timm.create_model`` under its own name."""
    import timm

    if not timm.is_model(entry_point.__name__):
        timm.models.register_model(entry_point)


def load_timm_weights(model: nn.Module, pretrained_cfg: dict[str, Any]) -> nn.Module:
    """Load the weights that timm found beside a ``config.json``, on disk or on the hub."""
    from timm.models import load_pretrained

    load_pretrained(model, pretrained_cfg=pretrained_cfg, num_classes=pretrained_cfg["num_classes"])
    return model


def _build_timm(base: Base, pretrained: bool) -> nn.Module:
    import timm

    known = base.name.partition(".")[0]
    if not timm.is_model(known):
        near = difflib.get_close_matches(known, timm.list_models(), 3)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists them"
        raise ModelError(
            f"timm has no model called {base.name!r}; {hint} (models of HuggingFace start with hf:, "
            "saved ones are directories)"
        )
    return timm.create_model(base.name, pretrained=pretrained, **base.arguments)


def _timm_arguments(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in which a timm model differs from its default, as far as it shows."""
    arguments: dict[str, Any] = {}
    classes = getattr(model, "num_classes", None)
    if classes is not None and classes != config.get("num_classes"):
        arguments["num_classes"] = classes
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None and tuple(size) != tuple(config.get("input_size", ())[1:]):
        arguments["img_size"] = list(size)
    pool = getattr(model, "global_pool", None)
    if isinstance(pool, str) and config.get("pool_size") is None and pool != "token":
        arguments["global_pool"] = pool
    return arguments


def _is_hf(model: nn.Module) -> bool:
    """Whether a model is of transformers, without importing it for one that is not."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError("models of HuggingFace need transformers; install hetdpt[hf]") from None
    return transformers


def _build_hf(base: Base, pretrained: bool) -> nn.Module:
    transformers = _transformers()
    model_class = getattr(transformers, base.name, None) if base.name.isidentifier() else None
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model:
        raise ModelError(f"transformers has no model class called {base.name!r}")
    assert model_class is not None
    model: nn.Module = model_class(model_class.config_class.from_dict(base.arguments))
    return model


def _create_hf(name: str, pretrained: bool, num_classes: int | None, img_size: int | None) -> tuple[Base, nn.Module]:
    transformers = _transformers()
    changes = {"num_labels": num_classes, "image_size": img_size}
    changes = {key: value for key, value in changes.items() if value is not None}
    config = _hf_config(transformers, name, changes)
    base = Base("transformers", _hf_class(transformers, config), _plain(config.to_diff_dict()))
    if not (pretrained or Path(name).is_dir()):
        return base, build(base)
    model_class = getattr(transformers, base.name)
    given = {"num_classes": num_classes, "img_size": img_size}
    sizes = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
    try:
        with _silent(transformers):
            return base, model_class.from_pretrained(name, config=config)
    except Exception as error:  # missing, damaged or of other shapes; transformers and safetensors have many classes
        if sizes:
            raise ModelError(f"the weights of hf:{name} do not fit {sizes}; leave out what was changed") from None
        raise ModelError(f"hf:{name} cannot be loaded: {first_line(error)}") from None


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Keep the reports and progress bars of transformers off the terminal."""
    logging = transformers.utils.logging
    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()


def _hf_config(transformers: Any, name: str, changes: dict[str, Any]) -> Any:
    if name in transformers.CONFIG_MAPPING:  # a model type such as "vit": its default configuration
        config = transformers.AutoConfig.for_model(name, **changes)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(name, **changes)
        except (OSError, ValueError) as error:
            near = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING), 3)
            hint = f" (did you mean hf:{near[0]}?)" if near else ""
            raise ModelError(
                f"hf:{name} is neither a directory with a config.json, nor a model type{hint}, nor to be had from "
                f"the hub: {first_line(error)}"
            ) from None
    return getattr(config, "vision_config", config)  # of CLIP and SigLIP, the vision tower


def _hf_class(transformers: Any, config: Any) -> str:
    named = (config.architectures or [None])[0]
    if named and hasattr(transformers, named):
        return str(named)
    classifiers = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    plain = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    found = classifiers.get(config.model_type) or plain.get(config.model_type)
    found = found[0] if isinstance(found, tuple | list) else found
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


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` as they are after a trip through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
