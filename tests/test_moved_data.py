"""Data is known by what it is, not by where it lies: what was begun goes on after a move, and other data is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import test_tasks
import test_training_cli
from torch import nn

import hetdpt
from hetdpt.core.errors import FileError, PredictError
from hetdpt.core.plan import Budget, Plan
from hetdpt.data.sources import Data, open_data
from hetdpt.data.streams import Stream
from hetdpt.flow.collection.collect import collect_into, recheck_into
from hetdpt.flow.comparison.compare import CompareConfig, compare_into
from hetdpt.flow.config import RunConfig
from hetdpt.flow.execution import Execution
from hetdpt.flow.resumable import recover_into, select_into
from hetdpt.flow.stages.stage import Event
from hetdpt.selection.predictor.samples import CollectConfig
from hetdpt.selection.select import SelectConfig
from hetdpt.store.stage_directory import read_stages
from hetdpt.studies.observe import ObserveConfig, observe_into
from hetdpt.studies.tokens import TokensConfig, tokens_into
from hetdpt.studies.transfer import TransferConfig, transfer_into
from hetdpt.tasks.run import learn_into
from hetdpt.tasks.table import TASKS
from hetdpt.training.recover import RecoverConfig

PLAN = Plan(attention=(1,), activation=(2,), removal="calibrated")
BRIEF = RecoverConfig().with_settings({"training.epochs": 2, "training.batch_size": 8, "augmentation.repeats": 1})
COLLECT = CollectConfig(recovery=BRIEF, rounds=(1, 1, 1), images=8)
SELECT = SelectConfig(search=BRIEF, images=8)
Job = Callable[[Path, nn.Module, str], Iterator[Any]]


class KilledError(Exception):
    """Ends a command that is under way."""


def choose(out: Path, model: nn.Module, data: str) -> Iterator[Any]:
    """Choose layers, and yield once the search has kept a state."""

    def stop(text: str, done: int, total: int) -> None:
        if list(Path(f"{out}.partial").rglob("*.pt")):
            raise KilledError

    with suppress(KilledError):
        select_into(out, model, data, Budget(1, 1), "hetdpt", SELECT, Execution(minutes=0, progress=stop))
    yield None


def recover(out: Path, model: nn.Module, data: str) -> Iterator[Any]:
    return recover_into(out, deepcopy(model), model, data, BRIEF, Execution(minutes=0), plan=PLAN, calibration=8)


def learn(task: str, out: Path, data: str) -> Iterator[Any]:
    return learn_into(out, test_tasks.backbone(), TASKS[task].open(data), test_tasks.config(task), minutes=0)


def compare(out: Path, model: nn.Module, data: str) -> Iterator[Any]:
    config = CompareConfig(layers=(1,), methods=("random",), selection=SELECT, recovery=BRIEF)
    return compare_into(out, model, data, config)


JOBS: dict[str, Job] = {
    "collect": lambda out, model, data: collect_into(out, model, data, COLLECT),
    "recover": recover,
    "select": choose,
    "compare": compare,
    "observe": lambda out, model, data: observe_into(out, model, data, ObserveConfig(recovery=BRIEF, blocks=())),
    "tokens": lambda out, model, data: tokens_into(out, {"dense": model}, data, TokensConfig(r=(1,), runs=5)),
    "transfer": lambda out, model, data: transfer_into(
        out, {"dense": model}, data, TransferConfig(mode="probe"), {"plan": PLAN}
    ),
    "detection": lambda out, model, data: learn("detection", out, data),
    "segmentation": lambda out, model, data: learn("segmentation", out, data),
}


def write_images(folder: Path) -> None:
    """Write four images of each of ten classes to train on, and two to measure on."""
    demo = open_data("demo").train
    for label in range(10):
        own = [index for index, target in enumerate(demo.targets()) if target == label]
        for number, index in enumerate(own[:6]):
            place = folder / ("train" if number < 4 else "val") / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            demo[index][0].save(place / f"{number}.png")


def write_data(job: str, folder: Path) -> str:
    test_tasks.WRITERS.get(job, write_images)(folder)
    return str(folder)


def rename_images(folder: Path) -> None:
    """Make other data of the data in ``folder``: in each split and class an image has another name."""
    for split in ("train", "val"):
        for place in {file.parent for file in (folder / split).rglob("*.png")}:
            [first, *_] = sorted(place.glob("*.png"))
            first.rename(place / "z.png")
            for boxes in folder.rglob(f"instances_{split}.json"):
                boxes.write_text(boxes.read_text().replace(f'"{first.name}"', '"z.png"'))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_training_cli.build(tmp_path_factory.mktemp("dense") / "dense")


def begin(job: Job, out: Path, model: nn.Module, data: str) -> None:
    """Do the first two steps of ``job``, so that there is something to go on from."""
    with closing(job(out, model, data)) as steps:
        list(islice(steps, 2))


@pytest.mark.parametrize("name", JOBS)
def test_what_was_begun_goes_on_where_the_data_lies_now(name: str, dense: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", write_data(name, tmp_path / "images")
    begin(JOBS[name], out, hetdpt.load(dense), data)
    shutil.move(data, tmp_path / "moved")
    begin(JOBS[name], out, hetdpt.load(dense), str(tmp_path / "moved"))
    rename_images(tmp_path / "moved")
    with pytest.raises(FileError, match=r"was started with data\.\S+ = "):
        begin(JOBS[name], out, hetdpt.load(dense), str(tmp_path / "moved"))


def test_a_recheck_too(dense: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "out", write_data("recheck", tmp_path / "images")
    begin(JOBS["collect"], out, hetdpt.load(dense), data)
    shutil.move(data, tmp_path / "moved")
    assert next(recheck_into(out, [Budget(1, 0)], str(tmp_path / "moved")))
    rename_images(tmp_path / "moved")
    with pytest.raises(PredictError, match="was collected on other data: data.names = "):
        next(recheck_into(out, [Budget(0, 1)], str(tmp_path / "moved")))


@pytest.mark.parametrize(
    ("stage", "goal"),
    [
        pytest.param("collect", {"layers": 2, "rounds": [1, 1, 1]}, marks=pytest.mark.slow),
        ("recover", {"budget": [1, 1]}),
    ],
)
def test_a_run_goes_on_in_the_midst_of_a_stage(stage: str, goal: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    data = write_data("run", tmp_path / "images")
    parts = ("collection", "search", "recovery")
    small = {f"{part}.{name}": value for part in parts for name, value in
             {"training.epochs": 2, "training.batch_size": 8}.items()}  # fmt: skip
    given = {
        "model": str(dense),
        "out": tmp_path / "run",
        "images": 16,
        "batch": 1,
        "checkpoint_minutes": 0.0,
        **goal,
        **small,
    }

    def stop(event: Event) -> None:
        if event.stage == stage and event.kind == "progress" and list((tmp_path / "run").rglob("*.pt")):
            raise KilledError

    with pytest.raises(KilledError):
        hetdpt.run(RunConfig.resolve(changes={**given, "data": data}), watch=stop, until=stage)
    shutil.move(data, tmp_path / "moved")
    config = RunConfig.resolve(changes={**given, "data": str(tmp_path / "moved")})
    hetdpt.run(config, until=stage)
    assert read_stages(config.out)[-1].is_done
    rename_images(tmp_path / "moved")
    with pytest.raises(FileError, match=r"the stage analyse .* was begun with inputs\.data\.names = "):
        hetdpt.run(config, until=stage)


def test_the_order_of_a_stream_is_decided_by_the_workers_too(tmp_path: Path) -> None:
    stream = Stream(tmp_path, "train", ("a", "b"), ("0.tar",), (4,))
    data, demo = Data("wds/x", stream, None, 2), open_data("demo")
    assert data.facts(1) != data.facts(2)
    assert demo.facts(1) == demo.facts(2)
