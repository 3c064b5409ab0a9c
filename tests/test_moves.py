"""The contract of every row of MOVES, what plans of all moves cost, and the one search over them."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import test_cli
import torch
from families import named
from test_cli import Run
from test_training import tiny
from test_training_cli import build
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import FewerFeatures, FewerTokens, Plan, Site, Styled, Tail
from hetdpt.core.tokens import Tokens
from hetdpt.flow import frontier as flow
from hetdpt.flow.frontier import FrontierConfig, frontier_into
from hetdpt.measurement.speed import measure_hidden_sizes
from hetdpt.reduce.apply import apply_
from hetdpt.results import FrontierPoint, Price, from_json, to_json
from hetdpt.selection import move_prices
from hetdpt.selection.frontier import FrontierSearch
from hetdpt.selection.move_prices import MovePrices, measure_move_prices
from hetdpt.selection.moves import MOVES, kind_of, offered, variants
from hetdpt.surgery.record import require_record
from hetdpt.surgery.remove import ready_for
from hetdpt.surgery.tail import trim_if_possible_, trim_to_class_token_

run = test_cli.run  # the fixture
KEEP = ("constant", "calibrated-keep")
TOME = Tokens("tome", 2)


def some(count: int = 16, seed: int = 0, side: int = 16) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def base(removal: Any = KEEP) -> nn.Module:
    return trim_to_class_token_(ready_for(some(), tiny(depth=4), removal))


@pytest.mark.parametrize("name", MOVES)
def test_every_move_that_is_offered_can_be_made(name: str) -> None:
    model = base()
    moves = offered(model, model, [name])
    assert moves
    assert {kind_of(move) for move in moves} == {name}
    found = variants(model, moves, [some()])
    assert [*found] == moves
    before = require_record(model).plan
    for move, variant in found.items():
        after = require_record(variant).plan
        assert replace(after, fits=()) == replace(before.plus(move), anatomy=after.anatomy)
        assert not torch.equal(variant(some()), model(some())) or isinstance(move, Tail)
        assert hetdpt.count_macs(hetdpt.merge_(deepcopy(variant)), (3, 16, 16)) < hetdpt.count_macs(model, (3, 16, 16))


@pytest.mark.parametrize(("fast", "left"), [(1, 235), (16, 240)])
def test_chunks_are_multiples_of_the_step_that_is_fast(fast: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(_: nn.Module, __: str, sizes: list[int], *___: Any, **____: Any) -> dict[int, float]:
        return {size: size * (1.5 if size % fast else 1.0) for size in sizes}

    dense = tiny(depth=2, mlp_ratio=8)
    monkeypatch.setattr(move_prices, "measure_hidden_sizes", times)
    prices = measure_move_prices(dense, removal=KEEP)
    assert prices.step == fast
    assert from_json(MovePrices, to_json(prices), Path("prices")) == prices
    search = FrontierSearch(
        dense, [some()], [some(seed=1)], cost_of(prices), removal=KEEP, kinds=("features",), step=prices.step
    )
    last = next(iter(search.rounds()))
    assert {count for _, count in last.plan.features} == {left}  # a twelfth of 256 is removed


def test_the_time_of_hidden_sizes_is_measured() -> None:
    dense = tiny(depth=1)
    times = measure_hidden_sizes(dense, "blocks.0.mlp.fc1", [8, 1024], batch=2)
    assert 0 < times[8] < times[1024]


def test_models_without_a_class_token_have_no_tails() -> None:
    family = named("swin_tiny_patch4_window7_224")
    model = ready_for(family.images(2), family.build(), "calibrated")
    moves = offered(model, model, MOVES)
    assert {kind_of(move) for move in moves} == {"attention", "activation", "features"}


def test_attention_becomes_values_for_each_position_where_tokens_cannot_be_merged() -> None:
    family = named("swin_tiny_patch4_window7_224")
    images = family.images(4)
    model = ready_for(images, family.build(), "calibrated")
    moves = offered(model, model, ["attention"])[:3]
    assert [move.style for move in moves if isinstance(move, Styled)] == ["constant", "position", "linear"]
    found = [variant(images) for variant in variants(model, moves, [images]).values()]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    vit = base()
    assert {move.style for move in offered(vit, vit, ["attention"]) if isinstance(move, Styled)} == {
        "constant",
        "linear",
    }


PLANS = [
    Plan(removal=KEEP),
    Plan(removal=KEEP, tail=2),
    Plan(removal=KEEP, attention=(1,), site_styles=(("attention", 1, "linear"),)),
    Plan(removal=KEEP, attention=(0, 1), activation=(1,), site_styles=(("attention", 1, "linear"),), tail=2),
    Plan(removal=KEEP, features=((0, 64), (1, 100))),
    Plan(removal=KEEP, attention=(0,), activation=(1,), features=((0, 32),), tail=2),
    Plan(removal=KEEP, heads=((0, 1), (2, 1))),
    Plan(removal=KEEP, attention=(0,), features=((0, 32),), heads=((1, 1), (2, 1), (3, 1)), tail=2),
    Plan(removal=KEEP, heads=((0, 1),), tail=4),
    Plan(removal=KEEP, heads=((0, 1), (2, 1)), head_dims=((0, 12), (1, 8)), tail=1),
    Plan(removal=KEEP, heads=((3, 1),), head_dims=((0, 8), (2, 12), (3, 4)), tail=2),
    Plan(removal=KEEP, heads=((0, 1), (3, 1)), tail=2, tokens=TOME),
    Plan(removal=KEEP, tokens=TOME),
    Plan(removal=KEEP, attention=(1,), activation=(0,), site_styles=(("attention", 1, "linear"),), tokens=TOME),
    Plan(removal=KEEP, attention=(0,), activation=(1,), features=((0, 32),), tail=2, tokens=TOME),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_macs_and_parameters_of_a_plan_are_those_of_the_model(plan: Plan) -> None:
    dense = tiny(depth=4)
    prices = measure_move_prices(dense, removal=KEEP)
    model = apply_(deepcopy(dense), plan, [some(), some()]) if not plan.is_empty else deepcopy(dense)
    trim_if_possible_(hetdpt.merge_(model))
    found = prices.of(plan)
    # where tokens merge, matching and the class tokens of blocks that keep them are not priced
    assert found.macs == pytest.approx(hetdpt.count_macs(model, (3, 16, 16)), rel=0.02 if plan.tokens else 1e-12)
    assert found.params == pytest.approx(hetdpt.count_params(model), rel=0.01)  # a bias here and there


def cost_of(prices: MovePrices) -> Any:
    return lambda plan: prices.of(plan).macs


@pytest.fixture(scope="module")
def prices() -> MovePrices:
    return measure_move_prices(tiny(depth=4), removal=KEEP)


def planted() -> nn.Module:
    """Return a model whose third block adds nothing by its attention."""
    model = tiny(depth=4)
    with torch.no_grad():
        model.get_submodule("blocks.2.attn.proj").weight.zero_()  # type: ignore[operator, union-attr]
    return model


def test_what_does_nothing_is_removed_first(prices: MovePrices) -> None:
    search = FrontierSearch(planted(), [some()], [some(seed=1)], cost_of(prices), removal=KEEP, share=0.2)
    first = next(iter(search.rounds()))
    assert first.damage == pytest.approx(0, abs=1e-6)
    assert 2 in first.plan.attention


def test_points_are_cheaper_and_cheaper_and_nested(prices: MovePrices) -> None:
    dense = tiny(depth=4)
    search = FrontierSearch(dense, [some()], [some(seed=1)], cost_of(prices), removal=KEEP, share=0.1)
    points = [*search.rounds(0.5 * prices.dense.macs)]
    assert len(points) > 2
    costs = [point.cost for point in points]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] <= 0.5 * prices.dense.macs < costs[-2]
    for one, other in pairwise(points):
        assert {*one.plan.attention} <= {*other.plan.attention}
        assert one.plan.tail <= other.plan.tail
    again = apply_(deepcopy(dense), points[-1].plan, [some(), some()])
    images = some(seed=1)
    assert hetdpt.measurement.agreement.measure_damage(dense, again, [images]) == pytest.approx(
        points[-1].damage, rel=0.5, abs=1e-3
    )  # fitted at once, not round by round


def test_a_search_can_be_resumed(prices: MovePrices) -> None:
    def search() -> FrontierSearch:
        return FrontierSearch(tiny(depth=4), [some()], [some(seed=1)], cost_of(prices), removal=KEEP, share=0.1)

    first, second = islice(search().rounds(), 2)
    other = search()
    other.resume(first)
    continued = next(iter(other.rounds()))
    assert continued.cost < first.cost
    assert {*first.plan.attention} <= {*continued.plan.attention}
    assert second.cost < first.cost


def test_only_the_kinds_that_are_asked_for(prices: MovePrices) -> None:
    search = FrontierSearch(
        tiny(depth=4), [some()], [some(seed=1)], cost_of(prices), removal=KEEP, kinds=("features",), share=0.1
    )
    *_, last = search.rounds(0.8 * search.whole)
    assert last.plan.features
    assert not len(last.plan)
    assert not last.plan.tail


class TestFrontierInto:
    """``hetdpt.frontier_into`` and what it writes."""

    @pytest.fixture(autouse=True)
    def quick_prices(self, monkeypatch: pytest.MonkeyPatch, prices: MovePrices) -> None:
        monkeypatch.setattr(flow, "measure_move_prices", lambda *_, **__: _timed(prices))

    def test_it_writes_plans_that_can_be_applied(self, tmp_path: Path) -> None:
        seen = list[float]()
        dense = tiny(depth=4)
        found = frontier_into(
            tmp_path / "run",
            dense,
            [some()],
            [some(seed=1)],
            FrontierConfig(speedup=1.5),
            watch=lambda _, x: seen.append(x),
        )
        assert seen == [found.speedup(point) for point in found.points]
        assert found.speedup(found.points[-1]) >= 1.5
        assert found.at(1.2) in found.points
        assert found.at(9.0) is None
        lines = (tmp_path / "run" / "frontier.csv").read_text().splitlines()
        assert len(lines) == 1 + len(found.points) == 1 + len([*(tmp_path / "run" / "plans").iterdir()])
        file = tmp_path / "run" / lines[-1].rpartition(",")[2]
        plan = Plan.from_json(file.read_text())
        assert replace(plan, fits=()) == replace(found.points[-1].plan, fits=())
        assert apply_(deepcopy(dense), plan, [some(), some()])(some()).shape == (16, 10)

    def test_a_finished_run_is_read_and_another_is_refused(self, tmp_path: Path) -> None:
        config = FrontierConfig(speedup=1.2)
        words = (tiny(depth=4), [some()], [some(seed=1)])
        found = frontier_into(tmp_path / "run", *words, config)
        assert frontier_into(tmp_path / "run", *words, config) == found
        with pytest.raises(hetdpt.HetDPTError, match="was started with"):
            frontier_into(tmp_path / "run", *words, FrontierConfig(speedup=1.3))

    def test_it_resumes_after_a_kill(self, tmp_path: Path) -> None:
        words = (tiny(depth=4), [some()], [some(seed=1)], FrontierConfig(speedup=1.4))

        def stop(point: FrontierPoint, speedup: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            frontier_into(tmp_path / "run", *words, watch=stop)
        seen = list[FrontierPoint]()
        found = frontier_into(tmp_path / "run", *words, watch=lambda point, _: seen.append(point))
        assert [*found.points[1:]] == seen
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["points"]

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ({"speedup": 1.0}, "speedup is 1; expected a number above 1"),
            ({"moves": ("depth",)}, "no move is called 'depth'"),
        ],
    )
    def test_wrong_settings_are_refused(self, wrong: dict[str, Any], says: str) -> None:
        with pytest.raises(PlanError, match=says):
            FrontierConfig(**wrong)


def _timed(prices: MovePrices) -> MovePrices:
    """Return prices whose times are as the MACs are."""

    def timed(value: Any) -> Any:
        if isinstance(value, Price):
            return replace(value, ms=value.macs / 1e6)
        if isinstance(value, tuple):
            return tuple(map(timed, value))
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{name: timed(getattr(value, name)) for name in value.__dataclass_fields__})
        return value

    found: MovePrices = timed(prices)
    return found


def test_moves_are_spelt_for_people() -> None:
    site = Site("attention", 3, "blocks.3.attn")
    assert [str(move) for move in (Styled(site, "linear"), Tail(2), FewerFeatures(3, 64), FewerTokens(TOME))] == [
        "attention 3 (linear)",
        "tail of 2",
        "64 features in block 3",
        "tome with r = 2",
    ]


def test_the_command_prints_a_table_and_resumes(run: Run, tmp_path: Path) -> None:
    dense = build(tmp_path / "dense", depth=3)
    words = ("frontier", dense, "--data", "demo", "--images", 16, "--judge-images", 8, "--speedup", 1.2)
    result = run(*words, "--out", tmp_path / "run")
    assert result.code == 0
    assert "the least damage at every speed" in result.out
    [command] = [line for line in result.out.splitlines() if line.startswith("to use a point: hetdpt apply ")]
    assert run(*command.removeprefix("to use a point: hetdpt ").split()[:-1], tmp_path / "fast").code == 0
    assert hetdpt.load(tmp_path / "fast")(some(1)).shape == (1, 10)
    again = run(*words, "--out", tmp_path / "run", "--json")
    assert json.loads(again.out)["points"]
    refused = run(*words[:-1], 1, "--out", tmp_path / "other")
    assert refused.code == 2
    assert "speedup is 1; expected a number above 1" in refused.err
