"""How speed is measured; how fast anything is belongs in benchmarks/."""

from __future__ import annotations

import math
import time

import pytest
import torch
from families import named
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import MeasureError
from hetdpt.core.plan import Plan
from hetdpt.measurement.agreement import relative_difference


class Sleeper(nn.Module):
    """A model that takes a known time and remembers when it ran."""

    log: list[str] = []  # noqa: RUF012  (shared on purpose: the order of runs across models)

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self.name, self.seconds = name, seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        Sleeper.log.append(self.name)
        time.sleep(self.seconds)
        return images


@pytest.fixture
def sleepers() -> dict[str, nn.Module]:
    Sleeper.log.clear()
    return {"slow": Sleeper("slow", 0.004), "fast": Sleeper("fast", 0.002)}


def test_models_take_turns_and_the_order_turns_too(sleepers: dict[str, nn.Module]) -> None:
    hetdpt.measure_throughput(sleepers, (3, 4, 4), batch=2, runs=4, warmup=2)
    rounds = [tuple(Sleeper.log[i : i + 2]) for i in range(0, len(Sleeper.log), 2)]
    assert len(rounds) == 6
    assert all(set(pair) == {"slow", "fast"} for pair in rounds)
    assert rounds[0] != rounds[1]


def test_the_speedup_is_the_ratio_with_an_interval(sleepers: dict[str, nn.Module]) -> None:
    result = hetdpt.measure_throughput(sleepers, (3, 4, 4), batch=2, runs=15, warmup=1)
    ratio = result.speedup["fast"]
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value > 1.2  # twice as fast by construction; sleep is not exact
    assert result.speedup["slow"].value == 1
    fast = result.throughput["fast"]
    assert (fast.unit, fast.device, fast.dtype, fast.batch, fast.runs) == ("img/s", "cpu", "float32", 2, 15)
    assert all(model.training for model in sleepers.values())


def test_time_is_limited_but_not_below_five_rounds(sleepers: dict[str, nn.Module]) -> None:
    result = hetdpt.measure_throughput(sleepers, (3, 4, 4), batch=2, runs=10_000, warmup=0, seconds=0.01)
    assert result.throughput["fast"].runs == 5


def test_progress_is_told(sleepers: dict[str, nn.Module]) -> None:
    seen: list[tuple[int, int]] = []
    report = lambda done, total: seen.append((done, total))  # noqa: E731
    hetdpt.measure_throughput(sleepers, (3, 4, 4), batch=1, runs=2, warmup=1, progress=report)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_latency_table_has_a_row_per_site_and_leaves_the_model_alone(model: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        before = model(images)
    table = hetdpt.latency_table(model, batch=1, runs=2, warmup=0)
    assert [saving.site for saving in table.savings] == hetdpt.sites(model)
    assert set(table.breakdown) == {"attention", "FFN linear", "activation", "norm", "other"}
    assert all(value.value > 0 for value in table.breakdown.values())
    assert table.dense.unit == "ms"
    with torch.no_grad():
        assert torch.equal(model(images), before)


def test_latency_table_of_a_pruned_model_and_of_gated_ffns(model: nn.Module) -> None:
    hetdpt.merge_(hetdpt.prune_(model, Plan(attention=(0,), activation=(1,))))
    assert len(hetdpt.latency_table(model, batch=1, runs=1, warmup=0).savings) == 4
    gated = named("eva02_tiny_patch14_224").build()
    assert len(hetdpt.latency_table(gated, batch=1, runs=1, warmup=0).savings) == 3
    dropped = hetdpt.latency_table(gated, batch=1, runs=1, warmup=0, removal=("skip", "drop"))
    assert len(dropped.savings) == 6
    hetdpt.restore_(hetdpt.gate_(gated))  # leaves a record, but of nothing removed
    again = hetdpt.latency_table(gated, batch=1, runs=1, warmup=0, removal=("skip", "drop"))
    assert len(again.savings) == 6
    fitted = hetdpt.latency_table(gated, batch=1, runs=1, warmup=0, removal="calibrated")  # needs no images
    assert len(fitted.savings) == 6
    in_parts = named("hf Swinv2ForImageClassification").build()  # its FFNs cannot go as a whole
    assert len(hetdpt.latency_table(in_parts, batch=1, runs=1, warmup=0, removal=("skip", "drop")).savings) == 4


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(MeasureError, match="at least one model"):
        hetdpt.measure_throughput({})
    with torch.device("meta"):
        hollow = nn.Linear(2, 2)
    with pytest.raises(MeasureError, match="on the meta device"):
        hetdpt.measure_throughput({"hollow": hollow}, (3, 4, 4))


def test_relative_difference_sees_a_change(model: nn.Module) -> None:
    twin = named("vit_tiny_patch16_224").build()
    assert relative_difference(model, twin, (3, 32, 32)) == 0
    with torch.no_grad():
        twin.head.bias += 1
    assert relative_difference(model, twin, (3, 32, 32)) > 0
    with torch.no_grad():
        twin.head.bias[3] = float("nan")
    assert math.isnan(relative_difference(model, twin, (3, 32, 32)))
    twin.reset_classifier(3)
    assert relative_difference(model, twin, (3, 32, 32)) == math.inf
