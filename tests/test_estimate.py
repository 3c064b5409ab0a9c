"""The dry run: its numbers are those of the real stages, and it leaves everything as it was."""

from __future__ import annotations

import time
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_training_cli
from run_directories import USUAL
from torch import nn

import hetdpt
from hetdpt.core.errors import DataError, PlanError, PredictError
from hetdpt.core.modules import digest
from hetdpt.core.plan import Budget
from hetdpt.data.sources import open_data
from hetdpt.data.subset import hold_out
from hetdpt.flow.collection.collect import collect_into
from hetdpt.flow.config import RunConfig
from hetdpt.flow.dry_run import Estimate, estimate
from hetdpt.flow.execution import Execution
from hetdpt.flow.pipeline import run, stages_of
from hetdpt.flow.recipes import quick
from hetdpt.flow.stages.stage import StageEstimate
from hetdpt.flow.stages.timing import Trials
from hetdpt.selection.select import select
from hetdpt.store.stage_directory import WORK, stage_directory
from hetdpt.surgery.gate import gates_of

BRIEF = {"training.batch_size": 8, "per_class": 4, "training.lr": 5e-4}
DATA = open_data("demo")
WITHOUT_SPLIT = {"method": "random", "rounds": None}
PLUS = {"plus": True, "layers": None, "macs": "70%", "tokens": "tome:2", "method": "map+te"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return hetdpt.load(test_training_cli.build(tmp_path_factory.mktemp("estimate") / "dense"))


def config(out: Path, **changes: Any) -> RunConfig:
    short = quick().collection.with_settings(BRIEF)
    usual = {
        "model": "tiny",
        "data": "demo",
        "out": out,
        "layers": 2,
        "images": 8,
        "rounds": (2, 1, 1),
        "collection": short.with_settings({"training.epochs": 1}),
        "search": short.with_settings({"training.epochs": 2}),
        "recovery": short.with_settings({"training.epochs": 3}),
        "batch": 1,
    }
    return RunConfig(**(usual | changes))


@pytest.fixture(scope="module")
def whole(dense: nn.Module) -> Estimate:
    """Return what is said of a run with all stages."""
    return estimate(config(Path("nowhere"), compare=("random", "map+te", "importance-only")), dense, DATA)


def weights_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def stage(found: Estimate, name: str) -> StageEstimate:
    return next(one for one in found.stages if one.stage == name)


@pytest.mark.slow
def test_the_collection_takes_as_many_updates_and_evaluations(
    dense: nn.Module, whole: Estimate, tmp_path: Path
) -> None:
    told: Counter[str] = Counter()

    def progress(text: str, done: int, total: int) -> None:
        told[text.rpartition(", ")[2]] += 1

    held, asked = hold_out(DATA), config(tmp_path).collect_config
    steps = list(collect_into(tmp_path / "run", dense, held, asked, Execution(progress=progress, batch=1)))
    found = stage(whole, "collect")
    assert found.updates == told["fine-tuning"] == 5 * 4  # 40 images in batches of 8, for 4 samples
    assert found.text.startswith(f"{len(steps)} samples, 1 epoch of 5 updates each, measured on {len(held.val or ())} ")
    assert found.evaluations == (1 + 2 * (len(steps) - 1)) * len(held.val or ())
    saved = [file for file in (tmp_path / "run").rglob("*.safetensors") if file.parent.name in ("dense", "last")]
    assert found.left == len(saved) * weights_of(dense)


def test_the_search_and_the_fine_tuning_take_as_many_updates(dense: nn.Module, whole: Estimate, tmp_path: Path) -> None:
    asked, told = config(tmp_path), list[tuple[str, int, int]]()
    select(dense, DATA, Budget(1, 1), "hetdpt", asked.select_config, progress=lambda *now: told.append(now))
    assert stage(whole, "select").updates == len([text for text, _, _ in told if text == "learning importances"]) == 10
    *_, last = hetdpt.recover(deepcopy(dense), None, DATA, asked.recovery)
    assert stage(whole, "recover").updates == last.update == 15
    assert stage(whole, "recover").evaluations == 4 * len(DATA.val or ())


def test_a_comparison_is_a_choice_and_a_fine_tuning_for_each_method(whole: Estimate) -> None:
    found, recovery, search = (stage(whole, name) for name in ("compare", "recover", "select"))
    assert found.updates == 3 * recovery.updates + search.updates  # of the three, importance-only searches
    assert found.evaluations == 3 * recovery.evaluations + 4 * len(DATA.val or ())
    assert found.text.startswith("random, map+te, importance-only: ")


def test_every_stage_of_a_run_is_there_and_has_a_time(whole: Estimate) -> None:
    assert [one.stage for one in whole.stages] == list(USUAL)
    moments = {one.stage for one in whole.stages if one.seconds is None}
    assert moments == {"fit", "allocate", "report"}
    assert all(one.seconds > 0 for one in whole.stages if one.seconds is not None)
    assert whole.seconds == pytest.approx(sum(one.seconds or 0.0 for one in whole.stages))  # in another order
    assert (whole.layers, whole.is_guess, whole.device) == (2, False, "cpu")
    assert whole.memory > 50e6, "torch alone takes more"


def test_layers_chosen_for_a_goal_are_a_guess(dense: nn.Module) -> None:
    asked = config(Path("nowhere"), layers=None, macs="70%", method="calibrated-greedy", rounds=None, tail=None)
    found = estimate(asked, dense, DATA)
    assert stage(found, "select").text == "about 2 layers, or tails, by calibrated-greedy, 8 training images"
    assert (stage(found, "select").seconds or 0) > 0
    assert found.is_guess


def test_nothing_is_written_and_the_model_is_left_alone(dense: nn.Module, tmp_path: Path) -> None:
    before, was_training = digest(dense), dense.training
    told: list[str] = []
    estimate(config(tmp_path / "out"), dense, DATA, progress=lambda text, *_: told.append(text))
    assert not list(tmp_path.iterdir())
    assert (digest(dense), dense.training, gates_of(dense)) == (before, was_training, {})
    assert all(parameter.grad is None for parameter in dense.parameters())
    assert "trying the search" in told


@pytest.mark.slow
def test_layers_or_width_takes_as_many_updates_evaluations_and_models(dense: nn.Module, tmp_path: Path) -> None:
    samples = tmp_path / "samples.csv"
    samples.write_text("attention,activation,accuracy\n0,0,50\n1,0,49\n2,0,45\n0,1,48\n0,2,44\n1,1,46\n2,2,30\n")
    asked = config(tmp_path / "run", **PLUS, samples=samples, rounds=None, depths=(0, 1))
    expected, told = estimate(asked, dense, DATA), Counter[str]()
    assert [one.stage for one in expected.stages] == [one.name for one in stages_of(asked)]
    run(asked, inputs=(dense, DATA), until="narrow", watch=lambda event: told.update([event.text]))
    found, held = stage(expected, "balance"), len(hold_out(DATA).val or ())
    assert (
        found.updates
        == told["0 layers removed and width: fine-tuning"] + told["1 layer removed and width: fine-tuning"]
        == 2 * 5
    )
    assert found.evaluations == 2 * 2 * held
    assert found.text == f"0, 1 layers removed and width, 1 epoch of 5 updates each, measured on {held} images held out"
    for name in ("balance", "narrow"):
        saved = [*(stage_directory(asked.out, name) / WORK).rglob("*.safetensors")]
        assert stage(expected, name).left == len(saved) * weights_of(dense)


def test_all_of_the_goal_may_be_for_width_to_meet(dense: nn.Module) -> None:
    found = estimate(config(Path("nowhere"), **PLUS | {"layers": 0}, rounds=None), dense, DATA)
    assert all(parameter.grad is None for parameter in dense.parameters())
    assert (found.layers, found.is_guess) == (0, False)
    assert stage(found, "select").text == "no layers: width meets the whole goal"
    assert stage(found, "select").seconds is None
    assert stage(found, "narrow").text == "width for the rest of the goal, at most 70% of the MACs: 8 training images"
    assert stage(found, "reduce").text == "2 tokens fewer after each attention (tome)"
    assert stage(found, "recover").left == 2 * weights_of(dense), "without a calibrated model to begin from"
    assert all(one.seconds > 0 for one in found.stages if one.seconds is not None)


def test_numbers_of_layers_that_a_model_does_not_have_are_refused(dense: nn.Module) -> None:
    with pytest.raises(PlanError, match="depths has 7 layers, but only 6 of this model can be removed"):
        estimate(config(Path("nowhere"), **PLUS, depths=(0, 7)), dense, DATA)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (WITHOUT_SPLIT, {"collect", "fit", "allocate", "compare"}),
        ({"samples": Path("some.csv"), "rounds": None, "method": "map+te"}, {"collect", "compare"}),
    ],
)
def test_stages_that_a_run_does_not_have_are_left_out(dense: nn.Module, changes: Any, missing: set[str]) -> None:
    found = estimate(config(Path("nowhere"), **changes), dense, DATA)
    assert set(USUAL) - {one.stage for one in found.stages} == missing
    assert stage(found, "select").updates == 0


def test_stages_that_are_done_are_marked_and_cost_nothing(dense: nn.Module, tmp_path: Path) -> None:
    found = estimate(config(tmp_path, **WITHOUT_SPLIT), dense, DATA, done=["analyse"])
    assert [one.stage for one in found.stages if one.is_done] == ["analyse"]
    left = [one.seconds or 0.0 for one in found.stages if one.stage != "analyse"]
    assert found.seconds == pytest.approx(sum(left))  # in another order


def test_a_goal_that_is_no_number_of_layers_is_guessed_at(dense: nn.Module) -> None:
    found = estimate(config(Path("nowhere"), layers=None, speedup=1.2, method="map+te"), dense, DATA)
    assert (found.layers, found.is_guess) == (2, True)  # a third of 6
    assert stage(found, "select").text.startswith("about 2 layers by map+te")


def test_what_a_run_would_refuse_is_refused(dense: nn.Module) -> None:
    with pytest.raises(PlanError, match="cannot remove 7 layers: this model has 6"):
        estimate(config(Path("nowhere"), layers=7, **WITHOUT_SPLIT), dense, DATA)
    with pytest.raises(PredictError, match="9 rounds of the chain attention remove 9 attention layers"):
        estimate(config(Path("nowhere"), rounds=(9, 1, 1)), dense, DATA)
    with pytest.raises(DataError, match="accuracy is measured on the split val"):
        estimate(config(Path("nowhere"), **WITHOUT_SPLIT), dense, replace(DATA, val=None))


@pytest.mark.parametrize(("ema", "parts"), [(0.0, 3), (0.5, 4)])
def test_a_checkpoint_has_weights_two_moments_and_an_average(dense: nn.Module, ema: float, parts: int) -> None:
    asked = config(Path("nowhere"))
    tried = Trials(asked, dense, DATA).training(asked.recovery.with_settings({"training.ema_decay": ema}), DATA)
    assert tried.state == pytest.approx(parts * weights_of(dense), rel=0.02)  # beside them, counters of a few bytes
    assert (tried.epochs, tried.updates, tried.images, tried.has_average) == (3, 15, 40, bool(ema))
    assert tried.evaluations == 4 * (2 if ema else 1)


def test_answers_of_a_teacher_that_are_kept_are_asked_for_once(dense: nn.Module) -> None:
    asked = config(Path("nowhere"))
    kept = {"cache_teacher": True, "augmentation.views": 1}
    tried = Trials(asked, dense, DATA).training(asked.recovery.with_settings(kept), DATA)
    assert tried.asks
    assert not Trials(asked, dense, DATA).training(asked.recovery, DATA).asks


def test_times_on_a_few_images_are_stretched_to_all(dense: nn.Module) -> None:
    asked = config(Path("nowhere"), images=200)

    def work(images: Any) -> None:
        time.sleep(0.02 + 0.002 * images.count)

    found = Trials(asked, dense, DATA).on_all_images(work)
    assert 0.35 < found < 1.5  # 0.42; a busy machine sleeps longer


def test_the_disk_holds_what_stages_have_left_and_what_one_needs_meanwhile() -> None:
    stages = (
        StageEstimate(stage="collect", text="", left=10, most=50),
        StageEstimate(stage="recover", text="", left=20, most=45),
        StageEstimate(stage="save", text="", left=5),
    )
    rest: dict[str, Any] = {"device": "cpu", "processor": "", "threads": 1, "memory": 0, "memory_of": "", "layers": 1}
    made = Estimate(stages=stages, is_guess=False, **rest)
    assert made.disk == 10 + 45
    assert made.to_dict()["disk"] == 55
    assert replace(made, stages=stages[2:]).disk == 5
