"""The contract of every row of MOVES, what plans of all moves cost, and the one search over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import ANY

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
from hetdpt.core.modules import Held, clone
from hetdpt.core.plan import FewerFeatures, FewerTokens, Plan, Site, Styled, Tail
from hetdpt.core.tokens import Tokens
from hetdpt.flow import frontier as flow
from hetdpt.flow import shared_search
from hetdpt.flow.frontier import FrontierConfig, frontier_into
from hetdpt.measurement.speed import measure_hidden_sizes
from hetdpt.reduce.apply import Refits, apply_
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.results import FrontierPoint, Price, from_json, to_json
from hetdpt.selection import move_prices
from hetdpt.selection.damage import DenseOutputs
from hetdpt.selection.frontier import DamageJob, FrontierSearch, frontier_of
from hetdpt.selection.move_prices import MovePrices, measure_move_prices
from hetdpt.selection.moves import MOVES, kind_of, offered, variants
from hetdpt.selection.returns import Return, put_back, returns, without_pointless
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


def search_on(prices: MovePrices, model: nn.Module | None = None, **options: Any) -> FrontierSearch:
    """Return a search on a tiny model; ``options`` as ``FrontierSearch`` takes them."""
    given = {"removal": KEEP, "share": 0.1, **options}
    return FrontierSearch(model or tiny(depth=4), [some()], [some(seed=1)], cost_of(prices), **given)


def test_points_are_cheaper_and_cheaper_and_their_plans_give_that_damage(prices: MovePrices) -> None:
    points = [*search_on(prices).rounds(0.5 * prices.dense.macs)]
    costs = [point.cost for point in points]
    assert costs[-1] <= 0.5 * prices.dense.macs < costs[-2]
    kept = frontier_of(points)
    assert kept[-1] == points[-1]
    for one, other in pairwise(kept):
        assert one.cost > other.cost
        assert one.damage < other.damage
    again = apply_(tiny(depth=4), points[-1].plan, [some(), some()])
    found = hetdpt.measurement.agreement.measure_damage(tiny(depth=4), again, [some(seed=1)])
    assert found == pytest.approx(points[-1].damage, rel=0.02)  # twice the images give other held-out parts


def test_a_search_whose_damages_are_kept_takes_the_same_way(prices: MovePrices) -> None:
    kept = dict[str, list[float]]()
    measured = list[str]()

    def measure(jobs: Sequence[DamageJob]) -> list[list[float]]:
        for job in jobs:
            if job.name not in kept:
                kept[job.name] = job.run()
                measured.append(job.name)
        return [kept[job.name] for job in jobs]

    least = 0.6 * prices.dense.macs
    points = [*search_on(prices, measure=measure).rounds(least)]
    before = [*measured]
    assert [*search_on(prices, measure=measure).rounds(least)] == points
    assert measured == before
    assert [*search_on(prices).rounds(least)] == points
    for name in before[3:]:  # killed after the third measurement
        del kept[name]
    assert [*search_on(prices, measure=measure).rounds(least)] == points


def pretended(search: FrontierSearch, damage: Callable[[Plan], float]) -> FrontierSearch:
    """Let ``search`` measure nothing: the damage of every plan is given."""

    def damages_of(changes: list[Any], _: Any) -> dict[Any, float]:
        return {one: damage(one.plan if isinstance(one, Return) else search.plan.plus(one)) for one in changes}

    vars(search)["_damages_of"] = damages_of
    vars(search)["_damage_of"] = lambda plan, _: damage(plan)
    return search


def test_what_later_moves_made_worse_is_given_back_once(prices: MovePrices) -> None:
    def damage(plan: Plan) -> float:
        """Attention 0 does nothing alone, and harm as soon as an FFN is narrower."""
        others = sum(128 - count for _, count in plan.features)
        return 1e-3 * others + 5.0 * (others > 0 and 0 in plan.attention) + 99.0 * len({*plan.attention} - {0})

    search = pretended(search_on(prices, kinds=("attention", "features"), share=0.01), damage)
    points = [*islice(search.rounds(), 24)]
    assert 0 in points[0].plan.attention
    back = [point for point in points if "attention 0 given back" in point.moves]
    assert len(back) == 1
    before = points[points.index(back[0]) - 1]
    assert back[0].cost > before.cost
    assert back[0].damage < before.damage
    assert 0 not in back[0].plan.attention
    assert before not in frontier_of(points)


def test_nothing_is_given_back_for_a_plan_that_an_earlier_one_makes_pointless(prices: MovePrices) -> None:
    """The third token does much harm and those after it none, for which half of them would be worth giving back."""

    def damage(plan: Plan) -> float:
        merged = plan.tokens.r if plan.tokens else 0
        return {0: 0.0, 1: 0.5, 2: 1.2, 3: 2.3}.get(merged, 2.35)

    points = pretended(search_on(prices, kinds=("tokens",), share=0.01), damage).rounds()
    merged = [point.plan.tokens.r for point in points if point.plan.tokens]
    assert merged == sorted(set(merged))
    assert merged[:4] == [1, 2, 3, 4]


def test_moves_that_harm_together_are_not_made_together(prices: MovePrices) -> None:
    def damage(plan: Plan) -> float:
        """Narrower FFNs hardly matter, unless there is more than one."""
        return 0.01 * sum(128 - count for _, count in plan.features) / 8 + 5.0 * max(len(plan.features) - 1, 0)

    words = {"kinds": ("features",), "share": 0.9}
    assert (
        len(next(iter(pretended(search_on(prices, **words), lambda plan: 0.01 * len(plan.features)).rounds())).moves)
        > 1
    )
    first = next(iter(pretended(search_on(prices, **words), damage).rounds()))
    assert len(first.moves) == 1
    assert first.damage == pytest.approx(0.01)


RETURNED = Plan(
    removal=KEEP,
    attention=(0, 1),
    activation=(1,),
    site_styles=(("attention", 1, "linear"),),
    features=((0, 100),),
    tail=2,
)


def test_what_is_put_back_is_that_of_the_dense_model() -> None:
    dense = base()
    refits = Refits(dense, [some()])
    current = refits(RETURNED)
    found = returns(RETURNED, dense)
    assert [one.what for one in found] == [
        "attention 0",
        "attention 1",
        "activation 1",
        "features in block 0",
        "a block of the tail",
    ]
    for one in found:
        variant = put_back(current, dense, one.plan, [some()])
        assert replace(require_record(variant).plan, fits=()) == replace(one.plan, fits=(), anatomy=ANY)
        assert not torch.equal(variant(some(seed=1)), current(some(seed=1)))
    last = put_back(current, dense, replace(RETURNED, features=()), [some()])
    assert last.get_submodule("blocks.0.mlp.fc1").weight is dense.get_submodule("blocks.0.mlp.fc1").weight
    for only in (  # with nothing else removed, what is left is the dense model
        Plan(removal=KEEP, attention=(1,)),
        Plan(removal=KEEP, features=((0, 64),), heads=((1, 1),), head_dims=((1, 12), (2, 8))),
    ):
        variant = put_back(refits(only), dense, Plan(removal=KEEP), [some()])
        torch.testing.assert_close(variant(some()), dense(some()))


def test_heads_and_dimensions_that_are_given_back_are_fitted_anew() -> None:
    """The other narrow branches are those of the current model, which here are before: all is as ``apply_`` has it."""
    dense = base()
    refits = Refits(dense, [some()])
    plan = Plan(removal=KEEP, features=((0, 64),), heads=((3, 1),), head_dims=((2, 8), (3, 8)), tail=1)
    current, found = refits(plan), returns(plan, dense)
    assert [one.what for one in found] == [
        "features in block 0",
        "head dims in block 2",
        "heads in block 3",
        "head dims in block 3",
    ]
    assert [one.plan.head_dims for one in found[1:]] == [((2, 10), (3, 8)), ((2, 8), (3, 8)), ((2, 8), (3, 10))]
    for one in found[2:]:
        variant = put_back(current, dense, one.plan, [some()])
        torch.testing.assert_close(variant(some(seed=1)), refits(one.plan)(some(seed=1)))


def test_tokens_are_given_back_by_half() -> None:
    dense, plan = base(), Plan(removal=KEEP, tokens=Tokens("tome", 4))
    [one] = returns(plan, dense)
    assert one.plan.tokens == TOME
    variant = put_back(Refits(dense, [some()])(plan), dense, one.plan, [some()])
    expected = reduce_tokens_(clone(dense), TOME)
    assert torch.equal(variant(some()), expected(some()))


def test_what_a_longer_tail_made_pointless_is_given_back(prices: MovePrices) -> None:
    plan = Plan(removal=KEEP, features=((0, 64), (3, 64)), tail=2)
    found = without_pointless(plan, cost_of(prices), 1e-4 * prices.dense.macs)
    assert found == replace(plan, features=((0, 64),))


def test_refits_are_those_of_apply_and_fit_nothing_twice() -> None:
    dense, passes = base(), list[int]()

    class Counted(list[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            passes.append(1)
            return super().__iter__()

    images = Counted([some(8), some(8, seed=2)])
    refits = Refits(dense, images)
    plans = [replace(RETURNED, features=rows) for rows in ((), ((0, 100),), ((0, 64),), ((0, 64), (2, 64)))]
    plans.append(replace(plans[-1], tail=0, tokens=TOME))
    for plan in plans:
        before = len(passes)
        found = refits(plan)
        taken = len(passes) - before
        expected = apply_(clone(dense), plan, [*images])
        assert torch.equal(found(some(seed=1)), expected(some(seed=1)))
        assert taken <= (9 if plan.tokens or plan is plans[0] else 2)  # one narrower block, and the tail
    assert refits(plans[-2]) is refits(plans[-2])


def test_memory_does_not_grow_with_the_images() -> None:
    """Images are held only up to a bound; of each judged image, its answers and one number."""
    batches = [some(4, seed=seed) for seed in range(6)]
    for memory, is_held in ((sum(one.nbytes for one in batches), True), (5 * batches[0].nbytes, False)):
        held = Held(batches, memory)
        assert all(map(torch.equal, held, batches))
        assert (held.held is not None) == is_held
        assert all(map(torch.equal, held, batches))
    outputs = DenseOutputs(base(), batches)
    per_image = (sum(one.nbytes for one in (*outputs.answers, *outputs.marks))) / 24
    assert per_image == 4 * (10 + 1)  # ten classes, a number to recognise it


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
        words = (tiny(depth=4), [some()], [some(seed=1)], FrontierConfig(speedup=1.8))
        all_of_them, before, after = (list[FrontierPoint]() for _ in range(3))
        whole = frontier_into(tmp_path / "whole", *words, watch=lambda point, _: all_of_them.append(point))

        def stop(point: FrontierPoint, speedup: float) -> None:
            before.append(point)
            if len(before) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            frontier_into(tmp_path / "run", *words, watch=stop)
        found = frontier_into(tmp_path / "run", *words, watch=lambda point, _: after.append(point))
        assert found == whole
        assert before + after == all_of_them
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["points"]

    def test_two_searches_in_one_directory_share_the_damages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words, measured = ([some()], [some(seed=1)], FrontierConfig(speedup=1.3)), list[str]()
        whole = frontier_into(tmp_path / "whole", tiny(depth=4), *words)
        original = shared_search._measured

        def noted(job: DamageJob, guard: Any) -> dict[str, float]:
            measured.append(job.name)
            return original(job, guard)

        monkeypatch.setattr(shared_search, "_measured", noted)
        with ThreadPoolExecutor(2) as pool:  # claims keep out other threads as they do other processes
            found = [
                *pool.map(lambda model: frontier_into(tmp_path / "run", model, *words), [tiny(depth=4), tiny(depth=4)])
            ]
        assert found == [whole, whole]
        assert sorted(f"{name}.json" for name in measured) == sorted(
            file.name for file in (tmp_path / "run" / "damages").iterdir()
        )

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
