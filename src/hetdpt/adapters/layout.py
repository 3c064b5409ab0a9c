"""The layout of a model's tokens: which of them are patches, in what grid, and which of them its head reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.heads import answer_tensors
from hetdpt.adapters.trace import dry_run
from hetdpt.core.errors import ModelError, first_line
from hetdpt.core.modules import clone, tensors_in

InputSize = tuple[int, int, int]
IMAGES = 2  # of a dry run


@dataclass(frozen=True)
class TokenLayout:
    """The input of the blocks: ``protected`` tokens first, then one for each patch, row by row."""

    protected: int
    """Class, distillation and register tokens."""
    grid: tuple[int, int]
    """Rows and columns of patches."""
    is_patch_read: bool
    """Whether the output depends on the patches of the last block, not only on the protected tokens."""
    read: int | None
    """How many of the first tokens of the last block its answer depends on; None if it depends on patches.

    The answer is the output without hidden states that a model may return beside it.
    """
    mean_from: int | None = None
    """The first of the tokens whose mean is all that its answer depends on; None if it depends on more."""
    crowded: str | None = None
    """A block that gets other tensors too, such as an embedding of positions; None if there is none."""

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.protected + self.grid[0] * self.grid[1]


def find_layout(model: nn.Module, input_size: InputSize, blocks: list[str], purpose: str) -> TokenLayout:
    """Return the layout of the tokens that ``blocks``, by path, get; ``ModelError`` unless it is (B, N, D).

    The grid of patches is that of the last convolution before the first block. ``purpose`` begins the sentence of the
    error, such as "tokens can be reduced".
    """
    given, grids, is_tuple = _watched(model, input_size, blocks)
    shapes = [tuple(tensors[0].shape) for tensors in given]
    if any(len(shape) != 3 or shape[0] != IMAGES for shape in shapes) or len(set(shapes)) > 1:
        raise ModelError(
            f"{purpose} in models whose blocks all get as many tokens, (B, N, D); this one has "
            f"{' and '.join(str(shape) for shape in dict.fromkeys(shapes))}"
        )
    n = shapes[0][1]
    rows, columns = grids[-1] if grids else (0, 0)
    if not 0 <= n - rows * columns < rows * columns:
        raise ModelError(
            f"expected the {n} tokens of {type(model).__name__} to be the patches that a convolution makes of the "
            f"image, and a few more; its last one makes {rows} x {columns}"
        )
    protected = n - rows * columns
    probe = _HeadProbe(model, input_size, dict(zip(blocks, is_tuple, strict=True)))
    is_read = probe.is_read(answer_tensors, first=protected)
    reads = [] if is_read else range(1, protected + 1)
    return TokenLayout(
        protected=protected,
        grid=(rows, columns),
        is_patch_read=probe.is_read(tensors_in, first=protected),
        read=next((count for count in reads if not probe.is_read(answer_tensors, first=count)), None),
        mean_from=next((first for first in (protected, 0) if probe.is_mean_read(first)), None) if is_read else None,
        crowded=next((path for path, tensors in zip(blocks, given, strict=True) if len(tensors) > 1), None),
    )


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

    dry_run(model, (IMAGES, *input_size), watch)
    return given, grids, are_tuples


class _HeadProbe:
    """A copy of a model whose blocks do nothing, to find out what its head reads of the tokens of the last one.

    Weights outside of blocks are random, those inside take part in nothing.
    """

    def __init__(self, model: nn.Module, input_size: InputSize, blocks: dict[str, bool]) -> None:
        self.probe, self.input_size, self.blocks = clone(model).eval(), input_size, blocks
        self.random = torch.Generator().manual_seed(0)
        tensors = dict((*self.probe.named_parameters(), *self.probe.named_buffers()))
        self.values = {name: self._value(name, tensor) for name, tensor in tensors.items()}

    def _value(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if name.startswith(tuple(f"{path}." for path in self.blocks)):
            return torch.zeros(tensor.shape)
        draw = torch.randn if tensor.ndim > 1 else torch.rand  # a variance is positive
        return draw(tensor.shape, generator=self.random)

    @torch.no_grad()
    def answer(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Return the output if the last block returns what ``change`` makes of its tokens."""
        for path, is_tuple in self.blocks.items():
            last = change if path == list(self.blocks)[-1] else None
            vars(self.probe.get_submodule(path))["forward"] = partial(_pass, is_tuple, last)
        try:
            return torch.func.functional_call(self.probe, self.values, (torch.zeros(1, *self.input_size),))
        except Exception as error:
            raise ModelError(
                f"which tokens {type(self.probe).__name__} reads cannot be found, as its blocks do not return what "
                f"they get: {first_line(error)}"
            ) from error

    def is_read(self, of: Callable[[Any], list[Tensor]], first: int) -> bool:
        """Whether a tensor of the output is NaN if all tokens but the ``first`` are."""
        answer = self.answer(lambda tokens: _overwritten(tokens, slice(first, None), torch.nan))
        return any(bool(tensor.isnan().any()) for tensor in of(answer))

    def is_mean_read(self, first: int) -> bool:
        """Whether the answer stays the same if the tokens from ``first`` on become their mean and others NaN."""

        def noise(tokens: Tensor) -> Tensor:
            return torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))

        def mean(tokens: Tensor) -> Tensor:
            changed = noise(tokens)
            changed[:, first:] = changed[:, first:].mean(1, keepdim=True)
            return _overwritten(changed, slice(0, first), torch.nan)

        pairs = zip(answer_tensors(self.answer(noise)), answer_tensors(self.answer(mean)), strict=True)
        return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4 * one.abs().max().item()) for one, other in pairs)


def _overwritten(tokens: Tensor, which: slice, value: float) -> Tensor:
    tokens = tokens.clone()
    tokens[:, which] = value
    return tokens


def _pass(is_tuple: bool, change: Callable[[Tensor], Tensor] | None, *args: Any, **kwargs: Any) -> Any:
    """Return the tokens, changed if that is given."""
    tokens = tensors_in(args, kwargs)[0]
    tokens = tokens if change is None else change(tokens)
    return (tokens, None) if is_tuple else tokens
