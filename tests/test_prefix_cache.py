"""Variants of a model: whatever is replaced is seen, and every answer is bit-equal to that of a full pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import Family, named
from torch import Tensor, nn

from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.modules import checked, clone, require_takes
from hetdpt.measurement.agreement import outputs_of
from hetdpt.surgery.prefix_cache import MEMORY, CachedVariants, Probe, heads_of


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: Tensor) -> Tensor:
        return self.factor * values


class Attention(nn.Module):
    """Holds a layer that never runs by itself, as ``nn.MultiheadAttention`` does, and tensors of its own in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.gains = nn.ParameterList([torch.randn(6)])

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.linear(values, self.proj.weight, self.proj.bias) * self.gains[0]


class Block(nn.Module):
    """``x + gamma * scale(mlp(attention(norm(x))))``, with a LayerScale that the block itself holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.scale = nn.LayerNorm(6), Attention(), Scale(2.0)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.gamma = nn.Parameter(torch.randn(6))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.gamma * self.scale(self.mlp(self.attention(self.norm(values))))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 6, 4, 4), nn.Sequential(Block(), Block()), nn.Linear(6, 5)
        self.position = nn.Parameter(torch.randn(6))
        self.last = self.blocks[1].scale  # a second path to a module

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).mT + self.position
        answer: Tensor = self.last(self.head(self.blocks(tokens).mean(1)))
        return answer


@pytest.fixture
def tiny() -> Tiny:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tiny().eval()


def images_of(batch: int) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def put(path: str, make: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda variant: variant.set_submodule(path, make())


def other_weight(path: str) -> Callable[[nn.Module], object]:
    def change(variant: nn.Module) -> None:
        layer: Any = variant.get_submodule(path)
        layer.weight = nn.Parameter(layer.weight + 1)

    return change


def other_gain(variant: nn.Module) -> None:
    gains: Any = variant.get_submodule("blocks.1.attention.gains")
    gains[0] = nn.Parameter(gains[0] + 1)


def neutral(path: str, name: str) -> Callable[[nn.Module], object]:
    def change(variant: nn.Module) -> None:
        owner = variant.get_submodule(path)
        delattr(owner, name)
        owner.register_buffer(name, torch.ones(1), persistent=False)

    return change


def appended(path: str, make: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda variant: variant.get_submodule(path).append(make())  # type: ignore[operator]


def shortened(variant: nn.Module) -> None:
    del variant.get_submodule("blocks")[1]  # type: ignore[index]


def hooked(variant: nn.Module) -> None:
    variant.get_submodule("blocks.1").register_forward_hook(lambda module, args, output: output.relu())


def hooked_and_late(variant: nn.Module) -> None:
    hooked(variant)
    other_weight("head")(variant)


EARLIER = {"stem", "blocks.0"}
# name: (what is done to a copy, what has finished by then and need not run again)
CHANGES: dict[str, tuple[Callable[[nn.Module], object], set[str]]] = {
    "another weight in a layer of the same class": (other_weight("blocks.1.mlp.0"), EARLIER),
    "another layer of the same class": (put("blocks.1.mlp.2", lambda: nn.Linear(12, 6)), EARLIER),
    "a module with children by one without": (put("blocks.1.mlp", nn.Identity), EARLIER),
    "a module without children by one with": (
        put("blocks.1.mlp.0", lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 12))),
        EARLIER,
    ),
    "a sequence by a longer one": (
        put("blocks.1.mlp", lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.ReLU())),
        EARLIER,
    ),
    "a module put at the end of a sequence": (appended("blocks.1.mlp", nn.Tanh), EARLIER),
    "a block more": (appended("blocks", Block), {"stem"}),
    "a block less": (shortened, EARLIER),
    "a setting alone": (put("blocks.1.mlp.1", lambda: nn.GELU("tanh")), EARLIER),
    "one path of a module that has two": (put("last", lambda: Scale(3.0)), set()),
    "the other path of it": (put("blocks.1.scale", lambda: Scale(3.0)), EARLIER),
    "a LayerScale that the block holds": (neutral("blocks.1", "gamma"), EARLIER),
    "a parameter of the model itself": (neutral("", "position"), set()),
    "a layer that does not run by itself": (put("blocks.1.attention.proj", lambda: nn.Linear(6, 6)), EARLIER),
    "a parameter in a list": (other_gain, EARLIER),
    "a hook": (hooked, EARLIER),
    "a hook, and a layer after it": (hooked_and_late, EARLIER),
    "a module that is called first": (put("stem", lambda: nn.Conv2d(3, 6, 4, 4, bias=False)), set()),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_whatever_is_changed_is_seen_and_what_came_before_is_recalled(tiny: Tiny, name: str) -> None:
    change, finished = CHANGES[name]
    change(variant := clone(tiny))
    scan = CachedVariants(tiny, {name: variant}, Probe(), images_of(2), MEMORY)
    assert scan.starts_at[name].finished >= finished
    assert bool(scan.starts_at[name].finished) == bool(finished)
    (_, dense), (key, answer) = scan.answers(images_of(4))
    assert key == name
    assert torch.equal(dense, tiny(images_of(4)))
    assert torch.equal(answer, variant(images_of(4)))
    assert not torch.equal(answer, dense)


@torch.no_grad()
def test_variants_side_by_side_keep_their_order_and_stay_as_they_were(tiny: Tiny) -> None:
    variants: dict[object, nn.Module] = {}
    for number, name in enumerate(reversed(CHANGES)):
        variants[name, number] = clone(tiny)
        CHANGES[name][0](variants[name, number])
    modules = {key: list(variant.named_modules()) for key, variant in variants.items()}
    for memory in (0, 1000, MEMORY):
        scan = CachedVariants(tiny, variants, Probe(), images_of(3), memory)
        for images in (images_of(3), images_of(1)):
            answers = dict(scan.answers(images))
            assert list(answers) == [None, *variants]
            assert all(torch.equal(answers[key], variant(images)) for key, variant in variants.items())
    assert {key: list(variant.named_modules()) for key, variant in variants.items()} == modules
    assert not any(module._forward_hooks for module in tiny.modules())


@torch.no_grad()
def test_a_variant_in_which_no_difference_is_found_runs_in_full(tiny: Tiny) -> None:
    scan = CachedVariants(tiny, {"same": clone(tiny)}, Probe(), images_of(2), MEMORY)
    assert not scan.starts_at
    (_, dense), (_, same) = scan.answers(images_of(2))
    assert torch.equal(dense, same)


class Zeros(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values)


@torch.no_grad()
def test_a_variant_may_read_what_the_model_does_not(tiny: Tiny) -> None:
    tiny.set_submodule("blocks.1.attention", Zeros())
    put("blocks.1.attention", lambda: nn.Linear(6, 6))(variant := clone(tiny))
    scan = CachedVariants(tiny, {1: variant, 2: clone(variant)}, Probe(), images_of(2), MEMORY)
    assert "blocks.1.norm" in scan.starts_at[1].finished
    answers = dict(scan.answers(images_of(3)))
    assert torch.equal(answers[1], variant(images_of(3)))
    assert torch.equal(answers[2], answers[1])


def test_a_block_before_the_first_change_does_not_run(tiny: Tiny) -> None:
    other_weight("blocks.1.mlp.2")(variant := clone(tiny))
    scan = CachedVariants(tiny, {1: variant}, Probe(), images_of(2), MEMORY)
    left = [path for path, module in scan.variants[1].named_modules() if isinstance(module, nn.Linear)]
    assert left == ["blocks.1.mlp.2", "head"]


@pytest.mark.parametrize(
    ("label", "heads"),
    [
        ("vit_tiny_patch16_224", ("head",)),
        ("deit_tiny_distilled_patch16_224", ("head", "head_dist")),
        ("swin_tiny_patch4_window7_224", ("head.fc",)),
        ("hf ViTForImageClassification", ("classifier",)),
        ("hf DeiTForImageClassificationWithTeacher", ("cls_classifier", "distillation_classifier")),
        ("hf CLIPVisionModelWithProjection", ("visual_projection",)),
    ],
)
def test_the_feature_is_what_the_heads_are_given(label: str, heads: tuple[str, ...]) -> None:
    family = named(label)
    model, images = family.build(), family.images(3)
    assert heads_of(model, images[:1]) == heads
    with torch.no_grad():
        feature = Probe.of("feature", model, images, "a test")(model, images)
        parts = feature.split([model.get_submodule(path).in_features for path in heads], dim=1)
        answers = [model.get_submodule(path)(part) for path, part in zip(heads, parts, strict=True)]
    torch.testing.assert_close(sum(answers) / len(answers), outputs_of(model, images)[0])


def test_what_is_refused_says_what_it_is_for(tiny: Tiny, vit: Family) -> None:
    with pytest.raises(DataError, match="the probe of a test is one of logits, feature, not 'tokens'"):
        Probe.of("tokens", tiny, images_of(1), "a test")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="probe 'feature' reads .* but Scale has none at its end; use probe 'logits'"):
        Probe.of("feature", Scale(1.0), images_of(1), "a test")
    with pytest.raises(DataError, match="a test needs images, but the batches are empty; was an iterator read"):
        list(checked([], tiny, "a test"))
    with pytest.raises(DataError, match="VisionTransformer does not take images of 3 x 8 x 8: .*; prepare them in the"):
        require_takes(vit.build(), images_of(1))
