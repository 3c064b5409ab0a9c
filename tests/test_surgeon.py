"""The optimal brain surgeon: its order and errors are those of a refit after each removal, tried by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetdpt.core import fold, surgeon
from hetdpt.core.fold import Moments, fit_linear
from hetdpt.core.surgeon import order_removals
from hetdpt.reduce.width.errors import errors_without
from hetdpt.reduce.width.refit import InputMoments, refit_


def layer(inputs: int, outputs: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return weights (outputs, inputs) and correlated samples (n, inputs)."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    samples = torch.randn(200, inputs, generator=generator, dtype=torch.float64) @ mixed
    return torch.randn(outputs, inputs, generator=generator, dtype=torch.float64), samples


def least_error(x: Tensor, y: Tensor) -> float:
    """Return the squared error of the least-squares fit of ``y`` on ``x``."""
    return float((y - x @ torch.linalg.lstsq(x, y).solution).square().sum()) if x.shape[1] else float(y.square().sum())


def by_brute_force(weight: Tensor, x: Tensor, groups: Tensor) -> tuple[list[int], list[float]]:
    """Return the order and the errors if the best next removal is found by fitting all candidates."""
    y, left, order, errors = x @ weight.T, list(range(len(groups))), [], []
    never = sorted({*range(x.shape[1])} - {*groups.flatten().tolist()})
    while left:
        tried = {g: [*never, *groups[[o for o in left if o != g]].flatten().tolist()] for g in left}
        found = {g: least_error(x[:, kept], y) for g, kept in tried.items()}
        best = min(found, key=found.__getitem__)
        left.remove(best)
        order.append(best)
        errors.append(found[best])
    return order, errors


GROUPS = {
    "features": torch.arange(20)[:, None],
    "heads": torch.arange(20).view(5, 4),
    "features and a bypass": torch.arange(6, 20)[:, None],
}


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("name", GROUPS)
def test_order_and_errors_are_those_of_brute_force(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgeon, "BLOCK", block)
    weight, x = layer(20)
    if "bypass" in name:
        weight[:, :6] = 0
    found = order_removals(weight, x.T @ x, GROUPS[name], ridge=0.0)
    order, errors = by_brute_force(weight, x, GROUPS[name])
    assert found.order.tolist() == order
    torch.testing.assert_close(found.errors, torch.tensor(errors, dtype=torch.float64), rtol=1e-9, atol=0.0)


def test_a_bypass_with_no_feature_left_is_the_calibrated_removal_of_the_activation() -> None:
    """y = W GELU(V z) + b with [z, h] as inputs: without h what is left is the linear map of z closest to y."""
    z, first = layer(6)[1], layer(6, 16, seed=1)[0]
    second = layer(16, seed=2)[0]
    hidden = nn.functional.gelu(z @ first.T / 8)
    both, tokens = Moments(22, 0), torch.cat([z, hidden], 1)
    weights = torch.rand(len(z), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    both.add(tokens, tokens[:, :0], weights)
    found = order_removals(
        torch.cat([torch.zeros(5, 6, dtype=torch.float64), second], 1), both.xx, torch.arange(6, 22)[:, None], ridge=0.0
    )
    removal = Moments(6, 5)
    removal.add(z, hidden @ second.T + 1, weights)
    fit = fit_linear([removal])
    assert found.errors[-1].item() == pytest.approx(removal.error(fit.weight.T, fit.bias), rel=1e-9)
    assert found.errors[0] < found.errors[-1] < ((second @ both.xx[6:, 6:]) * second).sum()


@pytest.mark.parametrize("bias", [True, False])
def test_errors_are_those_that_the_refit_leaves(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "RIDGES", fold.RIDGES[:1])  # with few samples it finds a larger one
    weight, x = layer(20)
    x, linear = x.view(20, 10, 20) + 1, nn.Linear(20, 5, bias=bias).double()
    linear.load_state_dict({"weight": weight, **({"bias": torch.ones(5)} if bias else {})})
    given, y = InputMoments(20), linear(x).detach()
    given.add(x, y)
    errors = errors_without(linear, given, torch.arange(20)[:, None])
    size = y.norm(dim=-1).clamp(min=given.floor)
    for count in (5, 12):
        kept = errors.topk(20 - count).indices.sort().values
        narrow = nn.Linear(20, 5, bias=bias).double()
        narrow.load_state_dict(linear.state_dict())
        refit_(narrow, kept, given)
        off = narrow(x * torch.zeros(20, dtype=torch.float64).index_fill(0, kept, 1.0)) - y
        relative = (off.square().sum(-1) / size).sum() / (y.square().sum(-1) / size).sum()
        assert relative.item() == pytest.approx(errors.sort().values[count - 1].item(), rel=1e-4)  # a ridge of 1e-6


def test_what_is_useless_or_redundant_is_removed_first() -> None:
    weight, x = layer(12)
    x[:, 4:8] = x[:, :4] @ torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight[:, 8:] = 0
    found = order_removals(weight, x.T @ x, torch.arange(12).view(3, 4))
    energy = (x @ weight.T).square().sum()
    assert found.order[0] == 2  # its weights are 0
    assert (found.errors[:2] / energy).max() < 1e-4  # and of the other two, either can replace the other
    assert found.errors[-1] / energy == pytest.approx(1, rel=1e-4)


def test_constant_inputs_are_removed_for_free() -> None:
    weight, x = layer(8)
    x[:, 3] = 0
    found = order_removals(weight, x.T @ x, torch.arange(8)[:, None])
    assert found.order[0] == 3
    assert found.errors.isfinite().all()
    none = order_removals(weight, torch.zeros(8, 8), torch.arange(8)[:, None])
    assert none.errors.isfinite().all()
