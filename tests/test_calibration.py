"""Calibrated removal: planted truths, relations between styles, and every family."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, KINDS, Family, by_label, named
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.fold import Means, Moments, fit_linear, fit_mean
from hetdpt.core.gates import Constant, Mapped
from hetdpt.core.plan import Plan, with_class_token
from hetdpt.core.styles import STYLES, ClassToken, styles_for
from hetdpt.measurement.agreement import outputs_of
from hetdpt.surgery.calibrate import calibrate_, fit_sites, gate_fitted_, replaced
from hetdpt.surgery.gate import gates_by_site
from hetdpt.surgery.record import record_of, require_record
from hetdpt.surgery.remove import place_, ready
from hetdpt.surgery.replacement import place_of

FITTED = [name for name in styles_for("attention") if STYLES[name].fit]
ROUNDING = 2e-5  # of the largest output, as in the contract suite
SCALED = 0.1  # of the largest output: before LayerScale channels weigh otherwise in the fit


@torch.no_grad()
def run(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([output.flatten() for output in outputs_of(model, images)])


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def error(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def batches_of(family: Family, count: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, *family.size, generator=generator) for _ in range(count)]


def planted(vit: Family) -> nn.Module:
    """Return a ViT whose FFN 1 is linear and whose attention 2 always gives the same vector."""
    model = vit.build()
    model.blocks[1].mlp.act = nn.LeakyReLU(1.0)  # type: ignore[union-attr,index] # a slope of 1 on both sides
    nn.init.zeros_(model.blocks[2].attn.proj.weight)  # type: ignore[union-attr,index,arg-type]
    return model


class TestLeastSquares:
    def test_streaming_is_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hetdpt.core.fold.RIDGES", (1e-10,))  # the smallest ones fit alike; rounding would pick one
        generator = torch.Generator().manual_seed(0)
        x = 3 + torch.randn(999, 12, generator=generator, dtype=torch.float64)
        y = torch.randn(999, 7, generator=generator, dtype=torch.float64) + x[:, :7]
        weight = torch.rand(999, generator=generator, dtype=torch.float64)
        whole, parts = Moments(12, 7), Moments(12, 7)
        whole.add(x, y, weight)
        for start, stop in ((0, 1), (1, 400), (400, 401), (401, 999)):
            parts.add(x[start:stop], y[start:stop], weight[start:stop])
        one, other = fit_linear([whole]), fit_linear([parts])
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.bias, other.bias, rtol=1e-10, atol=1e-10)
        assert abs(one.r2 - other.r2) < 1e-10

    def test_is_the_solution_that_torch_finds(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(200, 5, generator=generator).double(), torch.randn(200, 3, generator=generator).double()
        weight = torch.rand(200, generator=generator).double()
        moments = Moments(5, 3)
        moments.add(x, y, weight)
        fit = fit_linear([moments])
        design = torch.cat([x, torch.ones(200, 1)], 1) * weight.sqrt()[:, None]
        truth = torch.linalg.lstsq(design, y * weight.sqrt()[:, None]).solution
        torch.testing.assert_close(fit.weight, truth[:5].T, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(fit.bias, truth[5], rtol=1e-8, atol=1e-8)

    def test_the_ridge_is_the_one_that_is_best_on_what_was_held_out(self) -> None:
        """With fewer samples than inputs, noise alone is fitted unless the ridge is large; a clean map needs none."""
        generator = torch.Generator().manual_seed(0)
        ridges = {}
        for noise in (0.0, 10.0):
            folds = []
            matrix = torch.randn(30, 4, generator=generator).double()
            for _ in range(4):
                fold = Moments(30, 4)
                x = torch.randn(10, 30, generator=generator).double()
                fold.add(x, x @ matrix + noise * torch.randn(10, 4, generator=generator), torch.ones(10))
                folds.append(fold)
            ridges[noise] = fit_linear(folds).ridge
        assert ridges[0.0] < 1e-6 < 0.1 < ridges[10.0]

    def test_r2_is_honest(self) -> None:
        """Random outputs are not predicted, though 40 inputs fit 60 samples of them rather well."""
        generator = torch.Generator().manual_seed(0)
        folds = [Moments(40, 2) for _ in range(4)]
        for fold in folds:
            fold.add(torch.randn(15, 40, generator=generator), torch.randn(15, 2, generator=generator), torch.ones(15))
        assert fit_linear(folds).r2 < 0.1

    def test_nothing_to_explain_is_explained(self) -> None:
        moments, means = Moments(3, 2), Means()
        moments.add(torch.randn(9, 3), torch.zeros(9, 2), torch.ones(9))
        means.add(torch.zeros(9, 1, 2), torch.ones(9, 1))
        assert fit_linear([moments]).r2 == fit_mean([means]).r2 == 1

    def test_means_by_place(self) -> None:
        y, weight = torch.randn(10, 4, 3).double(), torch.rand(10, 4).double()
        folds = [Means(), Means()]
        folds[0].add(y[:3], weight[:3])
        folds[1].add(y[3:], weight[3:])
        mean = (y * weight[..., None]).sum(0) / weight.sum(0)[:, None]
        torch.testing.assert_close(fit_mean(folds).value, mean)


class TestPlanted:
    @pytest.mark.parametrize("class_token", ["share", "keep"])
    def test_a_linear_ffn_is_recovered(self, vit: Family, class_token: ClassToken) -> None:
        model, dense = planted(vit), planted(vit)
        removal = with_class_token("calibrated", class_token)
        calibrate_(model, Plan(activation=(1,), removal=removal), batches_of(vit))
        assert distance(run(model, vit.images()), run(dense, vit.images())) < ROUNDING
        assert record_of(model).plan.fits[0].r2 > 1 - 1e-8  # type: ignore[union-attr]

    @pytest.mark.parametrize("style", ["constant", "position", "linear"])
    def test_a_constant_attention_is_recovered(self, vit: Family, style: str) -> None:
        model, dense = planted(vit), planted(vit)
        calibrate_(model, Plan(attention=(2,), removal=(style, "identity")), batches_of(vit))
        assert distance(run(model, vit.images()), run(dense, vit.images())) < ROUNDING
        assert record_of(model).plan.fits[0].r2 > 1 - 1e-8  # type: ignore[union-attr]

    def test_an_attention_that_only_knows_the_place_is_recovered(self, vit: Family) -> None:
        """Where all images are the same, all a token's attention can depend on is its place."""
        model, dense = vit.build(), vit.build()
        images = vit.images(1).expand(8, -1, -1, -1)
        calibrate_(model, Plan(attention=(1,), removal=("position", "identity")), [images])
        assert distance(run(model, images), run(dense, images)) < ROUNDING

    def test_of_layers_that_are_neither_nothing_is_claimed(self, vit: Family) -> None:
        model = vit.build()
        calibrate_(model, Plan(attention=(1,), activation=(0, 2), removal="calibrated"), batches_of(vit))
        assert all(fit.r2 < 1 - 1e-4 for fit in record_of(model).plan.fits)  # type: ignore[union-attr]

    def test_a_massive_token_does_not_take_the_constant_for_itself(self, vit: Family) -> None:
        """Attention 2 gives one vector to all tokens, and to that of the class a thousand times as much of another."""
        model = planted(vit)
        usual = model.blocks[2].attn.proj.bias.detach().clone()  # type: ignore[union-attr,index,operator]
        massive = torch.zeros(17, 48)
        massive[0] = 1000 * torch.randn(48, generator=torch.Generator().manual_seed(0))
        add_ = lambda module, args, output: output + massive  # noqa: E731
        model.blocks[2].attn.proj.register_forward_hook(add_)  # type: ignore[union-attr,index]
        base = ready(model, "calibrated", vit.size)
        site = next(site for site in hetdpt.sites(base) if (site.kind, site.block) == ("attention", 2))
        [value] = fit_sites(base, {site: ("constant",)}, batches_of(vit))[site, "constant"].values
        mean = usual + massive.mean(0)
        assert (value[0] - usual).norm() < 0.3 * (mean - usual).norm()

    def test_massive_tokens_do_not_decide(self) -> None:
        """One token a thousand times as large as the others would else take the fit for itself."""
        x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)).double()
        y = x.clone()
        y[0] = 1000 * torch.ones(6)
        weights = {"robust": 1 / y.norm(dim=1), "equal": torch.ones(400)}
        errors = {}
        for name, weight in weights.items():
            moments = Moments(6, 6)
            moments.add(x, y, weight)
            fit = fit_linear([moments])
            errors[name] = (x[1:] @ fit.weight.T + fit.bias - y[1:]).norm().item()
        assert errors["robust"] < 0.3 * errors["equal"]


class TestStyles:
    def test_each_is_closer_than_the_one_before(self, vit: Family) -> None:
        """skip, then a vector, then one for each token: each can be what the one before is."""
        images = torch.cat(batches_of(vit, count=8))
        dense = vit.build()
        target = {}

        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            target["y"] = output

        hook = dense.blocks[1].attn.register_forward_hook(keep)  # type: ignore[union-attr,index]
        run(dense, images)
        hook.remove()
        base = ready(dense, "plain", vit.size)
        site = next(site for site in hetdpt.sites(dense, vit.size) if (site.kind, site.block) == ("attention", 1))
        found = fit_sites(base, {site: ("constant", "position", "linear")}, [images])
        r2 = {style: found[site, style].fit.r2 for style in ("constant", "position", "linear")}
        assert 0 < r2["constant"] < 1
        assert r2["constant"] <= r2["position"] + 0.05
        assert r2["linear"] >= r2["constant"] - 0.05
        [value] = found[site, "constant"].values
        robust = 1 / target["y"].norm(dim=-1, keepdim=True)
        mean = (robust * target["y"]).sum((0, 1)) / robust.sum()
        torch.testing.assert_close(value[0].float(), mean, rtol=1e-3, atol=1e-4)  # but for the floor of small tokens

    def test_the_plan_without_a_fitted_removal_is_taken_as_calibrated(self, vit: Family) -> None:
        plan = Plan(attention=(1,), activation=(0,))
        one = calibrate_(vit.build(), plan, batches_of(vit))
        other = calibrate_(vit.build(), Plan((1,), (0,), removal="calibrated"), batches_of(vit))
        assert torch.equal(run(one, vit.images()), run(other, vit.images()))
        assert isinstance(one.get_submodule("blocks.1.attn"), Constant)

    def test_only_what_is_asked_for_is_fitted(self, vit: Family) -> None:
        model = calibrate_(vit.build(), Plan((1,), (0,), removal=("skip", "calibrated")), batches_of(vit))
        plan = record_of(model).plan  # type: ignore[union-attr]
        assert [(fit.kind, fit.block, fit.style) for fit in plan.fits] == [("activation", 0, "calibrated")]
        other = hetdpt.prune_(vit.build(), Plan(attention=(1,)))
        calibrated = calibrate_(vit.build(), Plan((1,), removal=("skip", "calibrated")), batches_of(vit))
        assert torch.equal(run(calibrated, vit.images()), run(other, vit.images()))

    def test_the_gated_ffn_becomes_a_map(self) -> None:
        family = named("eva02_tiny_patch14_224")
        model = family.build()
        dense, dropped = run(model, family.images()), family.build()
        calibrate_(model, Plan(activation=(1,)), batches_of(family))
        hetdpt.prune_(dropped, Plan(activation=(1,), removal=("skip", "drop")))
        assert isinstance(model.get_submodule("blocks.1.mlp"), Mapped)
        assert error(run(model, family.images()), dense) < error(run(dropped, family.images()), dense)

    def test_position_refuses_other_sizes(self, vit: Family) -> None:
        model = calibrate_(vit.build(), Plan((1,), removal=("position", "identity")), batches_of(vit))
        model.patch_embed.strict_img_size = False  # type: ignore[union-attr]
        with pytest.raises(ModelError, match=r"values for tokens of shape \(17, 48\), but got \(18, 48\)"):
            model.get_submodule("blocks.1.attn")(torch.zeros(1, 18, 48))


class TestOrder:
    def test_each_is_fitted_on_what_it_gets_in_the_pruned_model(self, vit: Family) -> None:
        batches = batches_of(vit)
        together = calibrate_(vit.build(), Plan((0,), (2,), removal="calibrated"), batches)
        first = calibrate_(vit.build(), Plan((0,), removal="calibrated"), batches)
        then = calibrate_(first, Plan((0,), (2,), removal="calibrated"), batches)
        assert torch.equal(run(together, vit.images()), run(then, vit.images()))
        assert record_of(together).plan.fits == record_of(then).plan.fits  # type: ignore[union-attr]
        alone = ready(vit.build(), "calibrated", vit.size)
        site = next(site for site in hetdpt.sites(alone) if (site.kind, site.block) == ("activation", 2))
        dense = fit_sites(alone, {site: ("calibrated",)}, batches)[site, "calibrated"]
        last = together.blocks[2].mlp.fc1.weight  # type: ignore[union-attr,index]
        assert (last - dense.values[0].float()).abs().max() > 1e-3

    def test_an_iterator_is_read_once(self, vit: Family) -> None:
        batches = batches_of(vit)
        model = calibrate_(vit.build(), Plan((0,), (2,)), iter(batches))
        base = ready(vit.build(), "calibrated", vit.size)
        for site in hetdpt.sites(base):
            if (site.kind, site.block) in (("attention", 0), ("activation", 2)):
                style = "constant" if site.kind == "attention" else "calibrated"
                base = replaced(
                    base, fit_sites(ready(vit.build(), "calibrated", vit.size), {site: (style,)}, batches)[site, style]
                )
        torch.testing.assert_close(run(model, vit.images()), run(base, vit.images()))

    def test_sizes_of_batches_make_no_difference(self, vit: Family) -> None:
        images = torch.cat(batches_of(vit))
        plan = Plan((0,), (2,), removal="calibrated")
        one = calibrate_(vit.build(), plan, [images])
        other = calibrate_(vit.build(), plan, [images[:3], images[3:4], images[4:]])
        torch.testing.assert_close(run(one, vit.images()), run(other, vit.images()))

    def test_more_passes_where_all_sums_at_once_take_too_much(
        self, vit: Family, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, batches = ready(vit.build(), "calibrated", vit.size), batches_of(vit)
        asked = {site: ("linear" if site.kind == "attention" else "calibrated",) for site in hetdpt.sites(base)}
        passes = []

        class Counted(list):  # type: ignore[type-arg]
            def __iter__(self) -> Any:
                passes.append(1)
                return super().__iter__()

        whole = fit_sites(base, asked, Counted(batches))
        once = len(passes)
        monkeypatch.setattr("hetdpt.surgery.calibrate.SUMS", 2 * 8 * 4 * 2 * 48**2)  # two layers of six
        parts = fit_sites(base, asked, Counted(batches))
        assert len(passes) - once > once
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key].values[0], parts[key].values[0]) for key in whole)

    def test_what_is_going_on_is_told(self, vit: Family) -> None:
        seen: list[tuple[int, int]] = []
        calibrate_(vit.build(), Plan((0,), (2,)), batches_of(vit, 3), progress=lambda *now: seen.append(now))
        assert seen == [(step, 6) for step in range(1, 7)]

    def test_the_model_is_as_it_was_where_images_do_not_fit(self, vit: Family) -> None:
        model = vit.build().train()
        before = deepcopy(model)
        with pytest.raises((DataError, ModelError)):
            calibrate_(model, Plan((0,), (2,)), [torch.randn(2, 3, 40, 40)])
        assert str(model) == str(before)
        assert record_of(model) is None
        assert model.training


class TestMerging:
    def test_a_constant_goes_into_the_bias_before_it(self, vit: Family) -> None:
        model = calibrate_(vit.build(), Plan((0, 2), (1,), removal="calibrated"), batches_of(vit))
        pruned = run(model, vit.images())
        count = hetdpt.count_params(model)
        hetdpt.merge_(model)
        assert record_of(model).folded_constants == (0, 2)  # type: ignore[union-attr]
        assert hetdpt.count_params(model) == count - 2 * 48
        assert distance(run(model, vit.images()), pruned) < ROUNDING
        assert not any(isinstance(module, Constant) for module in model.modules())
        merged = run(model, vit.images())
        assert torch.equal(run(hetdpt.merge_(model), vit.images()), merged)

    def test_a_vector_for_each_token_goes_into_the_positions_alone(self, vit: Family) -> None:
        model = calibrate_(vit.build(), Plan((0, 2), removal=("position", "identity")), batches_of(vit))
        pruned = run(model, vit.images())
        hetdpt.merge_(model)
        assert record_of(model).folded_constants == (0,)  # type: ignore[union-attr]
        assert distance(run(model, vit.images()), pruned) < ROUNDING

    def test_norms_fold_into_fitted_maps(self, vit: Family) -> None:
        model = calibrate_(vit.build(), Plan(activation=(1,), removal="calibrated"), batches_of(vit))
        pruned, count = run(model, vit.images()), hetdpt.count_params(model)
        hetdpt.merge_(model, fold_norms=True)
        assert hetdpt.count_params(model) == count - 2 * 48
        assert distance(run(model, vit.images()), pruned) < ROUNDING

    def test_pruning_on_after_merging(self, vit: Family) -> None:
        model = hetdpt.merge_(calibrate_(vit.build(), Plan((1,), (0,)), batches_of(vit)))
        more = calibrate_(model, Plan((1, 2), (0, 1), removal="calibrated"), batches_of(vit))
        assert len(hetdpt.sites(more)) == 2
        plan = record_of(more).plan  # type: ignore[union-attr]
        assert len(plan.fits) == len(plan) == 4
        pruned = run(more, vit.images())
        assert distance(run(hetdpt.merge_(more), vit.images()), pruned) < ROUNDING

    def test_streams_that_are_handed_out_are_left_as_they_are(self) -> None:
        """What a backbone returns from between its blocks must not have a constant of the next block in it."""
        from transformers import Dinov2Backbone, Dinov2Config

        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        options = {"out_features": ["stage1", "stage2"], "apply_layernorm": False, "reshape_hidden_states": False}
        model = Dinov2Backbone(Dinov2Config(**sizes, **options)).eval()
        images = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
        calibrate_(model, Plan((1, 2), removal=("constant", "identity")), [images])
        pruned = run(model, images)
        assert distance(run(hetdpt.merge_(model), images), pruned) < ROUNDING

    def test_constants_stay_where_they_are_if_asked_to(self, vit: Family) -> None:
        model = calibrate_(vit.build(), Plan((0, 2), removal="calibrated"), batches_of(vit))
        hetdpt.merge_(model, fold_constants=False)
        assert isinstance(model.get_submodule("blocks.2.attn"), Constant)

    def test_an_ffn_that_has_taken_in_a_constant_stays(self, vit: Family) -> None:
        removal = ("constant", "drop")
        model = hetdpt.merge_(calibrate_(vit.build(), Plan((2,), removal=removal), batches_of(vit)))
        with pytest.raises(PlanError, match="FFN of block 1 cannot be removed: merging has folded .* attention 2"):
            calibrate_(model, Plan((2,), (1,), removal=removal), batches_of(vit))


class Written(nn.Module):
    """A block whose function is written in one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = Attention(32)
        self.alpha = nn.Parameter(torch.full((32,), 0.5))
        hidden = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
        self.mlp = nn.Sequential(nn.LayerNorm(32), *hidden) if way == "inside" else nn.Sequential(*hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "half":
            x = x + 0.5 * self.attn(self.norm1(x))
        elif self.way == "early":
            x = x + self.attn(self.alpha * self.norm1(x))
        else:
            x = x + self.attn(self.norm1(x))
        return x + self.mlp(x if self.way == "inside" else self.norm2(x))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        y: Tensor = self.proj((query @ key.transpose(1, 2) / 5).softmax(-1) @ value)
        return y


class Tower(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.Sequential(*(Written(way) for _ in range(3)))

    def forward(self, images: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.embed(images).flatten(2).transpose(1, 2)).mean(1)
        return y


def towers(way: str) -> tuple[nn.Module, nn.Module]:
    """Return one function written plainly and in the other ``way``."""
    generator = torch.Generator().manual_seed(0)
    one, other = Tower("plain"), Tower(way)
    with torch.no_grad():
        for parameter in one.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 0.5 + 0.1 * noise)
        state = one.state_dict()
        if way == "inside":  # norm2 is mlp.0 there, and the rest of mlp is one further
            for name, value in one.state_dict().items():
                block, _, leaf = name.partition(".mlp.")
                number, _, last = leaf.partition(".")
                state[f"{block}.mlp.{int(number) + 1}.{last}" if leaf else name.replace("norm2", "mlp.0")] = value
            state = {name: state[name] for name in other.state_dict()}
        other.load_state_dict(state)
        for block in other.blocks:  # type: ignore[union-attr]
            if way == "half":
                block.attn.proj.weight.mul_(2)
                block.attn.proj.bias.mul_(2)
            if way == "early":
                block.norm1.weight.div_(block.alpha)
                block.norm1.bias.div_(block.alpha)
    return one.eval(), other.eval()


@pytest.mark.parametrize("style", FITTED)
@pytest.mark.parametrize("way", ["half", "early", "inside"])
def test_the_way_a_function_is_written_makes_no_difference(way: str, style: str) -> None:
    models = towers(way)
    images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run(models[0], images), run(models[1], images), rtol=1e-4, atol=1e-5)
    for model in models:
        hetdpt.sites(model, (3, 32, 32))
        calibrate_(model, Plan((0, 2), (1, 2), removal=(style, "calibrated")), [images])
    pruned = [run(model, images) for model in models]
    assert distance(*pruned) < 1e-3  # of ridges that are chosen among decades
    merged = [run(hetdpt.merge_(model), images) for model in models]
    assert all(distance(one, other) < ROUNDING for one, other in zip(merged, pruned, strict=True))


@pytest.mark.parametrize(
    "removal",
    [
        *(pytest.param((style, "calibrated"), marks=pytest.mark.slow) for style in ("constant", "position")),
        ("linear", "calibrated-keep"),
    ],
    ids=str,
)
def test_onnx(vit: Family, removal: tuple[str, str], tmp_path: Path) -> None:
    model = hetdpt.merge_(calibrate_(vit.build(), Plan((1,), (2,), removal=removal), batches_of(vit)))
    assert hetdpt.export_onnx(model, tmp_path / "model.onnx").largest_difference < 1e-4


def test_what_was_frozen_stays_frozen_and_vectors_do_not_decay(vit: Family) -> None:
    frozen = calibrate_(vit.build().requires_grad_(False), Plan((1,), (2,)), batches_of(vit))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    free = calibrate_(vit.build(), Plan((1,), (2,)), batches_of(vit))
    assert free.get_parameter("blocks.1.attn.bias").shape == (48,)  # flat: timm does not decay what is
    assert free.get_parameter("blocks.1.attn.bias").requires_grad


def test_half_precision(vit: Family) -> None:
    model = calibrate_(vit.build().half(), Plan((1,), (2,)), batches_of(vit))
    exact = calibrate_(vit.build(), Plan((1,), (2,)), batches_of(vit))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert distance(run(model, vit.images().half()).float(), run(exact, vit.images())) < 0.02


def test_gates_on_what_is_left_of_a_calibrated_model(vit: Family) -> None:
    model = calibrate_(vit.build(), Plan((1,), (2,)), batches_of(vit))
    before = run(model, vit.images())
    assert len(hetdpt.gates_of(hetdpt.gate_(model))) == 4
    assert torch.equal(run(model, vit.images()), before)
    assert torch.equal(run(hetdpt.restore_(model), vit.images()), before)


class TestRefusals:
    def test_gates(self, model: nn.Module) -> None:
        with pytest.raises(PlanError, match="a gate has no images to fit removal 'calibrated' on"):
            hetdpt.gate_(model, Plan(removal="calibrated"))

    def test_no_images(self, model: nn.Module) -> None:
        with pytest.raises(DataError, match="calibration needs images, but the batches are empty"):
            calibrate_(model, Plan((0,)), [])

    def test_not_images(self, model: nn.Module) -> None:
        with pytest.raises(DataError, match="batches are float tensors of images .* one is a str"):
            calibrate_(model, Plan((0,)), ["a.jpg"])  # type: ignore[list-item]

    def test_one_image(self, vit: Family, model: nn.Module) -> None:
        with pytest.raises(DataError, match="there is only one image; give two or more"):
            calibrate_(model, Plan((0,)), [vit.images(1)])

    def test_images_of_another_size_for_a_model_that_is_pruned(self, vit: Family, model: nn.Module) -> None:
        calibrate_(model, Plan((0,)), batches_of(vit))
        with pytest.raises(DataError, match="does not take images of 3 x 40 x 40"):
            calibrate_(model, Plan((0, 1), removal="calibrated"), [torch.randn(2, 3, 40, 40)])

    def test_tokens_first(self) -> None:
        class Turned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attn = Attention(32)

            def forward(self, x: Tensor) -> Tensor:  # (N, B, D)
                y: Tensor = self.attn(x.transpose(0, 1)).transpose(0, 1)
                return y

        model = Tower("plain").eval()
        for block in model.blocks:
            block.attn = Turned()  # type: ignore[union-attr]
        model.blocks.register_forward_pre_hook(lambda module, args: (args[0].transpose(0, 1),))
        model.blocks.register_forward_hook(lambda module, args, output: output.transpose(0, 1))
        images = torch.randn(6, 3, 32, 32)
        hetdpt.sites(model, (3, 32, 32))
        for batch in (images, images[:2]):  # two are as many as a model is watched with
            with pytest.raises(PlanError, match=r"attention 0 has tokens before images, \(N, B, D\)"):
                calibrate_(model, Plan((0,), removal=("position", "identity")), [batch])
        calibrate_(model, Plan((0,), removal=("linear", "identity")), [images])

    def test_another_removal_than_before(self, vit: Family, model: nn.Module) -> None:
        hetdpt.prune_(model, Plan((0,)))
        with pytest.raises(PlanError, match="was pruned with removal 'plain' and the plan says 'calibrated'"):
            calibrate_(model, Plan((0, 1), removal="calibrated"), batches_of(vit))

    def test_values_that_are_not_finite(self, vit: Family, model: nn.Module) -> None:
        nn.init.constant_(model.blocks[0].mlp.fc2.weight, float("nan"))  # type: ignore[union-attr,index,arg-type]
        with pytest.raises(ModelError, match=r"blocks.0.mlp.fc2 returns values that are not finite"):
            calibrate_(model, Plan(activation=(0,)), batches_of(vit))


@pytest.fixture(params=FAMILIES, ids=by_label)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.mark.parametrize("label", [*KINDS, pytest.param("coatnet_nano_rw_224", marks=pytest.mark.slow)])
def test_kinds_of_families(label: str) -> None:
    closer_than_plain_and_the_same_when_merged(named(label))


@pytest.mark.slow
def test_every_family(family: Family) -> None:
    closer_than_plain_and_the_same_when_merged(family)


def closer_than_plain_and_the_same_when_merged(family: Family) -> None:
    """On the images it was fitted on, calibrated is closer to dense than plain; merged is the same."""
    model = family.build()
    plain = family.plan(hetdpt.sites(model, family.size))
    batches = batches_of(family)
    dense = run(model, batches[0])
    left_out = run(hetdpt.prune_(family.build(), plain, family.size), batches[0])
    calibrate_(model, Plan(plain.attention, plain.activation), batches)
    calibrated = run(model, batches[0])
    assert error(calibrated, dense) < error(left_out, dense)
    assert distance(run(hetdpt.merge_(model), batches[0]), calibrated) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("style", FITTED)
def test_every_family_and_style_is_saved_and_loaded(family: Family, style: str, tmp_path: Path) -> None:
    model = family.build()
    plan = family.plan(hetdpt.sites(model, family.size))
    batches = batches_of(family)
    calibrate_(model, Plan(plan.attention, plan.activation, removal=(style, "calibrated")), batches)
    calibrated = run(model, batches[0])
    assert calibrated.isfinite().all()
    fits = record_of(model).plan.fits  # type: ignore[union-attr]
    assert [fit.style for fit in fits if fit.kind == "attention"] == [style] * len(plan.attention)
    merged = run(hetdpt.merge_(model), batches[0])
    assert distance(merged, calibrated) < ROUNDING
    loaded = hetdpt.load(hetdpt.save(model, tmp_path / "saved"))
    assert torch.equal(run(loaded, batches[0]), merged)
    assert record_of(loaded).plan.fits == fits  # type: ignore[union-attr]


def test_places_without_values_are_plain(vit: Family) -> None:
    """Until it is filled, a constant adds nothing and a map in place of an FFN is what ``identity`` leaves."""
    placed = place_(vit.build(), Plan((1,), (0,), removal="calibrated"))
    plain = hetdpt.merge_(hetdpt.prune_(vit.build(), Plan((1,), (0,))))
    torch.testing.assert_close(run(placed, vit.images()), run(plain, vit.images()), rtol=1e-5, atol=1e-6)


MEMORY = """
import resource, sys, torch
import hetdpt, timm
from hetdpt.surgery.calibrate import calibrate_
model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10)
generator = torch.Generator().manual_seed(0)
class Batches:
    def __iter__(self):
        return (torch.randn(32, 3, 64, 64, generator=generator) for _ in range(int(sys.argv[1])))
calibrate_(model, hetdpt.Plan((0, 1), (0, 1), removal=("linear", "calibrated")), Batches())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images() -> None:
    """64 batches more are 100 MiB of images, and 1.2 GiB of hidden features."""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", MEMORY, str(count)], capture_output=True, text=True, check=True
            ).stdout
        )
        for count in (4, 68)
    ]
    assert peaks[1] - peaks[0] < 30 * 1024  # KiB


# one stream, LayerScale, a norm behind the core, gated FFNs
GATED = ["vit_tiny_patch16_224", "cait_xxs24_224", "swinv2_tiny_window8_256", "eva02_tiny_patch14_224"]


@pytest.mark.parametrize("label", GATED)
def test_closed_gate_is_the_calibrated_removal(label: str) -> None:
    closed_gate_is_the_calibrated_removal(named(label), ("linear", "calibrated"))


@pytest.mark.slow
@pytest.mark.parametrize("style", FITTED)
def test_closed_gate_is_the_calibrated_removal_in_every_family(family: Family, style: str) -> None:
    closed_gate_is_the_calibrated_removal(family, (style, "calibrated"))


def test_gates_of_a_plan_are_closed_and_fitted(model: nn.Module, vit: Family) -> None:
    batches = batches_of(vit)
    plan = Plan(attention=(1,), removal="calibrated")
    pruned = run(calibrate_(vit.build(), plan, batches), batches[0])
    assert distance(run(gate_fitted_(model, plan, batches), batches[0]), pruned) < ROUNDING


def test_gates_that_cannot_be_fitted_leave_the_model_alone(model: nn.Module, vit: Family) -> None:
    with pytest.raises(DataError, match="there is only one image"):
        gate_fitted_(model, Plan(removal="calibrated"), [vit.images(1)])
    assert not hetdpt.gates_of(model)


def test_gates_are_fitted_on_an_iterator_too(model: nn.Module, vit: Family) -> None:
    batches, plan = batches_of(vit), Plan(attention=(1,), removal="calibrated")
    outputs = [run(gate_fitted_(vit.build(), plan, given), batches[0]) for given in (batches, iter(batches))]
    assert torch.equal(*outputs)


def closed_gate_is_the_calibrated_removal(family: Family, removal: tuple[str, str]) -> None:
    """The other side of a gate, which is before LayerScale, does what the replacement of the layer does."""
    model, batches = family.build(), batches_of(family, 1, 4)
    dense = run(model, batches[0])
    gate_fitted_(model, Plan(removal=removal), batches)
    assert torch.equal(run(model, batches[0]), dense)
    gates = gates_by_site(model)
    assert len(gates) == family.attention + family.activation
    handles = {handle.site: handle for handle in require_record(model).survey.handles}
    for site in [*gates][:3]:
        gates[site].is_open = False
        alone = calibrate_(family.build(), Plan(**{site.kind: (site.block,)}, removal=removal), batches)
        gated, pruned = run(model, batches[0]), run(alone, batches[0])
        is_scaled = place_of(model, handles[site], STYLES[removal[site.kind == "activation"]]).scales
        assert distance(gated, pruned) < (SCALED if is_scaled else ROUNDING), site.path
        assert distance(gated, dense) > ROUNDING
        gates[site].is_open = True
    assert torch.equal(run(hetdpt.restore_(model), batches[0]), dense)
