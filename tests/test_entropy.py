"""Transfer entropy: the scan equals full passes bit by bit in every family, and finds what was planted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, KINDS, Family, named, sparing
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import DataError, ModelError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan, Site
from hetdpt.measurement.agreement import outputs_of
from hetdpt.selection.entropy import Spread, greedy_order, transfer_entropy
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe
from hetdpt.surgery.record import record_of

SAME = 1e-9  # relative; the same operations run, so only the order of the float64 sums may differ


def ready_copy(model: nn.Module, family: Family) -> nn.Module:
    """Return a copy that knows its sites, so that they are looked for once."""
    return hetdpt.prune_(clone(model), Plan(removal=family.removal), family.size)


def without(model: nn.Module, *sites: Site, removal: Any = "plain") -> nn.Module:
    blocks = {kind: tuple(s.block for s in sites if s.kind == kind) for kind in ("attention", "activation")}
    return hetdpt.prune_(clone(model), Plan(**blocks, removal=removal))


def scan_of(model: nn.Module, sites: Iterable[Site], images: Tensor, memory: int = MEMORY) -> CachedVariants[Site]:
    """Return the scan over ``sites`` of a model that knows them."""
    record = record_of(model)
    assert record is not None
    variants = {site: without(model, site, removal=record.plan.removal) for site in sites}
    return CachedVariants(model, variants, Probe(), images, memory)


@torch.no_grad()
def naive_entropy(model: nn.Module, batches: list[Tensor]) -> float:
    """Return H of the first tensor that a model answers with, all images at hand at once."""
    answers = np.concatenate([outputs_of(model, images)[0].flatten(1).double().numpy() for images in batches])
    sigma = answers.std(axis=0)
    return float(np.log(sigma[sigma > 0]).sum())


def batches_of(family: Family) -> list[Tensor]:
    return list(family.images(3).split(2))


@pytest.mark.parametrize("family", sparing(FAMILIES, KINDS))
def test_the_scan_is_equal_to_full_passes_and_recalls_in_every_family(family: Family) -> None:
    model, batches = ready_copy(family.build(), family), batches_of(family)
    offered = hetdpt.sites(model)
    some = offered[:: -(-len(offered) // 4)] + offered[-1:]
    found = transfer_entropy(model, batches, sites=some, removal=family.removal, signed=True)
    dense = naive_entropy(model, batches)
    expected = {s: dense - naive_entropy(without(model, s, removal=family.removal), batches) for s in some}
    assert found == pytest.approx(expected, rel=SAME, abs=SAME * abs(dense))
    scan = scan_of(model, some, batches[0])
    assert set(scan.starts_at) == set(some)


def test_the_answers_of_a_scan_are_bit_equal_to_those_of_the_pruned_models(model: nn.Module, vit: Family) -> None:
    base, images = ready_copy(model, vit), vit.images(4)
    scan = scan_of(base, hetdpt.sites(base), vit.images(2))
    for site, answer in scan.answers(images):
        with torch.no_grad():
            assert torch.equal(answer, (without(base, site) if site else base)(images))
    assert not scan.kept


@pytest.mark.parametrize("sizes", [(7,), (1, 1, 5), (3, 4), (1,) * 7])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_streaming_variance_is_that_of_all_samples(sizes: tuple[int, ...], offset: float) -> None:
    values = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + offset
    spread = Spread()
    for part in values.split(list(sizes)):
        spread.add(part)
    shifted = values.numpy() - values[0].numpy()  # exact enough: numpy itself loses digits to the offset
    np.testing.assert_allclose(spread.variance.numpy(), shifted.var(axis=0), rtol=1e-12)
    assert spread.entropy == pytest.approx(np.log(shifted.std(axis=0)).sum(), rel=1e-12)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1,) * 7])
def test_constant_channels_are_left_out_also_where_sums_are_not_exact(sizes: tuple[int, ...]) -> None:
    values = torch.full((7, 3), 0.1, dtype=torch.float64)
    values[:, 1] = torch.arange(7)
    spread = Spread()
    for part in values.split(list(sizes)):
        spread.add(part)
    assert spread.variance[[0, 2]].tolist() == [0, 0]
    assert spread.entropy == pytest.approx(np.log(2), rel=1e-12)  # sigma of 0..6


def inert(model: nn.Module, block: int) -> Site:
    """Make one attention answer with zeros, and return its site."""
    for parameter in model.get_submodule(f"blocks.{block}.attn.proj").parameters():
        nn.init.zeros_(parameter)
    return next(s for s in hetdpt.sites(model) if s.kind == "attention" and s.block == block)


def test_a_planted_inert_attention_carries_nothing_and_goes_first(model: nn.Module, vit: Family) -> None:
    planted, batches = inert(model, 1), batches_of(vit)
    found = transfer_entropy(model, batches)
    assert [site for site, value in found.items() if value == 0] == [planted]
    order = greedy_order(model, batches, (None,) * 2)
    first, second = order
    assert first == planted
    assert order[first] == 0
    assert order[second] == min(value for site, value in found.items() if site != planted)


@pytest.mark.parametrize("kind", [None, "attention", "activation"])
def test_greedy_order_is_that_of_full_passes(model: nn.Module, vit: Family, kind: Any) -> None:
    batches, gone, expected = batches_of(vit), [], {}
    dense = naive_entropy(model, batches)
    for _ in range(3):
        left = [s for s in hetdpt.sites(model) if kind in (None, s.kind) and s not in gone]
        values = {s: abs(dense - naive_entropy(without(model, *gone, s), batches)) for s in left}
        gone.append(min(values, key=values.__getitem__))
        expected[gone[-1]] = values[gone[-1]]
    steps: list[tuple[int, int]] = []
    found = greedy_order(model, batches, (kind,) * 3, progress=lambda *step: steps.append(step))
    assert list(found) == gone
    assert found == pytest.approx(expected, rel=SAME, abs=SAME * abs(dense))
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_greedy_order_goes_on_from_a_pruned_model_with_its_own_removal(model: nn.Module, vit: Family) -> None:
    first = hetdpt.sites(model)[2]
    hetdpt.prune_(model, Plan(attention=(first.block,), removal="authors"))
    order = greedy_order(model, batches_of(vit), (None,) * 5)
    assert set(order) == set(hetdpt.sites(model))


def test_calibrated_removal_is_fitted_before_it_is_compared(model: nn.Module, vit: Family) -> None:
    """Each site by itself as ``calibrate_`` would replace it; a constant attention then carries nothing."""
    for parameter in model.get_submodule("blocks.1.attn.proj").parameters():
        nn.init.zeros_(parameter) if parameter.ndim > 1 else nn.init.ones_(parameter)
    batches = batches_of(vit)
    dense = naive_entropy(model, batches)
    found = transfer_entropy(model, batches, removal="calibrated")
    for site, value in found.items():
        plan = hetdpt.Plan(**{site.kind: (site.block,)}, removal="calibrated")
        alone = hetdpt.calibrate_(clone(model), plan, batches)
        assert value == pytest.approx(abs(dense - naive_entropy(alone, batches)), abs=1e-6)
    order = greedy_order(model, batches, (None,) * 2, removal="calibrated")
    first = next(iter(order))
    assert (first.kind, first.block) == ("attention", 1)
    assert order[first] == pytest.approx(0, abs=1e-4)
    with pytest.raises(DataError, match="the images are read twice: to fit the replacements, and to compare"):
        transfer_entropy(model, iter(batches), removal="calibrated")


def test_signed_keeps_the_sign(model: nn.Module, vit: Family) -> None:
    signed = transfer_entropy(model, batches_of(vit), signed=True)
    assert {value > 0 for value in signed.values()} == {True, False}
    assert transfer_entropy(model, batches_of(vit)) == {site: abs(value) for site, value in signed.items()}


def test_any_iterable_will_do_and_is_read_once(model: nn.Module, vit: Family) -> None:
    read: list[int] = []

    def stream() -> Iterator[Tensor]:
        for images in batches_of(vit):
            read.append(len(images))
            yield images

    passes: list[tuple[int, int]] = []
    found = transfer_entropy(model, stream(), progress=lambda *step: passes.append(step))
    assert read == [2, 1]
    assert passes == [(number, 0) for number in range(1, 15)]  # an iterator does not say how long it is
    passes.clear()
    assert transfer_entropy(model, batches_of(vit), progress=lambda *step: passes.append(step)) == found
    assert passes[-1] == (14, 14)


def test_the_model_stays_as_it_was(model: nn.Module, vit: Family) -> None:
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    found = transfer_entropy(model, batches_of(vit), probe="feature")
    greedy_order(model, batches_of(vit), (None,))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    with torch.inference_mode():
        assert transfer_entropy(model.eval(), batches_of(vit), probe="feature") == found


@pytest.mark.parametrize("memory", [0, 100_000, 200_000])
def test_values_do_not_depend_on_memory_and_what_is_kept_fits_in_it(model: nn.Module, vit: Family, memory: int) -> None:
    base, images = ready_copy(model, vit), vit.images(4)
    assert transfer_entropy(model, [images], memory=memory) == transfer_entropy(model, [images])
    scan = scan_of(base, hetdpt.sites(base), images, memory)
    next(answers := scan.answers(images))
    held = sum(t.untyped_storage().nbytes() for t in scan.kept.values())
    assert held <= memory + 4 * len(scan.kept)  # one number for each answer that nobody reads
    assert bool(scan.starts_at) == bool(memory)
    answers.close()
    assert not scan.kept


def test_a_block_before_the_removed_one_does_not_run(model: nn.Module, vit: Family) -> None:
    base, images = ready_copy(model, vit), vit.images(2)
    last = hetdpt.sites(base)[-1]
    scan = scan_of(base, [last], images)
    ran = [path for path, module in scan.variants[last].named_modules() if isinstance(module, nn.Linear)]
    assert ran == ["blocks.2.mlp.fc2", "head"]


def remember(module: nn.Module, _: Any, output: Tensor) -> None:
    vars(module)["said"] = output.detach().mean((1, 2))[:, None]


class Rumour(nn.Module):
    """Sends a value around the blocks where autograd cannot see it: as an attribute of a block."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit
        vit.blocks[0].register_forward_hook(remember)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images) + self.vit.blocks[0].said


class InPlace(nn.Module):
    """Changes in place what its stem answered, and reads it again at the end."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit, self.stem = vit, nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        answer = self.vit(stem)
        stem.mul_(2)
        return answer + stem.mean((1, 2, 3))[:, None]


@pytest.mark.parametrize(("wrapper", "is_recalled"), [(Rumour, False), (InPlace, True)])
def test_values_that_flow_around_the_blocks_are_not_lost(wrapper: Any, is_recalled: bool, vit: Family) -> None:
    model = ready_copy(wrapper(vit.build()).eval(), vit)
    sites, batches = hetdpt.sites(model), list(vit.images(6).split(3))
    found = transfer_entropy(model, batches, signed=True)
    dense = naive_entropy(model, batches)
    expected = {s: dense - naive_entropy(without(model, s), batches) for s in sites}
    assert found == pytest.approx(expected, rel=SAME, abs=SAME * abs(dense))
    scan = scan_of(model, sites, batches[1])
    assert any("vit.blocks.0" in cut.finished for cut in scan.starts_at.values()) == is_recalled


@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "hf DeiTForImageClassificationWithTeacher"])
def test_the_feature_has_an_entropy_of_its_own(label: str) -> None:
    family = named(label)
    model, images = family.build(), family.images(3)
    found = transfer_entropy(model, [images], probe="feature")
    assert found.keys() == transfer_entropy(model, [images]).keys()
    assert found != transfer_entropy(model, [images])


def test_a_model_without_a_head_has_no_feature_but_its_answer(vit: Family) -> None:
    tower = named("hf CLIPVisionModel")
    with pytest.raises(
        ModelError, match=r"linear layers that compute the logits, but CLIPVisionModel has none at its end"
    ):
        transfer_entropy(tower.build(), [tower.images(2)], probe="feature")
    model = vit.build()
    feature = transfer_entropy(model, [vit.images(3)], probe="feature")
    model.reset_classifier(0)
    assert transfer_entropy(model, [vit.images(3)]) == feature


def test_gated_ffns_are_left_out_where_the_removal_cannot_take_them() -> None:
    family = named("eva02_tiny_patch14_224")
    model = family.build()
    found = transfer_entropy(model, [family.images(3)])
    assert {site.kind for site in found} == {"attention"}
    with pytest.raises(PlanError, match="gated FFN, which has no exact linear form"):
        transfer_entropy(model, [family.images(3)], sites=hetdpt.sites(model))


def test_a_removal_that_breaks_the_answers_is_the_last_to_choose(model: nn.Module, vit: Family) -> None:
    mlp: Any = model.get_submodule("blocks.1.mlp")
    mlp.act = nn.Sigmoid()
    with torch.no_grad():
        mlp.fc1.weight.mul_(1e37)  # without the sigmoid the next norm squares it
    found = transfer_entropy(model, batches_of(vit))
    assert [site.path for site, value in found.items() if value == float("inf")] == ["blocks.1.mlp.act"]


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ([], "transfer entropy needs images, but the batches are empty"),
        ([torch.randn(0, 3, 32, 32)], "needs images, but the batches are empty"),
        ([torch.randn(1, 3, 32, 32)], "a spread over images, but there is only one image; give two or more"),
        ([torch.ones(3, 3, 32, 32)], "same output for all 3 images; give images that differ"),
        (torch.randn(2, 3, 32, 32), r"images \(B, C, H, W\), but one is float32 of shape \(3, 32, 32\); give images"),
        ([(torch.randn(2, 3, 32, 32), 1)], r"images \(B, C, H, W\), but one is a tuple; give images alone"),
        ([torch.ones(2, 3, 32, 32).byte()], r"float tensors .* but one is uint8 of shape \(2, 3, 32, 32\)"),
        ([torch.randn(2, 3, 40, 40)], "VisionTransformer does not take images of 3 x 40 x 40: .*; prepare them in the"),
        ([torch.randn(2, 3, 32, 32), torch.randn(2, 3, 40, 40)], "one size, but got 3 x 32 x 32 and 3 x 40 x 40"),
    ],
)
def test_images_that_will_not_do_are_refused_in_a_sentence(model: nn.Module, batches: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        transfer_entropy(model, batches)


def test_what_cannot_be_answered_is_refused_in_a_sentence(model: nn.Module, vit: Family) -> None:
    batches = batches_of(vit)
    with pytest.raises(DataError, match="the probe of transfer entropy is one of logits, feature, not 'tokens'"):
        transfer_entropy(model, batches, probe="tokens")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="once for each site, but got a one-shot iterator; pass a"):
        greedy_order(model, iter(batches), (None,) * 2)
    with pytest.raises(PlanError, match="cannot remove 4 attention layers: this model has 3 that can be removed"):
        greedy_order(model, batches, ("attention",) * 4)
    with pytest.raises(
        PlanError, match=r"attention 7 at blocks.7.attn is not a site of this model, or was removed already"
    ):
        transfer_entropy(model, batches, sites=[Site("attention", 7, "blocks.7.attn")])
    with pytest.raises(ModelError, match="has no weights"):
        transfer_entropy(vit.build().to("meta"), batches)
    nn.init.constant_(model.head.weight, float("nan"))  # type: ignore[union-attr,arg-type]
    with pytest.raises(ModelError, match="outputs are not finite; check its weights"):
        transfer_entropy(model, batches)
