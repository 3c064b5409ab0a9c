"""Detection: data with boxes, the detector with its two groups of queries, and average precision."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.randomness import seeded
from hetdpt.data.batches import OrderedBatches, RandomBatches
from hetdpt.data.views import Loading, Share
from hetdpt.tasks import detector as detector_module
from hetdpt.tasks.annotated import AnnotatedBatch, Target
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.boxes import BoxView, CocoBoxes, Objects, open_boxes
from hetdpt.tasks.detector import Detector, DetectorConfig, detect, look_forward_twice
from hetdpt.tasks.hybrid import Answer, MatchedLoss, Weights, repeated
from hetdpt.tasks.scores import DetectionScores, Found, average_precision, measure_detection

HALF = (0.5, 0.5, 0.5)
PLAIN = Preprocessing(input_size=(3, 32, 32), mean=HALF, std=HALF, interpolation="bilinear")
SMALL = DetectorConfig(
    width=16, heads=2, points=2, hidden=32, encoder_layers=1, decoder_layers=3, queries=6, extra_queries=12, repeats=3
)
CLASSES = ("one", "two")


def objects(
    *boxes: tuple[float, ...], labels: tuple[int, ...] = (), crowd: tuple[int, ...] = (), number: int = 0
) -> Objects:
    array = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    return Objects(
        number,
        array,
        np.array(labels or [0] * len(array), dtype=np.int64),
        array[:, 2] * array[:, 3],
        np.isin(np.arange(len(array)), crowd),
    )


# Data


def content(**changes: Any) -> dict[str, Any]:
    """Return annotations of two images of 40 x 20 pixels, with categories 9, 3 and 7."""
    box = {"image_id": 5, "category_id": 7, "bbox": [10, 5, 8, 6], "iscrowd": 0, "area": 30}
    return {
        "images": [{"id": 5, "file_name": "a.png", "width": 40, "height": 20}, {"id": 2, "file_name": "b.png"}],
        "categories": [{"id": 9, "name": "cat"}, {"id": 3, "name": "ant"}, {"id": 7, "name": "bee"}],
        "annotations": [
            {**box, "id": 1},
            {**box, "id": 2, "category_id": 9, "bbox": [30, -4, 20, 10]},  # over the edge
            {**box, "id": 3, "iscrowd": 1, "category_id": 3},
            {**box, "id": 4, "bbox": [1, 1, 0, 5]},  # of no size
            {**box, "id": 5, "image_id": 77},  # of an image that is not listed
        ],
        **changes,
    }


def write(folder: Path, values: Any, *, split: str = "train", images: str = "train2017", file: str = "") -> Path:
    path = folder / (file or f"annotations/instances_{split}2017.json")
    for place in (path.parent, folder / images):
        place.mkdir(parents=True, exist_ok=True)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 20), "red").save(folder / images / name)
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("images", "file"),
    [
        ("train2017", "annotations/instances_train2017.json"),
        ("images/train2017", "annotations/instances_train2017.json"),
        ("images", "annotations/train.json"),
        ("train", "train/_annotations.coco.json"),
        (".", "train.json"),
    ],
)
def test_coco_is_found_in_its_layouts(tmp_path: Path, images: str, file: str) -> None:
    path = write(tmp_path, content(), images=images, file=file)
    for name in (tmp_path, path):  # the folder, or the file itself
        data = open_boxes(str(name), splits=("train",))
        assert data.train is not None
        assert data.train[0][0].size == (40, 20)


def test_labels_follow_the_categories_and_odd_boxes_are_treated_as_told(tmp_path: Path) -> None:
    write(tmp_path, content())
    data = open_boxes(str(tmp_path), splits=("train",))
    source = data.train
    assert isinstance(source, CocoBoxes)
    assert (data.classes, source.category_ids) == (("ant", "bee", "cat"), (3, 7, 9))
    image, found = source[0]
    assert found.labels.tolist() == [1, 2, 0]
    assert found.areas.tolist() == [30, 30, 30]  # what the file says, not width x height
    assert len(source[1][1].boxes) == 0
    _, target = BoxView((20, 40), PLAIN, False)(image, found)
    assert target["labels"].tolist() == [1, 2]  # no crowd
    assert target["boxes"][1].tolist() == pytest.approx([0.875, 0.15, 0.25, 0.3])  # cut at the edge
    assert target["truth_crowd"].tolist() == [False, False, True]
    assert target["truth_boxes"][1].tolist() == [30, -4, 20, 10]  # as in the file
    assert source.facts()["boxes"] == 3


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in content().items() if name != key}


BOX = content()["annotations"][0]
DAMAGED = [
    ('{"images": [', "is not JSON: .*; annotations in COCO's format were expected"),
    ("[]", "has no list of images; COCO's format has images, annotations and categories"),
    (without("categories"), "has no list of categories"),
    (content(annotations=[]), "has an empty list of annotations"),
    (content(annotations=[{**BOX, "category_id": 4}]), r"a box of category 4, but its categories are \[3, 7, 9\]; add"),
    (content(annotations=[{**BOX, "bbox": [1, 2, 3]}]), r"has the box \[1, 2, 3\]; left, top, width and height"),
    (content(annotations=[{**BOX, "bbox": [1, 2, 3, float("nan")]}]), "has the box .*nan"),
    (
        content(annotations=[{**BOX, "bbox": [1, 2, 3, 10**400]}]),
        r"has the box \[1, 2, 3, 1000.*; left, top, width and",
    ),
    (
        content(annotations=[{**BOX, "area": 10**400}]),
        "has a box whose area is 1000.*; pixels were expected, or no area",
    ),
    (content(annotations=[{**BOX, "area": "large"}]), "has a box whose area is 'large'; pixels were expected"),
    (content(images=[{"id": 5, "file_name": "a.png", "height": "20", "width": 40}]), "entry .*, in which 'height' is"),
    (content(images=[{"id": 5, "file_name": "a.png", "height": 20, "width": [40]}]), "entry .*, in which 'width' is"),
    (content(annotations=[{**BOX, "bbox": [1, 2, 0, 3]}]), "has no boxes of its images"),
    (content(annotations=[{"bbox": [1, 2, 3, 4]}]), "has the entry .*, in which 'image_id' is not as in COCO's format"),
    (content(images=[{"id": 5}]), "in which 'file_name' is not"),
    (content(images=[{"id": 5, "file_name": "z.png"}]), "lists the image z.png, which is in none of .*train2017"),
    (content(images=[{"id": 5, "file_name": "a.png"}] * 2), "has two images with the same id"),
    (content(categories=[{"id": 7, "name": "x"}] * 2), "has two categories with the same id"),
    (content(categories=[{"id": 7, "name": "x"}, {"id": "8", "name": "y"}]), "in which 'id' is not"),
]


@pytest.mark.parametrize(("values", "sentence"), DAMAGED)
def test_damaged_annotations_are_refused_in_a_sentence(tmp_path: Path, values: Any, sentence: str) -> None:
    write(tmp_path, values)
    with pytest.raises(DataError, match=sentence):
        open_boxes(str(tmp_path), splits=("train",))


def test_categories_of_one_name_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    names = [{"id": 9, "name": "cat"}, {"id": 3, "name": "ant"}, {"id": 7, "name": "cat"}]
    write(tmp_path, content(categories=names))
    source = open_boxes(str(tmp_path), splits=("train",)).train
    assert isinstance(source, CocoBoxes)
    assert source.classes == ("ant", "cat (id 7)", "cat (id 9)")
    truth = objects(WHOLE, ASIDE, labels=(1, 2))
    scores = average_precision([found_in(truth, (WHOLE, 0.9, 1))], source.classes)
    assert scores.by_class == {"ant": None, "cat (id 7)": pytest.approx(100), "cat (id 9)": 0}


def test_an_area_that_is_not_given_is_that_of_the_box(tmp_path: Path) -> None:
    write(tmp_path, content(annotations=[{**BOX, "area": None}]))
    source = open_boxes(str(tmp_path), splits=("train",)).train
    assert source is not None
    assert source[0][1].areas.tolist() == [8 * 6]


def test_data_that_is_not_there_is_refused_by_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; give a folder in COCO's"):
        open_boxes(str(tmp_path / "nowhere"))
    write(tmp_path, content())
    with pytest.raises(DataError, match=r"no annotations of val: looked for annotations/instances_val\*.json, .*valid"):
        open_boxes(str(tmp_path))
    write(tmp_path, content(categories=[{"id": 7, "name": "x"}], annotations=[BOX]), split="val", images="val2017")
    with pytest.raises(DataError, match="do not have the same classes, for example 'ant'"):
        open_boxes(str(tmp_path))
    with pytest.raises(DataError, match="the splits are train and val, not test"):
        open_boxes("shapes", splits=("test",))


def test_an_image_of_another_size_is_refused_and_a_missing_one_left_out(tmp_path: Path) -> None:
    write(tmp_path, content())
    source = open_boxes(str(tmp_path), splits=("train",)).train
    assert source is not None
    (tmp_path / "train2017" / "b.png").unlink()
    batches = [*OrderedBatches(source, BoxView((16, 32), PLAIN, False), Loading(batch_size=2))]
    assert batches[0].targets[0]
    assert not batches[0].targets[1]
    assert batches[0].unreadable == (str(tmp_path / "train2017" / "b.png"),)
    Image.new("RGB", (20, 40)).save(tmp_path / "train2017" / "a.png")
    with pytest.raises(DataError, match="a.png has 20 x 40 pixels but .* says 40 x 20; its boxes would not fit"):
        source[0]


def around(view: Tensor) -> list[int]:
    """Return left, top, right and bottom of the bright pixels of a view."""
    rows, columns = (np.flatnonzero((view[0] > 0.5).any(dim=axis)) for axis in (1, 0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def corners(box: Tensor, height: float, width: float) -> list[float]:
    x, y, w, h = (box * torch.tensor([width, height, width, height])).tolist()
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def pictured(width: int, height: int, box: tuple[int, int, int, int]) -> tuple[Image.Image, Objects]:
    """Return a black image with a white box."""
    image = Image.new("RGB", (width, height))
    image.paste((255, 255, 255), (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    return image, objects(box)


def test_a_training_view_moves_boxes_as_it_moves_pixels() -> None:
    image, found = pictured(100, 60, (20, 10, 50, 30))
    view = BoxView((64, 80), PLAIN, True)
    parts, middles = set(), set()
    for seed in range(30):
        with seeded(seed):
            pixels, target = view(image, found)
        assert pixels.shape == (3, 64, 80)
        height, width = (target["valid"] * torch.tensor([64, 80])).tolist()
        assert (pixels[:, round(height) :] == 0).all()
        assert (pixels[:, :, round(width) :] == 0).all()
        assert corners(target["boxes"][0], 64, 80) == pytest.approx(around(pixels), abs=1)  # half a pixel is blurred
        parts.add((round(height), round(width)))
        middles.add(target["boxes"][0, 0].item() / target["valid"][1].item() > 0.5)
    assert len(parts) > 10
    assert middles == {True, False}  # flipped, and not


@pytest.mark.parametrize("is_training", [True, False])
def test_grey_of_16_bits_is_seen_as_that_of_8(is_training: bool) -> None:
    tones = np.tile(np.arange(0, 240, 20, dtype=np.uint8), (8, 1))
    seen = []
    for pixels in (tones, tones.astype(np.uint16) * 257):
        with seeded(0):
            seen.append(BoxView((16, 16), PLAIN, is_training)(Image.fromarray(pixels), objects((2, 2, 6, 5)))[0])
    assert torch.equal(seen[0], seen[1])


def test_a_box_outside_of_the_part_that_is_seen_is_dropped() -> None:
    image = Image.new("RGB", (100, 100))
    found = objects((0, 0, 20, 20), (80, 80, 20, 20), (40, 40, 20, 20), labels=(0, 1, 0))
    counts = set()
    for seed in range(10):
        with seeded(seed):
            _, target = BoxView((50, 50), PLAIN, True, scales=(2.0, 2.0))(image, found)
        assert len(target["labels"]) == len(target["boxes"])
        assert ((target["boxes"][:, 2:] * 50 >= 1) & (target["boxes"][:, 2:] <= 1)).all()
        counts.add(len(target["labels"]))
    assert counts == {1, 2}  # a quarter of the image is seen: the middle always, both corners never


@pytest.mark.parametrize("canvas", [(64, 64), (32, 96)])
def test_an_evaluation_view_keeps_the_whole_image_and_leads_back_to_its_pixels(canvas: tuple[int, int]) -> None:
    image, found = pictured(100, 60, (20, 10, 50, 30))
    pixels, target = BoxView(canvas, PLAIN, False)(image, found)
    assert target["valid"].max() == 1
    assert corners(target["boxes"][0], *canvas) == pytest.approx(around(pixels), abs=1)
    assert target["size"].tolist() == [60, 100]
    truth = detector_module._of_image(target)
    best = detector_module._best(torch.tensor([[9.0, 0.0]]), truth["boxes"], target["size"], 1)
    assert best.boxes[0].tolist() == pytest.approx([20, 10, 70, 40], abs=1e-3)
    assert (best.labels.tolist(), best.scores[0].item()) == ([0], pytest.approx(torch.tensor(9.0).sigmoid().item()))


def test_shapes_have_tight_boxes_and_differ_between_the_splits() -> None:
    data = open_boxes("shapes")
    assert data.train is not None
    assert data.val is not None
    image, found = data.train[0]
    assert ((found.boxes[:, :2] >= 0) & (found.boxes[:, :2] + found.boxes[:, 2:] <= image.size)).all()
    assert (found.areas <= found.boxes[:, 2] * found.boxes[:, 3]).all()
    assert (found.areas > 0.2 * found.boxes[:, 2] * found.boxes[:, 3]).all()
    assert image.tobytes() == data.train[0][0].tobytes() != data.val[0][0].tobytes()


# The two groups of queries


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.5, 0.4, 0.3]])
    return [
        {"boxes": boxes, "labels": torch.tensor([0, 1]), "valid": torch.tensor([1.0, 1.0])},
        {"boxes": boxes[:1], "labels": torch.tensor([1]), "valid": torch.tensor([0.6, 0.9])},
    ]


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def make(config: DetectorConfig = SMALL, *, is_random: bool = True) -> Detector:
    """Return a detector on a ViT of two blocks; its boxes change from layer to layer if ``is_random``."""
    import timm  # after hetdpt, also in a process of its own

    with seeded(0):
        vit = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3, num_classes=0
        )
        made = Detector(Backbone(vit, width=16), CLASSES, config).train()
        for head in [made.proposal_box, *made.decoder.bbox_embed] if is_random else []:
            torch.nn.init.normal_(head.layers[-1].weight, std=0.5)
    return made


def answers(model: Detector, images: Tensor, targets: list[Target]) -> list[Answer]:
    """Return what all queries say after each layer."""
    with torch.no_grad():
        return model._answers(images, torch.stack([target["valid"] for target in targets]))[1]


def test_one_to_many_matching_gives_every_object_as_many_queries_as_it_is_repeated() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = (0, 1, 7)
    truths = [
        {
            "boxes": torch.rand(count, 4, generator=generator) / 2 + 0.1,
            "class_labels": torch.randint(5, (count,), generator=generator),
        }
        for count in counts
    ]
    answer = Answer(torch.randn(3, 60, 5, generator=generator), torch.rand(3, 60, 4, generator=generator))
    matched = MatchedLoss(5, Weights(2, 5, 2)).match(answer, repeated(truths, 6))
    for (queries, found), count in zip(matched, counts, strict=True):
        assert len(set(queries.tolist())) == 6 * count
        assert sorted((found % max(count, 1)).tolist()) == sorted([*range(count)] * 6)


@pytest.mark.parametrize("group", ["one to one", "one to many"])
def test_neither_group_of_queries_sees_the_other(
    images: Tensor, targets: list[Target], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    one, many = slice(SMALL.queries), slice(SMALL.queries, None)
    changed, other = (many, one) if group == "one to one" else (one, many)

    def difference() -> tuple[float, float]:
        before = answers(model, images, targets)
        kept = model.contents.detach().clone()
        with torch.no_grad():
            model.contents[changed] += 1
        after = answers(model, images, targets)
        model.contents.data = kept
        parts = [
            max(
                (getattr(a.part(part), name) - getattr(b.part(part), name)).abs().max().item()
                for a, b in zip(before, after, strict=True)
                for name in ("logits", "boxes")
            )
            for part in (other, changed)
        ]
        return parts[0], parts[1]

    assert difference()[0] == 0  # bit-equal
    assert difference()[1] > 1e-3
    monkeypatch.setattr(detector_module, "apart", lambda one, many, device: torch.ones(18, 18, dtype=torch.bool))
    assert difference()[0] > 1e-3


def test_a_weight_of_0_is_no_further_queries(images: Tensor, targets: list[Target]) -> None:
    state = make().state_dict()
    losses, gradients = [], []
    for changes in ({"extra_weight": 0.0}, {"extra_queries": 0}, {}):
        model = make(replace(SMALL, **changes))
        contents = state["contents"][: len(model.contents)]
        model.load_state_dict({**state, "contents": contents})
        loss = model(images, targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.decoder.layers[0].mlp.fc1.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # other shapes round otherwise
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
    assert losses[2] > 1.2 * losses[0]


def test_the_loss_is_that_of_every_layer_and_group_by_hand(images: Tensor, targets: list[Target]) -> None:
    """Each answer by itself, through the criterion of transformers with its own count of objects."""
    from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss

    model = make()

    def by_library(answer: Answer, truths: list[Any], classes: int) -> float:
        criterion = DeformableDetrImageLoss(DeformableDetrHungarianMatcher(2, 5, 2), classes, 0.25, ["labels", "boxes"])
        found = criterion({"logits": answer.logits, "pred_boxes": answer.boxes}, truths)
        return float(2 * found["loss_ce"] + 5 * found["loss_bbox"] + 2 * found["loss_giou"])

    truths = [dict(detector_module._of_image(target)) for target in targets]
    with torch.no_grad():
        first, found = model._answers(images, torch.stack([target["valid"] for target in targets]))
        whole = by_library(first, [{**t, "class_labels": 0 * t["class_labels"]} for t in truths], 1)
        for answer in found:
            whole += by_library(answer.part(slice(6)), truths, 2)
            whole += by_library(answer.part(slice(6, None)), repeated(truths, 3), 2)
        assert model(images, targets).item() == pytest.approx(whole, rel=1e-5)


# The decoder and its boxes


def test_look_forward_twice_reaches_one_layer_back_and_leaves_the_values() -> None:
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(1, 3, 4, generator=generator).requires_grad_() for _ in range(3)]
    reference = torch.rand(1, 3, 4, generator=generator)
    boxes = look_forward_twice(deltas, reference)
    expected = torch.logit(reference)
    for delta, box in zip(deltas, boxes, strict=True):
        expected = expected + delta.detach()
        torch.testing.assert_close(box, expected.sigmoid())
    found = torch.autograd.grad(boxes[2].sum(), deltas, allow_unused=True)
    assert found[0] is None
    assert found[1].abs().min() > 0
    assert found[2].abs().min() > 0


def test_the_loss_of_a_layer_reaches_the_box_head_of_the_layer_before(images: Tensor, targets: list[Target]) -> None:
    model = make()
    seen: list[Any] = []
    model.decoder.register_forward_hook(lambda _, args, output: seen.append(output))
    _, found = model._answers(images, torch.stack([target["valid"] for target in targets]))
    heads = [head.layers[-1].weight for head in model.decoder.bbox_embed]
    gradients = torch.autograd.grad(found[2].boxes.sum(), heads, allow_unused=True, retain_graph=True)
    # Of the last box the head before counts directly; the first only by where the second layer looks, detached.
    assert gradients[0] is None
    assert gradients[1].abs().max() > 0
    first = torch.autograd.grad(found[0].boxes.sum(), heads, allow_unused=True)
    assert first[1] is None
    references = seen[0].intermediate_reference_points.unbind(1)  # the decoder's own, without a gradient
    for answer, reference in zip(found, references, strict=True):
        assert torch.equal(answer.boxes, reference)


def test_in_evaluation_only_the_one_to_one_queries_run(images: Tensor, targets: list[Target]) -> None:
    model = make()
    counts: list[int] = []
    model.decoder.register_forward_hook(
        lambda _, args, kwargs, output: counts.append(kwargs["reference_points"].shape[1]), with_kwargs=True
    )
    training = answers(model, images, targets)[-1].part(slice(6))
    model.eval()
    found = model(images, valid=torch.stack([target["valid"] for target in targets]))
    assert counts == [18, 6]
    torch.testing.assert_close(found.boxes, training.boxes, rtol=1e-4, atol=1e-5)  # the same queries, other shapes
    with torch.no_grad():
        model.contents[6:] += 1
    assert torch.equal(model(images, valid=torch.stack([target["valid"] for target in targets])).boxes, found.boxes)


def test_what_is_beside_the_image_is_not_looked_at(images: Tensor) -> None:
    model = make().eval()
    valid = torch.tensor([[0.5, 1.0], [0.75, 0.25]])

    def encoded(valid: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        handles = [
            one.register_forward_hook(
                lambda _, args, output: output + noise * ~detector_module._seen(output.shape[2:], valid)[:, None]
            )
            for one in model.projections
        ]
        with torch.no_grad():
            memory = model._encoded(images, torch.ones(2, 2) if noise == 2 else valid)
        for handle in handles:
            handle.remove()
        return memory.features, memory.is_seen

    plain, is_seen = encoded(valid, 0.0)
    noisy, _ = encoded(valid, 1.0)
    assert torch.equal(plain[is_seen], noisy[is_seen])
    assert not torch.equal(plain[~is_seen], noisy[~is_seen])
    assert not torch.allclose(encoded(valid, 2.0)[0][is_seen], plain[is_seen])  # seen, it would matter
    with torch.no_grad():
        boxes = model(images, valid=valid).boxes
    proposals = answers(make(is_random=False).eval(), images, [{"valid": one} for one in valid])[0].boxes
    assert boxes.isfinite().all()
    assert ((proposals[..., :2] > 0) & (proposals[..., :2] < 1)).all()  # none begins beside the image


def test_everything_learns_also_from_images_without_objects(images: Tensor, targets: list[Target]) -> None:
    model = make()
    nothing = [{**target, "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)} for target in targets]
    for given in (targets, nothing, [targets[0], nothing[1]]):
        model.zero_grad()
        loss = model(images, given)
        loss.backward()
        assert loss.isfinite()
        unused = {name for name, value in model.named_parameters() if value.grad is None}
        assert all(name.startswith("backbone.pyramid.levels.0.") for name in unused)  # the finest map is not looked at
    assert model.backbone.model.patch_embed.proj.weight.grad.abs().max() > 0


def test_state_round_trip_and_same_seed_same_weights(images: Tensor, targets: list[Target]) -> None:
    model, other = make(), make(is_random=False)
    assert all(torch.equal(a, b) for a, b in zip(make().parameters(), model.parameters(), strict=True))
    assert {name for name, _ in model.named_parameters() if name.startswith("backbone.")} == {
        f"backbone.{name}" for name, _ in model.backbone.named_parameters()
    }
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)  # no tensor under two names
    other.load_state_dict(state)
    model.eval()
    other.eval()
    assert torch.equal(model(images).boxes, other(images).boxes)
    assert torch.equal(model(images).logits, other(images).logits)


def test_before_training_queries_see_each_other_and_boxes_are_those_proposed(images: Tensor) -> None:
    model = make(is_random=False)
    layer = model.decoder.layers[0]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx((2 / (16 + 16)) ** 0.5, rel=0.2)  # Glorot
    assert layer.encoder_attn.sampling_offsets.weight.abs().max() == 0  # but where attention looks is the library's
    assert layer.encoder_attn.sampling_offsets.bias.abs().max() >= 1
    with torch.no_grad():
        found = model._answers(images, torch.ones(2, 2))[1]
    torch.testing.assert_close(found[2].boxes, found[0].boxes)  # no layer moves a box yet
    assert found[0].logits.sigmoid().mean().item() == pytest.approx(0.01, abs=0.02)


def test_a_loss_that_is_not_finite_is_told_not_raised(images: Tensor, targets: list[Target]) -> None:
    model = make()
    with torch.no_grad():
        model.scores_of[1].weight.fill_(torch.nan)
    assert model(images, targets).isnan()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"queries": 0}, "queries is 0; it must be 1 or more"),
        ({"extra_queries": -1}, "extra_queries is -1; it must be 0 or more"),
        ({"heads": 3}, "width is 256 for 3 heads; it must be a multiple of 4"),
        ({"width": 192}, "width is 192 for 8 heads"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"label_weight": 0, "box_weight": 0, "overlap_weight": 0}, "nothing would be learned"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        DetectorConfig(**changes)


def test_a_backbone_or_canvas_that_is_too_small_is_refused(images: Tensor) -> None:
    with pytest.raises(ModelError, match="the backbone has 4 maps, not 5; set maps to at least 1"):
        make(replace(SMALL, maps=5))
    # 8 x 8, 4 x 4, 2 x 2 and 1 x 1 places
    sentence = "86 queries need as many positions of the maps, but images of 32 x 32 have 85; use larger images, or"
    with pytest.raises(ModelError, match=sentence):
        make(replace(SMALL, queries=74))
    model = make(replace(SMALL, queries=73))
    assert model._answers(images, torch.ones(2, 2))[1][0].boxes.shape[1] == 85  # as many as there are


def test_the_loss_falls_and_the_objects_are_found() -> None:
    """Two images are learned by heart: their objects are found then, and were not before."""
    data = open_boxes("shapes", splits=("val",))
    assert data.val is not None
    view = BoxView((32, 32), PLAIN, False)
    batch = next(iter(OrderedBatches(data.val, view, Loading(batch_size=2))))
    two = OrderedBatches(_First(data.val, 2), view, Loading(batch_size=2))
    with seeded(0):
        model = Detector(make().backbone, data.classes, replace(SMALL, width=32, decoder_layers=2))
    before = measure_detection(model, two, data.val)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0)
    losses = []
    for _ in range(40):
        loss = model(batch.images, batch.targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    after = measure_detection(model, two, data.val)
    assert losses[-1] < 0.6 * losses[0]
    assert after.ap50 > before.ap50 + 20
    assert (after.count, after.unreadable) == (2, ())


class _First:
    """The first images of a source."""

    def __init__(self, source: Any, count: int) -> None:
        self._source, self._count, self.classes, self.name_of = source, count, source.classes, source.name_of

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._source[index]

    def facts(self) -> dict[str, Any]:
        return {}


# Average precision


def found_in(truth: Objects, *detections: tuple[Any, float, int]) -> Found:
    boxes, scores, labels = zip(*detections, strict=True) if detections else ((), (), ())
    return Found(
        truth,
        np.array(boxes, dtype=np.float64).reshape(-1, 4),
        np.array(scores, dtype=np.float64),
        np.array(labels, dtype=np.int64),
    )


WHOLE = (0.0, 0.0, 100.0, 100.0)
ASIDE = (200.0, 0.0, 100.0, 100.0)


def test_a_perfect_detector_has_100_percent_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    truth = objects(WHOLE, (200, 0, 50, 50), (300, 0, 10, 10), labels=(0, 1, 1))
    found = found_in(truth, *[(box, 0.9, label) for box, label in zip(truth.boxes, truth.labels, strict=True)])
    scores = average_precision([found], CLASSES)
    parts = (scores.ap, scores.ap50, scores.ap75, scores.ap_small, scores.ap_medium, scores.ap_large, scores.recall)
    assert parts == pytest.approx((100,) * 7)
    assert scores.by_class == pytest.approx({"one": 100, "two": 100})
    assert (scores.score, scores.count) == (scores.ap, 1)
    assert capsys.readouterr() == ("", "")


def test_one_of_two_found_is_51_of_101_recalls() -> None:
    scores = average_precision([found_in(objects(WHOLE, ASIDE), (WHOLE, 0.9, 0))], CLASSES)
    assert scores.ap == pytest.approx(100 * 51 / 101)  # precision 1 at the recalls 0, 0.01, ..., 0.5, then 0
    assert scores.recall == pytest.approx(50)


def test_an_overlap_between_two_thresholds_counts_below_it() -> None:
    scores = average_precision([found_in(objects(WHOLE), ((0, 0, 100, 62), 0.9, 0))], CLASSES)  # IoU 0.62
    assert (scores.ap, scores.ap50, scores.ap75) == pytest.approx((30, 100, 0))  # 0.5, 0.55 and 0.6 of ten


def test_a_surer_wrong_box_halves_the_precision_and_a_less_sure_one_costs_nothing() -> None:
    truth = objects(WHOLE)
    assert average_precision([found_in(truth, (ASIDE, 0.9, 0), (WHOLE, 0.5, 0))], CLASSES).ap == pytest.approx(50)
    assert average_precision([found_in(truth, (ASIDE, 0.4, 0), (WHOLE, 0.5, 0))], CLASSES).ap == pytest.approx(100)
    assert average_precision([found_in(truth, (WHOLE, 0.9, 1))], CLASSES).ap == 0  # the other class


def test_what_lies_in_a_crowd_is_neither_found_nor_wrong() -> None:
    truth = objects(WHOLE, (200, 0, 200, 200), crowd=(1,))
    inside = [((200.0 + 40 * step, 0, 40, 40), 0.99, 0) for step in range(4)]
    assert average_precision([found_in(truth, (WHOLE, 0.5, 0), *inside)], CLASSES).ap == pytest.approx(100)
    plain = replace(truth, crowd=np.zeros(2, dtype=bool))
    assert average_precision([found_in(plain, (WHOLE, 0.5, 0), *inside)], CLASSES).ap < 50


def test_nothing_found_is_0_and_nothing_to_find_is_refused() -> None:
    scores = average_precision([found_in(objects(WHOLE)), found_in(objects(number=1))], CLASSES)
    assert (scores.ap, scores.recall, scores.ap_small) == (0, 0, None)
    with pytest.raises(DataError, match="the 1 images have no objects"):
        average_precision([found_in(objects(), (WHOLE, 0.9, 0))], CLASSES)


def test_a_class_that_is_not_there_is_not_counted() -> None:
    scores = average_precision([found_in(objects(WHOLE), (WHOLE, 0.9, 0), (ASIDE, 0.95, 1))], CLASSES)
    assert scores.ap == pytest.approx(100)
    assert scores.by_class == {"one": pytest.approx(100), "two": None}


def test_the_order_of_images_changes_nothing() -> None:
    truths = [objects(WHOLE, number=number) for number in range(4)]
    found = [found_in(t, (WHOLE if t.number % 2 else ASIDE, 0.9, 0)) for t in truths]  # equal scores: a tie
    assert average_precision(found, CLASSES) == average_precision(found[::-1], CLASSES)


def test_unreadable_images_are_told_and_not_counted(tmp_path: Path) -> None:
    write(tmp_path, content())
    source = open_boxes(str(tmp_path), splits=("train",)).train
    assert source is not None
    with seeded(0):
        model = Detector(make().backbone, source.classes, SMALL)
    view = BoxView((32, 32), PLAIN, False)
    (tmp_path / "train2017" / "b.png").unlink()
    scores = measure_detection(model, OrderedBatches(source, view, Loading(batch_size=2)), source)
    assert scores.count == 1
    assert scores.unreadable == (str(tmp_path / "train2017" / "b.png"),)
    assert model.training  # as it was
    (tmp_path / "train2017" / "a.png").unlink()
    with pytest.raises(DataError, match="none of the images can be read, for example .*a.png"):
        measure_detection(model, OrderedBatches(source, view, Loading(batch_size=2)), source)


def test_detections_are_the_surest_pairs_of_query_and_class(images: Tensor) -> None:
    model = make(replace(SMALL, detections=5)).eval()
    whole = torch.ones(2)
    targets: tuple[Any, ...] = ({"valid": whole, "size": torch.tensor([64, 128])}, {})
    first, second = detect(model, AnnotatedBatch(images, targets, torch.tensor([0, -1])))
    assert len(second.boxes) == len(second.scores) == len(second.labels) == 0  # padding
    answer = model(images)
    scores = answer.logits[0].sigmoid()
    assert first.scores.tolist() == pytest.approx(scores.flatten().sort(descending=True).values[:5].tolist())
    query = int((scores == first.scores[0]).nonzero()[0, 0])
    assert first.labels[0] == scores[query].argmax()
    assert first.boxes[0].tolist() == pytest.approx(corners(answer.boxes[0, query], 64, 128), rel=1e-4)


def test_detecting_is_done_in_eval_mode_and_leaves_the_model_as_it_was(images: Tensor) -> None:
    model = make(replace(SMALL, dropout=0.5))
    model.backbone.eval()
    target = {"valid": torch.ones(2), "size": torch.tensor([64, 128])}
    batch = AnnotatedBatch(images, (target, target), torch.tensor([0, 1]))
    found = detect(model, batch)
    assert (model.training, model.encoder.training, model.backbone.training) == (True, True, False)
    expected = detect(model.eval(), batch)
    assert all(
        torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


def _in_process(rank: int, folder: Path) -> None:
    """Write the loss of one image of two, and the scores of all, as one of two processes sees them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    images, targets = torch.load(folder / "given.pt", weights_only=True)
    part = slice(rank, rank + 1)
    with torch.no_grad():
        loss = make()(images[part], targets[part]).item()
    (folder / f"{rank}.json").write_text(json.dumps([loss, _scores_of_nine(Share(rank, 2)).record()]))
    dist.destroy_process_group()


def _scores_of_nine(share: Share) -> DetectionScores:
    data = open_boxes("shapes", splits=("val",))
    assert data.val is not None
    with seeded(0):
        model = Detector(make().backbone, data.classes, replace(SMALL, queries=73))  # all places: some box will do
    batches = OrderedBatches(_First(data.val, 9), BoxView((32, 32), PLAIN, False), Loading(batch_size=1, share=share))
    return measure_detection(model, batches, data.val)


@pytest.mark.slow
def test_two_processes_come_to_what_one_does(tmp_path: Path, images: Tensor, targets: list[Target]) -> None:
    """The mean of their losses is that of all images; nine are scored, so that one process has padding."""
    torch.save((images, targets), tmp_path / "given.pt")
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_in_process, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    (one, scores), (two, others) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one != two
    with torch.no_grad():
        assert (one + two) / 2 == pytest.approx(make()(images, targets).item(), rel=1e-4)
    assert scores == others == json.loads(json.dumps(_scores_of_nine(Share()).record()))
    assert scores["count"] == 9
    assert scores["recall"] > 0


def test_training_batches_are_made_of_views(images: Tensor) -> None:
    data = open_boxes("shapes", splits=("train",))
    assert data.train is not None
    batches = RandomBatches(data.train, BoxView((32, 48), PLAIN, True), Loading(batch_size=2))
    one, again = (next(iter(batches.epoch(0))) for _ in range(2))
    assert one.images.shape == (2, 3, 32, 48)
    assert torch.equal(one.images, again.images)
    assert all(set(target) == {"boxes", "labels", "valid"} for target in one.targets)
