"""The two observations: what is measured is what it is called, kills change nothing, and all of it can be looked at."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_cli
import test_training_cli
import torch
from PIL import Image
from test_cli import SCRIPT, Run
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, FileError, PlanError, TrainError
from hetdpt.core.plan import Plan, Site
from hetdpt.data.batches import TrainingBatches
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import open_data
from hetdpt.data.subset import subset
from hetdpt.flow.execution import Execution
from hetdpt.flow.recipes import brief
from hetdpt.report.observation import COLUMNS, draw
from hetdpt.results import Asymmetry, Disparity, Gradient, Observations, from_json
from hetdpt.store.queue import Claim
from hetdpt.studies.heterogeneity import accuracies_without, gradient_disparity
from hetdpt.studies.observe import ObserveConfig, Observed, observe_into, read_results
from hetdpt.training.recover import RecoverConfig

run = test_cli.run  # the fixture
DATA = open_data("demo")
SETTINGS = {"training.epochs": 2, "training.batch_size": 16, "training.lr": 1e-3, "per_class": 8}
OPTIONS = (
    "--data", "demo", "--epochs", 2, "--batch-size", 16, "--lr", 1e-3, "--per-class", 8, "--images", 24, "--blocks", 1,
    "--gradient-epochs", 2, "--workers", 0,
)  # fmt: skip
LAYERS = [f"{removal}-{kind}-1" for removal in ("calibrated", "plain") for kind in ("activation", "attention")]


def recovery(**changes: Any) -> RecoverConfig:
    return brief().config.with_settings({**SETTINGS, "training.lr_batch": None, **changes})


def config(**changes: Any) -> ObserveConfig:
    return ObserveConfig(**{"recovery": recovery(), "blocks": (1,), "images": 24, "gradient_epochs": 2, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of two blocks that has seen the demo images for a moment."""
    folder = tmp_path_factory.mktemp("observe")
    training = recovery(**{"training.epochs": 2, "training.warmup_epochs": 0.2, "per_class": 30})
    return test_training_cli.build_trained(folder, training, DATA, depth=2)


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """Return the directory of an observation that nobody disturbed."""
    list(observe_into(home / "whole", hetdpt.load(home / "dense"), DATA, config()))
    return home / "whole"


def images_for(model: nn.Module, count: int = 24) -> ImageBatches:
    assert DATA.train is not None
    return ImageBatches(DATA.train, preprocessing_of(model), count=count)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


# gradients


def replacement(model: nn.Module, site: Site, removal: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return the module that a mask is on, and what takes its place."""
    if removal == "plain":
        return (site.path, torch.zeros_like) if site.kind == "attention" else (site.path, lambda x: x)
    plan = Plan(**{site.kind: (site.block,)}, removal=removal)  # type: ignore[arg-type]
    left = hetdpt.calibrate_(deepcopy(model), plan, images_for(model)).requires_grad_(False)
    path = f"blocks.{site.block}.{'attn' if site.kind == 'attention' else 'mlp'}"
    return path, left.get_submodule(path)


def gradients_by_hand(model: nn.Module, settings: RecoverConfig, removal: str) -> Tensor:
    """Return d loss / d m by autograd, for each batch of the first epoch and each site with a mask m of 1."""
    assert DATA.train is not None
    source = subset(DATA.train, per_class=settings.per_class, seed=0)
    batches = TrainingBatches(source, preprocessing_of(model), settings.augmentation, batch_size=16, seed=0)
    wanted = [replacement(model, site, removal) for site in hetdpt.sites(model)]
    masks = [torch.ones((), requires_grad=True) for _ in wanted]

    def masked(mask: Tensor, other: Callable[[Tensor], Tensor]) -> Any:
        return lambda _, args, y: mask * y + (1 - mask) * other(args[0])

    for (path, other), mask in zip(wanted, masks, strict=True):
        model.get_submodule(path).register_forward_hook(masked(mask, other))
    model.train()
    losses = [nn.functional.cross_entropy(model(batch.images), batch.targets) for batch in batches.epoch(0)]
    return torch.tensor([torch.autograd.grad(loss, masks) for loss in losses], dtype=torch.float64)


@pytest.mark.parametrize("removal", ["plain", "calibrated"])
def test_what_is_taken_down_are_the_gradients_of_the_masks(removal: str, dense: nn.Module) -> None:
    """With weights that stay as they are, the mean over the updates is that over the batches, by hand."""
    settings = recovery(**{"training.epochs": 1, "training.lr": 1e-12})
    found = gradient_disparity(dense, DATA, settings, removal, images_for(dense))
    by_hand = gradients_by_hand(deepcopy(dense), settings, removal)
    assert [layer.site for layer in found.layers] == hetdpt.sites(dense)
    assert (found.updates, found.batch, len(by_hand)) == (5, 16, 5)
    magnitudes, means = by_hand.abs().mean(0).tolist(), by_hand.mean(0).tolist()
    # float32 sums over all values of a layer, in another order
    assert [layer.magnitude for layer in found.layers] == pytest.approx(magnitudes, rel=1e-3)
    assert [layer.mean for layer in found.layers] == pytest.approx(means, rel=1e-3, abs=1e-3 * max(magnitudes))
    assert magnitudes != pytest.approx(list(map(abs, means)), rel=0.1)  # that of a mean would be something else


def test_every_epoch_has_its_own_gradients_and_the_model_stays(dense: nn.Module) -> None:
    before = deepcopy(dense.state_dict())
    one, two = (
        gradient_disparity(dense, DATA, recovery(**{"training.epochs": n}), "plain", images_for(dense)) for n in (1, 2)
    )
    assert (one.epochs, two.epochs, one.updates, two.updates) == (1, 2, 5, 5)
    assert all(layer.magnitudes[0] != layer.magnitudes[1] for layer in two.layers)
    assert dense.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


def inert(model: nn.Module) -> list[Site]:
    """Make one layer of each kind count for nothing, also while it trains, and return them."""
    for linear in (model.blocks[0].attn.proj, model.blocks[1].mlp.fc2):  # type: ignore[union-attr,index]
        for parameter in linear.parameters():
            parameter.requires_grad_(False).zero_()
    return [site for site in hetdpt.sites(model) if (site.kind, site.block) in (("attention", 0), ("activation", 1))]


def test_an_inert_layer_has_no_gradient_and_its_removal_loses_nothing(dense: nn.Module) -> None:
    idle = inert(dense)
    found = gradient_disparity(dense, DATA, recovery(), "plain", images_for(dense))
    assert [layer.site for layer in found.layers if layer.magnitude == 0] == idle
    whole = hetdpt.evaluate(dense, DATA).top1
    starts = {
        site: next(accuracies_without(dense, site, DATA, recovery(), "plain", images_for(dense)))
        for site in hetdpt.sites(dense)
    }
    assert {starts[site] for site in idle} == {(0, whole)}
    assert any(start != (0, whole) for site, start in starts.items() if site not in idle)


# the whole of it


def test_an_observation_is_complete(whole: Path, home: Path, dense: nn.Module) -> None:
    assert names(whole) == [
        "accuracy", "claims", "gradients", "layers", "results.csv", "results.json", "results.png", "run.json", "steps",
    ]  # fmt: skip
    assert not names(whole / "steps")
    assert names(whole / "gradients") == ["calibrated.json", "plain.json"]
    assert names(whole / "layers") == [f"{name}.json" for name in LAYERS]
    found = read_results(whole)
    values = json.loads((whole / "results.json").read_text(), parse_constant=pytest.fail)
    assert from_json(Observations, values, whole) == found
    assert found.dense == hetdpt.evaluate(dense, DATA).top1
    assert found.removals == ("plain", "calibrated")
    assert [one.epochs for one in found.disparities] == [2, 2]
    for removal in found.removals:
        assert [len(row.accuracies) for kind in ("attention", "activation") for row in found.of(removal, kind)] == [
            3,
            3,
        ]  # type: ignore[arg-type]


@pytest.mark.parametrize("removal", ["plain", "calibrated"])
def test_accuracies_are_those_of_a_recovery(removal: str, whole: Path, dense: nn.Module) -> None:
    site = hetdpt.sites(dense)[-1]
    plan, student = Plan(activation=(1,), removal=removal), deepcopy(dense)
    student = (
        hetdpt.prune_(student, plan) if removal == "plain" else hetdpt.calibrate_(student, plan, images_for(dense))
    )
    accuracies = tuple(epoch.last for epoch in hetdpt.recover(student, dense, DATA, recovery()))
    (row,) = read_results(whole).of(removal, "activation")
    assert row == Asymmetry(site, removal, accuracies)  # type: ignore[arg-type]


def test_gradients_alone_and_more_later(home: Path, dense: nn.Module, whole: Path, tmp_path: Path, run: Run) -> None:
    """What is there is not done again when more is asked for, and a pair of styles has its name."""
    pair = ("linear", "calibrated")
    first = list(observe_into(tmp_path / "run", dense, DATA, config(removals=(pair,), blocks=())))
    assert [(one.subject.part, one.subject.key) for one in first] == [("gradients", "linear-calibrated")]
    assert not (tmp_path / "run" / "layers").exists()
    found = read_results(tmp_path / "run")
    assert (found.dense, found.removals, found.asymmetries) == (None, (pair,), ())
    more = list(observe_into(tmp_path / "run", dense, DATA, config(removals=("plain",), blocks=())))
    assert [(one.subject.key, one.is_own) for one in more] == [("plain", True)]
    found = read_results(tmp_path / "run")
    assert found.removals == ("plain", pair)
    assert found.disparities[0] == read_results(whole).disparities[0]
    assert [row["removal"] for row in table(tmp_path / "run")] == ["plain"] * 4 + ["linear,calibrated"] * 4
    options = [option for option in OPTIONS if option not in ("--blocks", 1)]
    command = ("observe", home / "dense", "--out", tmp_path / "run", *options, "--no-recovery", "--removal")
    result = run(*command, "linear,calibrated")
    assert (result.code, result.err) == (0, "")
    assert "points lost" not in result.out
    assert "after 2 epochs" not in result.out
    assert len(re.findall(r"^│ [01] ", result.out, re.MULTILINE)) == 4


# kills and company


class Stop(Exception):  # noqa: N818
    """Ends an observation in the middle."""


def test_stopped_in_the_gradients_it_comes_to_the_same(dense: nn.Module, whole: Path, tmp_path: Path) -> None:
    updates: list[int] = []

    def stop(stage: str, done: int, _: int) -> None:
        updates.append(done)
        if (stage, done) == ("1 of 1: gradients, plain removal, training", 7):
            raise Stop

    observed = config(blocks=(), removals=("plain",))
    with pytest.raises(Stop):
        list(observe_into(tmp_path / "run", dense, DATA, observed, Execution(minutes=0, progress=stop)))
    told = Execution(progress=lambda _, done, __: updates.append(-done))
    (again,) = observe_into(tmp_path / "run", dense, DATA, observed, told)
    assert next(-done for done in updates if done < 0) > 1  # what was kept is not done again
    assert again.result == read_results(whole).disparities[0]


@pytest.mark.slow
def test_killed_in_a_fine_tuning_it_comes_to_the_same(home: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for file in [*out.glob("layers/calibrated*"), *out.glob("results.*")]:
        file.unlink()
    done = {file: file.stat().st_mtime_ns for file in out.glob("*/*.json")}
    command = [str(part) for part in (SCRIPT, "observe", home / "dense", "--out", out, *OPTIONS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([*command, "--checkpoint-minutes", "0", "--quiet"], env=environment)
    checkpoints = out / "steps" / "layers-calibrated-attention-1" / "checkpoints"
    deadline = time.monotonic() + 120
    while len(list(checkpoints.glob("0*.pt"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    updates: list[int] = []
    place = Execution(
        progress=lambda stage, now, _: (
            updates.append(now) if "attention of block 1 removed (calibrated)" in stage else None
        )
    )
    found = list(observe_into(out, hetdpt.load(home / "dense"), DATA, config(), place))
    assert len(done) == 5
    assert not any(
        one.is_own for one in found if one.subject.removal != "calibrated" or one.subject.part == "gradients"
    )
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert updates[:1] != [1]  # of the fine-tuning that was killed, what was kept is not done again
    assert read_results(out) == read_results(whole)
    assert (out / "results.csv").read_text() == (whole / "results.csv").read_text()
    assert not names(out / "steps")


def test_what_another_works_on_is_waited_for(dense: nn.Module, whole: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "run", list[str]()
    claim = Claim.take(out / "claims", "gradients-plain")
    assert claim is not None
    (out / "run.json").write_text((whole / "run.json").read_text())

    def listen(stage: str, *_: int) -> None:
        if stage.startswith("waiting for"):
            told.append(stage)
            claim.release()

    observed = config(blocks=(), removals=("plain", "calibrated"))
    found = list(observe_into(out, dense, DATA, observed, Execution(progress=listen)))
    assert [one.subject.key for one in found] == ["calibrated", "plain"]
    assert told[0].startswith(f"waiting for pid {os.getpid()} on ")


# values and figures


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_says_what_was_measured(whole: Path) -> None:
    found, rows = read_results(whole), table(whole)
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 2 * 4
    for row in rows:
        disparity = found.disparity(row["removal"])
        assert disparity is not None
        layer = next(layer for layer in disparity.layers if layer.site.path == row["path"])
        assert (float(row["gradient"]), float(row["mean_gradient"])) == (layer.magnitude, layer.mean)
        assert row["style"] == Plan(removal=row["removal"]).style_of(layer.site.kind).name
        ends = [row[name] for name in ("dense", "removed", "recovered", "epochs")]
        if layer.site.block == 0:  # not asked for
            assert ends == [""] * 4
        else:
            (one,) = found.of(row["removal"], layer.site.kind)
            assert [*map(float, ends)] == [found.dense, one.accuracies[0], one.accuracies[2], 2]


def observations(blocks: int = 3, removals: tuple[Any, ...] = ("plain", "calibrated")) -> Observations:
    """Return what the paper would have: activations with 50 times the gradient, and lost at once, but only then."""
    disparities, asymmetries = [], []
    for removal in removals:
        layers = []
        for block in range(blocks):
            for kind, size, lost in (("attention", 0.001, 4.0), ("activation", 0.05, 79.0)):
                site = Site(kind, block, f"blocks.{block}.{kind}")  # type: ignore[arg-type]
                layers.append(Gradient(site, (size * (1 + block), 2 * size * (1 + block)), (0.0, 0.0)))
                asymmetries.append(Asymmetry(site, removal, (80 - lost, 77.0 + block, 78.0 + block)))
        disparities.append(Disparity(removal, tuple(layers), 100, 32))
    return Observations(80.0, tuple(disparities), tuple(asymmetries))


def test_the_figures_of_both_observations() -> None:
    found = observations()
    assert found.summary("plain") == {
        "removal": "plain",
        "gradients": {"attention": pytest.approx(0.003), "activation": pytest.approx(0.15)},
        "ratio": pytest.approx(50),
        "ratios": [pytest.approx(50), pytest.approx(50)],
        "drops": {"attention": (4.0, 2.0, 1.0), "activation": (79.0, 2.0, 1.0)},
    }
    pairs = observations(removals=(("linear", "calibrated"),))
    assert from_json(Observations, json.loads(json.dumps(pairs.to_dict())), Path()) == pairs


def test_no_ratio_without_both_kinds() -> None:
    (one,) = observations(removals=("plain",)).disparities
    alone = replace(one, layers=tuple(layer for layer in one.layers if layer.site.kind == "attention"))
    assert (alone.magnitude("activation"), alone.ratio()) == (None, None)
    still = replace(one, layers=tuple(replace(layer, magnitudes=(0.0, 0.0)) for layer in one.layers))
    assert still.ratio() is None


def test_the_figure_says_what_it_shows(tmp_path: Path) -> None:
    draw(observations(), tmp_path / "seen.svg")
    text = (tmp_path / "seen.svg").read_text()
    shown = (
        "gradient of the importance, 200 updates of 32 images",
        "one layer alone removed: right after",
        "one layer alone removed: after 2 epochs of fine-tuning",
        "the same, median over blocks",
        "dense",
        "attention: skip",
        "activation: identity",
        "attention: constant",
        "activation: calibrated",
    )
    assert [words for words in shown if words not in text] == []
    with pytest.raises(FileError, match="^a figure is a file that ends in .png or .svg, but seen.bmp does not$"):
        draw(observations(), tmp_path / "seen.bmp")


@pytest.mark.parametrize(
    "found",
    [
        observations(40),
        replace(observations(), dense=None, asymmetries=()),
        replace(observations(), disparities=()),
        replace(observations(), asymmetries=tuple(r for r in observations().asymmetries if r.site.kind == "attention")),
    ],
    ids=["deep", "gradients", "accuracies", "attention"],
)
def test_whatever_is_missing_the_rest_is_drawn(found: Observations, tmp_path: Path) -> None:
    draw(found, tmp_path / "seen.png")
    with Image.open(tmp_path / "seen.png") as image:
        assert image.format == "PNG"
        assert 1500 <= image.width <= 3000
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 20  # something is drawn


def test_the_room_is_light_until_it_draws() -> None:
    code = "import sys, hetdpt.report.observation; print([n for n in ('torch', 'matplotlib') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"


# the command


def test_json_alone(run: Run, home: Path, whole: Path, tmp_path: Path) -> None:
    result = run("observe", home / "dense", "--out", tmp_path / "run", *OPTIONS, "--removal", "plain", "--json")
    assert (result.code, result.err) == (0, "")
    assert result.values.pop("directory") == str(tmp_path / "run")
    found, known = (
        from_json(Observations, result.values, tmp_path),
        read_results(whole),
    )
    assert found.disparities == known.disparities[:1]
    assert found.asymmetries == tuple(row for row in known.asymmetries if row.removal == "plain")
    assert result.values["summary"][0]["ratio"] == known.disparities[0].ratio()
    with Image.open(tmp_path / "run" / "results.png") as image:
        assert image.width > 1000


def test_lines_a_table_and_a_sentence_for_each(run: Run, home: Path, whole: Path) -> None:
    result, found = run("observe", home / "dense", "--out", whole, *OPTIONS), read_results(whole)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == f"dense: accuracy {found.dense:.2f} % (done before, or by another process)"
    row = found.of("calibrated", "attention")[0]
    ends = " -> ".join(f"{accuracy:.2f}" for accuracy in row.accuracies)
    assert f"calibrated, without attention 1: {ends} % (done before, or by another process)" in lines
    assert max(map(len, (line for line in lines if line[:1] in "┃│"))) <= 120
    assert len(re.findall(r"^│ [01] ", result.out, re.MULTILINE)) == 4
    for removal in found.removals:
        summary = found.summary(removal)
        assert (
            f"{removal}: gradients of activations are {summary['ratio']:.3g} times those of attention, by" in result.out
        )
        attention, activation = (summary["drops"][kind] for kind in ("attention", "activation"))
        assert (
            f"{removal}: points lost of {found.dense:.2f} %, medians over blocks: {attention[0]:.2f} without attention "
            f"and {activation[0]:.2f} without activation; after 2 epochs {attention[2]:.2f} without attention and "
            f"{activation[2]:.2f} without activation"
        ) in lines
    assert lines[-1] == f"written to {whole}: results.json, results.csv, results.png"


# bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--blocks", "0,2"),
            "layers can be removed from the blocks 0, 1 of this model, but got block 2; leave it out",
        ),
        (("--blocks", "1-2"), "--blocks: expected a whole number, got '1-2'; hetdpt observe --help lists all options"),
        (
            ("--no-recovery",),
            "--no-recovery removes no layer, so that --blocks has no use; leave one of them out",
        ),
        (
            ("--removal", "plain", "--removal", "plain"),
            "removals are ('plain', 'plain'); one or more, each once, were expected, such as ('plain',)",
        ),
    ],
)
def test_bad_options(options: tuple[str, ...], text: str, run: Run, home: Path, tmp_path: Path) -> None:
    run("observe", home / "dense", "--out", tmp_path / "run", *OPTIONS, *options).is_refused(text)
    assert not (tmp_path / "run").exists()


def test_bad_configs() -> None:
    with pytest.raises(PlanError, match="removal is one of"):
        config(removals=("wild",))
    with pytest.raises(DataError, match="2 images or more are needed, not 1"):
        config(images=1)
    with pytest.raises(TrainError, match="epochs is 0; it must be 1 or more"):
        config(gradient_epochs=0)


def test_something_else_is_not_mixed_in(whole: Path, dense: nn.Module) -> None:
    before = (whole / "results.json").read_text()
    with pytest.raises(FileError, match="was started with config.images = 24, not 25"):
        list(observe_into(whole, dense, DATA, config(images=25)))
    with torch.no_grad():
        dense.head.bias += 1  # type: ignore[union-attr,operator]
    with pytest.raises(FileError, match="was started with model ="):
        list(observe_into(whole, dense, DATA, config()))
    assert (whole / "results.json").read_text() == before


def test_a_pruned_model_keeps_to_its_removal(dense: nn.Module, tmp_path: Path) -> None:
    hetdpt.prune_(dense, Plan(attention=(0,)))
    with pytest.raises(PlanError, match="was pruned with removal 'plain' and the plan says 'calibrated'"):
        list(observe_into(tmp_path / "run", dense, DATA, config(removals=("calibrated",))))
    assert not (tmp_path / "run").exists()
    found: list[Observed] = list(observe_into(tmp_path / "run", dense, DATA, config(removals=("plain",), blocks=())))
    assert isinstance(found[0].result, Disparity)
    assert [layer.site.path for layer in found[0].result.layers] == [
        "blocks.0.mlp.act",
        "blocks.1.attn",
        "blocks.1.mlp.act",
    ]


def test_a_damaged_result_is_named(whole: Path, dense: nn.Module, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "gradients" / "plain.json").write_text("{}")
    with pytest.raises(FileError, match=r"plain\.json is damaged .*; remove it to have it made again"):
        list(observe_into(tmp_path / "run", dense, DATA, config()))
