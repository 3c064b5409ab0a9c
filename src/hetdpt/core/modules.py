"""Operations on any torch module: copies that share weights, replacements, eval mode for a while, checked images.

No model, site or stage is known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetdpt.core.errors import DataError, DeviceError, ModelError, first_line

WRONG_SIZE = (RuntimeError, ValueError, AssertionError, IndexError)
"""What torch, timm and transformers raise for images of a size that a model does not take."""


def clone(model: nn.Module) -> nn.Module:
    """Return a copy of the modules of ``model`` that shares its tensors.

    Replacing a module of the copy does not change the model; training the copy trains the model.
    """
    held = tensors_in([list(vars(module).values()) for module in model.modules()])
    kept = [tensor for tensor in held if not tensor.is_leaf]  # from a pass with gradients
    tensors = (*model.parameters(), *model.buffers(), *kept)
    return deepcopy(model, {id(tensor): tensor for tensor in tensors})


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results, at any depth."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def put_(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at ``path`` by ``module``, whose new parts get the train or eval mode of the replaced one.

    In eval mode without gradients, ``nn.TransformerEncoderLayer`` computes with the weights of its modules and calls
    none of them (torch's fast path), unless one of them has a hook. So a module put into such a layer gets a hook and,
    in place of its attention, the attributes that the layer reads before it looks for hooks.
    """
    before = model.get_submodule(path)
    kept = {*before.modules()}
    for part in module.modules():
        if part not in kept:
            part.training = before.training
    model.set_submodule(path, module)
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        if "batch_first" in vars(before):
            vars(module).update(batch_first=vars(before)["batch_first"], in_proj_bias=None)
        module.register_forward_pre_hook(_no_fast_path)


def _no_fast_path(_: nn.Module, __: Any) -> None:
    """Do nothing; torch leaves its fast path for any hook."""


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and restore the mode of each afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def memory_advice(sentence: str) -> Iterator[None]:
    """Raise ``DeviceError(sentence)`` in place of what torch raises when it runs out of memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        words = ("can't allocate memory", "out of memory", "out of shared memory")
        if isinstance(error, MemoryError) or any(word in str(error) for word in words):
            raise DeviceError(sentence) from None
        raise


def random_images(model: nn.Module, size: tuple[int, int, int], batch: int) -> Tensor:
    """Return the same random images (B, C, H, W) every time, on the device and in the dtype of ``model``."""
    images = torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))
    return images.to(next(model.parameters()))


def checked(batches: Iterable[Tensor], model: nn.Module, purpose: str) -> Generator[Tensor]:
    """Yield the images on the device and in the dtype of ``model``; ``DataError`` says what is wrong with them.

    ``purpose`` is what the sentence says they are for, such as "transfer entropy". Empty batches are skipped.

    >>> [images] = checked([torch.ones(2, 3, 8, 8)], nn.Conv2d(3, 4, 1).double(), "an example")
    >>> images.dtype
    torch.float64
    """
    weight = next(model.parameters())
    if weight.is_meta:
        raise ModelError("this model has no weights (its parameters are on the meta device); load them first")
    first: Tensor | None = None
    for images in batches:
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            raise DataError(
                f"batches are float tensors of images (B, C, H, W), but one is {_spell(images)}; give images alone, "
                "prepared for the model, such as [images]"
            )
        if not len(images):
            continue
        first = images if first is None else first
        if images.shape[1:] != first.shape[1:]:
            raise DataError(f"images must be of one size, but got {_size(first)} and {_size(images)}; resize them")
        yield images.to(weight)
    if first is None:
        raise DataError(f"{purpose} needs images, but the batches are empty; was an iterator read before?")


class Peeked:
    """Images as ``checked`` yields them, with the first batch available before the first pass.

    The first pass continues the iterator that was opened for it, so that workers are not started twice.
    """

    def __init__(self, batches: Iterable[Tensor], model: nn.Module, purpose: str) -> None:
        self._open = partial(checked, batches, model, purpose)
        opened = self._open()
        self.first = next(opened)
        self._opened: Iterator[Tensor] | None = chain([self.first], opened)
        self.is_once = is_once(batches)
        self._length = length_hint(batches)
        self.count = 0
        """Images of the latest pass, so far."""

    @property
    def size(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        channels, height, width = self.first.shape[1:]
        return channels, height, width

    def __length_hint__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Tensor]:
        stream, self._opened, self.count = self._opened or self._open(), None, 0
        for images in stream:
            self.count += len(images)
            yield images


class Held:
    """Batches that stay in memory after their first pass, unless they take more than ``memory`` bytes."""

    def __init__(self, batches: Iterable[Tensor], memory: int = 1 << 29) -> None:
        self.batches, self.memory = batches, memory
        self.held: list[Tensor] | None = None

    def __length_hint__(self) -> int:
        return length_hint(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        if self.held is not None:
            yield from self.held
            return
        held, room = list[Tensor](), self.memory
        for images in self.batches:
            room -= images.nbytes if isinstance(images, Tensor) else 0
            held.append(images)
            if room < 0:
                held.clear()
            yield images
        self.held = held if room >= 0 else None


def is_once(batches: Iterable[Tensor]) -> bool:
    """Whether ``batches`` can be read only once; they are not opened to find out."""
    return batches.is_once if isinstance(batches, Peeked) else isinstance(batches, Iterator)


def require_more_than_once(batches: Iterable[Tensor], times: str) -> None:
    """Raise ``DataError`` if ``batches`` are an iterator; ``times`` says how often and why they are read."""
    if is_once(batches):
        raise DataError(f"the images are read {times}, but got a one-shot iterator; pass a list or a DataLoader")


@torch.no_grad()
def require_takes(model: nn.Module, images: Tensor) -> None:
    """Run ``model`` on the first of ``images`` (B, C, H, W); ``DataError`` if it does not take them."""
    try:
        model(images[:1])
    except WRONG_SIZE as error:
        raise DataError(
            f"{type(model).__name__} does not take images of {_size(images)}: {first_line(error)}; "
            "prepare them in the size that the model was built for"
        ) from error


def _spell(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _size(images: Tensor) -> str:
    return " x ".join(str(side) for side in images.shape[1:])


def digest(model: nn.Module) -> str:
    """Return a checksum of the structure and the weights of ``model``."""
    found = hashlib.sha256(str(model).encode())
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + bytes_of(tensor))
    return found.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of ``tensor``, row by row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def find_device(name: str | None = None) -> torch.device:
    """Return the device called ``name``, or the fastest available; ``DeviceError`` if it is not available.

    >>> find_device("cpu")
    device(type='cpu')
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(k for k in has if has[k]))
    kind, _, number = name.partition(":")
    if not has.get(kind) or not (number or "0").isdecimal():
        raise DeviceError(f"device {name!r} is not available; available: {', '.join(k for k in has if has[k])}")
    return torch.device(name)
