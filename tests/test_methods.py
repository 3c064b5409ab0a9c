"""METHODS: one contract suite over all rows, and the command that uses them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from click.testing import CliRunner
from test_oneshot import tail_prices
from torch import nn

import hetdpt
from hetdpt.cli import app
from hetdpt.core.errors import PlanError
from hetdpt.core.plan import KINDS, Budget, Plan, Site, Tail
from hetdpt.data.sources import Data, open_data
from hetdpt.flow.comparison.compare import CompareConfig
from hetdpt.selection.goal import RemovalTarget
from hetdpt.selection.importance import Picked
from hetdpt.selection.methods import BY_LAYERS, Method
from hetdpt.selection.select import SCORES, SelectConfig, kinds_of, usual_search

DOCS = Path(__file__).parents[1] / "docs"
SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
SEARCH = usual_search().with_settings({"per_class": 4, "training.batch_size": 8, "training.epochs": 1})
SMALL = ("--per-class", "4", "--batch-size", "8", "--epochs", "1", "--images", "32", "--workers", "0", "--quiet")


@pytest.fixture(params=hetdpt.METHODS.values(), ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Method:
    return request.param


@pytest.fixture(scope="module")
def data() -> Data:
    return open_data("demo")


@pytest.fixture
def dense() -> Iterator[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield timm.create_model("vit_tiny_patch16_224", **SIZES).eval()


@pytest.fixture(params=BY_LAYERS)
def counted(request: pytest.FixtureRequest) -> Method:
    """Return a method that removes a number of layers."""
    return hetdpt.METHODS[request.param]


class TestContract:
    def test_row_says_how_it_splits_and_scores_and_where_it_is_from(self, row: Method) -> None:
        assert hetdpt.METHODS[row.name] is row
        assert row.score in SCORES
        assert row.paper
        assert row.about.endswith(".")

    def test_plan_has_the_budget_and_its_split(self, counted: Method, dense: nn.Module, data: Data) -> None:
        before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
        found: list[Picked] = []
        config = SelectConfig(search=SEARCH, images=32)
        plan = hetdpt.select(dense, data, Budget(1, 2), counted.name, config, watch=found.append)
        assert len(plan) == 3
        assert plan.removal == "calibrated"
        plan.check(plan.anatomy)  # type: ignore[arg-type]
        assert [plan.removes(picked.site) for picked in found] == [True] * 3
        if counted.split == "map":
            assert plan.budget == Budget(1, 2)
        if counted.only:
            assert len(getattr(plan, counted.only)) == 3
        assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
        assert hetdpt.select(dense, data, Budget(1, 2), counted.name, config) == plan  # the seed decides

    def test_plan_is_of_the_removal_asked_for(self, counted: Method, dense: nn.Module, data: Data) -> None:
        config = SelectConfig(search=SEARCH, images=32, removal="plain")
        plan = hetdpt.select(dense, data, Budget(1, 1), counted.name, config)
        hetdpt.prune_(dense, plan)  # needs no images
        assert plan.removal == "plain"

    def test_too_large_a_budget_is_refused(self, counted: Method, dense: nn.Module, data: Data) -> None:
        with pytest.raises(PlanError, match=r"cannot remove \d+ (\w+ )?layers: this model has \d that can be removed"):
            hetdpt.select(dense, data, Budget(4, 4), counted.name, SelectConfig(images=32))

    def test_row_is_in_the_docs(self, row: Method) -> None:
        page = (DOCS / "method.md").read_text()
        (line,) = re.findall(rf"^\| `{re.escape(row.name)}` \|.*$", page, re.MULTILINE)
        assert row.paper.split(",")[0].split(":")[0] in line
        assert f"| {row.split} |" in line
        assert f"| {row.score} |" in line


class TestBudget:
    def test_a_number_will_do_where_kinds_are_not_split(self) -> None:
        assert kinds_of(hetdpt.METHODS["te-static"], 2) == (None, None)
        assert kinds_of(hetdpt.METHODS["attention-only"], Budget(1, 1)) == ("attention", "attention")
        with pytest.raises(
            PlanError, match="hetdpt needs the number of layers of each kind, but got 3 in total; give both"
        ):
            kinds_of(hetdpt.METHODS["hetdpt"], 3)

    @pytest.mark.parametrize("budget", [0, Budget(0, 0), Budget(-1, 2)])
    def test_nothing_to_remove_is_refused(self, budget: Any) -> None:
        with pytest.raises(PlanError, match="expected at least 1 layer, and no negative numbers"):
            kinds_of(hetdpt.METHODS["hetdpt"], budget)

    def test_data_without_training_images_is_refused(self, dense: nn.Module, data: Data) -> None:
        with pytest.raises(PlanError, match="choosing layers needs training images"):
            hetdpt.select(dense, replace(data, train=None), 2, "te-static")


class TestMore:
    """A method that removes more than layers."""

    def test_it_takes_no_number_of_layers(self, row: Method, dense: nn.Module, data: Data) -> None:
        assert row.takes_budget == (row.name in BY_LAYERS) == (row.name != "mixed")
        if row.takes_budget:
            return
        for budget in (2, Budget(1, 1), target(dense, 0)):
            with pytest.raises(PlanError, match="the method mixed removes more than layers, until a goal of .* is met"):
                hetdpt.select(dense, data, budget, row.name, SelectConfig(images=32))

    def test_it_is_not_compared_at_a_number_of_layers(self) -> None:
        with pytest.raises(PlanError, match="the method mixed removes more than layers"):
            CompareConfig(layers=(2,), methods=("mixed",), selection=SelectConfig(), recovery=SEARCH)


class TestGoal:
    """A method that chooses by what plans cost, until they meet a goal."""

    @pytest.mark.parametrize("longest", [3, 0])
    def test_a_tail_that_does_no_damage_is_chosen(self, longest: int, dense: nn.Module, data: Data) -> None:
        nn.init.zeros_(dense.patch_embed.proj.weight)  # type: ignore[union-attr,arg-type]
        goal = target(dense, longest)  # all patches are constant, so that their inputs to attention can be fitted
        found: list[Picked] = []
        config = SelectConfig(images=32, removal="plain")
        plan = hetdpt.select(dense, data, goal, "calibrated-greedy", config, watch=found.append)
        assert goal.reached(plan) >= 2
        assert [plan.removes(one.move) for one in found if isinstance(one.move, Site)] == [True] * len(plan)
        tails = [(str(one.move), one.score) for one in found if isinstance(one.move, Tail)]
        if longest:
            assert [name for name, _ in tails] == ["tail of 2", "tail of 3"]
            assert (len(plan), plan.tail) == (0, 3)
            assert all(score < 1e-6 for _, score in tails)  # float32
        else:
            assert (tails, plan.tail) == ([], 0)
            assert min(one.score for one in found) > 1e-5, "every layer does damage"

    def test_other_methods_take_a_number(self, counted: Method, dense: nn.Module, data: Data) -> None:
        assert counted.is_priced == (counted.name == "calibrated-greedy")
        if counted.is_priced:
            return
        with pytest.raises(PlanError, match="removes a number of layers, whatever they cost; .* or calibrated-greedy"):
            hetdpt.select(dense, data, target(dense, 0), counted.name, SelectConfig(images=32))


def target(model: nn.Module, longest: int) -> RemovalTarget:
    """Return that half of 100 ms has to be saved, where one more block of a tail saves 20 and a layer 4."""
    return RemovalTarget.priced({"speedup": 2.0}, hetdpt.sites(model), tail_prices(), longest)


class TestCommand:
    @pytest.fixture
    def saved(self, dense: nn.Module, tmp_path: Path) -> str:
        hetdpt.save(dense, tmp_path / "dense", base=hetdpt.Base("timm", "vit_tiny_patch16_224", SIZES))
        return str(tmp_path / "dense")

    def select(self, saved: str, out: Path, *options: str) -> Any:
        command = ["select", saved, "--data", "demo", "--out", str(out), *SMALL, *options]
        return CliRunner().invoke(app, command)

    def test_writes_a_plan_that_recover_takes(self, saved: str, tmp_path: Path) -> None:
        out = tmp_path / "plan.json"
        result = self.select(saved, out, "--attention", "1", "--activation", "2", "--json")
        assert result.exit_code == 0, result.output
        plan = Plan.from_json(out.read_text())
        assert plan.budget == Budget(1, 2)
        found = json.loads(result.stdout)
        assert found["plan"] == {"attention": [*plan.attention], "activation": [*plan.activation]}
        assert [pick["kind"] for pick in found["picks"]] == ["activation", "attention", "activation"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "plan.json"]  # nothing is left behind
        again = self.select(saved, out, "--attention", "1", "--activation", "2")
        assert "exists already; give another name, or --overwrite" in str(again.exception)

    def test_a_directory_is_no_plan(self, saved: str, tmp_path: Path) -> None:
        result = self.select(saved, Path(saved), "--layers", "1", "--method", "random", "--overwrite")
        assert "exists already" in str(result.exception)

    def test_samples_split_the_layers(self, saved: str, tmp_path: Path) -> None:
        rows = [(0, 0, 90), (1, 0, 50), (2, 0, 30), (0, 1, 89), (0, 2, 88), (1, 1, 49), (2, 1, 29)]
        samples = tmp_path / "samples.csv"
        samples.write_text("attention,activation,accuracy\n" + "".join(f"{a},{g},{y}\n" for a, g, y in rows))
        out = tmp_path / "plan.json"
        result = self.select(saved, out, "--layers", "2", "--samples", str(samples), "--method", "map+te")
        assert result.exit_code == 0, result.output
        assert Plan.from_json(out.read_text()).budget == Budget(0, 2)  # attention costs 40 points each

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ((), "give either how many layers of each kind to remove"),
            (("--layers", "2", "--attention", "1"), "give either how many layers of each kind to remove"),
            (("--layers", "2"), "the method hetdpt needs the number of layers of each kind, but got 2 in total"),
            (("--layers", "2", "--method", "mixed"), "the method mixed removes more than layers"),
            (("--layers", "2", "--method", "ranom"), "no method is called 'ranom'; did you mean random?"),
            (("--layers", "2", "--method", "random", "--samples", "x.csv"), "random has no such split"),
            (("--attention", "4"), "cannot remove 4 attention layers: this model has 3"),
        ],
    )
    def test_contradictions_get_a_sentence(
        self, saved: str, tmp_path: Path, options: tuple[str, ...], sentence: str
    ) -> None:
        result = self.select(saved, tmp_path / "plan.json", *options)
        assert result.exit_code
        assert sentence in str(result.exception)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]

    def test_killed_search_goes_on(self, saved: str, tmp_path: Path, dense: nn.Module, data: Data) -> None:
        """A watcher that fails stands for a kill between two checkpoints; the states are on disk."""
        from hetdpt.flow.execution import Execution
        from hetdpt.flow.resumable import select_into

        class KilledError(Exception):
            pass

        def stop(picked: Picked) -> None:
            raise KilledError

        out, config = tmp_path / "plan.json", SelectConfig(search=SEARCH, images=32)
        with pytest.raises(KilledError):
            select_into(out, dense, data, Budget(1, 2), "hetdpt", config, Execution(minutes=0), watch=stop)
        assert (tmp_path / "plan.json.partial").is_dir()
        assert not out.exists()
        found: list[Picked] = []
        plan = select_into(out, dense, data, Budget(1, 2), "hetdpt", config, Execution(minutes=0), watch=found.append)
        assert plan == hetdpt.select(dense, data, Budget(1, 2), "hetdpt", config)
        assert len(found) == 3
        assert not (tmp_path / "plan.json.partial").exists()


def test_every_kind_is_split_by_some_row() -> None:
    assert {row.only for row in hetdpt.METHODS.values()} == {None, *KINDS}
