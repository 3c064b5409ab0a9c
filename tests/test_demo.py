"""The model that comes with hetdpt, and the recipe that made it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hetdpt
from hetdpt.core.errors import ModelError
from hetdpt.export.saved import DEMO, DEMO_DIRECTORY, WEIGHTS, open_model
from hetdpt.flow.demo import demo_config, demo_training, train_model
from hetdpt.selection.methods import METHODS

MOST_BYTES, LEAST_ACCURACY = 3_000_000, 95.0


def test_the_model_has_12_blocks_in_3_megabytes_and_reads_digits() -> None:
    model = open_model(DEMO)
    kinds = [site.kind for site in hetdpt.sites(model)]
    assert (kinds.count("attention"), kinds.count("activation")) == (12, 12)
    assert sum(file.stat().st_size for file in DEMO_DIRECTORY.iterdir()) <= MOST_BYTES
    scores = hetdpt.evaluate(model, "demo")
    assert scores.count == 360
    assert scores.top1 > LEAST_ACCURACY


@pytest.mark.slow
def test_the_recipe_gives_this_model_and_the_same_bits_twice_with_any_number_of_threads(tmp_path: Path) -> None:
    threads, told = torch.get_num_threads(), list[tuple[int, int]]()
    accuracies = [
        train_model(tmp_path / "one", _short(), progress=lambda _, done, total: told.append((done, total))),
        _with_threads(3 - min(threads, 2), tmp_path / "two"),
    ]
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()
    made, shipped = hetdpt.load(tmp_path / "one"), open_model(DEMO)
    assert accuracies[0] == accuracies[1] == hetdpt.evaluate(made, "demo").top1
    assert torch.get_num_threads() == threads
    assert told[-1][0] == told[-1][1] == len(told)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (made, shipped)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_the_recipe_reads_digits(tmp_path: Path) -> None:
    assert train_model(tmp_path / "model") > LEAST_ACCURACY


def test_a_saved_model_in_a_folder_of_that_name_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEMO).mkdir()
    assert len(hetdpt.sites(open_model(DEMO))) == 24  # a folder of anything else does not matter
    other = hetdpt.prune_(open_model(DEMO), hetdpt.Plan(attention=(0,)))
    hetdpt.save(other, tmp_path / DEMO, overwrite=True)
    with pytest.raises(
        ModelError, match=r"demo is the model that comes with hetdpt, but .* write \./demo for that one"
    ):
        open_model(DEMO)
    assert len(hetdpt.sites(open_model(f"./{DEMO}"))) == 23


def test_the_model_brings_its_own_sizes() -> None:
    with pytest.raises(ModelError, match="demo is a saved model with its own weights and sizes; leave out img_size"):
        open_model(DEMO, img_size=32)


def test_the_run_treats_all_methods_alike_and_flips_no_digit(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    assert (config.model, config.data) == (DEMO, DEMO)
    methods = {config.chooser.name, *config.compare}
    assert methods == {"hetdpt", "attention-only", "activation-only", "random"} <= set(METHODS)
    assert all(part.augmentation.hflip == 0 for part in (config.collection, config.search, config.recovery))
    assert (config.kept, config.recovery.hold_out > 0) == ("best", True)  # the validation images choose nothing


def _short() -> hetdpt.RecoverConfig:
    return demo_training().with_settings({"training.epochs": 1, "training.warmup_epochs": 0.0, "per_class": 13})


def _with_threads(count: int, directory: Path) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return train_model(directory, _short())
    finally:
        torch.set_num_threads(before)
