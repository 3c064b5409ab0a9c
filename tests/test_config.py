"""The settings of a run: what is refused, what wins over what, and that what is written is what is read."""

from __future__ import annotations

import tempfile
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import hetdpt
from hetdpt.core.errors import FileError, HetDPTError, PlanError, PredictError, TrainError
from hetdpt.core.styles import PRESETS
from hetdpt.flow.config import RunConfig
from hetdpt.flow.recipes import RECIPES, quick, recipe
from hetdpt.reduce.width.narrow import WidthConfig
from hetdpt.results import Price
from hetdpt.selection.methods import BY_LAYERS, METHODS

REQUIRED: dict[str, Any] = {"model": "demo", "data": "demo", "out": Path("runs/one")}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**REQUIRED, "layers": 4, **changes})


def read(text: str, suffix: str = ".yaml", **more: Any) -> RunConfig:
    """Return the settings in a file with this text; what a run needs is given unless the file says it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"run{suffix}"
        file.write_text(text, encoding="utf-8")
        return RunConfig.resolve(file=file, **{"changes": {**REQUIRED, "layers": 4}, **more})


def test_it_is_a_public_name_and_frozen() -> None:
    assert hetdpt.RunConfig is RunConfig
    with pytest.raises(FrozenInstanceError):
        config().layers = 5  # type: ignore[misc]


def test_its_defaults_are_those_of_the_recipe_quick() -> None:
    assert config() == RunConfig.resolve(recipe="quick", changes={**REQUIRED, "layers": 4})
    assert (config().recovery, config().search, config().collection) == (
        quick().config,
        quick().search,
        quick().collection,
    )


GREEDY: dict[str, Any] = {"method": "calibrated-greedy", "layers": None, "macs": 1e9}
REFUSED: list[tuple[dict[str, Any], type[HetDPTError], str]] = [
    ({"layers": None}, PlanError, "a run needs a goal; give one of --layers 8, --speedup 1.5, --macs 3G, --params 16M"),
    ({"layers": 0}, PlanError, "the dense model already meets the goal layers 0; set a harder one, such as 8"),
    ({"layers": -1, "plus": True, "macs": "50%"}, PredictError, "layers is -1; expected a whole number of at least 0"),
    ({"plus": True}, PlanError, "exactly one of speedup, macs, params, got none"),
    ({"plus": True, "macs": 1e9, "speedup": 2.0}, PlanError, "got speedup and macs"),
    ({"plus": True, "macs": 1e9, "compare": ("random",)}, PlanError, "--compare cannot be used with --plus"),
    ({"plus": True, "macs": 1e9, "depths": (2,)}, PlanError, "but the number is given; leave one of them out"),
    (
        {"plus": True, "macs": 1e9, "layers": None, "depths": (-1,)},
        PlanError,
        "expected different numbers of layers of at least 0",
    ),
    (
        {"plus": True, "macs": 1e9, "layers": None, "depths": (4, 4)},
        PlanError,
        "expected different numbers of layers",
    ),
    ({"width": WidthConfig(round_to=8)}, PlanError, "width says how width is removed .*, but it is kept; add --plus"),
    ({"tokens": "tome:2", "removal": ("position", "identity")}, PlanError, "which merged tokens do not have"),
    ({"depths": (2,)}, PlanError, "depths are numbers of layers to try before width is removed, but it is kept"),
    ({"tokens": "tome"}, PlanError, "tokens are METHOD:R, such as tome:8, .* not 'tome'"),
    ({"tokens": "tomé:8"}, PlanError, "tomé"),
    ({"speedup": 1.0}, PlanError, "the dense model already meets the goal speedup 1; set a harder one, such as 1.5"),
    ({"speedup": float("inf")}, PredictError, "speedup is inf"),
    ({"macs": 0}, PredictError, "macs is 0"),
    ({"macs": "3 parsecs"}, PredictError, "^macs is '3 parsecs'; expected a number above 0, such as 3G"),
    ({"params": "101%"}, PredictError, "params is '101%'; expected"),
    ({"params": "0%"}, PredictError, "params is '0%'; expected"),
    ({"method": "hetdtp"}, PlanError, "no method is called 'hetdtp'; did you mean hetdpt"),
    ({"compare": ("randon",)}, PlanError, "no method is called 'randon'; did you mean random"),
    ({"compare": ("random", "hetdpt")}, PlanError, "hetdpt would be compared with itself"),
    ({"compare": ("random", "random")}, PlanError, "random would be compared with itself"),
    ({"compare": "random"}, TrainError, r"compare is 'random', but a list \(a text...\) was expected"),
    ({"method": "random", "compare": ("map+te",)}, PlanError, "use the method map.te, and compare random"),
    (
        {"method": "random", "layers": None, "macs": 1e9},
        PlanError,
        "random removes a number of layers, .* give --layers, or .* hetdpt, .* or calibrated-greedy, which removes",
    ),
    ({**GREEDY, "speedup": 1.5}, PlanError, "exactly one of speedup, macs, params, got speedup and macs"),
    ({**GREEDY, "plus": True}, PlanError, "with --plus, width meets the goal after a number of layers; give --layers"),
    ({**GREEDY, "compare": ("random",)}, PlanError, "compared at the same number of layers, .* or leave out --compare"),
    ({**GREEDY, "rounds": (1, 1, 1)}, PlanError, "calibrated-greedy splits no budget, so that rounds has no use"),
    ({**GREEDY, "budget": (1, 1)}, PlanError, "the method calibrated-greedy removes a number in all; give layers"),
    ({"method": "random", "samples": Path("a.csv")}, PlanError, "random splits no budget, so that samples has"),
    ({"method": "random", "rounds": (1, 1, 1)}, PlanError, "random splits no budget, so that rounds has no use"),
    ({"samples": Path("a.csv"), "rounds": (1, 1, 1)}, PlanError, "samples are given; leave one of them out"),
    ({"removal": "softly"}, PlanError, "removal is one of plain"),
    ({"removal": ("skip", "skip")}, PlanError, "removal is one of plain"),
    ({"images": 1}, HetDPTError, "at least 2"),
    ({"rounds": (0, 0, 0)}, PredictError, "rounds is"),
    ({"workers": -1}, TrainError, "workers is -1; expected at least 0"),
    ({"checkpoint_minutes": float("nan")}, TrainError, "checkpoint_minutes is nan; expected at least 0"),
    ({"batch": 0}, TrainError, "batch is 0; expected at least 1"),
    ({"model": ""}, TrainError, "model is empty"),
    ({"keep": "ema"}, TrainError, "recovery.training.ema_decay is 0, so that there is no average to keep"),
    ({"candidates": "some"}, TrainError, "candidates is 'some', but 'all' or 'te' was expected"),
    ({"recovery": {"drop_path": 0.1}}, TrainError, "recovery is {'drop_path': 0.1}, but a RecoverConfig was expected"),
    ({"layers": "8"}, TrainError, "layers is '8', but a whole number or null was expected"),
    ({"layers": True}, TrainError, "layers is True, but a whole number"),
    ({"pretrained": 1}, TrainError, "pretrained is 1, but true or false was expected"),
    ({"rounds": (1, 2)}, TrainError, r"but a list \(a whole number, a whole number, a whole number\) or null"),
]


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=lambda value: str(value) if value else "")
def test_contradictions_are_refused(changes: dict[str, Any], error: type[HetDPTError], text: str) -> None:
    with pytest.raises(error, match=text):
        config(**changes)


def test_what_stands_for_a_value_becomes_it() -> None:
    made = config(out="runs/one", data=Path("some/folder"), compare=["random"], removal=["skip", "calibrated"])
    assert (made.out, made.data, made.compare) == (Path("runs/one"), "some/folder", ("random",))
    assert made.removal == ("skip", "calibrated")
    assert (config(macs="3.2G").macs, config(params="16M").params, config(macs="2.5e9").macs) == (3.2e9, 16e6, 2.5e9)


@pytest.mark.parametrize("method", BY_LAYERS)
def test_the_configs_of_stages_say_what_it_says(method: str) -> None:
    made = config(method=method, removal="norm", images=7, candidates="te", explores=False)
    assert made.is_split == (METHODS[method].split == "map")
    select, collect = made.select_config, made.collect_config
    assert (select.search, select.removal, select.images) == (made.search, "norm", 7)
    assert (select.candidates, select.explores) == ("te", False)
    assert (collect.recovery, collect.removal, collect.images) == (made.collection, "norm", 7)
    assert config(rounds=(1, 2, 3)).collect_config.rounds == (1, 2, 3)


def test_parts_of_the_dense_model_are_numbers_once_it_is_counted() -> None:
    made = config(macs="70 %", params=5e5)
    assert made.macs == "70%"
    with pytest.raises(PredictError, match="macs is a percentage of the dense model, whose costs are not known yet"):
        _ = made.wanted
    wanted = made.with_numbers(Price(macs=4e9, params=1e6)).wanted
    assert wanted.conditions == {"layers": 4, "macs": 2.8e9, "params": 5e5}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_where_it_begins(name: str) -> None:
    row, made = recipe(name), RunConfig.resolve(recipe=name, changes={**REQUIRED, "layers": 4})
    assert (made.recovery, made.search, made.collection) == (row.config, row.search, row.collection)
    assert (made.removal, made.candidates, made.explores) == (row.removal, row.candidates, row.explores)


FILES = {
    ".toml": """
recipe = "deit_small_imagenet"
compare = ["random"]
removal = ["skip", "calibrated"]
macs = "3G"
[recovery]
drop_path = 0.2
[recovery.training]
epochs = 7
lr = 1e-5
""",
    ".yaml": """
recipe: deit_small_imagenet
compare: [random]
removal: [skip, calibrated]
macs: 3G
collection:
recovery:
  drop_path: 0.2
  training: {epochs: 7, lr: 1e-5}
""",
}


@pytest.mark.parametrize("suffix", FILES)
def test_changes_win_over_the_file_and_the_file_over_the_recipe(suffix: str) -> None:
    changes = {**REQUIRED, "recovery.training.epochs": 9, "out": "elsewhere"}
    made, row = read(FILES[suffix], suffix, changes=changes), recipe("deit_small_imagenet")
    assert made.recovery.training == replace(row.config.training, epochs=9, lr=1e-5)
    assert made.recovery == replace(row.config, training=made.recovery.training, drop_path=0.2)
    assert (made.search, made.collection) == (row.search, row.collection)
    assert (made.compare, made.removal, made.macs) == (("random",), ("skip", "calibrated"), 3e9)
    assert made.out == Path("elsewhere")


def test_a_recipe_that_is_given_takes_the_place_of_the_one_in_the_file() -> None:
    made = read(FILES[".yaml"], recipe="quick")
    assert made.search == quick().search
    assert made.recovery.training.epochs == 7


def test_a_recipe_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(TrainError, match="sets all that the recipe quick would set; leave one of them out"):
        read(config().to_yaml(), recipe="quick")


UNKNOWN = [
    ("modle: demo", "modle", "model"),
    ("recipie: quick", "recipie", "recipe"),
    ("recovery: {trainin: {epochs: 2}}", "recovery.trainin.epochs", "recovery.training.epochs"),
    ("recovery: {training: {epoch: 2}}", "recovery.training.epoch", "recovery.training.epochs"),
    ("recovery: {fractoin: 0.5}", "recovery.fractoin", "recovery.fraction"),
    ("serach: {}", "serach", "search"),
    ("method: {name: hetdpt}", "method.name", "method"),
    ("7: 8", "7", ""),
    (
        "epochs: 2",
        "epochs",
        "collection.training.epochs or search.training.epochs or recovery.training.epochs",
    ),
]


@pytest.mark.parametrize(("text", "name", "nearest"), UNKNOWN)
def test_an_unknown_name_is_answered_with_the_nearest(text: str, name: str, nearest: str) -> None:
    end = "\\?$" if nearest else ""
    with pytest.raises(TrainError, match=rf"^unknown setting {name}; did you mean {nearest}{end}"):
        read(text)


def test_unknown_changes_are_refused_too() -> None:
    with pytest.raises(TrainError, match=r"^unknown setting recovery.lr; did you mean recovery.training.lr\?$"):
        RunConfig.resolve(changes={**REQUIRED, "layers": 4, "recovery.lr": 1.0})


WRONG = [
    ("recovery: {training: {epochs: five}}", "recovery.training.epochs is 'five', but a whole number was expected"),
    ("recovery: {training: {epochs: 2.5}}", "recovery.training.epochs is 2.5, but a whole number was expected"),
    ("recovery: {augmentation: {scale: 1}}", r"scale is 1, but a list \(a number, a number\) was expected"),
    ("recovery: 5", "recovery is 5, but it is a table of settings, such as recovery.training.epochs; set those"),
    ("download: maybe", "download is 'maybe', but true or false was expected"),
    ("samples: 3", "samples is 3, but a path or null was expected"),
    ("recipe: [quick]", "recipe is .'quick'., but a text was expected"),
    ("recipe: quik", "there is no recipe 'quik'; did you mean quick"),
    ("search: {training: {lr: -1.0}}", "^search.training: lr is -1.0; it must be above 0"),
    ("collection: {drop_path: 1.5}", "^collection: drop_path is 1.5"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_wrong_values_are_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        read(text)


DAMAGED = [
    ("a: [1", ".yaml", "are damaged .*line 1"),
    ("model: demo\nmodel: other", ".yaml", "model occurs twice"),
    ("recovery: {drop_path: 0.1, drop_path: 0.2}", ".yml", "drop_path occurs twice"),
    ("- model\n- data", ".yaml", "expected a table of names, got a list"),
    ("a: &b\n  c: *b", ".yaml", "are damaged"),
    ("model: !!python/object:os.system x", ".yaml", "are damaged .*could not determine a constructor"),
    ("model =", ".toml", "are damaged .Invalid value"),
    ('model = "a"\nmodel = "b"', ".toml", "are damaged"),
    ("{}", ".json", "whose name ends in .toml, .yaml or .yml, not from .*run.json"),
]


@pytest.mark.parametrize(("text", "suffix", "sentence"), DAMAGED)
def test_damaged_files_are_refused_in_a_sentence(text: str, suffix: str, sentence: str) -> None:
    with pytest.raises(FileError, match=sentence) as caught:
        read(text, suffix)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()
    for name in ("binary.yaml", "folder.toml", "missing.yaml"):
        with pytest.raises(FileError, match=f"the settings .*{name} cannot be read: "):
            RunConfig.resolve(file=tmp_path / name)


def test_what_a_run_needs_is_asked_for() -> None:
    with pytest.raises(TrainError, match="a run needs model, out; give it on the command line or in a file"):
        RunConfig.resolve(changes={"data": "demo", "layers": 4})
    with pytest.raises(TrainError, match="a run needs out;"):
        read("model: demo\ndata: demo\nout: null", changes={"layers": 4})


def test_yaml_says_every_setting() -> None:
    text = config(compare=("random",)).to_yaml()
    values = yaml.safe_load(text)
    assert text.startswith("# Every setting of a run of hetdpt.")
    assert set(values) == {field.name for field in fields(RunConfig)}
    assert values["speedup"] is None
    assert set(values["recovery"]["training"]) == set(asdict(quick().config)["training"])


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
paths = words.map(Path)
numbers = st.floats(1e-9, 1e9)
recoveries = st.builds(
    lambda name, changes: recipe(name).config.with_settings(changes),
    st.sampled_from(list(RECIPES)),
    st.fixed_dictionaries(
        {},
        optional={
            "training.lr": numbers,
            "training.lr_batch": st.none() | st.integers(1, 99),
            "training.optimizer": words,
            "augmentation.scale": st.tuples(st.floats(0.01, 0.5), st.floats(0.5, 1.0)),
            "augmentation.auto_augment": st.none() | words,
            "fraction": st.none() | st.floats(0.1, 1.0),
            "train_merged": st.booleans(),
        },
    ),
)
configs = st.builds(
    RunConfig,
    model=words,
    data=words,
    out=paths,
    weights=st.none() | paths,
    layers=st.integers(1, 99),
    speedup=st.none() | st.floats(1.01, 99),
    macs=st.none() | numbers | st.sampled_from(["70%", "33.3%", "2.9G"]),
    compare=st.lists(st.sampled_from(["random", "te-static", "map+te"]), unique=True).map(tuple),
    removal=st.sampled_from([*PRESETS, ("linear", "calibrated"), ("skip", "drop")]),
    images=st.integers(2, 999),
    rounds=st.none() | st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
    collection=recoveries,
    search=recoveries,
    recovery=recoveries,
    explores=st.booleans(),
    device=st.none() | words,
    checkpoint_minutes=numbers,
)


@given(configs)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_what_is_read(made: RunConfig) -> None:
    assert read(made.to_yaml(), changes=None) == made


@pytest.mark.parametrize("text", ["0E0", "1e5", "1e5x", "1.e-3", "12", "1.5", "null", "yes", "~"])
def test_a_text_that_looks_like_a_number_stays_a_text(text: str) -> None:
    made = RunConfig.resolve(changes={**REQUIRED, "layers": 4, "data": text})
    assert read(made.to_yaml(), changes=None).data == text


def test_what_is_written_does_not_hang_on_the_defaults() -> None:
    far = RunConfig.resolve(recipe="cifar100", changes={**REQUIRED, "layers": 4, "keep": "ema"})
    assert read(far.to_yaml(), changes=None) == far != config()


def test_demo_is_demo_beside_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        (tmp_path / name).mkdir()
    found = RunConfig(model="demo", data="demo", out=Path("run"), layers=2).located()
    assert (found.model, found.data, found.out) == ("demo", "demo", tmp_path / "run")
    found = RunConfig(model="mine", data="mine", out=Path("run"), layers=2).located()
    assert (found.model, found.data) == (str(tmp_path / "mine"), str(tmp_path / "mine"))
