"""The layout of a model's tokens: which of them are patches, in what grid, and whether its output depends on those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import ModelError
from hetdpt.core.modules import clone, tensors_in
from hetdpt.surgery.record import InputSize


@dataclass(frozen=True)
class TokenLayout:
    """The input of the blocks: ``protected`` tokens first, then one for each patch, row by row."""

    protected: int
    """Class, distillation and register tokens."""
    grid: tuple[int, int]
    """Rows and columns of patches."""
    is_patch_read: bool
    """Whether the output depends on the patches of the last block, not only on the protected tokens."""


def find_layout(model: nn.Module, input_size: InputSize, blocks: list[str]) -> TokenLayout:
    """Return the layout of the tokens that ``blocks``, by path, get; ``ModelError`` unless it is (B, N, D).

    The grid of patches is that of the last convolution before the first block.
    """
    given, grids, is_tuple = _watched(model, input_size, blocks)
    shapes = [tuple(tensors[0].shape) for tensors in given]
    if any(len(shape) != 3 for shape in shapes) or len(set(shapes)) > 1:
        raise ModelError(
            f"tokens can be reduced in models whose blocks all get as many tokens, (B, N, D); this one has "
            f"{' and '.join(str(shape) for shape in dict.fromkeys(shapes))}"
        )
    if crowded := [path for path, tensors in zip(blocks, given, strict=True) if len(tensors) > 1]:
        raise ModelError(
            f"{crowded[0]} cannot reduce tokens: it takes other inputs too, such as an embedding of their positions, "
            "which merged tokens do not have"
        )
    n = shapes[0][1]
    rows, columns = grids[-1] if grids else (0, 0)
    if not 0 <= n - rows * columns < rows * columns:
        raise ModelError(
            f"expected the {n} tokens of {type(model).__name__} to be the patches that a convolution makes of the "
            f"image, and a few more; its last one makes {rows} x {columns}"
        )
    protected = n - rows * columns
    is_read = _is_patch_read(model, input_size, dict(zip(blocks, is_tuple, strict=True)), protected)
    return TokenLayout(protected, (rows, columns), is_read)


def _watched(
    model: nn.Module, input_size: InputSize, blocks: list[str]
) -> tuple[list[list[Tensor]], list[tuple[int, int]], list[bool]]:
    """Return the inputs of each block, the grids of the convolutions before, and which blocks return tuples."""
    given: list[list[Tensor]] = []
    grids: list[tuple[int, int]] = []
    are_tuples: list[bool] = []

    def convolved(_: nn.Module, args: Any, output: Tensor) -> None:
        if not given:
            grids.append((output.shape[-2], output.shape[-1]))

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(tensors_in(args, kwargs))

    def end(_: nn.Module, args: Any, output: Any) -> None:
        are_tuples.append(isinstance(output, tuple))

    @contextmanager
    def watch(probe: nn.Module, *_: Any) -> Iterator[None]:
        for found in (given, grids, are_tuples):
            found.clear()
        with ExitStack() as hooks:
            for module in probe.modules():
                if isinstance(module, nn.Conv2d):
                    hooks.callback(module.register_forward_hook(convolved).remove)
            for path in blocks:
                block = probe.get_submodule(path)
                hooks.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(end).remove)
            yield

    dry_run(model, (2, *input_size), watch)
    return given, grids, are_tuples


@torch.no_grad()
def _is_patch_read(model: nn.Module, input_size: InputSize, blocks: dict[str, bool], protected: int) -> bool:
    """Whether the output is NaN if the last block returns NaN for patches; weights are 0 and no block runs."""
    probe = clone(model).eval()
    for path, is_tuple in blocks.items():
        is_last = path == list(blocks)[-1]
        vars(probe.get_submodule(path))["forward"] = partial(_pass, is_tuple, protected if is_last else None)
    tensors = dict((*probe.named_parameters(), *probe.named_buffers()))
    zeros = {
        name: torch.zeros(t.shape, dtype=torch.float32 if t.is_floating_point() else t.dtype)
        for name, t in tensors.items()
    }
    answer = torch.func.functional_call(probe, zeros, (torch.zeros(1, *input_size),))
    return any(bool(tensor.isnan().any()) for tensor in tensors_in(answer))


def _pass(is_tuple: bool, protected: int | None, *args: Any, **kwargs: Any) -> Any:
    """Return the tokens unchanged or, with ``protected``, NaN for all but the first so many."""
    tokens = tensors_in(args, kwargs)[0].clone()
    if protected is not None:
        tokens[:, protected:] = torch.nan
    return (tokens, None) if is_tuple else tokens
