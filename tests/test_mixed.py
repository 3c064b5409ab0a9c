"""The method mixed: everything that can be removed until a goal is met, in ``run`` and in ``oneshot``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
import test_training_cli
from test_cli import Run
from test_estimate import config as estimated
from test_estimate import stage
from test_moves import _timed as timed_like_macs
from test_oneshot import BATCHES, JUDGE, SIZE, SMALL, KillError, names, stopped
from test_pipeline import CHANGES
from torch import nn

import hetdpt
from hetdpt.core.errors import FileError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.data.sources import open_data
from hetdpt.flow import mix, oneshot
from hetdpt.flow.config import RunConfig
from hetdpt.flow.dry_run import estimate
from hetdpt.flow.mix import MixConfig, mix_into
from hetdpt.flow.oneshot import OneShotStep, oneshot_into
from hetdpt.flow.stages.stage import Event
from hetdpt.measurement.agreement import measure_damage, relative_difference
from hetdpt.reduce.apply import apply_
from hetdpt.report.run import RunRecord
from hetdpt.results import Ratio
from hetdpt.selection.goal import OneShotConfig
from hetdpt.selection.move_prices import MovePrices, measure_move_prices
from hetdpt.store.atomic import sha256
from hetdpt.store.stage_directory import stage_directory
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record
from hetdpt.surgery.tail import trim_if_possible_

run = test_cli.run  # the fixture
KEEP = ("constant", "calibrated-keep")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a saved model."""
    folder = tmp_path_factory.mktemp("mixed")
    test_training_cli.build(folder / "dense")
    return folder


@pytest.fixture(scope="module")
def prices(home: Path) -> MovePrices:
    """Return prices whose times are as the MACs are, so that searches are the same every time."""
    return timed_like_macs(measure_move_prices(hetdpt.load(home / "dense"), removal=KEEP))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, prices: MovePrices) -> None:
    monkeypatch.setattr(mix, "measure_move_prices", lambda *_, **__: prices)
    for module in (mix, oneshot):
        monkeypatch.setattr(module, "TIMING_SECONDS", 0.0)  # the five rounds that are the least


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the speedups that will be measured, one after another."""
    measured: list[float] = []

    def counting(measure: Callable[..., Any]) -> Callable[..., Any]:
        def timed(models: dict[str, nn.Module], *args: Any, **options: Any) -> Any:
            value = measured.pop(0)
            return replace(measure(models, *args, **options), speedup={"pruned": Ratio(value, value, value)})

        return timed

    for module in (mix, oneshot):
        monkeypatch.setattr(module, "measure_throughput", counting(module.measure_throughput))
    return measured


class TestWhichGoal:
    """The goal decides which method a run uses, unless one is given."""

    def config(self, **changes: Any) -> RunConfig:
        return RunConfig(**{"model": "demo", "data": "demo", "out": Path("runs/one"), **changes})

    @pytest.mark.parametrize("goal", [{"speedup": 1.5}, {"macs": "70%"}, {"macs": 1e9, "tail": None}])
    def test_speed_or_macs_alone_is_met_by_a_mix(self, goal: dict[str, Any]) -> None:
        config = self.config(**goal)
        assert (config.chooser.name, config.method, config.is_mixed) == ("mixed", None, True)
        assert (config.is_split, config.tail_goal, config.has_free_tail) == (False, {}, False)
        assert replace(config, moves=("tail",)).mixed_moves == ("tail",)
        assert not replace(config, method="hetdpt").is_mixed
        assert replace(config, method="hetdpt").mixed_moves is None

    @pytest.mark.parametrize(
        ("more", "option"),
        [
            ({"layers": 4}, "--layers"),
            ({"budget": (2, 2)}, "--budget"),
            ({"params": 1e6}, "--params"),
            ({"macs": 1e9}, "one of --speedup and --macs"),
            ({"plus": True}, "--plus"),
            ({"compare": ("random",)}, "--compare"),
            ({"samples": Path("s.csv")}, "--samples"),
            ({"rounds": (2, 2, 1)}, "--rounds"),
            ({"tokens": "tome:2"}, "--tokens"),
            ({"tail": 2}, "--tail"),
            ({"trim": False}, "--no-trim"),
            ({"removal": "plain"}, "a removal without fits"),
        ],
        ids=str,
    )
    def test_all_else_is_met_by_the_method_of_the_paper(self, more: dict[str, Any], option: str) -> None:
        assert self.config(speedup=1.5, **more).chooser.name == "hetdpt"
        if set(more) == {"budget"}:
            assert not self.config(**more).is_mixed
        with pytest.raises(PlanError) as error:
            self.config(speedup=1.5, method="mixed", **more)
        assert str(error.value) == (
            "the method mixed removes what does the least damage for what it saves until one goal, --speedup or "
            f"--macs, is met; leave out {option}, or give another method such as hetdpt"
        )

    def test_unknown_moves_are_refused(self) -> None:
        with pytest.raises(PlanError, match="no move is called 'depth'; available: attention, activation, tail"):
            self.config(speedup=1.5, moves=("depth",))

    def test_methods_are_compared_at_a_number_of_layers(self) -> None:
        with pytest.raises(
            PlanError, match="the method mixed removes more than layers, .* a method that removes layers"
        ):
            self.config(layers=4, compare=("mixed",))

    @pytest.mark.parametrize(
        ("config", "is_mixed"),
        [
            (OneShotConfig(speedup=1.5), True),
            (OneShotConfig(speedup=1.5, tail=0), True),
            (OneShotConfig(speedup=1.5, tail=2), False),
            (OneShotConfig(speedup=1.5, kind="attention"), False),
            (OneShotConfig(speedup=1.5, trim=False), False),
            (OneShotConfig(speedup=1.5, removal="plain"), False),
            (OneShotConfig(layers=2), False),
        ],
        ids=str,
    )
    def test_of_oneshot(self, config: OneShotConfig, is_mixed: bool) -> None:
        assert config.is_mixed == is_mixed


class TestMixInto:
    """``mix_into``: rounds until the model is measured to meet the goal."""

    def mixed(self, place: Path, dense: nn.Module, **goal: Any) -> list[tuple[Plan, float]]:
        asked = MixConfig(removal=KEEP, **goal)
        return [(point.plan, reached) for point, reached in mix_into(place, dense, BATCHES, JUDGE, asked)]

    def test_it_ends_where_the_model_meets_the_goal(self, tmp_path: Path, dense: nn.Module, prices: MovePrices) -> None:
        wanted = 0.4 * prices.dense.macs
        found = self.mixed(tmp_path / "run", dense, goal="macs", value=wanted)
        reached = [macs for _, macs in found]
        assert reached == sorted(reached, reverse=True)
        made = merge_(apply_(clone(dense), found[-1][0], BATCHES))
        trim_if_possible_(made)
        assert hetdpt.count_macs(made, SIZE) <= wanted < reached[-2]

    def test_where_less_is_measured_more_is_removed(self, tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
        clock += [1.6]
        one = self.mixed(tmp_path / "one", dense, goal="speedup", value=1.5)
        clock += [1.2, 1.6]
        two = self.mixed(tmp_path / "two", dense, goal="speedup", value=1.5)
        assert clock == []
        assert two[: len(one)] == one
        assert len(two) > len(one)
        missing = 1 / 1.2 - 1 / 1.5  # of the time of the dense model
        assert 1 / two[-1][1] <= 1 / one[-1][1] - missing + 1e-9 < 1 / two[-2][1]

    def test_attempts_end(self, tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
        clock += [1.3, 1.45, 1.49]
        self.mixed(tmp_path / "run", dense, goal="speedup", value=1.5)
        assert clock == []

    @pytest.mark.parametrize(("value", "is_begun"), [(50.0, False), (5.0, True)])
    def test_a_goal_out_of_reach_says_what_can_be_reached(
        self, value: float, is_begun: bool, tmp_path: Path, dense: nn.Module
    ) -> None:
        asked = MixConfig(goal="speedup", value=value, removal=KEEP, moves=("features", "tail"))
        rounds = list[float]()
        with pytest.raises(
            PlanError,
            match=rf"a speedup of {value:g} is out of reach: by the costs measured here \(cpu, .*\), the model without "
            r"all that can be removed has a speedup of [\d.]+; set an easier goal",
        ):
            rounds.extend(reached for _, reached in mix_into(tmp_path / "run", dense, BATCHES, JUDGE, asked))
        assert bool(rounds) == is_begun
        assert names(tmp_path) == []

    def test_a_kill_loses_one_round_at_most(
        self, tmp_path: Path, dense: nn.Module, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = MixConfig(goal="speedup", value=2.2, removal=KEEP)
        begun = mix_into(tmp_path / "run", dense, BATCHES, JUDGE, asked)
        before = [next(begun)]
        begun.close()
        monkeypatch.setattr(mix, "measure_move_prices", lambda *_, **__: pytest.fail("measured again"))
        clock += [2.3]
        points = [*mix_into(tmp_path / "run", dense, BATCHES, JUDGE, asked)]
        assert points[:1] == before
        assert len(points) > 1
        with pytest.raises(FileError, match=r"was started with value = 2.2, not 1.7; give the same to resume"):
            next(mix_into(tmp_path / "run", dense, BATCHES, JUDGE, replace(asked, value=1.7)))


class TestOneShot:
    """``hetdpt oneshot --speedup``."""

    def test_what_is_saved_is_what_was_measured(self, tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
        clock += [2.1]
        steps = list[OneShotStep]()
        found = oneshot_into(tmp_path / "out", dense, BATCHES, JUDGE, OneShotConfig(speedup=2.0), watch=steps.append)
        assert names(tmp_path) == ["out"]
        loaded = hetdpt.load(tmp_path / "out")
        assert measure_damage(dense, loaded, JUDGE) == found.damage
        assert hetdpt.count_macs(loaded, SIZE) == found.costs["pruned"].macs < found.costs["dense"].macs / 2 * 1.02
        assert [step.number for step in steps] == [*range(1, len(found.rounds) + 1)]
        assert [step.moves for step in steps] == [point.moves for point in found.rounds]
        assert steps[-1].reached >= steps[-1].wanted == 2.0
        assert (found.choices, found.wanted_speedup) == ((), 2.0)
        expected = apply_(clone(dense), found.plan, BATCHES)
        assert relative_difference(expected, loaded, SIZE) < 1e-5  # merged and trimmed
        assert json.loads((tmp_path / "out" / "oneshot.json").read_text()) == json.loads(found.to_json())

    def test_it_resumes_after_a_kill(self, tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
        config = OneShotConfig(speedup=1.7)
        before = stopped(tmp_path / "out", dense, config, 1)
        assert names(tmp_path) == ["out.partial"]
        clock += [1.8]
        steps = list[OneShotStep]()
        found = oneshot_into(tmp_path / "out", dense, BATCHES, JUDGE, config, watch=steps.append)
        assert [step.number for step in before + steps] == [*range(1, len(found.rounds) + 1)]
        assert [step.damage for step in before] == [point.damage for point in found.rounds[:1]]
        assert names(tmp_path) == ["out"]

    def test_without_tails(self, tmp_path: Path, dense: nn.Module, clock: list[float]) -> None:
        clock += [2.1]
        found = oneshot_into(tmp_path / "out", dense, BATCHES, JUDGE, OneShotConfig(speedup=2.0, tail=0))
        assert found.plan.tail == 0
        assert not any("tail" in move for point in found.rounds for move in point.moves)

    def test_out_of_reach_leaves_nothing(self, tmp_path: Path, dense: nn.Module) -> None:
        with pytest.raises(PlanError, match="a speedup of 99 is out of reach: by the costs measured here"):
            oneshot_into(tmp_path / "out", dense, BATCHES, JUDGE, OneShotConfig(speedup=99))
        assert names(tmp_path) == []

    def test_in_words(self, run: Run, home: Path, tmp_path: Path, clock: list[float]) -> None:
        clock += [1.3, 1.4, 1.45]
        result = run("oneshot", home / "dense", *SMALL, "--speedup", 1.5, "--quiet", "--out", tmp_path / "out")
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("1: ")
        assert "x of 1.5x by the time of each layer\n" in result.out
        assert "removed, round by round" in result.out
        assert "\nnote: the goal was a speedup of 1.5, but 1.450 was reached\n" in result.out

    @pytest.mark.slow
    def test_with_recovery(self, run: Run, home: Path, tmp_path: Path, clock: list[float]) -> None:
        clock += [1.8]
        words = ("oneshot", home / "dense", *SMALL, "--speedup", 1.7, "--recover", "--epochs", 1)
        few = ("--set", "fraction=0.05", "--set", "hold_out=0.5")
        result = run(*words, *few, "--out", tmp_path / "out")
        assert (result.code, result.err) == (0, "")
        found = json.loads((tmp_path / "out" / "oneshot.json").read_text())
        assert found["recovery"]["epochs"] == 1
        assert found["rounds"]
        assert require_record(hetdpt.load(tmp_path / "out")).plan == replace(Plan.from_dict(found["plan"]), fits=())


def asked(home: Path, out: Path, **changes: Any) -> RunConfig:
    given = {"model": str(home / "dense"), "data": "demo", "out": out, "images": 16, "batch": 1, "macs": "50%"}
    return RunConfig.resolve(recipe="brief", changes={**given, **CHANGES, **changes})


class TestRun:
    """``hetdpt run`` with a goal of speed or MACs."""

    @pytest.mark.slow
    def test_a_kill_while_choosing_loses_one_round_at_most(self, home: Path, tmp_path: Path) -> None:
        config, first, second = asked(home, tmp_path / "run"), list[str](), list[str]()

        def stop(event: Event) -> None:
            if event.kind == "note" and event.text.startswith("round "):
                first.append(event.text)
                raise KillError

        def watch(event: Event) -> None:
            second.extend([event.text] if event.text.startswith("round ") else [])

        with pytest.raises(KillError):
            hetdpt.run(config, watch=stop, until="select")
        assert hetdpt.run(config, watch=watch, until="select") is None
        assert second[:1] == first
        record = RunRecord.read(tmp_path / "run")
        chosen = record.results.select
        assert chosen is not None
        assert (chosen.method, record.method, chosen.quantity) == ("mixed", "mixed", "MACs")
        assert len(chosen.rounds) == len(second)
        assert {(pick.kind, pick.block) for pick in chosen.picks if pick.kind != "tail"} == {
            (kind, block) for kind in ("attention", "activation") for block in getattr(chosen.plan, kind)
        }
        plan = Plan.from_json((stage_directory(tmp_path / "run", "select") / "work" / "plan.json").read_text())
        assert plan == chosen.plan
        with pytest.raises(FileError, match="the stage select of .* was begun with mixed_moves"):
            hetdpt.run(replace(config, moves=("tail", "features")))

    @pytest.mark.slow
    @pytest.mark.parametrize(("moves", "macs"), [(("tokens",), 68), (None, 50)], ids=str)
    def test_the_saved_model_is_the_one_that_was_measured(
        self, moves: tuple[str, ...] | None, macs: int, home: Path, tmp_path: Path
    ) -> None:
        more = {"macs": f"{macs}%", **({"moves": moves} if moves else {})}
        config = asked(home, tmp_path / "run", onnx=True, **{"recovery.distillation.hidden": 1.0}, **more)
        summary = hetdpt.run(config)
        assert summary is not None
        assert (summary.method, summary.goal.is_met) == ("mixed", True)
        assert summary.macs <= macs / 100 * summary.dense_macs
        model = hetdpt.load(tmp_path / "run" / "model")
        assert hetdpt.evaluate(model, "demo").top1 == summary.pruned_accuracy
        assert hetdpt.count_macs(model, SIZE) == summary.macs
        record = RunRecord.read(tmp_path / "run")
        assert record.results.select is not None
        plan = record.results.select.plan
        if moves:
            assert plan.tokens
            assert summary.tokens == f"tome:{plan.tokens.r}"
            assert len(plan) == 0
        assert [name for name, is_needed in record.flow.items() if is_needed] == [
            "analyse", "select", "recover", "merge", "measure", "save", "report",
        ]  # fmt: skip
        assert record.results.save is not None
        assert record.results.save.exports["model.onnx"] < 1e-3  # float32 rounding
        for page in ("report.md", "report.html"):
            text = (tmp_path / "run" / page).read_text()
            assert "All that was removed, with the least damage for what it saves first" in text
        before = sha256(tmp_path / "run" / "model" / "model.safetensors")
        assert hetdpt.run(config) == summary
        assert sha256(tmp_path / "run" / "model" / "model.safetensors") == before

    def test_a_dry_run_says_how_many_rounds(self, dense: nn.Module) -> None:
        config = estimated(Path("nowhere"), layers=None, speedup=1.2, rounds=None)
        found = estimate(config, dense, open_data("demo"))
        assert [one.stage for one in found.stages] == [
            "analyse", "select", "recover", "merge", "measure", "save", "report",
        ]  # fmt: skip
        assert stage(found, "select").text == "about 5 rounds by mixed, 8 training images"  # a sixth, 4 % in each
        assert (stage(found, "select").seconds or 0) > 0
        assert not found.is_guess
