"""The contract of every row of the table of removal styles."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import Family, named
from torch import Tensor, nn

import hetdpt
from hetdpt.core import gates
from hetdpt.core.plan import KINDS, Plan
from hetdpt.core.styles import PRESETS, STYLES, Style, styles_for
from hetdpt.surgery.calibrate import calibrate_, gate_fitted_
from hetdpt.surgery.record import require_record

ROUNDING = 2e-5  # of the largest output: float32 rounding of one merged matrix
DOCS = Path(__file__).parents[1] / "docs" / "oneshot.md"
D, N = 48, 17  # of the tiny ViT: width, and tokens with that of the class

EVERY = pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)


@pytest.fixture
def vit() -> Family:
    return named("vit_tiny_patch16_224")


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model.eval()(images)
    return output


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def plan_of(style: Style, block: int = 1) -> Plan:
    return Plan(**{style.kind: (block,)}, site_styles=((style.kind, block, style.name),))  # type: ignore[arg-type]


def evaluate(formula: str) -> int:
    """Return the value of a sum such as ``D² + 3 D``."""
    values = {"D": D, "D²": D**2, "N": N}
    total = 0
    for term in formula.split(" + "):
        product = 1
        for factor in term.split():
            product *= values[factor] if factor in values else int(factor)
        total += product
    return total


@EVERY
def test_a_row_names_a_module_that_agrees_with_it(style: Style) -> None:
    module = gates.replacement_class(style)
    assert issubclass(module, gates.Removed)
    assert (module.sums is not None) == (style.fit is not None)
    if style.costs_like:
        assert STYLES[style.costs_like].kind == style.kind
        assert STYLES[style.costs_like].macs == style.macs


def test_names_are_unique_and_presets_are_pairs_of_rows() -> None:
    assert sorted(name for kind in KINDS for name in styles_for(kind)) == sorted(STYLES)
    for preset in PRESETS.values():
        assert [STYLES[name].kind for name in preset.styles] == [*KINDS]


@EVERY
def test_gated_is_pruned_is_merged_and_none_is_dense(style: Style, vit: Family, tmp_path: Path) -> None:
    model, images, plan = vit.build(), vit.images(8), plan_of(style)
    dense = run(model, images)
    gated = run(gate_fitted_(deepcopy(model), plan, [images]), images)
    pruned_model = calibrate_(model, plan, [images]) if style.fit else hetdpt.prune_(model, plan)
    pruned = run(pruned_model, images)
    assert distance(gated, pruned) < ROUNDING
    assert distance(pruned, dense) > 1e-4
    merged = run(hetdpt.merge_(pruned_model), images)
    assert distance(merged, pruned) < ROUNDING
    loaded = hetdpt.load(hetdpt.save(pruned_model, tmp_path / "saved"))
    assert torch.equal(run(loaded, images), merged)
    assert [fit.style for fit in require_record(loaded).plan.fits] == ([style.name] if style.fit else [])


MIXED = Plan(
    attention=(0, 2),
    activation=(0, 1, 2),
    removal=("constant", "calibrated-keep"),
    site_styles=(("attention", 2, "linear"), ("activation", 1, "calibrated"), ("activation", 2, "drop")),
)


def test_every_layer_has_its_own_style(vit: Family, tmp_path: Path) -> None:
    model, images = vit.build(), vit.images(8)
    pruned_model = calibrate_(deepcopy(model), MIXED, [images, images])
    plan, modules = require_record(pruned_model).plan, dict(pruned_model.named_modules())
    assert plan.site_styles == MIXED.site_styles
    assert isinstance(modules["blocks.0.attn"], gates.Constant)
    assert isinstance(modules["blocks.2.attn"], gates.Mapped)
    assert isinstance(modules["blocks.0.mlp.patches"], gates.PatchMap)
    assert isinstance(modules["blocks.1.mlp.fc1"], nn.Linear)
    assert isinstance(modules["blocks.2.mlp"], gates.Zero)
    pruned = run(pruned_model, images)
    merged = run(hetdpt.merge_(pruned_model), images)
    assert distance(merged, pruned) < ROUNDING
    assert distance(pruned, run(model, images)) > 1e-4
    loaded = hetdpt.load(hetdpt.save(pruned_model, tmp_path / "saved"))
    assert torch.equal(run(loaded, images), merged)
    assert require_record(loaded).plan == plan


def test_layers_removed_later_may_have_another_style(vit: Family) -> None:
    """One by one, in order of execution, is the same as all at once."""
    model, images = vit.build(), vit.images(8)
    batches, removal = [images, images], MIXED.removal
    whole = run(calibrate_(deepcopy(model), MIXED, batches), images)
    for site in [site for site in hetdpt.sites(model) if MIXED.removes(site)]:
        calibrate_(model, Plan(removal=removal).with_style(site, MIXED.style_of(site).name), batches)
    assert require_record(model).plan == replace(MIXED, anatomy=require_record(model).plan.anatomy)
    assert distance(run(model, images), whole) < ROUNDING


@EVERY
def test_what_is_left_of_a_branch_costs_what_the_row_says(style: Style, vit: Family) -> None:
    model, images = vit.build(), vit.images(4)
    block = model.get_submodule("blocks.1")
    branch = ("attn", "norm1") if style.kind == "attention" else ("mlp", "norm2")
    params = sum(hetdpt.count_params(block.get_submodule(name)) for name in branch)
    before, macs = hetdpt.count_params(model), hetdpt.count_macs(model, vit.size)
    linear = 4 * D * D if style.kind == "attention" else 8 * D * D  # MACs of its linear layers per token
    mixing = 2 * N * D if style.kind == "attention" else 0  # of q k and of the product with v
    calibrate_(model, plan_of(style), [images]) if style.fit else hetdpt.prune_(model, plan_of(style))
    hetdpt.merge_(model, fold_constants=False)
    assert hetdpt.count_params(model) == before - params + evaluate(style.parameters)
    changed = N - 1 if style.class_token == "keep" else N  # tokens
    assert hetdpt.count_macs(model, vit.size) == macs - changed * (linear + mixing - evaluate(style.macs))


MERGES = {"bias": "folds into the bias before it", "pair": "`fc1` and `fc2` into one layer", None: "–"}


def models_for(style: Style) -> str:
    if style.is_per_position:
        return "images before tokens; the image size is then fixed"
    if style.class_token == "keep":
        return "a class token, tokens (B, N, D)" + ("" if style.allows_gated else "; FFNs without a gate")
    if not style.allows_gated:
        return "FFNs without a gate"
    return "all"


def test_the_table_in_the_docs_is_this_table() -> None:
    heading = "| style | computes | fitted by | parameters left | MACs left per token | `merge_` | models |"
    lines = DOCS.read_text().splitlines()
    start = lines.index(heading) + 2
    expected = [
        f"| {s.kind} `{s.name}` | {s.computes} | {s.fit or '–'} | {s.parameters} | {s.macs} | {MERGES[s.merge]} | "
        f"{models_for(s)} |"
        for s in STYLES.values()
    ]
    assert lines[start : start + len(expected)] == expected
    assert not lines[start + len(expected)].startswith("|")
