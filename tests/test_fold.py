from __future__ import annotations

import pytest
import torch
from torch import nn

from hetdpt.core.errors import FoldError
from hetdpt.core.fold import fold_norm, fold_pair, is_cheaper_folded

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # everything in float64


def pair(bias1: bool = True, bias2: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(6, 24, bias=bias1).double(), nn.Linear(24, 5, bias=bias2).double()


@pytest.mark.parametrize("bias1", [True, False])
@pytest.mark.parametrize("bias2", [True, False])
def test_folded_pair_is_the_composition(bias1: bool, bias2: bool) -> None:
    first, second = pair(bias1, bias2)
    z = torch.randn(7, 6, dtype=torch.float64)
    folded = fold_pair(first, second)
    torch.testing.assert_close(folded(z), second(first(z)), **EXACT)
    assert (folded.bias is not None) == (bias1 or bias2)


def test_scale_and_norm_fold_in() -> None:
    first, second = pair()
    norm = nn.LayerNorm(6).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    scale = torch.randn(5, dtype=torch.float64)
    bare = nn.LayerNorm(6, elementwise_affine=False).double()
    z = torch.randn(7, 6, dtype=torch.float64)
    folded = fold_norm(norm, fold_pair(first, second, scale))
    torch.testing.assert_close(folded(bare(z)), scale * second(first(norm(z))), **EXACT)


def test_pointwise_convolutions_fold_to_one() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 16, 1).double(), nn.Conv2d(16, 3, 1, bias=False).double()
    z = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    folded = fold_pair(first, second, torch.arange(1.0, 4.0, dtype=torch.float64)[:, None, None])
    expected = torch.arange(1.0, 4.0, dtype=torch.float64)[:, None, None] * second(first(z))
    torch.testing.assert_close(folded(z), expected, **EXACT)
    assert isinstance(folded, nn.Conv2d)


def test_float32_is_rounded_once() -> None:
    first, second = (layer.float() for layer in pair())
    exact = second.double().weight @ first.double().weight
    first.float()
    second.float()
    assert torch.equal(fold_pair(first, second).weight, exact.float())


def test_the_dtype_is_that_of_the_second_layer() -> None:
    first, second = pair()
    assert fold_pair(first.float(), second.half()).weight.dtype == torch.float16


def test_layers_that_do_not_meet_are_refused() -> None:
    with pytest.raises(FoldError, match="gives 24 features but the second takes 6"):
        fold_pair(nn.Linear(6, 24), nn.Linear(6, 5))


def test_merging_pays_only_above_half_the_width() -> None:
    assert is_cheaper_folded(nn.Linear(8, 5), nn.Linear(5, 8))  # 64 < 80
    assert not is_cheaper_folded(nn.Linear(8, 4), nn.Linear(4, 8))  # 64 = 64
