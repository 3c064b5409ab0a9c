"""Where the detector looks and where its queries begin, for images that fill only a part of the canvas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from test_detection import CLASSES, SMALL, corners, make
from torch import Tensor

from hetdpt.tasks.annotated import AnnotatedBatch
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.detector import Detector, _anchors, _layout, _places, detect
from hetdpt.tasks.hybrid import Answer, MatchedLoss, Weights, objects_per_process

VALID = torch.tensor([[0.5, 1.0], [0.75, 0.25]])
"""Heights and widths of two images, as parts of the canvas."""


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Detector:
    return make().eval()


def test_anchors_are_around_the_middles_of_places_as_parts_of_the_image() -> None:
    anchors = _anchors([(4, 4), (2, 2)], VALID)
    assert anchors.shape == (2, 20, 4)
    assert anchors[0, 0].tolist() == pytest.approx([0.125, 0.25, 0.05, 0.05])
    assert anchors[0, 5].tolist() == pytest.approx([0.375, 0.75, 0.05, 0.05])  # second row, second column
    assert anchors[1, 16].tolist() == pytest.approx([1.0, 1 / 3, 0.1, 0.1])  # of the next map, twice the side


def test_the_library_is_told_widths_before_heights() -> None:
    ratios = _layout([(4, 4), (2, 2)], VALID)["valid_ratios"]
    assert ratios.tolist() == [[[1.0, 0.5]] * 2, [[0.25, 0.75]] * 2]


@torch.no_grad()
def test_before_training_every_place_proposes_its_anchor(images: Tensor) -> None:
    fresh = make(is_random=False).eval()
    memory = fresh._encoded(images, VALID)
    first, _ = fresh._proposed(memory, VALID)
    expected = _anchors(memory.shapes, VALID).clamp(1e-5, 1 - 1e-5)  # the library's inverse of the sigmoid is finite
    torch.testing.assert_close(first.boxes, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_no_query_begins_beside_the_image_however_sure_padding_is(model: Detector, images: Tensor) -> None:
    plain = model(images, valid=VALID)
    is_seen = model._encoded(images, VALID).is_seen
    assert (is_seen.sum(1) >= SMALL.queries).all()
    model.proposal_score.register_forward_hook(lambda _, args, scores: scores + 100 * ~is_seen[..., None])
    assert torch.equal(model(images, valid=VALID).boxes, plain.boxes)


@pytest.mark.parametrize("weights", [Weights(2, 5, 2), Weights(1, 0, 0), Weights(0, 0, 1)])
def test_objects_at_the_edge_of_a_padded_image_are_matched_with_places_that_are_seen(
    images: Tensor, weights: Weights
) -> None:
    """The anchors beside the image are pressed against its edges, where these objects lie."""
    corner, right, lower = [0.97, 0.97, 0.06, 0.06], [0.97, 0.5, 0.06, 0.1], [0.3, 0.96, 0.1, 0.08]
    truth = {"boxes": torch.tensor([corner, right, lower]), "class_labels": torch.zeros(3, dtype=torch.long)}
    fresh = make(is_random=False)
    first, _ = fresh._answers(images, VALID)
    is_seen = fresh._encoded(images, VALID).is_seen
    for number, (places, _) in enumerate(MatchedLoss(1, weights).match(first, [truth, truth])):
        assert len(places) == 3
        assert is_seen[number, places].all()


def test_the_loss_of_the_first_stage_is_that_of_the_places_that_are_seen(images: Tensor) -> None:
    model = make()
    truth = {"boxes": torch.tensor([[0.97, 0.97, 0.06, 0.06]]), "class_labels": torch.zeros(1, dtype=torch.long)}
    first, _ = model._answers(images, VALID)
    is_seen = model._encoded(images, VALID).is_seen
    loss = MatchedLoss(1, Weights(2, 5, 2))
    alone = [loss([Answer(a[s][None], b[s][None])], [truth], 2) for a, b, s in zip(*first, is_seen, strict=True)]
    whole = loss([first], [truth, truth], 2)
    torch.testing.assert_close(whole, torch.stack(alone).sum(), rtol=1e-5, atol=1e-6)  # other sums, other rounding
    gradient = torch.autograd.grad(whole, model.proposal_score.weight)[0]
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_more_objects_than_places_that_are_seen_leave_the_loss_finite(images: Tensor) -> None:
    model = make()
    valid = torch.tensor([0.1, 0.1])  # one place of each of the four maps
    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2]]).repeat(6, 1) * 0.1
    targets = [{"boxes": boxes, "labels": torch.zeros(6, dtype=torch.long), "valid": valid}] * 2
    loss = model(images, targets)
    loss.backward()
    assert loss.isfinite()
    assert all(value.grad.isfinite().all() for value in model.parameters() if value.grad is not None)


@torch.no_grad()
def test_a_query_that_begins_beside_the_image_is_not_told(images: Tensor) -> None:
    """Of 40 queries the first image has places for all, the second, with 12 + 3 + 2 + 1 places, for 18."""
    model = make(replace(SMALL, queries=40)).eval()
    targets: tuple[Any, ...] = tuple({"valid": one, "size": torch.tensor([64, 128])} for one in VALID)
    found = detect(model, AnnotatedBatch(images, targets, torch.tensor([0, 1])))
    assert [len(one.scores) for one in found] == [40 * 2, 18 * 2]  # of two classes each
    boxes = model(images, valid=VALID).boxes[1, :18]
    expected = torch.tensor([corners(box, 64, 128) for box in boxes])
    apart = torch.cdist(found[1].boxes, expected, compute_mode="donot_use_mm_for_euclid_dist")  # which would round
    assert apart.amin(dim=1).max() < 1e-3  # pixels


@torch.no_grad()
def test_what_the_encoder_leaves_beside_the_image_changes_nothing(model: Detector, images: Tensor) -> None:
    memory = model._encoded(images, VALID)
    beside, inside = (
        memory._replace(features=memory.features + 5 * mask[..., None]) for mask in (~memory.is_seen, memory.is_seen)
    )
    proposals = model._proposed(memory, VALID)[1]
    assert torch.equal(model._proposed(beside, VALID)[1], proposals)
    assert not torch.equal(model._proposed(inside, VALID)[1], proposals)
    reference = proposals[:, : SMALL.queries].sigmoid()
    plain, same, other = (model._decoded(one, reference)[-1].boxes for one in (memory, beside, inside))
    assert torch.equal(same, plain)
    assert not torch.equal(other, plain)


@torch.no_grad()
def test_positions_of_an_image_are_those_it_has_on_a_canvas_of_its_own_size(model: Detector, images: Tensor) -> None:
    given: list[Tensor] = []
    model.encoder.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["spatial_position_embeddings"]), with_kwargs=True
    )
    memory = model._encoded(images, VALID)
    height, width = memory.shapes[0]  # 8 x 8, of which the second image has 6 x 2
    found = given[0][1, : height * width].mT.reshape(SMALL.width, height, width)[:, :6, :2]
    alone = model.positions(torch.Size((1, SMALL.width, 6, 2)), images.device, images.dtype)[0]
    torch.testing.assert_close(found, alone + model.levels[0][:, None, None], rtol=1e-4, atol=1e-5)


def test_the_loss_of_queries_does_not_teach_where_they_begin(images: Tensor) -> None:
    model = make()
    first, answers = model._answers(images, VALID)
    head = [*model.proposal_box.parameters()]
    for answer in answers:
        gradients = torch.autograd.grad(answer.boxes.sum(), head, allow_unused=True, retain_graph=True)
        assert gradients == (None,) * len(head)
    assert torch.autograd.grad(first.boxes.sum(), head)[-1].abs().max() > 0


@torch.no_grad()
def test_detections_are_told_of_how_images_lie_on_the_canvas(model: Detector, images: Tensor) -> None:
    targets: tuple[Any, ...] = tuple({"valid": one, "size": torch.tensor([64, 128])} for one in VALID)
    found = detect(model, AnnotatedBatch(images, targets, torch.tensor([0, 1])))
    answer = model(images, valid=VALID)
    for number, one in enumerate(found):
        scores = answer.logits[number].sigmoid()
        query = int(scores.amax(1).argmax())
        assert one.scores[0] == scores.max()
        assert one.boxes[0].tolist() == pytest.approx(corners(answer.boxes[number, query], 64, 128), rel=1e-4)


@pytest.mark.parametrize("sides", [(5, 5), (7, 2)])
@torch.no_grad()
def test_places_are_those_that_maps_of_an_odd_number_of_patches_have(sides: tuple[int, int]) -> None:
    size = (8 * sides[0], 8 * sides[1])
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, patch_size=8, depth=1, embed_dim=48, num_heads=3, num_classes=0
    )
    config = replace(SMALL, queries=2, extra_queries=0, further_maps=2)
    model = Detector(Backbone(vit, width=16), CLASSES, config).eval()
    memory = model._encoded(torch.zeros(1, 3, *size), torch.ones(1, 2))
    assert memory.features.shape[1] == _places(model.backbone, config)


@torch.no_grad()
def test_a_loss_is_over_the_objects_or_over_one_where_there_are_fewer(images: Tensor) -> None:
    """Without objects the further queries' loss is not divided by how often each would have been repeated."""
    generator = torch.Generator().manual_seed(0)
    answer = Answer(torch.randn(2, 9, 2, generator=generator), torch.rand(2, 9, 4, generator=generator))
    nothing = {"boxes": torch.zeros(0, 4), "class_labels": torch.zeros(0, dtype=torch.long)}
    assert objects_per_process([nothing] * 2, images.device) == 0
    loss = MatchedLoss(2, Weights(2, 5, 2))
    whole, none, few, many = (loss([answer], [nothing] * 2, count).item() for count in (1, 0, 0.5, 4))
    assert whole == none == few == pytest.approx(4 * many)
    targets = [{"boxes": nothing["boxes"], "labels": nothing["class_labels"], "valid": one} for one in VALID]
    losses = [make(replace(SMALL, repeats=times))(images, targets).item() for times in (1, 3)]
    assert losses[0] == losses[1]
