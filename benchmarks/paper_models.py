"""The models behind the rows of the paper's tables, as far as the paper says which they are; no measuring here.

A row of a table can often be read in several ways: the model with one head or with two, the norm before a removed
attention layer gone or kept. Each way is a ``Subject`` of its own, told apart by its variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from paper_printed import printed, reference
from paper_swin import even_choice, plan_of_counts
from torch import nn

import hetdpt
from hetdpt.core.plan import Plan
from hetdpt.measurement.costs import Costs
from hetdpt.reduce.width.choice import Ratios
from hetdpt.reduce.width.narrow import WidthConfig, narrow_, narrow_to

GIANT = "vit_giant_patch14_dinov2"
NOTHING = Plan()
WHOLE_BRANCHES = ("skip", "drop")  # the only removal that a gated FFN allows without images
SIZES_ALONE = WidthConfig(importance="l2", refits=False)  # which pieces go does not matter for what a model costs
ROUNDS = 2  # of the search for a target that leaves the products out; a third changes nothing

# (table, group, row): (model, what goes); the paper does not print NOSE's layers for DeiT-S, and any cost the same
DEIT: dict[tuple[int, str, str], tuple[str, str | Plan]] = {
    (8, "DeiT-B", "DeiT-B (Dense)"): ("deit_base", NOTHING),
    (8, "DeiT-B", "NOSE (5 layers)"): ("deit_base", "paper/deit_base-5/attention-only"),
    (8, "DeiT-B", "NOSE (6 layers)"): ("deit_base", "paper/deit_base-6/attention-only"),
    (8, "DeiT-B", "HetDPT (8 layers)"): ("deit_base", "paper/deit_base-8"),
    (8, "DeiT-B", "HetDPT (10 layers)"): ("deit_base", "paper/deit_base-10"),
    (8, "DeiT-S", "DeiT-S (Dense)"): ("deit_small", NOTHING),
    (8, "DeiT-S", "NOSE (4 layers)"): ("deit_small", Plan(attention=range(4))),
    (8, "DeiT-S", "NOSE (5 layers)"): ("deit_small", Plan(attention=range(5))),
    (8, "DeiT-S", "HetDPT (6 layers)"): ("deit_small", "paper/deit_small-6"),
    (8, "DeiT-S", "HetDPT (8 layers)"): ("deit_small", "paper/deit_small-8"),
    (9, "DeiT-B-KD", "DeiT-B-KD"): ("deit_base", NOTHING),
    (9, "DeiT-B-KD", "HetDPT--KD"): ("deit_base", "paper/deit_base-10"),
    (9, "DeiT-B-KD", "DeiT-S-KD"): ("deit_small", NOTHING),
    (9, "DeiT-B-KD", "DeiT-T-KD"): ("deit_tiny", NOTHING),
}
OFF_THE_SHELF = {
    "Cait-S24": "cait_s24_224",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "TNT-S": "tnt_s_patch16_224",
    "CrossVit-S": "crossvit_small_240",
    "Efficientformer-L3": "efficientformer_l3",
    "PVTv2-B2": "pvt_v2_b2",
}
SWIN = {"Swin-S": "swin_small_patch4_window7_224", "Swin-B": "swin_base_patch4_window7_224"}
SWIN_ROWS = {"Swin-S": ("HetDPT (10 layers)", 10), "Swin-B": ("HetDPT", None)}  # and how many layers, if printed
# The paper does not say from which of its depth-pruned models these start; those of 8 layers are taken.
PLUS = {
    "HetDPT+-3.7G": ("deit_base", "paper/deit_base-8"),
    "HetDPT+-2.4G": ("deit_base", "paper/deit_base-8"),
    "HetDPT+-1.1G": ("deit_small", "paper/deit_small-8"),
}


class Target(NamedTuple):
    """So many MACs, after merging."""

    macs: float
    products: bool
    """Whether the attention products are among them."""


@dataclass(frozen=True)
class Subject:
    """A model for a row of a table, and how the row is read."""

    table: int
    group: str
    row: str
    variant: str
    model: str
    """timm's name."""
    plan: Plan = NOTHING
    width: Ratios | Target | None = None
    pixels: int = 224

    @property
    def key(self) -> dict[str, Any]:
        return {"table": self.table, "group": self.group, "row": self.row, "variant": self.variant}

    @property
    def input_size(self) -> tuple[int, int, int]:
        return (3, self.pixels, self.pixels)

    def build(self, is_empty: bool = True) -> nn.Module:
        """Return the model, pruned, narrowed and merged; without values where ``is_empty``, else with random ones."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = create(self.model, is_empty and self.width is None)
        if self.plan.attention or self.plan.activation:
            hetdpt.prune_(model, self.plan)
        if isinstance(self.width, Ratios):
            narrow_(model, self.width, SIZES_ALONE)
        elif self.width:
            model = narrowed(model, self.width)
        merged = hetdpt.merge_(model).eval()
        return merged.to("meta") if is_empty else merged


def create(name: str, is_empty: bool) -> nn.Module:
    """Return a dense model of timm; the giant has the 224 px and the 100 classes of the paper's CIFAR-100."""
    sizes = {"img_size": 224, "num_classes": 100} if name == GIANT else {}
    return hetdpt.create(name, is_empty=is_empty, **sizes)


def narrowed(model: nn.Module, target: Target) -> nn.Module:
    """Return a narrow copy with so many MACs, with the attention products or without."""
    found = narrow_to(model, macs=target.macs, config=SIZES_ALONE)
    for _ in range(0 if target.products else ROUNDS):
        left_out = Costs.of(hetdpt.merge_(deepcopy(found.model)), (3, 224, 224)).macs_without_attention_products
        found = narrow_to(model, macs=found.macs * target.macs / left_out, config=SIZES_ALONE)
    return found.model


def subjects(group: str | None = None) -> Iterator[Subject]:
    """Yield the models of the paper's tables (or of a group) that we know, in every way in which a row can be read."""
    for one in _families(group):
        if group in (None, one.group):
            yield one


def _families(group: str | None) -> Iterator[Subject]:
    yield from _deit()
    for row, name in OFF_THE_SHELF.items():
        yield Subject(9, "DeiT-B-KD", row, "timm", name, pixels=240 if name.endswith("240") else 224)
    for name in SWIN if group is None else SWIN.keys() & {group}:
        yield from _swin(name)
    yield Subject(6, "DINOv2-giant", "DINO-V2-Giant (Dense)", "timm", GIANT)
    for row, attention, ffns in (("NOSE (12 layers)", 12, 0), ("HetDPT (15 layers)", 8, 7)):
        plan = Plan(attention=range(attention), activation=range(ffns), removal=WHOLE_BRANCHES)
        yield Subject(6, "DINOv2-giant", row, "whole branches", GIANT, plan)
    yield from _narrow()


def _deit() -> Iterator[Subject]:
    for place, (size, what) in DEIT.items():
        plan = hetdpt.published_plan(what) if isinstance(what, str) else what
        for heads, name in (("one head", f"{size}_patch16_224"), ("two heads", f"{size}_distilled_patch16_224")):
            yield Subject(*place, heads, name, plan)
            if plan.attention:
                yield Subject(*place, f"{heads}, norm1 kept", name, replace(plan, removal="norm"))


def _swin(group: str) -> Iterator[Subject]:
    yield Subject(8, group, f"SwinTransformer-{group[-1]} (Dense)", "timm", SWIN[group])
    row, layers = SWIN_ROWS[group]
    figures = printed(8, group, row)
    counts = even_choice(SWIN[group], figures["macs_g"], figures["params_m"], layers)
    yield Subject(8, group, row, "layers chosen by us", SWIN[group], plan_of_counts(counts))


def _narrow() -> Iterator[Subject]:
    for name, setting in reference()["paper_hetdpt_plus"]["isomorphic_settings"].items():
        if name.endswith("G"):
            base, channels, heads, dims = setting
            ratios = Ratios(channels, channels, heads, dims)
            row = f"Isomorphic-Pruning{name}"
            yield Subject(9, "DeiT-B-KD", row, "published ratios", f"{base}_patch16_224", width=ratios)
    for row, (size, plan) in PLUS.items():
        macs = 1e9 * printed(9, "DeiT-B-KD", row)["macs_g"]
        for variant, products in (("products counted", True), ("products left out", False)):
            name = f"{size}_distilled_patch16_224"
            width = Target(macs, products)
            yield Subject(9, "DeiT-B-KD", row, variant, name, hetdpt.published_plan(plan), width)
