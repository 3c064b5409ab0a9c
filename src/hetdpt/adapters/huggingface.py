"""What hetdpt needs to know of models of transformers. The library is imported only if there is such a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hetdpt.core.errors import ModelError


def is_hf(model: nn.Module) -> bool:
    """Whether a model is of transformers; the library is not imported to find out."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)


def import_transformers() -> Any:
    """Return the library, with what all its models need imported: some of that starts a process (lscpu)."""
    try:
        import transformers
    except ImportError:
        raise ModelError("models of HuggingFace need transformers; install hetdpt[hf]") from None
    transformers.PreTrainedModel  # noqa: B018 - the library imports it when it is first accessed
    return transformers


def find_class(name: str) -> Any:
    """Return the model class of transformers called ``name``."""
    transformers = import_transformers()
    found: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise ModelError(f"transformers has no model class called {name!r}")
    return found


def require_images(model: nn.Module) -> None:
    """Raise ``ModelError`` for a model of transformers whose first argument is not images."""
    if not is_hf(model):
        return
    hf_model: Any = model
    is_video = "video" in hf_model.input_modalities and "image" not in hf_model.input_modalities
    given = "video" if is_video else _first_argument(model)
    if not is_video and not given.startswith("input_"):  # input_ids, input_values, input_features
        return
    if tower := vision_tower_of(model):
        raise ModelError(f"{type(model).__name__} takes text as well as images; use its vision tower: model.{tower}")
    raise ModelError(f"{type(model).__name__} is not an image model: expected pixel_values, but it takes {given}")


def vision_tower_of(model: nn.Module) -> str | None:
    """Return the path of the part that takes images in a transformers model that also takes text; None if none does."""
    hf_model: Any = model
    if not is_hf(model):
        return None
    parts = [path for path, part in model.named_modules() if _first_argument(part) == "pixel_values"]
    takes_text = "text" in hf_model.input_modalities or "" not in parts
    return next((path for path in parts if path), None) if takes_text else None


def _first_argument(module: nn.Module) -> str:
    return next(iter([*signature(type(module).forward).parameters][1:]), "")


@contextmanager
def silent(transformers: Any) -> Iterator[None]:
    """Suppress the log messages and progress bars of transformers."""
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


class SetArgument:
    """Forward pre-hook that sets one argument of its module to True, whether it is passed by position or by name."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.place = list(signature(type(module).forward).parameters).index(name) - 1  # self is not given

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.place < len(args):
            return (*args[: self.place], True, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, self.name: True}


def takes(module: nn.Module, name: str) -> bool:
    """Whether the ``forward`` of ``module`` has an argument called ``name``."""
    return name in signature(type(module).forward).parameters


def set_argument(model: nn.Module, name: str) -> list[RemovableHandle]:
    """Set the argument ``name`` to True in every module of ``model`` that has it, until the hooks are removed."""
    return [
        module.register_forward_pre_hook(SetArgument(module, name), with_kwargs=True)
        for module in model.modules()
        if takes(module, name) and not is_argument_set(module, name)
    ]


def is_argument_set(module: nn.Module, name: str) -> bool:
    """Whether ``set_argument`` has set the argument ``name`` of ``module``."""
    return any(isinstance(hook, SetArgument) and hook.name == name for hook in module._forward_pre_hooks.values())


@contextmanager
def with_argument(model: nn.Module, name: str) -> Iterator[None]:
    """Set the argument ``name`` to True, as ``set_argument`` does, inside the context."""
    with ExitStack() as stack:
        for hook in set_argument(model, name):
            stack.enter_context(hook)
        yield
