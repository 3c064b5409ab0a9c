"""Segmentation: masks as they are read and shown, UperNet on a backbone, scores against cases done by hand."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import named
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

import hetdpt
from hetdpt.adapters.preprocessing import Preprocessing
from hetdpt.core.errors import DataError, TrainError
from hetdpt.core.randomness import seeded
from hetdpt.data.batches import OrderedBatches, RandomBatches
from hetdpt.data.views import Loading
from hetdpt.export.saved import DEMO_DIRECTORY
from hetdpt.tasks import shapes
from hetdpt.tasks.annotated import AnnotatedBatch, AnnotatedSource
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.learning import LearnConfig, build, learn
from hetdpt.tasks.masks import IGNORED, MaskAugmentation, MaskView, classes_of_pixels, open_masks
from hetdpt.tasks.scores import OverlapScores, count, measure_segmentation
from hetdpt.tasks.segmenter import CLASSES_AT_ONCE, Segmenter, SegmenterConfig, _best, pixel_loss, segment

HALF = (0.5, 0.5, 0.5)
WANTED = Preprocessing(input_size=(3, 32, 32), mean=HALF, std=HALF)
SMALL = SegmenterConfig(width=8, auxiliary_width=8)
THREE = ("sky", "tree", "road")
ADE = "Idx\tRatio\tTrain\tVal\tName\n1\t0.2\t9\t9\twall\n2\t0.1\t9\t9\tbuilding, edifice\n3\t0.1\t9\t9\tbed \n"


def drawn_masks(seed: int, count: int, side: int) -> shapes.DrawnImages:
    return shapes.DrawnImages(seed, count, side, ("background", *shapes.CLASSES), classes_of_pixels)


def numbers(side: int = 8, most: int = 2) -> np.ndarray:
    """Return a mask of three bands: 0, 1, ``most``, wider than high."""
    return np.repeat(np.array([0, 1, most], dtype=np.uint8), side // 2)[None].repeat(side, axis=0)


def write(folder: Path, images: str, masks: str, mask: Any = None, names: Iterable[str] = ("a", "b")) -> None:
    """Write images whose colour tells their mask: 100 for each class."""
    mask = numbers() if mask is None else mask
    for place in (folder / images, folder / masks):
        place.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.fromarray(100 * np.stack([mask % 3] * 3, axis=-1).astype(np.uint8)).save(folder / images / f"{name}.png")
        Image.fromarray(mask).save(folder / masks / f"{name}.png")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Return a plain folder of three classes."""
    for split in ("train", "val"):
        write(tmp_path, f"{split}/images", f"{split}/masks")
    return tmp_path


def val_of(folder: Path) -> AnnotatedSource:
    source = open_masks(str(folder)).val
    assert source is not None
    return source


# Drawings


def test_a_drawing_is_the_same_every_time_and_its_objects_share_no_pixel() -> None:
    first, again, other = shapes.draw(0, 5, 32), shapes.draw(0, 5, 32), shapes.draw(1, 5, 32)
    assert (first.image == again.image).all()
    assert (first.masks == again.masks).all()
    assert (first.image != other.image).any()
    for index in range(20):
        drawing = shapes.draw(2, index, 32)
        assert drawing.masks.sum(axis=0).max() == 1
        assert drawing.masks.any(axis=(1, 2)).all()
        assert 1 <= len(drawing.masks) == len(drawing.labels) <= shapes.MOST


def test_a_shape_is_what_its_label_says() -> None:
    """How much an object fills of the circle around it: all of it, 64 % (of a square), 41 % (of a triangle)."""
    fills: dict[str, list[float]] = {name: [] for name in shapes.CLASSES}
    for index in range(60):
        drawing = shapes.draw(3, index, 96)
        if len(drawing.labels) == 1:
            rows, columns = np.nonzero(drawing.masks[0])
            corner = np.hypot(rows - rows.mean(), columns - columns.mean()).max() + 0.5
            fills[shapes.CLASSES[drawing.labels[0]]].append(len(rows) / (math.pi * corner**2))
    assert min(fills["disc"]) > 0.9 > 0.68 > max(fills["rectangle"])
    assert min(fills["rectangle"]) > 0.5 > max(fills["triangle"]) > 0.3


def test_drawn_masks_have_the_background_as_class_0() -> None:
    source, drawing = drawn_masks(0, 4, 32), shapes.draw(0, 1, 32)
    _, mask = source[1]
    assert ((mask > 0) == drawing.masks.any(axis=0)).all()
    assert set(np.unique(mask)) == {0, *(drawing.labels + 1)}


# Folders


def test_ade20k_counts_classes_from_1_and_0_is_none(tmp_path: Path) -> None:
    for split in ("training", "validation"):
        write(tmp_path, f"images/{split}", f"annotations/{split}", numbers(most=3))
    (tmp_path / "objectInfo150.txt").write_text(ADE)
    data = open_masks(str(tmp_path))
    assert data.classes == ("wall", "building", "bed")
    assert data.train is not None
    assert len(data.train) == 2
    assert np.unique(val_of(tmp_path)[0][1]).tolist() == [0, 2, IGNORED]


def test_a_flat_folder_is_both_splits_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, "images", "annotations")
    with pytest.warns(UserWarning, match="has no splits, so the scores are of the images that are trained on"):
        data = open_masks(str(tmp_path))
    assert data.facts["data"]["train"] == data.facts["data"]["val"]
    assert data.classes == ("1", "2")
    assert open_masks(str(tmp_path), splits=("val",)).classes == data.classes  # one split: no word, which would raise


def test_what_is_around_a_folder_of_masks_does_not_change_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "annotations"
    for images, masks in (("images", "masks"), ("train/images", "train/masks"), ("images/train", "masks/train")):
        write(folder / images.replace("/", "-"), images, masks)
        data = open_masks(str(folder / images.replace("/", "-")), splits=("train",))
        assert data.classes == ("0", "1", "2")
    write(folder, "images", "masks")
    assert open_masks(str(folder), splits=("val",)).classes == ("0", "1", "2")


def test_a_plain_folder_keeps_its_numbers_and_255_is_none(plain: Path) -> None:
    mask = numbers()
    mask[0] = IGNORED
    Image.fromarray(mask).save(plain / "val/masks/a.png")
    data = open_masks(str(plain), splits=("val",))
    assert data.train is None
    assert data.classes == ("0", "1", "2")
    assert data.val is not None
    assert (data.val[0][1] == mask).all()


def test_classes_are_counted_over_both_splits_or_read_from_a_file(plain: Path) -> None:
    write(plain, "train/images", "train/masks", numbers(most=4))
    assert open_masks(str(plain), splits=("val",)).classes == ("0", "1", "2", "3", "4")
    (plain / "classes.txt").write_text("sky\ntree\nroad\nsea\nsand\n\n")
    assert open_masks(str(plain)).classes == ("sky", "tree", "road", "sea", "sand")
    (plain / "classes.txt").write_text("sky\ntree\nroad\nsea\nsand\n", encoding="utf-8-sig")  # as Notepad does
    assert open_masks(str(plain)).classes == ("sky", "tree", "road", "sea", "sand")


def test_a_palette_is_not_what_counts(plain: Path) -> None:
    mask = Image.fromarray(numbers()).convert("P")
    mask.putdata(numbers().flatten().tolist())
    mask.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    mask.save(plain / "val/masks/a.png")
    assert (val_of(plain)[0][1] == numbers()).all()


def colours(folder: Path) -> None:
    Image.new("RGB", (12, 8)).save(folder / "val/masks/a.png")


def another_size(folder: Path) -> None:
    Image.new("L", (12, 9)).save(folder / "val/masks/a.png")


def beyond(folder: Path) -> None:
    (folder / "classes.txt").write_text("sky\ntree\n")


def no_mask(folder: Path) -> None:
    (folder / "val/masks/a.png").unlink()


def no_masks(folder: Path) -> None:
    (folder / "val/masks").rename(folder / "val/labels")


def one_name(folder: Path) -> None:
    Image.new("RGB", (12, 8)).save(folder / "val/images/a.jpg")


def no_images(folder: Path) -> None:
    for file in (folder / "val/images").iterdir():
        file.unlink()


def no_split(folder: Path) -> None:
    (folder / "val").rename(folder / "later")


def two_kinds(folder: Path) -> None:
    (folder / "val/masks").rename(folder / "val/annotations")


def black_and_white(folder: Path) -> None:
    for file in folder.glob("*/masks/*.png"):
        Image.fromarray(np.uint8(255) * (numbers() > 0)).save(file)


def unreadable_names(folder: Path) -> None:
    (folder / "classes.txt").write_bytes(b"\xff\xfe\xff")


def same_names(folder: Path) -> None:
    (folder / "classes.txt").write_text("sky\nsea\nsky\n")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (colours, r"mask .*a\.png is a picture of mode RGB, but expected a PNG with one number for each pixel"),
        (another_size, r"mask .*a\.png has 12 x 9 pixels but its image has 12 x 8; a mask has a number for every"),
        (beyond, r"mask .*a\.png has the number 2, but the 2 classes are 0-1, and 255 for no class"),
        (
            no_mask,
            r"1 of 2 images in .*images have no mask, for example .*a\.png; a mask is a PNG file with the name",
        ),
        (one_name, r"val/images has a\.jpg and a\.png, which would share the mask a\.png; rename one of them"),
        (no_masks, r"val/images has no masks: looked for .*val/masks and annotations"),
        (no_images, r"val/images has no images; files that end in \.jpg"),
        (no_split, r"has no images of split val: looked for val/images, images/val.*, found later, train"),
        (two_kinds, r"has masks in one split and annotations in the other; use the same name for both"),
        (
            black_and_white,
            r"expected 2-254 classes, but the masks of .* have 1; masks of two classes contain 0 and",
        ),
        (same_names, r"classes\.txt have the class 'sky' twice; give every class its own name"),
        (unreadable_names, r"the names of classes in .*classes\.txt cannot be read"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_sentence(plain: Path, harm: Any, sentence: str) -> None:
    val_of(plain)[0]
    harm(plain)
    with pytest.raises(DataError, match=sentence):
        val_of(plain)[0]


def test_data_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataError, match="there is no folder nowhere; data is a folder of images and masks, or shapes"):
        open_masks("nowhere")
    with pytest.raises(DataError, match="the splits are train and val, not test"):
        open_masks("shapes", splits=("test",))


# Views


def test_a_training_view_moves_image_and_mask_together(plain: Path) -> None:
    view = MaskView((24, 24), WANTED, True, MaskAugmentation(distortion=0))
    image, mask = val_of(plain)[0]
    shown = set()
    for seed in range(8):
        with seeded(seed):
            picture, target = view(image, mask)
        assert picture.shape == (3, 24, 24)
        assert target["mask"].shape == (24, 24)
        assert type(picture) is type(target["mask"]) is Tensor
        counts = target["mask"] != IGNORED
        told = ((picture[0] + 1) / 2 * 255 / 100).round()
        assert (told == target["mask"])[counts].double().mean() > 0.8  # but for blurred edges of the bands
        shown.add(int(counts.sum()))
    assert len(shown) > 2  # scales differ


def test_a_view_depends_on_its_seed_alone(plain: Path) -> None:
    view = pickle.loads(pickle.dumps(MaskView((24, 24), WANTED, True)))
    image, mask = val_of(plain)[0]
    views = []
    for seed in (1, 1, 2):
        with seeded(seed):
            views.append(view(image, mask)[0])
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])


def test_an_evaluation_view_has_the_whole_image_and_keeps_its_mask(plain: Path) -> None:
    image, mask = val_of(plain)[0]  # 8 x 12 pixels
    chance = torch.get_rng_state()
    picture, target = MaskView((24, 24), WANTED, False)(image, mask)
    assert torch.equal(torch.get_rng_state(), chance)
    assert target["size"].tolist() == [8, 12]
    assert target["inside"].tolist() == [16, 24]
    assert (target["original"].numpy() == mask).all()
    assert (target["mask"][16:] == IGNORED).all()
    assert (target["mask"][:16] != IGNORED).all()
    assert (picture[:, 16:] == 0).all()
    assert picture[:, :16].abs().min() > 0
    assert set(MaskView((24, 24), WANTED, False)(image, None)[1]) == {"size", "inside"}


def test_grey_of_16_bits_is_seen_as_that_of_8(plain: Path) -> None:
    _, mask = val_of(plain)[0]
    tones = np.tile(np.arange(0, 240, 20, dtype=np.uint8), (8, 1))
    for is_training in (True, False):
        view, seen = MaskView((24, 24), WANTED, is_training), []
        for pixels in (tones, tones.astype(np.uint16) * 257):
            Image.fromarray(pixels).save(plain / "val/images/a.png")
            with seeded(0):
                seen.append(view(val_of(plain)[0][0], mask)[0])
        assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("size", [(1, 300), (300, 1)])
def test_a_thin_image_keeps_a_pixel(size: tuple[int, int]) -> None:
    image, mask = Image.new("RGB", size), np.zeros(size[::-1], dtype=np.uint8)
    for is_training in (True, False):
        assert MaskView((16, 16), WANTED, is_training)(image, mask)[0].shape == (3, 16, 16)


def test_grey_models_get_grey_views() -> None:
    grey = Preprocessing(input_size=(1, 16, 16), mean=(0.5,), std=(0.5,))
    image, mask = drawn_masks(0, 1, 16)[0]
    for is_training in (True, False):
        assert MaskView((16, 16), grey, is_training)(image, mask)[0].shape == (1, 16, 16)


@pytest.mark.parametrize(
    "settings", [{"scale": (2.0, 1.0)}, {"scale": (0.0, 1.0)}, {"hflip": 2.0}, {"distortion": -1.0}]
)
def test_an_augmentation_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(settings))):
        MaskAugmentation(**settings)


# The model


def segmenter(
    label: str = "vit_tiny_patch16_224", config: SegmenterConfig = SMALL, classes: tuple[str, ...] = THREE
) -> Segmenter:
    with seeded(0):
        return Segmenter(Backbone(named(label).build(), width=8), classes, config)


def batch_of(side: int, seed: int = 0) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return two random images and masks, the upper rows of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, side, side, generator=generator)
    masks = torch.randint(3, (2, side, side), generator=generator, dtype=torch.uint8)
    masks[:, : side // 4] = IGNORED
    return images, [{"mask": mask} for mask in masks]


@pytest.mark.parametrize("label", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_the_head_fits_backbones_with_and_without_stages(label: str) -> None:
    model = segmenter(label).train()
    images, targets = batch_of(named(label).size[1])
    loss = model(images, targets)
    loss.backward()
    first = next(model.backbone.model.parameters())
    trained = [parameter for name, parameter in model.named_parameters() if not name.startswith("backbone.")]
    assert loss.shape == ()
    assert loss.isfinite()
    assert first.grad is not None
    assert first.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in trained)
    assert model.eval()(images).shape == (2, len(THREE), *images.shape[2:])


def test_pixels_that_do_not_count_change_nothing() -> None:
    _, [target, _] = batch_of(16)
    mask = target["mask"][None]
    logits = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    other = torch.where(mask == IGNORED, 50.0, logits)
    found = []
    for values in (logits, other):
        leaf = values.clone().requires_grad_()
        loss = pixel_loss(leaf, mask)
        loss.backward()
        assert leaf.grad is not None
        found.append((loss, leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][1][:, :, :4] == 0).all()
    assert (found[0][1][:, :, 4:] != 0).all()
    counted = torch.nn.functional.cross_entropy(logits[:, :, 4:], mask[:, 4:].long())
    torch.testing.assert_close(found[0][0], counted)


def test_a_batch_in_which_no_pixel_counts_teaches_nothing() -> None:
    model = segmenter().train()
    images, _ = batch_of(32)
    loss = model(images, [{}, {}])
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_the_auxiliary_head_adds_its_part() -> None:
    images, targets = batch_of(32)
    losses = {}
    for weight in (0.0, 0.4, 0.8):
        model = segmenter(config=SegmenterConfig(width=8, auxiliary_width=8, auxiliary_weight=weight)).train()
        assert (model.auxiliary is None) == (weight == 0)
        losses[weight] = model(images, targets)
    torch.testing.assert_close(losses[0.8] - losses[0.4], losses[0.4] - losses[0.0])
    assert losses[0.4] > losses[0.0]


def test_the_auxiliary_head_looks_at_the_last_map_but_one_alone() -> None:
    model = segmenter().train()
    maps = [torch.randn(2, 8, side, side, requires_grad=True) for side in (16, 8, 4, 2)]
    assert model.auxiliary is not None
    model.auxiliary(maps).square().sum().backward()
    assert [one.grad is not None for one in maps] == [False, False, True, False]


def test_weights_come_back_and_begin_the_same() -> None:
    model, same = segmenter(), segmenter()
    images, targets = batch_of(32)
    assert torch.equal(model.eval()(images), same.eval()(images))
    model.train()(images, targets)  # the batch norms have moved
    assert not torch.equal(model.eval()(images), same(images))
    same.load_state_dict(model.state_dict())
    assert torch.equal(model(images), same(images))


def test_one_image_at_a_time_is_refused_in_training_alone() -> None:
    model = segmenter()
    images, targets = batch_of(32)
    with pytest.raises(TrainError, match="UperNet has batch norms, which need at least 2 images per batch; raise"):
        model.train()(images[:1], targets[:1])
    assert model.eval()(images[:1], targets[:1]) > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 0}, "width is 0; it must be 1 or more"),
        ({"auxiliary_width": 0}, "auxiliary_width is 0; it must be 1 or more"),
        ({"auxiliary_layers": 0}, "auxiliary_layers is 0; it must be 1 or more"),
        ({"auxiliary_weight": -1.0}, "auxiliary_weight is -1.0; it cannot be negative"),
        ({"pool_scales": ()}, r"pool_scales are \(\); numbers of 1 or more were expected"),
        ({"pool_scales": (0, 2)}, r"pool_scales are \(0, 2\); numbers of 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        SegmenterConfig(**settings)


def test_a_segmenter_learns_two_drawings_by_heart() -> None:
    source, still = drawn_masks(0, 2, 32), MaskAugmentation(scale=(1, 1), hflip=0, distortion=0)
    model = segmenter(classes=source.classes).train()
    training = RandomBatches(source, MaskView((32, 32), WANTED, True, still), Loading(batch_size=2))
    validation = OrderedBatches(source, MaskView((32, 32), WANTED, False), Loading(batch_size=2))
    before = measure_segmentation(model, validation, source)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for epoch in range(40):
        for batch in training.epoch(epoch):
            loss = model(batch.images, batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert measure_segmentation(model, validation, source).score > before.score + 20
    assert model.training


# Scores


class Told(nn.Module):
    """Knows the class of a pixel by its colour, 100 for each class; is wrong by ``shift`` classes."""

    def __init__(self, classes: int, shift: int = 0) -> None:
        super().__init__()
        self.classes, self.shift, self.weight = classes, shift, nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        number = (images[:, :1] + 1) / 2 * 255 / 100
        return -(number - torch.arange(self.classes)[:, None, None]).abs().roll(self.shift, dims=1)


def scored(folder: Path, shift: int = 0, size: tuple[int, int] = (8, 12)) -> OverlapScores:
    source = val_of(folder)
    return measure_segmentation(
        Told(3, shift), OrderedBatches(source, MaskView(size, WANTED, False), Loading(batch_size=2)), source
    )


def test_a_model_that_knows_all_has_100_and_one_that_knows_nothing_0(plain: Path) -> None:
    scores = scored(plain)
    assert (scores.miou, scores.macc, scores.aacc) == (100, 100, 100)
    assert set(scores.iou.values()) == {100}
    scores = scored(plain, shift=1)
    assert (scores.miou, scores.macc, scores.aacc) == (0, 0, 0)
    assert scores.score == 0


def test_scores_are_of_the_pixels_of_the_file_whatever_the_canvas(plain: Path) -> None:
    """At three times the size and with a border, only pixels at the edges of the bands are in doubt."""
    assert scored(plain, size=(40, 36)).miou > 90
    batches = OrderedBatches(val_of(plain), MaskView((40, 36), WANTED, False), Loading(batch_size=2))
    [batch] = batches
    assert [tuple(classes.shape) for classes in segment(Told(3), batch)] == [(8, 12), (8, 12)]


def test_images_that_cannot_be_read_are_named_and_left_out(plain: Path) -> None:
    (plain / "val/images/a.png").write_bytes(b"no image")
    scores = scored(plain)
    assert scores.unreadable == (str(plain / "val/images/a.png"),)
    assert scores.miou == 100
    (plain / "val/masks/b.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of the images can be read, for example .*a\.png; check the files"):
        scored(plain)


class Twins:
    """A split of two images of one name; those in ``lost`` cannot be read."""

    classes = ("a", "b")

    def __init__(self, *lost: int) -> None:
        self.lost = lost

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Image.Image, np.ndarray]:
        if index in self.lost:
            raise OSError("damaged")
        return Image.new("RGB", (4, 4)), np.zeros((4, 4), dtype=np.uint8)

    def name_of(self, index: int) -> str:
        return "twin"

    def facts(self) -> dict[str, Any]:
        return {}


def test_whether_any_image_can_be_read_does_not_depend_on_names() -> None:
    def score(source: Twins) -> OverlapScores:
        batches = OrderedBatches(source, MaskView((8, 8), WANTED, False), Loading(batch_size=2))
        return measure_segmentation(Told(2), batches, source)

    assert score(Twins(1)).unreadable == ("twin",)
    with pytest.raises(DataError, match="none of the images can be read, for example twin; check the files"):
        score(Twins(0, 1))


def test_two_by_two_by_hand() -> None:
    """Truth 0 0 / 1 2, found 0 1 / 1 1: class 0 has 1 of 2, class 1 has 1 of 3, class 2 none of 1; 3 is nowhere."""
    truth, found = torch.tensor([[0, 0], [1, 2]]), torch.tensor([[0, 1], [1, 1]])
    scores = OverlapScores.of(count(found, truth, 4), ("a", "b", "c", "d"))
    assert scores.iou == {"a": 50, "b": pytest.approx(100 / 3), "c": 0, "d": None}
    assert scores.miou == pytest.approx((50 + 100 / 3 + 0) / 3)
    assert scores.macc == pytest.approx((50 + 100 + 0) / 3)
    assert scores.aacc == 50
    assert scores.record()["miou"] == scores.score


def test_a_class_that_is_found_but_not_there_counts_for_iou_alone() -> None:
    truth, found = torch.tensor([[0, 0]]), torch.tensor([[0, 1]])
    scores = OverlapScores.of(count(found, truth, 2), ("a", "b"))
    assert (scores.miou, scores.macc) == (25, 50)


def test_masks_without_a_pixel_that_counts_have_no_score(plain: Path) -> None:
    nothing = torch.full((2, 2), IGNORED)
    with pytest.raises(DataError, match="all pixels of the masks are ignored, so there is nothing to score"):
        OverlapScores.of(count(torch.zeros(2, 2, dtype=torch.long), nothing, 2), ("a", "b"))
    Image.fromarray(np.full((8, 12), IGNORED, dtype=np.uint8)).save(plain / "val/masks/a.png")
    assert scored(plain).miou == 100  # the other image counts


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_scores_equal_those_of_numpy_and_of_torchmetrics(seed: int, classes: int) -> None:
    chance = np.random.default_rng(seed)
    found = chance.integers(0, classes, (2, 4, 5))
    truth = np.where(chance.random((2, 4, 5)) < 0.3, IGNORED, chance.integers(0, classes, (2, 4, 5)))
    truth[0, 0, 0] = 0
    sums = sum(count(torch.tensor(one), torch.tensor(two), classes) for one, two in zip(found, truth, strict=True))
    assert isinstance(sums, Tensor)
    scores = OverlapScores.of(sums, [str(number) for number in range(classes)])
    one, two = found[truth != IGNORED], truth[truth != IGNORED]
    ious, accuracies = [], []
    for number in range(classes):
        both, either = (one == number) & (two == number), (one == number) | (two == number)
        ious += [100 * both.sum() / either.sum()] if either.any() else []
        accuracies += [100 * both.sum() / (two == number).sum()] if (two == number).any() else []
    assert scores.miou == pytest.approx(np.mean(ious))
    assert scores.macc == pytest.approx(np.mean(accuracies))
    assert scores.aacc == pytest.approx(100 * (one == two).mean())
    pair: dict[str, Any] = {"preds": torch.tensor(one), "target": torch.tensor(two), "num_classes": classes}
    assert scores.miou == pytest.approx(100 * float(multiclass_jaccard_index(**pair)), rel=1e-5)  # float32
    assert scores.aacc == pytest.approx(100 * float(multiclass_accuracy(**pair, average="micro")), rel=1e-5)


def test_many_classes_are_compared_a_few_at_a_time() -> None:
    logits = torch.randn(2 * CLASSES_AT_ONCE + 3, 5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_best(logits, [5, 4]), logits.argmax(dim=0))


def test_segment_answers_for_images_without_masks() -> None:
    view = MaskView((24, 24), WANTED, False)
    images, targets = zip(*(view(Image.new("RGB", size), None) for size in ((12, 8), (5, 9))), strict=True)
    batch = AnnotatedBatch(torch.stack(images), ({}, targets[1]), torch.tensor([-1, 1]))
    [classes] = segment(Told(3), batch)
    assert classes.shape == (9, 5)
    assert (classes == 0).all()


PROCESS = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, "tests")
from pathlib import Path
from test_segmentation import Told, WANTED, val_of
from hetdpt.data.batches import OrderedBatches, RandomBatches
from hetdpt.data.views import Loading
from hetdpt.data.views import Share
from hetdpt.tasks.masks import MaskView
from hetdpt.tasks.scores import measure_segmentation
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
source = val_of(folder)
batches = OrderedBatches(source, MaskView((8, 12), WANTED, False), Loading(batch_size=1, share=Share(rank, 2)))
print(measure_segmentation(Told(3), batches, source).record())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_find_what_one_finds(plain: Path) -> None:
    write(plain, "val/images", "val/masks", names=("a", "b", "c", "d"))
    Image.fromarray(2 - numbers()).save(plain / "val/masks/c.png")  # where the model is wrong, in the first process
    for name in "bd":  # all of the second
        (plain / f"val/images/{name}.png").write_bytes(b"no image")
    alone = scored(plain)
    assert 0 < alone.miou < 100
    workers = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), str(plain)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        output, _ = worker.communicate(timeout=120)
        assert output.strip() == str(alone.record())


def test_a_batch_of_one_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    small = {"training.batch_size": 1, "size": (48, 48), "pyramid": 8, "head.width": 8, "head.auxiliary_width": 8}
    config = LearnConfig.of("segmentation").with_settings(small)
    data = open_masks("shapes")
    model = build(hetdpt.load(DEMO_DIRECTORY), data, config)
    with pytest.raises(TrainError, match="UperNet has batch norms, which need at least 2 images per batch"):
        next(iter(learn(model, data, config, device="cpu")))
