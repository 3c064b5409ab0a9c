"""The modules that replace a removed layer, and the gate that chooses between a layer and its replacement.

y = m f(x) + (1 - m) r(x) with a mask m of 0 or 1; the gradient of m is passed straight to a learnable importance
(paper, Eq. 1 and 6). The rows of ``core.styles`` name these modules. No architecture and no budget is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hetdpt.core.errors import ModelError
from hetdpt.core.fold import Layer, LinearFit, MeanFit, Means, Moments, TokenMeans, fit_linear, fit_mean, new_layer
from hetdpt.core.styles import Style


@dataclass(frozen=True)
class OnDemand:
    """None if the argument with that number is true, and nothing otherwise."""

    number: int


Extras = tuple[int | OnDemand | None, ...] | None
Values = tuple[Tensor, ...]
"""Fitted values in float64: a constant (places, D), or the matrix and the bias of a linear map."""


class Removed(nn.Module):
    """Replaces a removed layer: takes any arguments and returns what the layer did, a tensor or a tuple.

    ``extras`` say what follows the tensor in that tuple: an argument by its number, or None, always or on demand.
    """

    uses_input: ClassVar[bool] = True
    """Whether r(x) depends on x."""
    sums: ClassVar[type[Means | Moments] | None] = None
    """What is summed over images to fit its values; None if it has none."""

    def __init__(self, extras: Extras = None) -> None:
        super().__init__()
        self.extras = extras

    @classmethod
    def new(cls, shape: tuple[int, ...], axis: int, like: Tensor, extras: Extras = None) -> Self:
        """Return a replacement whose values are 0, on the device and in the dtype of ``like``.

        ``shape`` is that of the layer's output without the images; ``axis`` is the one of its channels.
        """
        return cls(extras)

    @classmethod
    def fit(cls, folds: Sequence[Any]) -> MeanFit | LinearFit:
        """Return the best values for the sums of each part of the images."""
        return fit_linear(folds) if cls.uses_input else fit_mean(folds)

    def fill_(self, values: Values, axis: int) -> None:
        """Set fitted values; the output has its channels on ``axis``, not counting the axis of images."""
        raise NotImplementedError

    def replace(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        y = self.replace(first_tensor(given))
        if self.extras is None:
            return y
        extras = [extra for extra in self.extras if not isinstance(extra, OnDemand) or given[extra.number]]
        return y, *(given[extra] if isinstance(extra, int) else None for extra in extras)


class Pass(Removed):
    """Returns its input: r(x) = x."""

    def replace(self, x: Tensor) -> Tensor:
        return x


class Zero(Removed):
    """Adds nothing to the residual stream: r(x) = 0, one number in memory whatever the shape."""

    uses_input = False

    def replace(self, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)


class Constant(Removed):
    """Adds the same vector to every token of every image: r(x) = c.

    ``shape`` is that of the layer's output without the images; sides of 1 stand for all places. The vector is flat and
    called a bias, so that optimizers exempt it from weight decay as they do biases.
    """

    uses_input = False
    sums: ClassVar[type[Means | Moments] | None] = TokenMeans
    kept: int | None = None
    """How many of the first tokens it gets, where it has values for each and the others are not computed."""

    def __init__(self, bias: nn.Parameter, shape: tuple[int, ...], extras: Extras = None) -> None:
        super().__init__(extras)
        self.shape = shape
        self.bias = bias

    @classmethod
    def new(cls, shape: tuple[int, ...], axis: int, like: Tensor, extras: Extras = None) -> Self:
        bias = torch.zeros(shape[axis], dtype=like.dtype, device=like.device)
        vector = tuple(side if number == axis else 1 for number, side in enumerate(shape))
        return cls(nn.Parameter(bias, like.requires_grad), vector, extras)

    @torch.no_grad()
    def fill_(self, values: Values, axis: int) -> None:
        shape = self.value.movedim(axis, -1).shape
        self.bias.copy_(values[0].view(shape).movedim(-1, axis).reshape(self.bias.shape))

    @property
    def value(self) -> Tensor:
        return self.bias.view(self.shape)

    def replace(self, x: Tensor) -> Tensor:
        value = self.value if self.kept is None else self.value[: self.kept]
        shape = tuple(value.shape)
        if any(mine not in (1, side) for mine, side in zip(shape, x.shape[1:], strict=True)):
            raise ModelError(
                f"a layer of this model was replaced by values for tokens of shape {shape}, but got "
                f"{tuple(x.shape[1:])}; give images of the size it was calibrated on, or use removal style 'constant'"
            )
        return value.to(x.dtype).expand(x.shape)


class ConstantPerPosition(Constant):
    """Adds the same to every image, but another vector to each token: r(x) = c."""

    sums = Means

    @classmethod
    def new(cls, shape: tuple[int, ...], axis: int, like: Tensor, extras: Extras = None) -> Self:
        bias = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return cls(nn.Parameter(bias, like.requires_grad), shape, extras)


class Mapped(Removed):
    """Sends every token through one linear layer: r(x) = W x + b."""

    sums = Moments

    def __init__(self, linear: Layer, extras: Extras = None) -> None:
        super().__init__(extras)
        self.linear = linear

    @classmethod
    def new(cls, shape: tuple[int, ...], axis: int, like: Tensor, extras: Extras = None) -> Self:
        width = shape[axis]
        zeros = torch.zeros(width, width, dtype=torch.float64, device=like.device)
        is_image = len(shape) == 3 and axis == 0  # (C, H, W)
        return cls(new_layer(zeros, zeros[0], like, is_image), extras)

    def fill_(self, values: Values, axis: int) -> None:
        fill_layer_(self.linear, values)

    def replace(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class ForPatches(Removed):
    """Replaces a layer f for patches alone; the first p tokens keep it: r(x) = [f(x_:p), s(x_p:)].

    f stays registered where it was. There may be no patches, or not even p tokens, where others were left out.
    """

    def __init__(self, kept: nn.Module, protected: int) -> None:
        super().__init__()
        self.kept = (kept,)  # a tuple, so that it is not registered a second time
        self.protected = protected

    def keep_(self) -> None:
        """Let the kept layer compute r(x) whenever it is called, as long as this module is its child ``patches``."""
        (layer,) = self.kept
        layer.add_module("patches", self.train(layer.training))
        vars(layer)["forward"] = self.forward

    def release_(self) -> None:
        """Undo ``keep_``."""
        (layer,) = self.kept
        del layer._modules["patches"], vars(layer)["forward"]

    def for_patches(self, x: Tensor) -> Tensor:
        """Return s(x) for patches (B, N - p, D)."""
        raise NotImplementedError

    def replace(self, x: Tensor) -> Tensor:
        (layer,) = self.kept
        y: Tensor = type(layer).forward(layer, x[:, : self.protected])
        if x.shape[1] <= self.protected:
            return y
        return torch.cat((y, self.for_patches(x[:, self.protected :])), 1)

    def extra_repr(self) -> str:
        return f"protected={self.protected}"


class PatchPass(ForPatches):
    """Returns patches unchanged."""

    def for_patches(self, x: Tensor) -> Tensor:
        return x


class PatchMap(ForPatches):
    """Sends patches through one linear layer."""

    sums = Moments

    def __init__(self, kept: nn.Module, protected: int, linear: Layer) -> None:
        super().__init__(kept, protected)
        self.linear = linear

    def fill_(self, values: Values, axis: int) -> None:
        fill_layer_(self.linear, values)

    def for_patches(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def replacement_class(style: Style) -> type[Removed]:
    """Return the module of this file that the row of a style names."""
    found: type[Removed] = globals()[style.module]
    return found


@torch.no_grad()
def fill_layer_(layer: Layer, values: Values) -> None:
    """Set the matrix and the bias of a linear layer, or of a 1 x 1 convolution."""
    assert layer.bias is not None
    layer.weight.copy_(values[0].view_as(layer.weight))
    layer.bias.copy_(values[1])


class Gate(nn.Module):
    """Runs a layer while open and its replacement once closed; a closed layer is not evaluated.

    With a ``trial`` (images,) an open gate in training mode returns the replacement for those images for which it is
    true, and the gradient of m is that of these images, at m = 0. Under DistributedDataParallel the weights of closed
    layers get no gradient: pass ``find_unused_parameters=True``.
    """

    def __init__(self, inner: nn.Module, removed: Removed, images_at: int = 0) -> None:
        super().__init__()
        self.images_at = images_at
        """The axis of the layer's output that has the images, or the windows of all images."""
        self.was_inplace = bool(vars(inner).get("inplace"))
        if self.was_inplace:  # the input is needed for r(x) after the layer ran
            inner.inplace = False  # type: ignore[assignment]
        self.inner = inner
        self.removed = removed
        self.importance = nn.Parameter(torch.zeros(()))
        self.is_open = True
        self.trial: Tensor | None = None
        self.given: Tensor | None = None
        """The input of the replacement if it is not that of ``inner``; set by a ``Behind``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_open:
            return self.removed(*args, **kwargs)
        result = self.inner(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        kept = result[0] if isinstance(result, tuple) else result
        y = StraightThrough.apply(kept, self._other(args, kwargs), self.importance, self._tried(kept))
        return (y, *result[1:]) if isinstance(result, tuple) else y

    def _other(self, args: Any, kwargs: Any) -> Tensor | None:
        """Return r(x), None for 0."""
        given, self.given = self.given, None
        if isinstance(self.removed, Zero):
            return None
        return self.removed.replace(first_tensor((*args, *kwargs.values())) if given is None else given)

    def release(self) -> nn.Module:
        """Return the layer as it was before."""
        if self.was_inplace:
            self.inner.inplace = True  # type: ignore[assignment]
        return self.inner

    def _tried(self, kept: Tensor) -> Tensor | None:
        """Return for which rows of ``kept`` (B, ...) or (B * windows, ...) the layer is closed."""
        if self.trial is None or not self.training:
            return None
        if kept.shape[self.images_at] % len(self.trial):
            raise ModelError(
                f"a layer returns {tuple(kept.shape)} for {len(self.trial)} images, which does not have the images "
                "first, so it cannot be tried for some of them; search without trials (--no-explore)"
            )
        return per_image(self.trial.to(kept.device), kept, self.images_at)


class Behind(nn.Module):
    """Keeps a layer from running while the gate further down its branch is closed.

    One that ``is_source`` passes its own input to the gate, as the input of the replacement.
    """

    def __init__(self, inner: nn.Module, gate: Gate, extras: Extras = None, is_source: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.gates = (gate,)  # a tuple, so that the gate is not registered a second time
        self.passing = Pass(extras)
        self.is_source = is_source

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (gate,) = self.gates
        if not gate.is_open:
            return self.passing(*args, **kwargs)
        if self.is_source and torch.is_grad_enabled():
            gate.given = first_tensor((*args, *kwargs.values()))
        return self.inner(*args, **kwargs)

    def release(self) -> nn.Module:
        """Return the layer as it was before."""
        return self.inner


def is_removed(module: nn.Module) -> bool:
    """Whether ``module`` keeps the layer that it replaces or wraps from running."""
    if isinstance(module, Behind):
        return is_removed(module.gates[0])
    return not module.is_open if isinstance(module, Gate) else isinstance(module, Removed)


class StraightThrough(torch.autograd.Function):
    """f(x) itself, with d loss / d m = <d loss / d y, f(x) - r(x)> as the gradient of the importance (paper, Eq. 6).

    Returning f(x) unchanged keeps an open gate bit-equal to the ungated model and costs no arithmetic forward. Rows
    that are ``tried`` are r(x) instead, and only they contribute to the gradient of the importance.
    """

    @staticmethod
    def forward(ctx: Any, kept: Tensor, other: Tensor | None, importance: Tensor, tried: Tensor | None) -> Tensor:
        ctx.save_for_backward(kept, other, tried)
        if tried is None:
            return kept.view_as(kept)
        return torch.where(tried, kept.new_zeros(()) if other is None else other.to(kept.dtype), kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        kept, other, tried = ctx.saved_tensors
        (grad,) = grads
        closed = grad if tried is None else grad * tried
        score = _inner_product(closed, kept)
        if other is not None:
            score = score - _inner_product(closed, other)
        if tried is None:
            return grad, None, score, None
        return grad * ~tried, None if other is None else closed.to(other.dtype), score, None


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten().float(), b.flatten().float())


def per_image(values: Tensor, of: Tensor, images_at: int) -> Tensor:
    """Return one value per image (B,), shaped to multiply ``of``, with images or windows on axis ``images_at``."""
    rows = values.repeat_interleave(of.shape[images_at] // len(values))
    return rows.view(*[1] * images_at, -1, *[1] * (of.dim() - images_at - 1))


def first_tensor(values: Iterable[Any]) -> Tensor:
    """Return the first of the arguments of a module that is a tensor."""
    return next(value for value in values if isinstance(value, Tensor))


class StreamGelu:
    """Forward hook of the preset ``authors``: a GELU on the output of a block without attention and activation.

    On a gated block it applies while both ``gates`` are closed.
    """

    def __init__(self, gates: tuple[Gate, ...] = ()) -> None:
        self.gates = gates

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if any(gate.is_open for gate in self.gates):
            return output
        if isinstance(output, tuple):
            return nn.functional.gelu(output[0]), *output[1:]
        return nn.functional.gelu(output)
