"""What a training leaves open: epochs that fit into a time, and a learning rate by a probe; and what is kept."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_cli
import test_training_cli
import torch
from test_cli import Run
from test_training import PLAIN, SHORT, Memory, numbers, tiny, weights
from torch import nn

from hetdpt.core.errors import HetDPTError, TrainError
from hetdpt.core.plan import Plan
from hetdpt.data.sources import open_data
from hetdpt.flow.config import RunConfig
from hetdpt.flow.dry_run import estimate
from hetdpt.flow.recipes import quick
from hetdpt.results import unhelpful
from hetdpt.surgery.remove import prune_
from hetdpt.tasks.learning import LearnConfig
from hetdpt.training import decide, trial
from hetdpt.training import recover as recovery
from hetdpt.training.config import TrainConfig
from hetdpt.training.objective import Distillation
from hetdpt.training.rate import RATES, probe_rates, split_for_probe
from hetdpt.training.recover import RecoverConfig, recover, training_data
from hetdpt.training.trainer import Epoch

run = test_cli.run  # the fixture
PROBED = replace(SHORT, training=replace(PLAIN, lr=None, epochs=1), per_class=8)
# By the fake clock an update takes a second, evaluation none; an epoch of SHORT has two updates.
SEVEN_SECONDS = replace(SHORT, training=replace(PLAIN, minutes=7.1 / 60 / decide.SPARE))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the times that trainings measure: of an update, and of an image that is evaluated."""
    now = SimpleNamespace(update=1.0, image=0.0, trials=0)

    def seconds(_: Any) -> float:
        now.trials += 1
        return float(now.update)

    monkeypatch.setattr(trial.Attempt, "seconds", seconds)
    monkeypatch.setattr(recovery, "evaluation_seconds", lambda *_: now.image)
    monkeypatch.setattr(decide, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    return now


def students() -> tuple[nn.Module, nn.Module]:
    dense = tiny()
    return prune_(deepcopy(dense), Plan(attention=(1,))), dense


# Time


def test_as_many_epochs_as_fit(clock: SimpleNamespace) -> None:
    student, dense = students()
    epochs = list(recover(student, dense, "demo", SEVEN_SECONDS))
    assert [epoch.number for epoch in epochs] == [0, 1, 2, 3]
    assert epochs[0].notes == ("3 epochs of 2 updates in 7.5 s, at 1 s per update",)
    known, other = replace(SHORT, training=replace(PLAIN, epochs=3)), students()[0]
    assert numbers(epochs) == numbers(list(recover(other, dense, "demo", known)))
    assert torch.equal(weights(student), weights(other)), "trials have changed what is trained"


def test_evaluations_take_a_part_of_the_time(clock: SimpleNamespace) -> None:
    clock.image = 1.0 / len(open_data("demo").val or ())
    *_, last = recover(*students(), "demo", SEVEN_SECONDS)
    assert last.number == 2  # one second before, three for each


def test_where_no_epoch_fits_some_images_are_used_once(clock: SimpleNamespace) -> None:
    clock.update = 5.0
    epochs = list(recover(*students(), "demo", SEVEN_SECONDS))
    assert [(epoch.number, epoch.epochs, epoch.update) for epoch in epochs] == [(0, 1, 0), (1, 1, 1)]
    assert epochs[0].notes[-1] == "the time is not enough for all 40 images; 16 of them are used once"


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_training_decides_nothing_again(clock: SimpleNamespace, stop: int) -> None:
    settings = SEVEN_SECONDS.with_settings({"training.ema_decay": 0.9, "drop_path": 0.3})
    whole, dense = students()
    keeper = Memory()
    expected = list(recover(whole, dense, "demo", settings, keeper=keeper))
    assert [state["position"]["epoch"] for state in keeper.states] == [0, 0, 1, 1, 2, 2]
    clock.update, clock.trials = 100.0, 0
    again, _ = students()
    found = list(recover(again, dense, "demo", settings, keeper=Memory(keeper.states[:stop])))
    assert clock.trials == 0
    assert numbers(found) == numbers(expected)[-len(found) :]
    assert torch.equal(weights(whole), weights(again))
    assert found[0].notes == expected[0].notes


def test_before_the_first_checkpoint_it_may_decide_again(clock: SimpleNamespace) -> None:
    clock.update = 0.5
    *_, last = recover(*students(), "demo", SEVEN_SECONDS, keeper=Memory())
    assert last.number == 7


def test_a_state_of_given_epochs_is_refused(clock: SimpleNamespace) -> None:
    keeper = Memory()
    list(recover(*students(), "demo", SHORT, keeper=keeper))
    with pytest.raises(TrainError, match="the checkpoint is of a training whose epochs and learning rate were given"):
        list(recover(*students(), "demo", SEVEN_SECONDS, keeper=keeper))


def test_a_real_update_is_timed() -> None:
    student, dense = students()
    tried = recovery.attempt(deepcopy(student), dense, training_data(open_data("demo"), SHORT)[0], SHORT)
    assert 1e-4 < tried.seconds() < 10
    *_, last = recover(student, dense, "demo", replace(SHORT, training=replace(PLAIN, minutes=1e-4)))
    assert (last.number, last.update) == (1, 1)


def test_a_slow_first_update_is_not_taken_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one warms up; in bfloat16 on a CPU it took three times as long, which halved the epochs."""
    now, lasts = SimpleNamespace(time=0.0), [6.0, 2.0, 2.1, 2.0, 2.0, 2.0]
    student, dense = students()
    tried = recovery.attempt(student, dense, training_data(open_data("demo"), SHORT)[0], SHORT)

    def updates() -> Any:
        for seconds in lasts:
            now.time += seconds
            yield

    monkeypatch.setattr(tried, "updates", updates)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now.time)
    assert tried.seconds() == pytest.approx(2.05)
    assert now.time == pytest.approx(10.1)  # no more updates than it needs


# The learning rate


def planted(scale: float) -> nn.Module:
    """Return a model that SGD changes ``scale`` squared times as much: its features are larger, its head smaller."""
    model = tiny()
    with torch.no_grad():
        model.norm.weight.mul_(scale)  # type: ignore[union-attr,operator]
        model.norm.bias.mul_(scale)  # type: ignore[union-attr,operator]
        model.head.weight.div_(scale)  # type: ignore[union-attr,operator]
    return model


def by_sgd(student: nn.Module) -> list[Epoch]:
    teacher = tiny(seed=5)
    with torch.no_grad():
        teacher.head.weight.mul_(10)  # type: ignore[union-attr,operator]
    training = replace(PLAIN, lr=None, optimizer="sgd", weight_decay=0.0, epochs=2)
    distillation = Distillation(kind="soft", alpha=1.0)
    return list(recover(student, teacher, "demo", replace(SHORT, training=training, distillation=distillation)))


def test_a_sharp_model_gets_a_small_rate_and_a_flat_one_a_large_rate() -> None:
    found = {scale: by_sgd(planted(scale))[-1].lr_found for scale in (1.0, 100.0)}
    assert found[1.0] == RATES[-1], "it hardly moves"
    assert found[100.0] is not None
    assert found[100.0] <= 1e-4, "it diverges"


def test_the_probe_is_deterministic_and_leaves_the_student_alone() -> None:
    told: list[tuple[str, int, int]] = []
    student, dense = students()
    epochs = recover(student, dense, "demo", PROBED, progress=lambda *now: told.append(now))
    start = next(epochs)
    assert torch.equal(weights(student), weights(students()[0]))
    assert all(module.training is False for module in student.modules())
    assert next(recover(*students(), "demo", PROBED)).notes == start.notes
    assert start.lr_found in RATES
    updates = 4  # the fewest; the training has 5: 80 images in batches of 16
    assert told[0] == (f"finding the learning rate, up to {4 * updates} updates", 0, 4 * updates)
    assert told[-1][1] in (2 * updates, 3 * updates, 4 * updates)


def test_the_rate_found_is_the_peak_of_the_training() -> None:
    rates: list[float] = []
    settings = PROBED.with_settings({"training.schedule": "constant", "training.lr_batch": 512})
    *_, last = recover(*students(), "demo", settings, watch=lambda now: rates.append(now.lr))
    assert set(rates) == {last.lr_found}  # not scaled: it was found with these batches


def test_a_rate_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Memory()
    whole, dense = students()
    expected = list(recover(whole, dense, "demo", PROBED, keeper=keeper))
    monkeypatch.setattr(decide, "probe_rates", lambda *_: pytest.fail("it was found before"))
    again, _ = students()
    found = list(recover(again, dense, "demo", PROBED, keeper=Memory(keeper.states[:2])))
    assert numbers(found) == numbers(expected)[1:]
    assert torch.equal(weights(whole), weights(again))


@pytest.mark.parametrize("changes", [{"training.mixup": 0.8}, {"distillation.kind": "none"}, {"drop_path": 0.5}])
def test_the_probe_takes_every_objective(changes: dict[str, Any]) -> None:
    start = next(recover(*students(), "demo", PROBED.with_settings(changes)))
    assert start.lr_found in RATES


def test_held_out_images_are_those_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    loss = trial.Attempt.loss
    monkeypatch.setattr(
        trial.Attempt,
        "loss",
        lambda self, batches: judged.append(sum(len(b.images) for b in batches)) or loss(self, batches),
    )
    next(recover(*students(), "demo", PROBED.with_settings({"hold_out": 0.25})))
    assert set(judged) == {20}
    judged.clear()
    next(recover(*students(), "demo", PROBED))
    assert set(judged) == {8}


def searched(losses: dict[float, float], start: float = 1.0) -> tuple[float, list[float]]:
    tried: list[float] = []
    found = probe_rates(lambda rate: tried.append(rate) or losses[rate], start)  # type: ignore[func-returns-value]
    return found.best, tried


def test_which_rates_are_tried() -> None:
    falling = dict(zip(RATES, (0.9, 0.8, 0.7, 0.5, 0.4, 0.3), strict=True))
    assert searched(falling) == (3e-3, [1e-4, 3e-4, 1e-3, 3e-3])
    assert searched({**falling, 3e-4: math.inf}) == (1e-4, [1e-4, 3e-4, 3e-5])
    assert searched({**falling, 3e-4: 0.85, 3e-5: 0.5}) == (3e-5, [1e-4, 3e-4, 3e-5, 1e-5])
    assert searched({**falling, 3e-4: 0.76}) == (3e-4, [1e-4, 3e-4, 3e-5])  # within a tenth of the least
    assert searched({**falling, 3e-4: 0.78}) == (1e-4, [1e-4, 3e-4, 3e-5])
    rising = dict(zip(RATES, (1.1, 1.4, 1.7, 2.0, 2.3, 2.6), strict=True))
    assert searched(rising) == (1e-5, [1e-4, 3e-5, 1e-5])
    assert searched({**rising, 1e-4: math.inf, 3e-5: math.inf}) == (1e-5, [1e-4, 3e-5, 1e-5])
    with pytest.raises(TrainError, match="the loss is not finite with any of 0.0001, 3e-05, 1e-05; check the weights"):
        searched(dict.fromkeys(RATES, math.inf))


def test_images_to_judge_by() -> None:
    images = open_data("demo").train
    assert images is not None
    others, held = split_for_probe(images, seed=0, least=32)
    assert (len(others), len(held)) == (1437 - 143, 143)
    assert not {others.name_of(number) for number in range(len(others))} & {held.name_of(n) for n in range(len(held))}
    with pytest.raises(TrainError, match=r"1437 images are too few to find a learning rate with 1437 in an update"):
        split_for_probe(images, seed=0, least=1437)


# Warm-up


@pytest.mark.parametrize(
    ("settings", "steps", "updates"),
    [
        ({"epochs": 300}, 1251, 12510),
        ({"epochs": 100}, 10, 100),
        ({"epochs": 5}, 94, 47),
        ({"epochs": 1}, 100, 20),
        ({"epochs": 1}, 25, 5),
        ({"epochs": 1}, 1, 0),
        ({"epochs": 1, "schedule": "constant"}, 100, 0),
        ({"epochs": 2, "warmup_epochs": 0.5}, 7, 4),
        ({"epochs": 2, "warmup_epochs": 0.0}, 7, 0),
    ],
)
def test_warm_up_is_counted_in_updates(settings: dict[str, Any], steps: int, updates: int) -> None:
    assert TrainConfig(**settings).warmup_updates(steps) == updates


# Refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"minutes": 0.0}, "minutes is 0.0; it must be above 0, or left out"),
        ({"minutes": float("nan")}, "minutes is nan; it must be above 0"),
        (
            {"minutes": 5.0, "warmup_epochs": 1.0},
            "with minutes the number of epochs is not known yet; leave one of them",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainError, match=text):
        TrainConfig(**changes)


@pytest.mark.parametrize("changes", [{"training.minutes": 5.0}, {"training.lr": None}])
def test_what_cannot_be_decided_for_others_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(HetDPTError, match="are for classifiers; give epochs and lr"):
        LearnConfig.of("segmentation").with_settings(changes)
    companion: Any = object()
    with pytest.raises(TrainError, match="a search for layers needs a number of epochs and a learning rate"):
        next(recover(tiny(), None, "demo", SHORT.with_settings(changes), companion=companion))


def test_a_loop_without_a_rate_is_refused() -> None:
    with pytest.raises(TrainError, match="only the recovery of a classifier finds one; give --lr"):
        TrainConfig(lr=None).peak_lr()


# Commands


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decide")
    test_training_cli.build(folder / "dense")
    return folder


DEMO = ("--data", "demo", "--workers", 0, "--batch-size", 16, "--per-class", 4)


def test_a_training_of_some_minutes_with_a_rate_that_is_found(
    run: Run, home: Path, tmp_path: Path, clock: SimpleNamespace
) -> None:
    minutes = SEVEN_SECONDS.training.minutes
    command = ("train", home / "dense", "--out", tmp_path / "run", *DEMO, "--minutes", minutes)
    result = run(*command, "--set", "training.lr=null")
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert (found["epochs"], found["lr_found"] in RATES) == (3, True)
    assert result.out.splitlines()[:2] == found["notes"]
    assert found["notes"][0].startswith(f"learning rate {found['lr_found']:g}, by the loss on held-out images")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["lr_found"] for line in lines if line["kind"] == "epoch"] == 4 * [found["lr_found"]]


@pytest.mark.parametrize("command", ["train", "recover", "run"])
def test_epochs_and_minutes_are_refused_together(run: Run, home: Path, tmp_path: Path, command: str) -> None:
    goal = ("--layers", 2) if command == "run" else ()
    prefix = "recovery." if command == "run" else ""
    for epochs in (("--epochs", 2), ("--set", f"{prefix}training.epochs=2")):
        result = run(command, home / "dense", *DEMO, "--out", tmp_path / "run", "--minutes", 5, *epochs, *goal)
        assert result.code != 0
        assert result.err == "error: epochs and minutes both say how long to train; give one of them\n"
    assert not (tmp_path / "run").exists()


def test_epochs_of_the_command_line_replace_the_minutes_of_a_file(tmp_path: Path) -> None:
    from hetdpt.cli.run import RunOptions

    file = tmp_path / "run.yaml"
    training = "recovery: {training: {minutes: 5, lr: null}}"
    file.write_text(f"{{model: demo, data: demo, out: x, layers: 2, {training}, checkpoint_minutes: 3}}")
    asked = RunOptions(config=file).asked
    assert (asked.recovery.training.minutes, asked.recovery.training.lr, asked.checkpoint_minutes) == (5.0, None, 3.0)
    asked = RunOptions(config=file, epochs=3, lr=1e-4).asked
    assert (asked.recovery.training.minutes, asked.recovery.training.epochs) == (None, 3)
    assert (asked.recovery.training.lr, asked.recovery.training.lr_batch) == (1e-4, None)
    asked = RunOptions(config=file, minutes=7.0).asked
    assert asked.recovery.training.minutes == 7.0


def test_a_dry_run_knows_the_minutes(home: Path, clock: SimpleNamespace, tmp_path: Path) -> None:
    short = quick().config.with_settings({"training.batch_size": 16, "per_class": 4})
    timed = short.with_settings({"training.minutes": 2.0, "training.lr": None})
    asked: dict[str, Any] = {"model": "tiny", "data": "demo", "out": tmp_path, "layers": 2, "images": 8, "batch": 1}
    config = RunConfig(**asked, recovery=timed, method="random")
    from hetdpt import load

    found = next(stage for stage in estimate(config, load(home / "dense"), open_data("demo")).stages if stage.updates)
    assert found.stage == "recover"
    assert found.seconds == pytest.approx(120, abs=10)  # with calibration and saving
    # a quarter of 120 s for four rates, of which 7 updates each; then 86 s for epochs of two updates and evaluations
    assert found.text.startswith("2 min 0 s, about ")
    assert " of 2 updates after up to 28 to find the learning rate" in found.text
    assert 30 <= found.updates <= 86


# What is kept


def test_the_best_is_kept_where_images_are_held_out() -> None:
    asked: dict[str, Any] = {"model": "demo", "data": "demo", "out": Path("x"), "layers": 2}
    assert RunConfig(**asked).kept == "best"
    assert RunConfig(**asked, keep="last").kept == "last"
    assert RunConfig(**asked, recovery=RecoverConfig(hold_out=0.0)).kept == "last"


def test_a_training_that_helped_is_not_warned_of() -> None:
    assert not unhelpful(start=50.0, last=51.0, best_epoch=2, kept="best")
    text = unhelpful(start=50.0, last=51.0, best_epoch=0, kept="best", divergence=(0.2, 0.25))
    assert "50.00 % before, 51.00 % after it (KL to the teacher 0.2 and 0.25)" in text
    assert not unhelpful(start=50.0, last=49.0, best_epoch=2, kept="best")
    assert not unhelpful(start=50.0, last=50.0, best_epoch=0, kept="last")
    assert not unhelpful(start=50.0, last=49.0, best_epoch=0, kept="ema")
    assert not unhelpful(start=None, last=None, best_epoch=0, kept="best")
