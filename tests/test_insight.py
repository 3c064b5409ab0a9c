"""The scan: planted truths are found, numbers are those of full passes, and what cannot be used is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, log
from typing import Any, NamedTuple

import pytest
import torch
from families import Family, named
from torch import Tensor, nn
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.models import build
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.plan import Plan, Site
from hetdpt.measurement.agreement import outputs_of
from hetdpt.measurement.costs import Costs, count_macs
from hetdpt.selection.entropy import transfer_entropy
from hetdpt.studies.scan import LIMIT, ScanRow, ScanTable, Uninformed, scan
from hetdpt.surgery.calibrate import fit_sites, replaced
from hetdpt.surgery.remove import ready, without

SAME = 1e-9  # relative; the same operations run, so only the order of the float64 sums may differ
WRITERS = ("attn.proj", "mlp.fc2")
ATTENTION = ["skip", "norm", "constant", "position", "linear"]


def batches_of(family: Family, count: int = 8) -> list[Tensor]:
    return list(family.images(count).split(4))


def untimed(model: nn.Module, batches: Any, **options: Any) -> ScanTable:
    return scan(model, batches, latency=False, **options)


def row_of(table: ScanTable, kind: str, block: int, style: str) -> ScanRow:
    return next(r for r in table.rows if (r.site.kind, r.site.block, r.style) == (kind, block, style))


def styles_of(table: ScanTable, kind: str) -> list[list[str]]:
    return [[row.style for row in table.of(site)] for site in table.sites if site.kind == kind]


def linear_at(model: nn.Module, path: str) -> nn.Linear:
    module = model.get_submodule(path)
    assert isinstance(module, nn.Linear)
    return module


@torch.no_grad()
def decided(model: nn.Module, family: Family) -> nn.Module:
    """Make the answers differ from image to image, as those of a trained classifier do: logits 0 +- 3."""
    head, logits = linear_at(model, "head"), model(family.images(32))
    scale = 3 / logits.std(0)
    head.weight.mul_(scale[:, None])
    head.bias.sub_(logits.mean(0)).mul_(scale)
    return model


class Scanned(NamedTuple):
    table: ScanTable
    calls: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def scanned() -> Scanned:
    """Return the scan of the plain ViT, with times, and the calls of its progress."""
    family, calls = named("vit_tiny_patch16_224"), list[tuple[str, int, int]]()
    table = scan(family.build(), batches_of(family), batch=3, progress=lambda *call: calls.append(call))
    return Scanned(table, calls)


@pytest.fixture(scope="module")
def gated() -> ScanTable:
    """Return the scan of a model with gated FFNs, with times."""
    family = named("eva02_tiny_patch14_224")
    return scan(family.build(), batches_of(family), batch=1)


# What is in it


def test_every_site_and_style_in_order_and_the_model_stays_as_it_was(model: nn.Module, vit: Family) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = untimed(model, batches_of(vit))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert len(hetdpt.sites(model)) == 6
    assert table.sites == tuple(hetdpt.sites(model))
    assert styles_of(table, "attention") == [ATTENTION] * 3
    assert styles_of(table, "activation") == [["identity", "calibrated"]] * 3
    fitted = {row.style for row in table.rows if row.r2 is not None}
    assert fitted == {"constant", "position", "linear", "calibrated"}
    assert (table.fitted_on, table.judged_on, table.is_apart, table.latency) == (8, 8, False, None)
    assert table.is_classifier


def test_a_gated_ffn_is_mapped_or_dropped(gated: ScanTable) -> None:
    assert styles_of(gated, "activation") == [["calibrated", "drop"]] * 3
    assert all(site.is_gated for site in gated.sites if site.kind == "activation")


@pytest.mark.parametrize(
    "label", ["swin_tiny_patch4_window7_224", pytest.param("swinv2_tiny_window8_256", marks=pytest.mark.slow)]
)
def test_other_families(label: str) -> None:
    family = named(label)
    table = untimed(family.build(), batches_of(family, 4))
    assert styles_of(table, "attention") == [ATTENTION] * family.attention
    assert styles_of(table, "activation") == [["identity", "calibrated"]] * family.activation
    assert all(0 <= row.damage < inf and row.macs_saved > 0 for row in table.rows)


def test_a_model_without_classes_is_judged_by_its_features() -> None:
    family = named("hf DINOv3ViTModel")
    model, batches = family.build(), batches_of(family)
    table = untimed(model, batches)
    assert not table.is_classifier
    row = row_of(table, "attention", 1, "skip")
    with torch.no_grad():
        dense = torch.cat([outputs_of(model, images)[0] for images in batches]).double()
        pruned = hetdpt.prune_(family.build(), Plan(attention=(1,)))
        changed = torch.cat([outputs_of(pruned, images)[0] for images in batches]).double()
    size = dense.square().sum()
    assert row.damage == pytest.approx(((dense - changed).square().sum() / size).item(), rel=SAME)
    spread = (dense - dense.mean(0)).square().sum() / size
    assert table.uninformed == pytest.approx(spread.item(), rel=SAME)


def test_a_pruned_model_is_scanned_by_its_own_removal(model: nn.Module, vit: Family) -> None:
    hetdpt.prune_(model, Plan(attention=(0,), activation=(2,), removal="norm"))
    table = untimed(model, batches_of(vit))
    assert [(row.site.kind, row.site.block, row.style) for row in table.rows] == [
        ("activation", 0, "identity"),
        ("attention", 1, "norm"),
        ("activation", 1, "identity"),
        ("attention", 2, "norm"),
    ]


# Its numbers


def test_transfer_entropy_is_that_of_the_entropy_room(scanned: Scanned, model: nn.Module, vit: Family) -> None:
    table, batches = scanned.table, batches_of(vit)
    for site, value in transfer_entropy(model, batches).items():
        style = "skip" if site.kind == "attention" else "identity"
        assert row_of(table, site.kind, site.block, style).te == pytest.approx(value, rel=SAME)
    for site, value in transfer_entropy(model, batches, removal="calibrated").items():
        style = "constant" if site.kind == "attention" else "calibrated"
        assert row_of(table, site.kind, site.block, style).te == pytest.approx(value, rel=SAME)


def test_damage_is_that_of_full_passes_on_other_images(model: nn.Module, vit: Family) -> None:
    decided(model, vit)
    batches = batches_of(vit, 16)
    fit, judge = batches[:2], batches[2:]
    table = untimed(model, fit, judge=judge)
    base = ready(model, "plain")
    asked = {site: ATTENTION[2:] if site.kind == "attention" else ["calibrated"] for site in table.sites}
    fits = fit_sites(base, asked, fit)
    with torch.no_grad():
        dense = torch.cat([model(images) for images in judge]).double().log_softmax(1)
        for row in table.rows:
            fitted = fits.get((row.site, row.style))
            variant = replaced(base, fitted) if fitted else without(base, row.site, row.style)
            changed = torch.cat([variant(images) for images in judge]).double().log_softmax(1)
            expected = F.kl_div(changed, dense, reduction="batchmean", log_target=True).item()
            assert row.damage == pytest.approx(expected, rel=SAME)
            assert row.r2 == (fitted.fit.r2 if fitted else None)
        mean = dense.exp().mean(0).log()
        expected = F.kl_div(mean.expand_as(dense), dense, reduction="batchmean", log_target=True).item()
    assert table.uninformed == pytest.approx(expected, rel=SAME)
    assert (table.fitted_on, table.judged_on, table.is_apart) == (8, 8, True)


def test_the_memory_and_the_sizes_of_batches_make_no_difference(model: nn.Module, vit: Family) -> None:
    images = vit.images(8)
    one, other = untimed(model, [images]), untimed(model, list(images.split(3)), memory=0)
    for a, b in zip(one.rows, other.rows, strict=True):
        # other batch sizes, other float32 sums in the matrix products
        assert (a.te, a.damage, a.r2 or 0) == pytest.approx((b.te, b.damage, b.r2 or 0), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_macs_saved_are_those_of_the_merged_and_trimmed_model(label: str, scanned: Scanned, gated: ScanTable) -> None:
    family = named(label)
    model, table = family.build(), gated if "eva02" in label else scanned.table
    assert table.dense.macs == count_macs(model, family.size)
    base = ready(model, "plain", family.size)
    whole = table.dense.macs if "eva02" in label else count_macs(hetdpt.trim_(base), family.size)
    for row in (*table.rows[:7], *table.rows[-2:]):
        merged = hetdpt.merge_(without(base, row.site, row.style))
        assert row.macs_saved == whole - count_macs(merged, family.size)


def test_every_row_is_timed(scanned: Scanned, model: nn.Module) -> None:
    table = scanned.table
    assert table.latency is not None
    for row in table.rows:
        assert row.ms_saved is not None
        assert (row.ms_saved.unit, row.ms_saved.device, row.ms_saved.dtype) == ("ms", "cpu", "float32")
        assert row.ms_saved.batch == table.latency.batch == 3
    for site in hetdpt.sites(model)[::2]:
        skip, _, constant, position, linear = (row.ms_saved for row in table.of(site))
        assert skip == constant == position != linear


def test_a_gated_family_is_timed(gated: ScanTable) -> None:
    assert all(row.ms_saved is not None for row in gated.rows)


# Planted truths


def test_an_attention_that_is_constant_is_replaced_by_one(model: nn.Module, vit: Family) -> None:
    last = linear_at(model, "blocks.1.attn.proj")
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.linspace(-2, 2, 48))  # norms would not see the same number in all channels
    table = untimed(decided(model, vit), batches_of(vit))
    for style in ("constant", "position", "linear"):
        row = row_of(table, "attention", 1, style)
        assert row.r2 == pytest.approx(1, abs=1e-9)
        assert row.damage < 1e-9  # float32 rounding of the stream, squared
        assert row.is_replaceable
    skip = row_of(table, "attention", 1, "skip")
    assert skip.damage > 1e-4
    site = skip.site
    assert table.best(site).style in ("constant", "position", "linear")
    assert row_of(table, "attention", 0, "constant").damage > 1e-4


def test_an_ffn_that_is_linear_is_replaced_by_a_map(vit: Family, model: nn.Module) -> None:
    """GELU passes on what is far above 0 and nothing of what is far below."""
    first = linear_at(model, "blocks.2.mlp.fc1")
    with torch.no_grad():
        first.bias.copy_(torch.where(torch.arange(len(first.bias)) % 3 > 0, 60.0, -60.0))
    table = untimed(decided(model, vit), batches_of(vit, 32))
    row = row_of(table, "activation", 2, "calibrated")
    assert row.r2 == pytest.approx(1, abs=1e-6)
    assert row.damage < 1e-6
    assert row.is_replaceable
    assert row_of(table, "activation", 2, "identity").damage > 1e-2


# What replaces a layer


def test_the_answer_that_ignores_the_image() -> None:
    sure = Uninformed(is_classifier=True)
    sure.add(1e4 * torch.eye(8)[:5])
    sure.add(1e4 * torch.eye(8)[5:])
    assert sure.value == pytest.approx(log(8))
    same = Uninformed(is_classifier=True)
    same.add(torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3))
    assert same.value == pytest.approx(0, abs=1e-12)
    features = Uninformed(is_classifier=False)
    features.add(torch.tensor([[1.0, 3.0], [1.0, 5.0]]))
    assert features.value == pytest.approx(2 / 36)


def test_a_layer_is_replaced_if_half_of_what_is_told_is_still_told(model: nn.Module, vit: Family) -> None:
    table = untimed(decided(model, vit), batches_of(vit, 16))
    assert LIMIT == 0.5
    assert table.limit == table.uninformed / 2
    assert {row.is_replaceable for row in table.rows} == {True, False}
    assert all(row.is_replaceable == (row.damage <= table.limit) for row in table.rows)


def test_a_layer_that_decides_everything_is_irreplaceable_however_well_it_is_fitted(vit: Family) -> None:
    """Channel 0 is all that the head sees, and all that gets there is |z_1|, to which no linear map comes near.

    The layer has a constant besides, so large that hardly anything else counts in R^2.
    """
    model = vit.build()
    first, last, head = (linear_at(model, path) for path in ("blocks.2.mlp.fc1", "blocks.2.mlp.fc2", "head"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_embed", "_token")):
                parameter[..., 0] = 0
            elif name.startswith(("patch_embed.proj", *(f"blocks.{n}.{m}" for n in range(3) for m in WRITERS))):
                parameter[0] = 0
        given: list[Tensor] = []
        hook = first.register_forward_pre_hook(lambda _, args: given.append(args[0][:, 0, 1]))
        model(vit.images(32))
        hook.remove()
        model.get_parameter("blocks.2.norm2.bias")[1] -= given[0].mean()  # of the class token, which is what is read
        first.weight.zero_()
        first.bias.zero_()
        first.weight[:2, 1] = 50 / given[0].std() * torch.tensor([1, -1])  # GELU(a) + GELU(-a) = |a|, far from 0
        last.weight.zero_()
        last.weight[0, :2] = 1
        last.bias[1:] = 5000 * torch.linspace(-1, 1, 47)
        head.weight.zero_()
        head.weight[:, 0] = torch.linspace(-1, 1, 10)
    table = untimed(decided(model, vit), batches_of(vit, 32))
    row = row_of(table, "activation", 2, "calibrated")
    assert row.r2 is not None
    assert row.r2 > 0.99
    assert row.damage > table.limit
    assert row.site in table.irreplaceable


def test_the_best_style_of_a_tie_saves_more() -> None:
    site = Site("attention", 0, "blocks.0.attn")
    rows = tuple(
        ScanRow(site, style, 1.0, None, damage, damage < 1, saved, None)
        for style, damage, saved in (("linear", 2.0, 5), ("skip", 2.0, 9), ("norm", 3.0, 9))
    )
    table = ScanTable(rows, (), True, 2.0, Costs(1, 2, 3), None, 4, 4, True)
    assert table.best(site).style == "skip"
    assert table.irreplaceable == (site,)


# Its trip through JSON


def test_json_and_back(scanned: Scanned) -> None:
    assert ScanTable.from_json(scanned.table.to_json()) == scanned.table


def test_answers_that_are_not_finite_are_infinitely_bad_and_null_in_json(model: nn.Module, vit: Family) -> None:
    with torch.no_grad():  # attention does not look at what the norm gives; removed by ``norm``, that is all there is
        model.get_parameter("blocks.2.norm1.weight").mul_(1e38)
        model.get_parameter("blocks.2.attn.qkv.weight").zero_()
    table = untimed(model, batches_of(vit))
    row = row_of(table, "attention", 2, "norm")
    assert (row.te, row.damage, row.is_replaceable) == (inf, inf, False)
    values = json.loads(table.to_json(), parse_constant=pytest.fail)
    assert values["rows"][table.rows.index(row)]["te"] is None
    assert ScanTable.from_json(table.to_json()) == table


# Progress and refusals


def test_progress_by_stage(scanned: Scanned) -> None:
    calls = scanned.calls
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    assert stages == ["fitting", "comparing", "counting", "timing"]
    for stage in stages:
        done = [call[1:] for call in calls if call[0] == stage]
        assert [number for number, _ in done] == list(range(1, len(done) + 1))
        assert {total for _, total in done} == {len(done)}


def test_an_iterator_will_do_if_there_are_other_images_to_judge_on(model: nn.Module, vit: Family) -> None:
    batches = batches_of(vit, 16)
    expected = untimed(model, batches[:2], judge=batches[2:])
    assert untimed(model, iter(batches[:2]), judge=iter(batches[2:])) == expected
    with pytest.raises(
        DataError, match="^the images are read twice: to fit the replacements, and to compare, but got a one-shot"
    ):
        untimed(model, iter(batches))


@pytest.mark.parametrize(
    ("batches", "judge", "text"),
    [
        ([], None, "^a scan needs images, but the batches are empty"),
        ([torch.zeros(2, 3, 32, 32)], [], "^a scan needs images, but the batches are empty"),
        (
            [torch.randn(2, 3, 32, 32)],
            [torch.zeros(2, 3, 24, 24)],
            "^the images to judge on are 3 x 24 x 24 but those to ",
        ),
        ([torch.randn(2, 3, 24, 24)], None, "^VisionTransformer does not take images of 3 x 24 x 24: "),
        ([torch.randn(1, 3, 32, 32)], None, "there is only one image; give two or more$"),
        ([torch.ones(3, 3, 32, 32)], None, "^the model has the same output for all 3 images; give images that differ$"),
    ],
)
def test_images_that_will_not_do(model: nn.Module, batches: Any, judge: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        untimed(model, batches, judge=judge)


def test_a_model_on_meta_is_refused() -> None:
    family = named("vit_tiny_patch16_224")
    with pytest.raises(hetdpt.HetDPTError, match="^this model has no weights"):
        untimed(build(family.base).to("meta"), batches_of(family))


def test_weights_that_are_not_finite_are_refused(model: nn.Module, vit: Family) -> None:
    nn.init.constant_(linear_at(model, "blocks.0.attn.proj").weight, float("nan"))
    with pytest.raises(ModelError, match="^blocks.0.attn returns values that are not finite; check the weights"):
        untimed(model, batches_of(vit))


# Tails


def test_tails_are_compared_with_layers(vit: Family) -> None:
    deeper = Family(vit.label, replace(vit.base, arguments={**vit.base.arguments, "depth": 4}), vit.side, 4, 4)
    table = untimed(deeper.build(), batches_of(vit))
    assert [tail.blocks for tail in table.tails] == [1, 2]
    exact, fitted = table.tails
    assert (exact.r2, round(exact.damage, 9)) == (None, 0.0)
    assert fitted.r2 is not None
    assert fitted.damage > exact.damage
    assert fitted.macs_saved > exact.macs_saved > 0
    assert ScanTable.from_json(table.to_json()) == table
