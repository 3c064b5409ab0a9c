from __future__ import annotations

import pytest
import torch
from torch import nn

from hetdpt.gates import Behind, Gate, Pass, StreamGelu, Zero


class Counting(nn.Module):
    """A layer that knows how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, with_weights: bool = False) -> object:
        self.calls += 1
        y = torch.tanh(self.linear(x))
        return (y, x.sum()) if with_weights else y


@pytest.mark.parametrize("removed", [Zero(), Pass()])
def test_importance_gradient_is_the_finite_difference(removed: Zero | Pass) -> None:
    """d loss / d m of y = m f(x) + (1 - m) r(x) at m = 1, in float64 by central differences."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    gate = Gate(layer, removed)
    x, target = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    loss = (gate(x) - target).pow(2).sum()
    loss.backward()

    def masked(m: float) -> float:
        y = m * layer(x) + (1 - m) * removed.replace(x)
        return (y - target).pow(2).sum().item()

    step = 1e-5
    difference = (masked(1 + step) - masked(1 - step)) / (2 * step)
    assert gate.importance.grad.item() == pytest.approx(difference, rel=1e-5)  # the importance is float32


def test_open_gate_is_bit_equal_and_hands_gradients_on() -> None:
    layer = Counting()
    gate = Gate(layer, Pass())
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(gate(x), layer(x))
    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    (gated,) = torch.autograd.grad(gate(x).sum(), x)
    assert torch.equal(plain, gated)


def test_closed_gate_does_not_run_the_layer() -> None:
    layer = Counting()
    gate = Gate(layer, Zero())
    gate.is_open = False
    assert torch.equal(gate(torch.ones(2, 4)), torch.zeros(2, 4))
    behind = Behind(layer, gate, None)
    x = torch.ones(2, 4)
    assert behind(x) is x
    assert layer.calls == 0


def test_tuples_come_back_as_tuples() -> None:
    x = torch.ones(2, 4)
    gate = Gate(Counting(), Zero((None,)))
    assert len(gate(x, with_weights=True)) == 2
    gate.is_open = False
    y, weights = gate(x)
    assert weights is None
    assert not y.any()
    assert Pass((1, None))(x, "shape") == (x, "shape", None)


def test_keyword_tensors_are_found() -> None:
    x = torch.ones(2, 4)
    assert Pass()(hidden_states=x, mask=None) is x


def test_zero_takes_no_memory() -> None:
    assert Zero()(torch.ones(64, 64)).untyped_storage().nbytes() == 4


def test_stream_gelu_keeps_the_structure() -> None:
    x = torch.randn(3)
    expected = nn.functional.gelu(x)
    assert torch.equal(StreamGelu()(nn.Identity(), (), x), expected)
    y, rest = StreamGelu()(nn.Identity(), (), (x, "rest"))
    assert torch.equal(y, expected)
    assert rest == "rest"
