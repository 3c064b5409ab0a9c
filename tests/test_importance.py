"""The importance search: its schedule, what it learns, what was planted, resumed, on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate.optimizer import AcceleratedOptimizer
from families import named
from torch import Tensor, nn

import hetdpt
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import HetDPTError, PlanError
from hetdpt.core.gates import Constant
from hetdpt.core.plan import Budget, Plan, Site
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.sources import Data, open_data
from hetdpt.selection.damage import choose, damage_of_each
from hetdpt.selection.importance import ImportanceSearch, Picked, Prior
from hetdpt.selection.schedule import due, removal_order, stage_ends
from hetdpt.selection.select import SelectConfig, usual_search
from hetdpt.surgery.calibrate import gate_fitted_
from hetdpt.surgery.gate import gates_by_site
from hetdpt.training import trainer
from hetdpt.training.recover import RecoverConfig, recover

SMALL = {"per_class": 8, "training.batch_size": 8, "training.epochs": 1, "distillation.alpha": 1.0}


def search_config(**settings: Any) -> RecoverConfig:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return usual_search().with_settings({**SMALL, **named})


@pytest.fixture(scope="module")
def data() -> Data:
    return open_data("demo")


@pytest.fixture
def dense() -> nn.Module:
    """A ViT of four blocks whose attention 1, attention 2 and FFN 2 give nothing; large weights elsewhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=4, num_heads=2, num_classes=10
        )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=2 / parameter.shape[1] ** 0.5, generator=torch.Generator().manual_seed(1))
    for layer in (model.blocks[1].attn.proj, model.blocks[2].attn.proj, model.blocks[2].mlp.fc2):
        nn.init.zeros_(layer.weight)
    return model.eval()


def run_search(
    dense: nn.Module, data: Data, kinds: Any, scale: float = 1.0, keeper: Any = None, **options: Any
) -> ImportanceSearch:
    """Search all layers; the gradients of attention's importances are multiplied by ``scale``."""
    config = options.pop("config", search_config())
    assert data.train is not None
    images = ImageBatches(data.train, preprocessing_of(dense), count=32)
    student = gate_fitted_(deepcopy(dense), Plan(removal=options.pop("removal", "calibrated")), images)
    gates = gates_by_site(student)
    for site, gate in gates.items():
        if site.kind == "attention":
            gate.importance.register_hook(partial(torch.mul, scale))
    search = ImportanceSearch(student, kinds, **{"explores": True, "seed": 0, **options})
    for _ in recover(student, dense, data, config, companion=search, evaluates=False, keeper=keeper):
        pass
    return search


class TestSchedule:
    def test_order_is_that_of_the_release(self) -> None:
        a, g = "attention", "activation"
        assert removal_order(Budget(attention=5, activation=5)) == (g, a) * 5
        assert removal_order(Budget(attention=4, activation=3)) == (a, g, a, g, a, g, a)
        assert removal_order(Budget(attention=3, activation=4)) == (g, a, g, a, g, a, g)
        assert removal_order(Budget(attention=4, activation=1)) == (a, g, a, a, a)
        assert removal_order(Budget(attention=0, activation=2)) == (g, g)

    def test_stages_grow_by_two_epochs(self) -> None:
        ends = stage_ends(10)
        assert ends[:4] == (3, 8, 15, 24)
        assert [two - one for one, two in pairwise(ends)] == [5, 7, 9, 11, 13, 15, 17, 19, 21]

    @pytest.mark.parametrize(("updates", "count"), [(120, 10), (24, 4), (7, 7), (1000, 1), (3, 2)])
    def test_any_length_takes_all_layers_one_by_one_and_the_last_at_the_end(self, updates: int, count: int) -> None:
        gone = [due(update, updates, count) for update in range(updates + 1)]
        assert (gone[0], gone[-2], gone[-1]) == (0, count - 1, count) if updates > count else gone[-1] == count
        assert gone == sorted(gone)
        assert gone == [due(2 * update, 2 * updates, count) for update in range(updates + 1)]


class TestLearning:
    def test_importance_takes_plain_steps_and_weights_none_of_its_gradient(self, dense: nn.Module, data: Data) -> None:
        """importance = -gradient after one update, whatever Adam, decay and clipping do to the weights."""
        kinds = ("attention",)
        config = search_config(
            training__batch_size=80, training__lr=1e-9, training__weight_decay=0.5, training__clip_grad=1e-6,
            augmentation__scale=(1.0, 1.0), augmentation__ratio=(1.0, 1.0), augmentation__hflip=0.0,
            distillation__kind="none",
        )  # fmt: skip
        search = run_search(dense, data, kinds, config=config, explores=False, removal="plain")
        student = hetdpt.gate_(deepcopy(dense))
        images, targets = training_images(data, config, dense)
        nn.functional.cross_entropy(student(images), targets).backward()
        for site, gate in gates_by_site(student).items():
            found = search.gates[site].importance.item()
            assert gate.importance.grad is not None
            assert found == pytest.approx(-gate.importance.grad.item(), rel=1e-3, abs=1e-6), site.path  # float32

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "lion"])
    @pytest.mark.parametrize("scale", [1.0, 1000.0])
    def test_a_step_is_the_gradient_to_the_bit(
        self, dense: nn.Module, data: Data, optimizer: str, scale: float
    ) -> None:
        student, sums = hetdpt.gate_(deepcopy(dense)), dict[Site, Tensor]()
        gates = gates_by_site(student)

        def take_down(site: Site, gradient: Tensor) -> Tensor:
            sums[site] = sums.get(site, torch.zeros(())) - scale * gradient
            return scale * gradient

        for site, gate in gates.items():
            gate.importance.register_hook(partial(take_down, site))
        search = ImportanceSearch(student, ("attention",), explores=False, seed=0)
        config = search_config(training__optimizer=optimizer, training__weight_decay=0.5, training__clip_grad=1e-6)
        for _ in recover(student, dense, data, config, companion=search, evaluates=False):
            pass
        assert len(sums) == 8
        assert all(torch.equal(gate.importance.detach(), sums[site]) for site, gate in gates.items())


class TestScaledLoss:
    """Float16 on a GPU has its loss scaled; a scaler on the CPU takes the same way."""

    @pytest.fixture
    def scaler(self, monkeypatch: pytest.MonkeyPatch) -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

        class Scaled(trainer.Trainer):
            def _prepare(self) -> None:
                super()._prepare()
                self.accelerator.scaler = scaler
                self.optimizer = AcceleratedOptimizer(self.optimizer.optimizer, device_placement=False, scaler=scaler)

        monkeypatch.setattr("hetdpt.training.recover.Trainer", Scaled)
        return scaler

    @pytest.mark.parametrize("clip", [None, 1.0])
    def test_steps_are_those_of_the_loss_as_it_is(
        self, dense: nn.Module, data: Data, request: pytest.FixtureRequest, clip: float | None
    ) -> None:
        config, found = search_config(training__lr=1e-9, training__clip_grad=clip), []
        for fixture in (None, "scaler"):
            scaler = request.getfixturevalue(fixture) if fixture else None
            search = run_search(dense, data, ("attention",), config=config)
            found.append({site: gate.importance.item() for site, gate in search.gates.items()})
        assert scaler.get_scale() == 1024.0 * 2**3, "10 updates, every third of which it grows"
        assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)  # weights move by their rounding

    @pytest.mark.parametrize("whose", ["importance", "weight"])
    def test_where_one_overflows_importances_stay(
        self, dense: nn.Module, data: Data, scaler: torch.amp.GradScaler, whose: str
    ) -> None:
        student = hetdpt.gate_(deepcopy(dense))
        search = ImportanceSearch(student, ("attention",), explores=False, seed=0)
        scaler.set_growth_interval(100)
        parameter = search.parameters[0] if whose == "importance" else student.head.weight
        parameter.register_hook(lambda gradient: gradient * torch.inf)
        for _ in recover(student, dense, data, search_config(), companion=search, evaluates=False):
            pass
        assert [one.item() for one in search.parameters] == [0.0] * 8
        assert scaler.get_scale() == 1.0  # halved 10 times


def training_images(data: Data, config: RecoverConfig, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return all training images of ``config`` at once, as they come without augmentation."""
    from hetdpt.data.batches import TrainingBatches
    from hetdpt.data.subset import subset

    images = subset(data.train, per_class=config.per_class, seed=0)
    (batch,) = TrainingBatches(images, preprocessing_of(model), config.augmentation, batch_size=80, seed=0).epoch(0)
    return batch.images, batch.targets


class TestPlanted:
    def test_inert_layers_go_and_random_does_not_find_them(self, dense: nn.Module, data: Data) -> None:
        config = SelectConfig(search=search_config(), images=32)
        plan = hetdpt.select(dense, data, Budget(2, 1), "hetdpt", config)
        assert (plan.attention, plan.activation) == ((1, 2), (2,))
        found = [
            hetdpt.select(dense, data, 3, "random", SelectConfig(search=search_config(training__seed=seed), images=32))
            for seed in range(4)
        ]
        assert all((plan.attention, plan.activation) != ((1, 2), (2,)) for plan in found)
        assert len({(plan.attention, plan.activation) for plan in found}) > 1

    def test_candidates_by_entropy_have_them_too(self, dense: nn.Module, data: Data) -> None:
        config = SelectConfig(search=search_config(), images=32, candidates="te")
        plan = hetdpt.select(dense, data, Budget(2, 1), "hetdpt", config)
        assert (plan.attention, plan.activation) == ((1, 2), (2,))

    def test_papers_search_learns_nothing_of_them(self, dense: nn.Module, data: Data) -> None:
        """Without trials the importance of an inert layer stays 0, and that of all others does not."""
        search = run_search(
            dense, data, ("attention",), explores=False, removal=("skip", "drop"),
            config=search_config(distillation__kind="none", training__lr=1e-12),
        )  # fmt: skip
        inert = [("attention", 1), ("attention", 2), ("activation", 2)]
        for site, gate in search.gates.items():
            assert (abs(gate.importance.item()) < 1e-7) == ((site.kind, site.block) in inert), site.path


class TestPrior:
    """What a scan says of each layer before the search: worth as many trials as it saw images, and no more."""

    def searched(self, dense: nn.Module, updates: float, batches: int = 1) -> ImportanceSearch:
        """Return a search that was told attention 3 costs 0.25, attention 0 costs 0.5 and all others 1."""
        gated = hetdpt.gate_(deepcopy(dense)).train()
        costs = {("attention", 3): 0.25, ("attention", 0): 0.5}
        damages = {site: costs.get((site.kind, site.block), 1.0) for site in gates_by_site(gated)}
        return ImportanceSearch(
            gated, ("attention",), explores=True, seed=0, prior=Prior(damages, updates), accumulate=batches
        )

    def test_importances_begin_at_twice_the_damage(self, dense: nn.Module) -> None:
        found = self.searched(dense, 4.0).importances
        assert {site.block: value for site, value in found.items() if site.kind == "attention"} == {
            0: 1.0, 1: 2.0, 2: 2.0, 3: 0.5,
        }  # fmt: skip

    @pytest.mark.parametrize(("trials", "first"), [(0, 3), (1, 3), (100, 0)])
    def test_trials_outweigh_it_in_time(self, dense: nn.Module, trials: int, first: int) -> None:
        """Trials say that attention 0 costs less than attention 3; the more there are the more they count."""
        search = self.searched(dense, 16.0)
        for site, gate in search.gates.items():
            search.tried[site] += trials
            gate.importance.data += trials * (0.1 if (site.kind, site.block) == ("attention", 0) else 1.0)
        search.before_update(1, 1)
        assert [picked.site.block for picked in search.removed] == [first]

    @pytest.mark.parametrize("batches", [1, 4])
    def test_an_update_of_several_batches_weighs_as_one(self, dense: nn.Module, batches: int) -> None:
        search = self.searched(dense, 0.0, batches)
        for _ in range(batches):
            search._try(nn.Identity().train(), (torch.zeros(16 // batches, 3, 16, 16),))
        assert sum(search.tried.values()) == pytest.approx(1.0)

    def test_damage_of_each_is_that_of_the_first_choice(self, dense: nn.Module, data: Data) -> None:
        assert data.train is not None
        images, judge = (ImageBatches(data.train, preprocessing_of(dense), count=16, start=start) for start in (0, 16))
        sites = [site for site in hetdpt.sites(dense) if site.kind == "activation"]
        found = damage_of_each(dense, images, sites, judge=judge)
        (choice,) = choose(dense, images, sites, 1, judge=judge)
        assert list(found) == sites
        assert (choice.move, choice.damage) == (min(found, key=found.__getitem__), min(found.values()))

    @pytest.mark.parametrize(
        ("explores", "images", "accumulate", "updates"),
        [(True, 32, 1, 32 / 8), (True, 32, 2, 32 / 16), (True, 100_000, 1, None), (False, 32, 1, None)],
    )
    def test_it_weighs_as_much_as_its_images(
        self, dense: nn.Module, data: Data, explores: bool, images: int, accumulate: int, updates: float | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """In updates of the search; where all images are looked at, the same judge. Without trials there is none."""
        given: list[Prior | None] = []

        class Watched(ImportanceSearch):
            def __init__(self, *args: Any, prior: Prior | None, **kwargs: Any) -> None:
                given.append(prior)
                super().__init__(*args, prior=prior, **kwargs)

        monkeypatch.setattr("hetdpt.selection.select.ImportanceSearch", Watched)
        search = search_config(training__accumulate=accumulate)
        config = SelectConfig(search=search, images=images, explores=explores)
        hetdpt.select(dense, data, Budget(1, 0), "hetdpt", config)
        assert data.train is not None
        expected = updates or (len(data.train) / 8 if explores else None)
        assert [prior and prior.updates for prior in given] == [expected]

    def test_a_search_too_short_to_try_anything_finds_inert_layers(self, dense: nn.Module, data: Data) -> None:
        """Three updates of three images, three layers: no trials to speak of."""
        short = search_config(per_class=1, training__batch_size=3)
        plan = hetdpt.select(dense, data, Budget(2, 1), "hetdpt", SelectConfig(search=short, images=32))
        assert (plan.attention, plan.activation) == ((1, 2), (2,))


class TestTypes:
    KINDS = removal_order(Budget(2, 2))

    def test_types_are_never_compared(self, dense: nn.Module, data: Data) -> None:
        """Attention's gradients a thousand times as large change nothing; where all layers are in one list, they do."""
        plain, scaled = (run_search(dense, data, self.KINDS, scale) for scale in (1.0, 1000.0))
        assert [picked.site for picked in plain.removed] == [picked.site for picked in scaled.removed]
        joint, skewed = (run_search(dense, data, (None,) * 6, scale) for scale in (1.0, 1000.0))
        assert [picked.site for picked in joint.removed] != [picked.site for picked in skewed.removed]

    def test_removed_layers_stay_gone_and_are_not_run(self, dense: nn.Module, data: Data) -> None:
        search = run_search(dense, data, self.KINDS)
        assert [picked.site.kind for picked in search.removed] == list(self.KINDS)
        assert len({picked.site for picked in search.removed}) == 4
        for site, gate in search.gates.items():
            runs: list[Any] = []
            gate.inner.register_forward_hook(lambda *call, runs=runs: runs.append(call))
            is_gone = site in [picked.site for picked in search.removed]
            wide = site.kind == "activation" and not is_gone  # the gate of an FFN is on its second layer
            with torch.no_grad():
                gate(torch.ones(2, 17, 128 if wide else 32))
            assert len(runs) == (0 if is_gone else 1), site.path


class StoppedError(Exception):
    pass


class Memory:
    """Keeps every state, and ends the training when it has so many."""

    def __init__(self, limit: int | None = None) -> None:
        self.states: list[Any] = []
        self.limit = limit

    def latest(self) -> Any:
        return self.states[-1] if self.states else None

    def is_due(self) -> bool:
        return True

    def keep(self, state: Any) -> None:
        self.states.append(deepcopy(state))
        if len(self.states) == self.limit:
            raise StoppedError


def test_resumed_search_is_the_uninterrupted_one(dense: nn.Module, data: Data) -> None:
    def outcome(keeper: Memory | None) -> tuple[Plan, list[Picked]]:
        found: list[Picked] = []
        config = SelectConfig(search=search_config(training__lr=1e-3), images=32, candidates="all")
        plan = hetdpt.select(dense, data, Budget(2, 2), "hetdpt", config, keeper=keeper, watch=found.append)
        return plan, found

    plan, picked = outcome(None)
    memory = Memory(limit=8)  # of 10 updates: some layers are gone
    with pytest.raises(StoppedError):
        outcome(memory)
    assert 0 < len(memory.states[-1]["companion"]["removed"]) < 4
    memory.limit = None
    again, rest = outcome(memory)
    assert again == plan
    assert rest == picked  # also those that went before


# windows, two heads, gated FFNs, LayerScale
LABELS = [
    *("swin_tiny_patch4_window7_224", "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224"),
]


@pytest.mark.parametrize("label", LABELS)
def test_other_families_are_searched(label: str, data: Data) -> None:
    settings = {"per_class": 2, "training.batch_size": 5, "training.epochs": 1}
    config = SelectConfig(search=usual_search().with_settings(settings), images=8)
    plan = hetdpt.select(named(label).build(), data, Budget(1, 1), "hetdpt", config)
    assert plan.budget == Budget(1, 1)


def test_importance_gradient_is_the_finite_difference_in_a_model() -> None:
    """At m = 0 and m = 1, of an attention whose other side is a constant and which LayerScale multiplies."""
    family = named("cait_xxs24_224")
    model, images = family.build(), family.images(4)
    targets = torch.randn(4, 10, generator=torch.Generator().manual_seed(3))
    gate_fitted_(model, Plan(removal="calibrated"), [images])
    gate = gates_by_site(model)[next(site for site in gates_by_site(model) if site.kind == "attention")]
    assert isinstance(gate.removed, Constant)

    def loss(m: float) -> float:
        hook = gate.register_forward_hook(
            lambda module, args, y: m * y + (1 - m) * gate.removed.value  # type: ignore[operator]
        )
        with torch.no_grad():
            found = (model(images) - targets).pow(2).sum().item()
        hook.remove()
        return found

    for m, trial in ((1.0, None), (0.0, torch.ones(4, dtype=torch.bool))):
        gate.training, gate.trial, gate.importance.grad = True, trial, None
        (model(images) - targets).pow(2).sum().backward()
        step = 1e-2
        difference = (loss(m + step) - loss(m - step)) / (2 * step)
        assert gate.importance.grad is not None
        # float32: a difference of 1e-2 leaves about three digits
        assert gate.importance.grad.item() == pytest.approx(difference, rel=2e-2, abs=1e-4)
        assert abs(difference) > 1e-4


def test_model_pruned_by_another_removal_is_refused(dense: nn.Module, data: Data) -> None:
    hetdpt.prune_(dense, Plan(attention=(0,)))
    with pytest.raises(PlanError, match="was pruned with removal 'plain' and the plan says 'calibrated'"):
        hetdpt.select(dense, data, Budget(1, 1), "map+te", SelectConfig(images=32))


def test_too_short_a_search_is_refused(dense: nn.Module, data: Data) -> None:
    config = SelectConfig(search=search_config(training__batch_size=80), images=32)
    with pytest.raises(PlanError, match="the search has 1 updates, but needs one for each of the 2 layers to remove"):
        hetdpt.select(dense, data, Budget(1, 1), "hetdpt", config)


SCRIPT = """
import json, os, sys
from dataclasses import replace
import hetdpt, torch
from hetdpt.selection import select as room
from hetdpt.selection.select import SelectConfig, usual_search

searches = []
class Kept(room.ImportanceSearch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        searches.append(self)
room.ImportanceSearch = Kept
settings = {"per_class": 8, "training.batch_size": 4, "training.epochs": 1, "training.lr": 1e-3}
ours = SelectConfig(search=usual_search().with_settings(settings), images=32)
papers = replace(ours, removal="plain", explores=False)
dense = hetdpt.load(sys.argv[1])
plans = [hetdpt.select(dense, "demo", hetdpt.Budget(2, 2), "hetdpt", config, device="cpu") for config in (ours, papers)]
with open(f"{sys.argv[2]}.{torch.distributed.get_rank()}", "w") as file:
    found = [[parameter.item() for parameter in search.parameters] for search in searches]
    json.dump({"plans": [[plan.attention, plan.activation] for plan in plans], "importances": found}, file)
torch.distributed.barrier()
os._exit(0)  # threads of the group now and then abort a process that ends in the usual way
"""


@pytest.mark.slow
def test_importances_agree_on_all_processes(dense: nn.Module, tmp_path: Path) -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 10}
    hetdpt.save(dense, tmp_path / "dense", base=hetdpt.Base("timm", "vit_tiny_patch16_224", sizes))
    (tmp_path / "search.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(tmp_path / "search.py"), str(tmp_path / "dense"), str(tmp_path / "found")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    one, other = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in (0, 1))
    assert one == other  # to the last bit
    assert all(any(importances) for importances in one["importances"])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(HetDPTError, match="candidates is 'some'; expected 'all' or 'te'"):
        SelectConfig(candidates="some")  # type: ignore[arg-type]
    with pytest.raises(HetDPTError, match="images is 1; choosing layers needs at least 2"):
        SelectConfig(images=1)
