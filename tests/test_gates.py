from __future__ import annotations

import pytest
import torch
from torch import nn

from hetdpt.core.gates import Behind, Gate, Mapped, Pass, PatchMap, PatchPass, Removed, StreamGelu, Zero


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


@pytest.mark.parametrize("removed", [Zero(), Pass(), Mapped(nn.Linear(4, 4).double())], ids=lambda r: type(r).__name__)
def test_trial_answers_with_the_replacement_and_gives_the_gradient_at_0(removed: Removed) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    gate = Gate(layer, removed)
    gate.trial = torch.tensor([True, False, True])
    x, target = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    assert torch.equal(gate(x)[[0, 2]], removed.replace(x)[[0, 2]])
    assert torch.equal(gate(x)[1], layer(x)[1])
    (gate(x) - target).pow(2).sum().backward()

    def masked(m: float) -> float:
        """Return the loss of the two images that are tried."""
        y = m * layer(x) + (1 - m) * removed.replace(x)
        return (y - target)[[0, 2]].pow(2).sum().item()

    step = 1e-5
    difference = (masked(step) - masked(-step)) / (2 * step)
    assert gate.importance.grad.item() == pytest.approx(difference, rel=1e-5)
    learned = [parameter.grad.clone() for parameter in (*layer.parameters(), *removed.parameters())]
    for module in (layer, removed):
        module.zero_grad()
    loss = (layer(x) - target)[1].pow(2).sum() + (removed.replace(x) - target)[[0, 2]].pow(2).sum()
    loss.backward()  # each learns from the images that it answered
    torch.testing.assert_close(learned, [p.grad for p in (*layer.parameters(), *removed.parameters())])
    gate.eval()
    assert torch.equal(gate(x), layer(x))  # nothing is tried outside training


@pytest.mark.parametrize("name", ["pass", "map"])
def test_class_tokens_keep_the_layer_that_patches_lose(name: str) -> None:
    torch.manual_seed(0)
    layer, linear = Counting(), nn.Linear(4, 4)
    removed = PatchPass(layer, 2) if name == "pass" else PatchMap(layer, 2, linear)
    x = torch.randn(3, 7, 4)
    kept, rest = layer(x[:, :2]), x[:, 2:] if name == "pass" else linear(x[:, 2:])
    gate = Gate(layer, removed)
    assert len([*gate.parameters()]) == 3 + 2 * (name == "map")  # those of the layer once, and the importance
    assert torch.equal(gate(x), layer(x))
    gate.is_open = False
    assert torch.equal(gate(x), torch.cat((kept, rest), 1))
    assert torch.equal(gate(x[:, :2]), kept)  # patches may have been left out before
    state = {*layer.state_dict()}
    removed.keep_()
    assert torch.equal(layer(x), torch.cat((kept, rest), 1))
    own = {f"patches.linear.{leaf}" for leaf in linear.state_dict()} if name == "map" else set[str]()
    assert {*layer.state_dict()} - state == own
    removed.release_()
    assert torch.equal(layer(x)[:, :2], kept)
    assert {*layer.state_dict()} == state


def test_a_trial_of_patches_teaches_class_tokens_the_layer() -> None:
    """The gradient of the importance at m = 0 is that of patches, as class tokens are the same on both sides."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    removed = PatchMap(layer, 1, nn.Linear(4, 4).double())
    gate = Gate(layer, removed)
    gate.trial = torch.tensor([True, True])
    x, target = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()
    loss = (gate(x) - target).pow(2).sum()
    loss.backward()
    slope = 2 * ((removed.replace(x) - target) * (layer(x) - removed.replace(x)))[:, 1:].sum().item()
    assert gate.importance.grad.item() == pytest.approx(slope, rel=1e-5)
    learned = layer[0].weight.grad.clone()
    layer.zero_grad()
    (layer(x[:, :1]) - target[:, :1]).pow(2).sum().backward()
    torch.testing.assert_close(learned, layer[0].weight.grad)


def test_trial_gives_twice_the_cost_of_removal_where_the_loss_is_quadratic_and_least_with_the_layer() -> None:
    torch.manual_seed(0)
    layer, removed = nn.Linear(4, 4).double(), Mapped(nn.Linear(4, 4).double())
    gate = Gate(layer, removed)
    x = torch.randn(3, 4).double()
    target = layer(x).detach()
    gate(x).sub(target).pow(2).sum().backward()
    assert gate.importance.grad.item() == 0  # at m = 1 the gradient says nothing
    gate.trial = torch.ones(3, dtype=torch.bool)
    gate(x).sub(target).pow(2).sum().backward()
    cost = (removed.replace(x) - target).pow(2).sum()
    assert -gate.importance.grad.item() / 2 == pytest.approx(cost.item(), rel=1e-5)


def test_windows_are_tried_with_their_image() -> None:
    gate = Gate(nn.Identity(), Zero())
    gate.trial = torch.tensor([False, True])
    x = torch.ones(6, 4, 2)  # three windows of each image
    assert gate(x).flatten(1).sum(1).tolist() == [8, 8, 8, 0, 0, 0]


def test_source_tells_the_gate_what_the_replacement_is_of() -> None:
    torch.manual_seed(0)
    first, second, removed = nn.Linear(4, 8), nn.Linear(8, 4), Mapped(nn.Linear(4, 4))
    gate = Gate(second, removed)
    branch = nn.Sequential(Behind(first, gate, is_source=True), Behind(nn.GELU(), gate), gate)
    x = torch.randn(3, 4)
    gate.trial = torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(branch(x), removed.replace(x))
    assert gate.given is None  # nothing is kept alive
    gate.trial = None
    torch.testing.assert_close(branch(x), second(nn.functional.gelu(first(x))))
    gate.is_open = False
    torch.testing.assert_close(branch(x), removed.replace(x))


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
