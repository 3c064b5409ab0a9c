"""Images are gone through as often as a computation needs them, and not once more: a loader starts its workers anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hetdpt
from hetdpt.core.modules import Peeked
from hetdpt.core.plan import Plan
from hetdpt.flow.oneshot import oneshot_into
from hetdpt.selection.damage import choose, damage_of_each
from hetdpt.selection.entropy import greedy_order, transfer_entropy
from hetdpt.selection.goal import OneShotConfig
from hetdpt.selection.predictor.samples import prune_next
from hetdpt.studies.scan import scan
from hetdpt.surgery import calibrate as calibration
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_

ONE, TWO = Plan(attention=(1,), removal="calibrated"), Plan(attention=(1,), activation=(0,), removal="calibrated")


class Counted(DataLoader[Tensor]):
    """A loader that counts how often it is opened."""

    opened = 0

    def __iter__(self) -> Any:
        self.opened += 1
        return super().__iter__()


@pytest.fixture
def loader(vit: Family) -> Counted:
    return Counted(torch.cat([vit.images(), vit.images()]), 2)


Work = Callable[[nn.Module, Counted], object]
WORK: dict[str, tuple[Work, int]] = {
    "calibrate": (lambda model, images: calibrate_(model, ONE, images), 1),
    "calibrate two layers": (lambda model, images: calibrate_(model, TWO, images), 2),
    "gate": (lambda model, images: gate_fitted_(model, Plan(removal="calibrated"), images), 1),
    "entropy": (lambda model, images: transfer_entropy(model, images), 1),
    "entropy, fitted": (lambda model, images: transfer_entropy(model, images, removal="calibrated"), 2),
    "order": (lambda model, images: greedy_order(model, images, (None, None)), 2),
    "order, fitted": (lambda model, images: greedy_order(model, images, (None, None), removal="calibrated"), 4),
    "choose": (lambda model, images: [*choose(model, images, hetdpt.sites(model), 2)], 5),  # once by the dense
    "damage": (lambda model, images: damage_of_each(model, images, hetdpt.sites(model)), 3),
    "sample": (lambda model, images: prune_next(model, "attention", images), 3),
    "scan": (lambda model, images: scan(model, images, latency=False), 2),
    "scan, judged apart": (lambda model, images: scan(model, images, judge=[*images], latency=False), 2),
}  # fmt: skip


@pytest.mark.parametrize("work", WORK)
def test_a_loader_is_opened_once_for_each_pass(work: str, model: nn.Module, loader: Counted) -> None:
    call, passes = WORK[work]
    call(model, loader)
    assert loader.opened == passes


def test_one_shot(model: nn.Module, loader: Counted, vit: Family, tmp_path: Path) -> None:
    judge = Counted(vit.images(), 2)
    oneshot_into(tmp_path / "out", model, loader, judge, OneShotConfig(layers=1))
    # a checksum, the choice (judged twice), and the removal, with and without the FFN of the class token, or its damage
    assert (loader.opened, judge.opened) == (4, 6)


def test_passes_follow_one_another(model: nn.Module, vit: Family) -> None:
    """Workers that stay alive read one list of images at a time."""
    under_way: list[int] = []

    class OneAtATime:
        def __iter__(self) -> Iterator[Tensor]:
            assert not under_way, "a second pass has begun in the midst of the first"
            under_way.append(1)
            yield from [vit.images(), vit.images()]
            under_way.clear()

    transfer_entropy(model, OneAtATime(), removal="calibrated")
    prune_next(model, "attention", OneAtATime())


def test_a_scan_whose_sums_take_more_than_one_pass(
    model: nn.Module, loader: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scan(model, loader, latency=False)
    monkeypatch.setattr(calibration, "SUMS", 1)
    parts = scan(model, loader, latency=False)
    assert parts == whole
    assert loader.opened > 6


def test_the_first_batch_is_not_lost(model: nn.Module, vit: Family) -> None:
    batches = [vit.images(), vit.images() + 1]
    for given in (batches, iter(batches)):
        images = Peeked(given, model, "a test")
        assert torch.equal(images.first, batches[0])
        assert all(map(torch.equal, images, batches))
        assert images.count == sum(map(len, batches))
        assert images.is_once is (given is not batches)
    assert len([*Peeked(batches, model, "a test")]) == 2
