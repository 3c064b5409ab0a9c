"""Arguments that reach a module inside of a model, whatever its callers hand on. Knows no model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class Asked:
    """Forward pre-hook that makes one argument of its module true, in the place where it is given."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.place = list(inspect.signature(type(module).forward).parameters).index(name) - 1  # self is not given

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.place < len(args):
            return (*args[: self.place], True, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, self.name: True}


def takes(module: nn.Module, name: str) -> bool:
    """Whether the ``forward`` of ``module`` has an argument called ``name``."""
    return name in inspect.signature(type(module).forward).parameters


def ask(model: nn.Module, name: str) -> list[RemovableHandle]:
    """Make the argument ``name`` true in every module of ``model`` that has it, for as long as the hooks stay.

    Where it is so already, nothing changes.
    """
    return [
        module.register_forward_pre_hook(Asked(module, name), with_kwargs=True)
        for module in model.modules()
        if takes(module, name) and not is_asked(module, name)
    ]


def is_asked(module: nn.Module, name: str) -> bool:
    """Whether ``ask`` has made the argument ``name`` of ``module`` true."""
    return any(isinstance(hook, Asked) and hook.name == name for hook in module._forward_pre_hooks.values())


@contextmanager
def asking(model: nn.Module, name: str) -> Iterator[None]:
    """Do what ``ask`` does, for a while."""
    hooks = ask(model, name)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
