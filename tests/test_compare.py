"""A comparison of methods: what each row is, what is shared, that kills and company change nothing."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import test_cli
import test_training_cli
from test_cli import SCRIPT, Run
from test_report import size_of
from torch import nn

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, FileError, PlanError, PredictError
from hetdpt.core.plan import Budget, Sample
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.data.subset import hold_out, subset
from hetdpt.flow.comparison import work as compare_work
from hetdpt.flow.comparison.compare import GIVEN, CompareConfig, compare_into, read_comparison
from hetdpt.flow.comparison.statistics import difference_of
from hetdpt.flow.comparison.work import Cell, Chosen, ComparisonDone, Timed, Trained, plan_key
from hetdpt.flow.execution import Execution
from hetdpt.flow.recipes import quick, recipe
from hetdpt.measurement.costs import Costs
from hetdpt.report.comparison import COLUMNS, csv_rows, draw
from hetdpt.results import Difference, MethodComparison, from_json
from hetdpt.selection.methods import BY_LAYERS, METHODS
from hetdpt.selection.predictor.samples import CollectConfig, SampleStep
from hetdpt.selection.select import SelectConfig
from hetdpt.store.atomic import write_csv

run = test_cli.run  # the fixture
BRIEF = {"training.epochs": 1, "training.batch_size": 8, "per_class": 4}
PLACE = Execution(minutes=0, batch=1)
TWICE = ("hetdpt", "random")  # the methods of which there are two seeds
# Attention costs ten points a layer and activations one: the predictor takes activations.
SAMPLES = [
    Sample(Budget(attention, activation), 80.0 - 10 * attention - activation)
    for attention, activation in ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (0, 3))
]


def config(**changes: Any) -> CompareConfig:
    settings = {
        "layers": (2,),
        "selection": SelectConfig(search=recipe("search").config.with_settings(BRIEF), images=24),
        "recovery": quick().collection.with_settings({**BRIEF, "training.lr": 1e-3}),
    }
    return CompareConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def data() -> Data:
    """Return a part of the demo set that is soon gone through."""
    demo = open_data("demo")
    assert demo.train is not None
    assert demo.val is not None
    return replace(demo, train=subset(demo.train, per_class=8), val=subset(demo.val, per_class=6))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of three blocks that has seen the demo images for a moment."""
    folder = tmp_path_factory.mktemp("compare")
    training = {"training.epochs": 4, "training.lr": 2e-3, "augmentation.hflip": 0.0, "per_class": 40}
    return test_training_cli.build_trained(folder, quick().collection.with_settings(training))


def compare(
    out: Path, model: nn.Module, data: Data, place: Execution = PLACE, **changes: Any
) -> Iterator[ComparisonDone]:
    for done in compare_into(out, model, data, config(**changes), place, samples=SAMPLES):
        assert not isinstance(done.result, SampleStep)  # nothing is sampled where samples are given
        yield done


@pytest.fixture(scope="module")
def done(home: Path, data: Data) -> list[ComparisonDone]:
    """Return all tasks of a comparison that nobody disturbed: all methods, and then a second seed for some."""
    model = hetdpt.load(home / "dense")
    first = list(compare(home / "whole", model, data))
    return first + list(compare(home / "whole", model, data, methods=TWICE, seeds=2))


@pytest.fixture(scope="module")
def whole(home: Path, done: list[ComparisonDone]) -> MethodComparison:
    return read_comparison(home / "whole")


def rows_of(comparison: MethodComparison) -> dict[Cell, tuple[Any, ...]]:
    """Return what rows say, without times."""
    return {Cell(row.layers, row.method, row.seed): (row.plan, row.start, row.accuracy) for row in comparison.rows}


def own(done: list[ComparisonDone]) -> list[tuple[str, Cell | None]]:
    stages = {Chosen: "choose", Trained: "train", Timed: "time"}
    return [(stages[type(one.result)], one.subject) for one in done if one.is_own]


# what comes out


def test_every_method_has_its_rows(whole: MethodComparison) -> None:
    assert [(row.method, row.seed) for row in whole.rows] == [
        (method, seed) for method in BY_LAYERS for seed in ((0, 1) if method in TWICE else (0,))
    ]
    for row in whole.rows:
        only = METHODS[row.method].only
        assert len(row.plan) == 2
        assert row.plan.removal == "calibrated"
        assert only is None or len(getattr(row.plan, only)) == 2
        assert row.speed.low <= row.speed.speedup <= row.speed.high
    assert {row.split for row in whole.rows if row.method in ("hetdpt", "map+te")} == {"0+2"}
    assert len({row.plan for row in whole.rows}) > 3  # methods differ


def test_an_accuracy_is_that_of_the_plan_after_the_same_fine_tuning(
    whole: MethodComparison, dense: nn.Module, data: Data
) -> None:
    """By hand: calibrated on the same images, trained with the row's seed."""
    row = next(row for row in whole.rows if (row.method, row.seed) == ("random", 1))
    assert data.train is not None
    images = ImageBatches(data.train, preprocessing_of(dense), count=24, seed=1)
    student = hetdpt.calibrate_(deepcopy(dense), row.plan, images)
    settings = config().recovery.with_settings({"training.seed": 1})
    assert [row.start, row.accuracy] == [epoch.last for epoch in hetdpt.recover(student, dense, data, settings)]


def test_the_last_epoch_counts_and_not_the_best(home: Path, whole: MethodComparison) -> None:
    """The best is chosen on the images that accuracies are reported on."""
    found = []
    for row in whole.rows:
        file = home / "whole" / "models" / f"{plan_key(row.plan)}-{row.seed}" / "summary.json"
        found.append(json.loads(file.read_text()))
    assert [row.accuracy for row in whole.rows] == [summary["last"] for summary in found]
    assert any(summary["best"] > summary["last"] for summary in found)


def test_costs_are_those_of_the_merged_and_trimmed_model(whole: MethodComparison, dense: nn.Module) -> None:
    size = (3, 16, 16)
    costs = Costs.of(dense, size)
    assert (whole.dense.macs, whole.dense.params) == (costs.macs, costs.params)
    for row in whole.rows[::3]:
        left = hetdpt.plan_costs(dense, row.plan, size)
        assert (row.speed.macs, row.speed.params) == (left.macs, left.params)
    assert whole.measured == "cpu, float32, batch 1"


def test_equal_plans_are_trained_once(home: Path, done: list[ComparisonDone], whole: MethodComparison) -> None:
    plans = {(row.method, row.seed): row.plan for row in whole.rows}
    assert plans["map+te", 0] == plans["activation-only", 0]  # both take activations of the least transfer entropy
    models = {f"{plan_key(plan)}-{seed}" for (_, seed), plan in plans.items()}
    assert {folder.name for folder in (home / "whole" / "models").iterdir()} == models
    trained = [one for one in done if isinstance(one.result, Trained) and one.subject]
    assert {one.subject for one in trained} == {Cell(2, method, seed) for method, seed in plans}  # all are told of
    assert len([one for one in trained if one.is_own]) == len(models) < len(plans)
    shared = next(o.result for o in trained if o.subject == Cell(2, "activation-only", 0))
    assert isinstance(shared, Trained)
    assert shared.method != "activation-only"


def test_seeds_give_a_spread(whole: MethodComparison) -> None:
    for summary in whole.summaries:
        values = [row.accuracy for row in whole.rows if row.method == summary.method]
        assert list(summary.accuracies) == values
        assert summary.accuracy == pytest.approx(sum(values) / len(values))
        assert summary.spread == (pytest.approx(stdev(values)) if summary.method in TWICE else None)
    assert max(summary.spread or 0 for summary in whole.summaries) > 0


def test_differences_are_to_the_first_method(whole: MethodComparison) -> None:
    first, *others = whole.summaries
    assert (first.method, whole.first, first.difference) == ("hetdpt", "hetdpt", None)
    for summary in others:
        assert summary.difference is not None
        base = [accuracy for seed, accuracy in zip(first.seeds, first.accuracies, strict=True) if seed in summary.seeds]
        assert summary.difference.value == pytest.approx(summary.accuracy - sum(base) / len(base))
        assert summary.difference.low <= summary.difference.value <= summary.difference.high


def test_only_small_files_stay(home: Path, done: list[ComparisonDone]) -> None:
    kept = Counter(file.name for file in (home / "whole").rglob("*") if file.is_file() and file.suffix != ".claim")
    assert set(kept) - {file.name for file in (home / "whole" / "plans").iterdir()} == {
        "run.json", "dense.json", "speed.json", "results.json", "results.csv", "comparison.png",
        "metrics.jsonl", "summary.json", "result.json",
    }  # fmt: skip
    assert not list((home / "whole" / "searches").iterdir())


def test_a_choice_keeps_its_scores(done: list[ComparisonDone]) -> None:
    chosen = {o.subject: o.result for o in done if isinstance(o.result, Chosen)}
    assert len(chosen) == len(BY_LAYERS) + len(TWICE)
    for cell, outcome in chosen.items():
        assert cell is not None
        assert len(outcome.picks) == 2
        assert all(outcome.plan.removes(pick.site) for pick in outcome.picks)
        assert [pick.score == 0 for pick in outcome.picks] == [cell.method == "random"] * 2  # which has none


@pytest.mark.slow
def test_fewer_layers_are_the_beginning_of_more_and_are_not_chosen_again(
    dense: nn.Module, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = [name for name, method in METHODS.items() if method.is_nested]
    assert nested == ["te-static", "attention-only", "activation-only", "random", "calibrated-greedy"]

    def choices(folder: str, layers: tuple[int, ...]) -> dict[tuple[int, str], Chosen]:
        found = compare(tmp_path / folder, dense, data, layers=layers, methods=tuple(nested))
        return {
            (one.subject.layers, one.subject.method): one.result
            for one in found
            if one.subject and isinstance(one.result, Chosen)
        }

    alone = choices("alone", (2,))
    asked: list[int] = []
    really = compare_work.select
    monkeypatch.setattr(
        compare_work,
        "select",
        lambda model, data, count, *more, **kw: (asked.append(count), really(model, data, count, *more, **kw))[1],
    )
    both = choices("both", (3, 2))
    assert asked == [3] * len(nested)
    for method in nested:
        assert both[2, method].plan == alone[2, method].plan
        assert both[2, method].picks == both[3, method].picks[:2]
        assert both[2, method].seconds == both[3, method].seconds


def test_warnings_of_the_split_reach_the_reader(whole: MethodComparison) -> None:
    assert GIVEN in whole.warnings
    assert any(text.startswith("the split of 2 layers: the predictor prefers a corner") for text in whole.warnings)


def test_results_are_json_and_back(home: Path, whole: MethodComparison) -> None:
    text = (home / "whole" / "results.json").read_text()
    assert from_json(MethodComparison, json.loads(text, parse_constant=pytest.fail), home) == whole
    assert json.loads(text) == json.loads(json.dumps(whole.to_dict()))


# more of it, kills and company


def test_it_grows(done: list[ComparisonDone], whole: MethodComparison) -> None:
    """Asked for another seed of some methods, it does what is new, and times all anew so that it is of one session."""
    second = own(done)[[stage for stage, _ in own(done)].index("time") + 1 :]
    new = [Cell(2, method, 1) for method in TWICE]
    assert second == [*((stage, cell) for cell in new for stage in ("choose", "train")), ("time", None)]
    timed = done[-1].result
    assert isinstance(timed, Timed)
    assert set(timed.plans) == {plan_key(row.plan) for row in whole.rows}


def test_it_goes_on_where_it_stopped(whole: MethodComparison, dense: nn.Module, data: Data, tmp_path: Path) -> None:
    """Stopped after some tasks and begun anew: nothing is done twice, and it comes to the same."""
    out, methods = tmp_path / "run", ("attention-only", "random")
    some = list(islice(compare(out, dense, data, methods=methods), 4))  # the generator is dropped
    rest = list(compare(out, dense, data, methods=methods))
    assert [one.is_own for one in rest[:4]] == [False] * 4
    assert len(own(some)) + len(own(rest)) == 2 + 2 * len(methods)  # the dense model and the times
    asked = [Cell(2, method, 0) for method in methods]
    assert rows_of(read_comparison(out)) == {cell: rows_of(whole)[cell] for cell in asked}


class StopError(Exception):
    pass


@pytest.mark.parametrize(
    "stage",
    ["row 1 of 1: hetdpt, 2 layers, seed 0, learning importances", "row 1 of 1: hetdpt, 2 layers, seed 0, fine-tuning"],
)
def test_stopped_within_a_task_it_goes_on_from_the_checkpoint(
    stage: str, whole: MethodComparison, dense: nn.Module, data: Data, tmp_path: Path
) -> None:
    seen: list[int] = []

    def stop(name: str, done: int, total: int) -> None:
        if name == stage:
            seen.append(done)
            if len(seen) == 3:
                raise StopError

    out, only = tmp_path / "run", {"methods": ("hetdpt",)}
    with pytest.raises(StopError):
        list(compare(out, dense, data, replace(PLACE, progress=stop), **only))
    *_, timed = compare(out, dense, data, replace(PLACE, progress=stop), **only)
    assert isinstance(timed.result, Timed)
    assert seen[:4] == [1, 2, 3, 3]  # the update that was not kept is done again, those before it are not
    cell = Cell(2, "hetdpt", 0)
    assert rows_of(read_comparison(out)) == {cell: rows_of(whole)[cell]}
    picks = json.loads((out / "plans" / "2-hetdpt-0.json").read_text())["picks"]
    assert len(picks) == 2


def test_a_damaged_result_is_named(
    home: Path, whole: MethodComparison, dense: nn.Module, data: Data, tmp_path: Path
) -> None:
    out = shutil.copytree(home / "whole", tmp_path / "run")
    file = out / "plans" / "2-random-1.json"
    for damage in ("{}", file.read_text()[:50]):
        file.write_text(damage)
        with pytest.raises(FileError, match="2-random-1.json is damaged .* remove it to have it made again"):
            list(compare(out, dense, data, methods=TWICE, seeds=2))
    file.unlink()
    again = list(compare(out, dense, data, methods=TWICE, seeds=2))
    assert own(again) == [("choose", Cell(2, "random", 1))]  # its model is there
    assert rows_of(read_comparison(out)) == rows_of(whole)


def test_another_question_is_refused(home: Path, whole: MethodComparison, dense: nn.Module, data: Data) -> None:
    out = home / "whole"
    other = replace(config().selection, images=25)
    with pytest.raises(FileError, match="was started with config.selection.images = 24, not 25; give the same to"):
        list(compare(out, dense, data, selection=other))
    with pytest.raises(FileError, match="was started with config.recovery.training.epochs = 1, not 2"):
        list(compare(out, dense, data, recovery=config().recovery.with_settings({"training.epochs": 2})))
    with pytest.raises(FileError, match="was started with batch = 1, not 3"):
        list(compare_into(out, dense, data, config(), Execution(batch=3), samples=SAMPLES))
    with pytest.raises(FileError, match="was started with samples ="):
        list(compare_into(out, dense, data, config(), samples=SAMPLES[1:]))
    assert read_comparison(out) == whole


@pytest.mark.slow
def test_samples_are_collected_on_images_held_out(dense: nn.Module, data: Data, tmp_path: Path) -> None:
    brief = recipe("brief").config.with_settings(BRIEF)
    collection = CollectConfig(recovery=brief, images=24, rounds=(1, 2, 1), fine_tunes=False)
    asked = config(methods=("map+te",), collection=collection)
    found = list(compare_into(tmp_path / "run", dense, data, asked, PLACE))
    sampled = [one for one in found if isinstance(one.result, SampleStep)]
    assert [one.subject.key for one in sampled] == ["dense", "a", "g", "gg", "ag"]
    assert sampled[0].result.accuracy == hetdpt.evaluate(dense, hold_out(data)).top1
    assert json.loads((tmp_path / "run" / "samples" / "run.json").read_text())["images"] == [60, 20]  # of 80
    table = read_comparison(tmp_path / "run")
    assert table.dense.accuracy == hetdpt.evaluate(dense, data).top1
    assert GIVEN not in table.warnings
    again = list(compare_into(tmp_path / "run", dense, data, asked, PLACE))
    assert [one.is_own for one in again] == [False] * len(found)


def test_images_held_out_are_of_every_class_and_not_trained_on(data: Data) -> None:
    held = hold_out(data)
    names = [{split.name_of(index) for index in range(len(split))} for split in (held.train, held.val)]
    assert data.train is not None
    assert names[0] | names[1] == {data.train.name_of(index) for index in range(len(data.train))}
    assert not names[0] & names[1]
    assert Counter(held.val.targets()) == dict.fromkeys(range(10), 2)  # a fifth of 8, rounded
    demo = open_data("demo")
    few = hold_out(replace(demo, train=subset(demo.train, per_class=2)))
    assert Counter(few.val.targets()) == Counter(few.train.targets()) == dict.fromkeys(range(10), 1)
    with pytest.raises(DataError, match="held-out"):
        hold_out(replace(demo, train=None))


# the numbers


def test_a_difference_is_paired() -> None:
    """Two models right on the same 90 of 100 images differ for sure by one more; on others they might not."""
    same, one_more = "1" * 90 + "0" * 10, "1" * 93 + "0" * 7
    found = difference_of([(one_more, same)])
    assert found is not None
    assert found.value == pytest.approx(3)
    assert 0 <= found.low < 3 < found.high < 8
    apart = difference_of([("0" * 7 + "1" * 93, same)])
    assert apart is not None
    assert apart.value == pytest.approx(3)
    assert apart.low < -3  # ten against seven images
    assert difference_of([(same, same)]) == Difference(0, 0, 0)


def test_seeds_that_disagree_widen_the_interval_of_a_difference() -> None:
    right, wrong = "1" * 100, "0" * 100
    found = difference_of([(right, wrong), (wrong, wrong)])
    assert found == Difference(50, 0, 100)  # both seeds the one, or both the other
    assert difference_of([(right, wrong), (right, wrong)]) == Difference(100, 100, 100)


def test_a_difference_over_seeds_and_without_answers() -> None:
    both = difference_of([("11", "01"), ("11", "11")])
    assert both is not None
    assert both.value == 25  # half an image of two
    assert difference_of([("11", "0-"), ("11", "11")]).value == 50  # type: ignore[union-attr]
    assert difference_of([(None, "11")]) is None
    assert difference_of([("--", "11")]) is None


# tables, figures, commands


def test_csv_and_figure(whole: MethodComparison, tmp_path: Path) -> None:
    write_csv(tmp_path / "results.csv", COLUMNS, csv_rows(whole))
    with (tmp_path / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [(line["method"], int(line["seed"]), line["split"]) for line in lines] == [
        (row.method, row.seed, row.split) for row in whole.rows
    ]
    for line, row in zip(lines, whole.rows, strict=True):
        assert line["activation"] == " ".join(map(str, row.plan.activation))
        assert (float(line["accuracy"]), float(line["speedup"])) == (row.accuracy, row.speed.speedup)
        assert float(line["macs_part"]) == row.speed.macs / whole.dense.macs < 1
    draw(whole, tmp_path / "comparison.png")
    assert size_of(tmp_path / "comparison.png") > (1000, 600)
    draw(whole, tmp_path / "comparison.svg")
    text = (tmp_path / "comparison.svg").read_text()
    for word in (*BY_LAYERS, "dense", "0+2", "standard deviation over 2 seeds", "cpu, float32, batch 1"):
        assert f"<!-- {word}" in text or word in text, word
    with pytest.raises(FileError, match="ends in .png or .svg, but comparison.pdf does not"):
        draw(whole, tmp_path / "comparison.pdf")


def test_what_cannot_be_is_left_out_and_told(dense: nn.Module, data: Data, tmp_path: Path) -> None:
    found = list(compare(tmp_path / "run", dense, data, layers=(4,), methods=("activation-only", "random")))
    assert {one.subject.method for one in found if one.subject} == {"random"}
    text = "activation-only has no row for 4 layers: this model has 3 removable activation layers"
    assert read_comparison(tmp_path / "run").warnings == (text,)
    for methods, layers in ((("activation-only",), 4), (("random",), 7)):
        with pytest.raises(PlanError, match="this model has only 3 attention and 3 activation layers"):
            list(compare(tmp_path / "other", dense, data, layers=(layers,), methods=methods))
    with pytest.raises(PredictError, match="give samples, or how to collect"):
        list(compare_into(tmp_path / "other", dense, data, config()))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": ()}, "one number or more"),
        ({"layers": (2, 2)}, "each once"),
        ({"layers": (0,)}, "from 1 on"),
        ({"methods": ()}, "methods are"),
        ({"methods": ("hetdpd",)}, "no method is called 'hetdpd'; did you mean hetdpt?"),
        ({"seeds": 0}, "seeds is 0"),
        (
            {"collection": CollectConfig(recovery=quick().collection, removal="plain")},
            "sampled with removal 'plain', but layers removed with 'calibrated'",
        ),
    ],
)
def test_contradictions(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        config(**changes)


OPTIONS = (
    "--data", "demo", "--layers", "2", "--epochs", "1", "--batch-size", "8", "--per-class", "4", "--images", "24",
    "--workers", "0", "--batch", "1", *test_training_cli.PLAIN,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--layers", "two"), "--layers: expected a whole number, got 'two'; hetdpt compare --help lists all options"),
        (
            ("--candidates", "some"),
            "--candidates: 'some' is not one of 'all', 'te'; hetdpt compare --help lists all options",
        ),
    ],
)
def test_bad_options(options: tuple[str, ...], text: str, run: Run, home: Path, tmp_path: Path) -> None:
    run("compare", home / "dense", "--out", tmp_path / "run", *OPTIONS, *options).is_refused(text)
    assert not (tmp_path / "run").exists()


def test_samples_of_another_model(run: Run, home: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    asked = {"blocks": 12, "config": asdict(CollectConfig(recovery=quick().collection))}
    (samples / "run.json").write_text(json.dumps(asked))
    result = run("compare", home / "dense", "--out", tmp_path / "run", *OPTIONS, "--samples", samples)
    result.is_refused(f"{samples} was collected from a model with 12 blocks, but this one has 3; give its samples")


def test_the_command(run: Run, home: Path, tmp_path: Path) -> None:
    """Samples come from a file, as --samples takes one; JSON first, then the same command in words."""
    file, out = tmp_path / "samples.csv", tmp_path / "run"
    lines = [f"{s.budget.attention},{s.budget.activation},{s.accuracy}" for s in SAMPLES]
    file.write_text("\n".join(["attention,activation,accuracy", *lines]))
    command = ("compare", home / "dense", "--out", out, *OPTIONS, "--methods", "map+te,random", "--samples", file)
    found = run(*command, "--json").values
    first, second = found["summaries"]
    assert (first["layers"], first["method"], first["splits"], first["difference"]) == (2, "map+te", ["0+2"], None)
    assert (second["method"], second["spread"]) == ("random", None)
    assert {file.name for file in out.iterdir()} >= {"results.json", "results.csv", "comparison.png"}
    assert size_of(out / "comparison.png") > (1000, 600)
    settings = json.loads((out / "run.json").read_text())["config"]
    assert settings["selection"]["search"]["per_class"] == settings["recovery"]["per_class"] == 4
    words = run(*command)
    assert words.code == 0
    assert "2 layers, map+te, seed 0: removes attention none, activation" in words.out
    assert "(done before, or by another process)" in words.out
    assert f"written to {out}: results.json, results.csv, comparison.png" in words.out
    assert f"warning: {GIVEN}" in words.err


@pytest.mark.slow
def test_processes_share_the_tasks(home: Path, tmp_path: Path) -> None:
    """Two of the same command at once, all methods, samples collected: each task is done once, both tell the same."""
    out = tmp_path / "run"
    command = [str(part) for part in (SCRIPT, "compare", home / "dense", "--out", out, *OPTIONS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=env, **pipes) for _ in range(2)]
    told = []
    for process in processes:
        words, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        told.append([line for line in words.splitlines() if line.startswith(("sample ", "2 layers, ", "timed: "))])
    others = "(done before, or by another process)"
    for name in {line.removesuffix(f" {others}") for line in told[0]}:
        if "which chose the same" not in name:
            assert sum(f"{name} {others}" not in lines for lines in told) == 1, name
    assert len(read_comparison(out).rows) == len(BY_LAYERS)
