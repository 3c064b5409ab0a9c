"""No setting changes what a stage of a run comes to without changing what the stage is known by."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import test_training_cli
import torch

import hetdpt
from hetdpt.core.errors import HetDPTError
from hetdpt.core.goals import GOALS
from hetdpt.flow import pipeline
from hetdpt.flow.config import RunConfig
from hetdpt.flow.stages.stage import DATA, EVERY_STAGE, MODEL, SAMPLES, RunContext, Stage
from hetdpt.results import Price
from hetdpt.store.settings import setting_types

GIVEN = {
    **dict.fromkeys(("model", "weights", "pretrained", "num_classes", "img_size"), MODEL),
    **dict.fromkeys(("data", "data_root", "download"), DATA),
    "samples": SAMPLES,
}
"""What the inputs are opened from that are no stages; those are known by their content."""
PLACE = ("out", "workers", "checkpoint_minutes")
"""Where a run works and how often it writes."""
REFUSED = (*GOALS, "budget", "plus", "width", "tokens")
HARMLESS = {
    **{("analyse", name): "what cannot be reached is refused, nothing else" for name in REFUSED},
    ("analyse", "method"): "as above, and it is known by tail_goal, by which a method lets it choose a tail",
    **{("balance", name): "layers are chosen by damage there, without a search" for name in ("candidates", "explores")},
}
"""What a stage reads although it does not change what the stage comes to, and why."""
UNNAMED = {("collect", "analyse"): "the prices of layers are written beside the samples, for hetdpt predict"}
"""Results that a stage reads although they do not change what it comes to, and why."""

TRAINING: dict[str, Any] = {
    "epochs": 3, "minutes": 3.0, "batch_size": 4, "accumulate": 2, "optimizer": "sgd", "lr": 1e-3, "lr_batch": 64,
    "final_lr": 0.5, "schedule": "poly", "warmup_epochs": 0.5, "decay_epochs": 7.0, "weight_decay": 0.01,
    "layer_decay": 0.7, "backbone_lr": 0.5, "momentum": 0.5, "clip_grad": 2.0, "mixup": 0.3, "cutmix": 0.3,
    "mix_prob": 0.3, "smoothing": 0.3, "ema_decay": 0.5, "ema_warmup": True, "precision": "float32", "seed": 7,
}  # fmt: skip
AUGMENTATION: dict[str, Any] = {
    "auto_augment": "rand-m1-mstd0.5-inc1", "color_jitter": 0.7, "erasing": 0.7, "scale": (0.3, 0.9),
    "ratio": (0.9, 1.1), "hflip": 0.1, "repeats": 2, "views": 1,
}  # fmt: skip
RECOVERY: dict[str, Any] = {
    **{f"training.{name}": value for name, value in TRAINING.items()},
    **{f"augmentation.{name}": value for name, value in AUGMENTATION.items()},
    "distillation.kind": "hard", "distillation.alpha": 0.3, "distillation.temperature": 3.0,
    "distillation.hidden": 2.0, "drop_path": 0.3, "hold_out": 0.2,
    "train_merged": True, "cache_teacher": True, "fraction": 0.5, "per_class": 5,
}  # fmt: skip
ANOTHER: dict[str, Any] = {
    "model": "other", "weights": Path("w.pt"), "pretrained": True, "num_classes": 3, "img_size": 32, "data": "other",
    "data_root": Path("root"), "download": True, "samples": Path("s.csv"),
    "out": Path("elsewhere"), "device": "mps", "workers": 3, "checkpoint_minutes": 3.0,
    **{name: "70%" if goal.is_cost else goal.parse(goal.example).value for name, goal in GOALS.items()},
    "budget": (0, 2), "method": "map+te", "class_token": "share", "tail": 2, "trim": False,
    "compare": ("te-static",), "removal": "plain", "images": 32, "rounds": (1, 1, 1), "candidates": "te",
    "explores": False, "moves": ("tail", "features"),
    "plus": True, "depths": (1,), "tokens": "tome:3", "keep": "last", "export": ("onnx",),
    "onnx": True, "batch": 2,
    "width.importance": "l2", "width.round_to": 2, "width.shares": (0.5, 1.0, 1.0, 0.5), "width.refits": False,
    "width.seed": 7,
    **{f"{part}.{name}": value for part in ("collection", "search", "recovery") for name, value in RECOVERY.items()},
}  # fmt: skip
"""Another value for every setting; one that has none here fails below."""
NEEDS: dict[str, dict[str, Any]] = {
    "repeats": {"training.mixup": 0.0},
    "cache_teacher": {
        "augmentation.views": 1, "augmentation.repeats": 1, "training.mixup": 0.0, "training.cutmix": 0.0,
        "distillation.kind": "soft",
    },
    "views": {"augmentation.repeats": 1}, "fraction": {"per_class": None},
}  # fmt: skip
"""Settings of the same table without which another value is refused."""

SMALL = {"training.epochs": 1, "training.batch_size": 8, "training.lr": 5e-4, "per_class": 2}
CHANGES = {f"{part}.{name}": value for part in ("collection", "search", "recovery") for name, value in SMALL.items()}
SAMPLED = {"rounds": [2, 2, 1]}
FLOWS: dict[str, dict[str, Any]] = {
    "layers": {"layers": 2, "compare": ["random"]},
    "speedup": {"speedup": 1.001, "search.training.epochs": 8, **SAMPLED},  # an update for each layer, of any number
    "budget": {"budget": [1, 1]},
    "method": {"layers": 1, "method": "te-static"},
    "goal": {"macs": "60%", "method": "calibrated-greedy", "tail": None},
    "mixed": {"macs": "60%"},
    "width": {"plus": True, "macs": "60%", "depths": [0], "tokens": "tome:2", **SAMPLED},
    "layers and width": {"plus": True, "layers": 1, "params": "60%", **SAMPLED},
}
"""Runs that together have all stages, and of each its ways."""
SLOW = ("layers", "method", "goal", "mixed", "speedup", "budget", "width", "layers and width")
NAMES = {one.name for one in fields(RunConfig)}


class Watched:
    """A configuration that notes which of its settings are read."""

    def __init__(self, config: RunConfig, read: set[str]) -> None:
        self._config, self._read = config, read

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            self._read.add(name)
            return getattr(self._config, name)
        found = getattr(RunConfig, name)
        return found.fget(self) if isinstance(found, property) else MethodType(found, self)

    def with_numbers(self, dense: Price) -> Watched:
        return Watched(self._config.with_numbers(dense), self._read)  # a copy reads all settings, which says nothing


class WatchedResults(dict[type, Any]):
    """Results of stages that note of which stages they are read."""

    def __init__(self, results: dict[type, Any], read: set[str]) -> None:
        super().__init__(results)
        self._read, self._names = read, {stage.result: stage.name for stage in pipeline.FLOW}

    def __getitem__(self, kind: type) -> Any:
        self._read.add(self._names[kind])
        return super().__getitem__(kind)

    def get(self, kind: type, default: Any = None) -> Any:
        self._read.update({self._names[kind]} if kind in self else ())
        return super().get(kind, default)


def watched(stage: Stage[Any], settings: set[str], results: set[str]) -> Stage[Any]:
    """Return ``stage`` so that it notes what it reads."""

    def run(context: RunContext) -> Any:
        config: Any = Watched(context.config, settings)
        return stage.run(replace(context, config=config, results=WatchedResults(context.results, results)))

    found = copy(stage)
    vars(found)["run"] = run
    return found


def asked(home: Path, flow: str, **changes: Any) -> RunConfig:
    given = {"model": str(home / "dense"), "data": "demo", "out": home / flow, "images": 16, "batch": 1}
    return RunConfig.resolve(changes={**given, **CHANGES, **FLOWS[flow], **changes})


def known_by(stage: Stage[Any], config: RunConfig) -> Any:
    """Return what of ``config`` ``stage`` is known by: settings, and which inputs there are."""
    if not stage.is_needed(config):
        return None
    names = [one.name for one in pipeline.stages_of(config)]
    return stage.asked_of(config, {})["settings"], [name for name in names if name in inputs_of(stage)]


def inputs_of(stage: Stage[Any]) -> set[str]:
    """Return the inputs of a stage by name."""
    names = [one.name for one in pipeline.FLOW]
    return {*names[: names.index(stage.name)]} if EVERY_STAGE in stage.inputs else {*stage.inputs}


def behind(name: str) -> set[str]:
    """Return all that decides what the stage ``name`` comes to by its inputs, and by theirs."""
    stages = {stage.name: stage for stage in pipeline.FLOW}
    found = inputs_of(stages[name]) if name in stages else set()
    return found.union(*map(behind, found))


def pair(home: Path, flow: str, name: str) -> tuple[RunConfig, RunConfig] | None:
    """Return two configurations that differ in the setting ``name`` alone; None where the flow does not take it."""
    table, leaf = name.partition(".")[0], name.rpartition(".")[2]
    beside = {f"{table}.{other}": value for other, value in NEEDS.get(leaf, {}).items()}
    other = False if FLOWS[flow].get(name) is True else ANOTHER[name]
    try:
        found = asked(home, flow, **beside), asked(home, flow, **beside, **{name: other})
    except HetDPTError:
        return None
    return found if found[0] != found[1] else None


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fingerprints")
    test_training_cli.build(folder / "dense")
    return folder


def test_every_setting_can_be_changed(home: Path) -> None:
    leaves = {name for name, kind in setting_types(RunConfig).items() if not is_dataclass(kind)}
    assert ANOTHER.keys() == leaves, "give each setting another value"
    for name in ANOTHER:
        assert any(pair(home, flow, name) for flow in FLOWS), f"no run takes another {name}"


def test_samples_are_known_by_the_layers_they_are_to_reach(home: Path) -> None:
    [collect] = [stage for stage in pipeline.FLOW if stage.name == "collect"]
    assert known_by(collect, asked(home, "layers")) != known_by(collect, asked(home, "layers", layers=5))
    two, five = (asked(home, "layers", layers=layers, **SAMPLED) for layers in (2, 5))
    assert known_by(collect, two) == known_by(collect, five), "where rounds are given, they say how far samples reach"


@pytest.mark.parametrize("flow", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FLOWS])
def test_a_setting_that_a_stage_reads_is_one_it_is_known_by(
    home: Path, flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that is done anew takes all after it along, so that an earlier one may be known by the setting."""
    settings, results = ({stage.name: set[str]() for stage in pipeline.FLOW} for _ in range(2))
    monkeypatch.setattr(
        pipeline, "FLOW", tuple(watched(one, settings[one.name], results[one.name]) for one in pipeline.FLOW)
    )
    config = asked(home, flow)
    hetdpt.run(config)
    monkeypatch.setattr("hetdpt.flow.stages.stage.find_device", lambda name: torch.device(name or "cpu"))
    faults = []
    for name in ANOTHER:
        top, two = name.partition(".")[0], pair(home, flow, name)
        for stage in pipeline.FLOW if two else ():
            if known_by(stage, two[0]) != known_by(stage, two[1]):
                break  # what follows is done anew with it
            is_given = top in PLACE or GIVEN.get(top) in behind(stage.name)
            if top in settings[stage.name] and not is_given and (stage.name, top) not in HARMLESS:
                faults.append(f"{stage.name} reads {top}, but is not known by {name}")
    assert not faults
    for name in (stage.name for stage in pipeline.stages_of(config)):
        unnamed = {one for one in results[name] - behind(name) if (name, one) not in UNNAMED}
        assert not unnamed, f"{name} uses results that are not among its inputs"
