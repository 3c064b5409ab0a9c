"""Relevance maps of images, of a model and of the same model without the layers of a plan: a figure and its numbers.

NAME.png    or .svg: for each image the maps of whole models and of every block, removed layers framed
NAME.json   checksums of the images, classes, probabilities, similarity of neighbouring layers
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from hetdpt.adapters.heads import class_names, find_class
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import DataError, FileError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.data.fixed_batches import ImageBatches
from hetdpt.data.images import as_seen, open_images, picture_files, prepared
from hetdpt.report.charts import require_figure
from hetdpt.report.relevance import Layer, Picture, draw, title
from hetdpt.store.atomic import require_new, sha256, written
from hetdpt.studies.relevance import (
    Contrast,
    Pair,
    Relevance,
    contrast,
    explain,
    mean,
    neighbours,
    require_classifier,
    similarity,
)
from hetdpt.surgery.calibrate import calibrate_
from hetdpt.surgery.record import record_of, sites
from hetdpt.surgery.remove import prune_

MEASURES: dict[str, Literal["cosines", "ranks"]] = {"cosine": "cosines", "rank": "ranks"}
"""The measures of similarity, and their names in ``Pair``."""


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """Which class maps are for, which layers are removed, and how much is drawn."""

    target: int | str | None = None
    """Number or name of the class; the most probable one of each image by default."""
    plan: Plan | None = None
    """Layers to mark; the model without them is explained too."""
    data: str | None = None
    """Images, without labels, to fit the replacements of removed layers on."""
    root: Path | None = None
    """The folder of that data, if not the current one."""
    calibration: int = 256
    """How many of these images to use."""
    first: int = 8
    """Images to take from a folder, in the order of their names."""
    drawn: int = 8
    """How many images to draw; numbers are computed from all."""
    batch_size: int = 8
    """Images per forward pass."""
    name: str | None = None
    """Name of the model in the record: its class by default."""
    overwrite: bool = False
    """Whether an earlier figure and its numbers may be replaced."""

    def __post_init__(self) -> None:
        if self.data is not None and not self.plan:
            raise PlanError("data is to fit replacements of removed layers, but no layer is removed; give a plan too")
        for name in ("calibration", "first", "drawn", "batch_size"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; a number of images, 1 or more, was expected")


@dataclass(frozen=True)
class Explanation:
    """The relevance maps of images, and their numbers."""

    model: str
    plan: Plan | None
    files: tuple[Path, ...]
    checksums: tuple[str, ...]
    """SHA-256 of each file."""
    names: tuple[str, ...] | None
    """Of all classes; None if they are unknown."""
    found: Relevance
    """Of the model as it was given."""
    pruned: Relevance | None
    """Of the model without the layers of the plan, for the same classes; None without a plan, or attention left."""
    layers: tuple[Layer, ...]

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The similarity of neighbouring maps of the model as it was given."""
        return neighbours(self.found)

    def record(self) -> dict[str, Any]:
        """Return all numbers as plain JSON; unknown ones are null."""
        alike = {name: similarity(self.pairs, by) for name, by in MEASURES.items()}
        removed = {layer.block for layer in self.layers if layer.is_removed}
        return {
            "model": self.model,
            "plan": json.loads(self.plan.to_json()) if self.plan else None,
            "rows": self.found.rows,
            "images": [self._image(number) for number in range(len(self.files))],
            "layers": [
                {**asdict(layer), **{name: _known(mean(of.get(layer.block, ()))) for name, of in alike.items()}}
                for layer in self.layers
            ],
            "pairs": [_pair(pair) for pair in self.pairs],
            "contrast": {name: _contrast(contrast(of, removed)) for name, of in alike.items()},
        }

    def _image(self, number: int) -> dict[str, Any]:
        target = self.found.classes[number]
        return {
            "file": str(self.files[number]),
            "sha256": self.checksums[number],
            "class": target,
            "class_name": self._name(target),
            **self._answer(self.found, number),
            "pruned": self._answer(self.pruned, number) if self.pruned else None,
        }

    def _answer(self, one: Relevance, number: int) -> dict[str, Any]:
        return {
            "probability": one.probabilities[number],
            "answer": one.answers[number],
            "answer_name": self._name(one.answers[number]),
            "answer_probability": one.answer_probabilities[number],
        }

    def _name(self, number: int) -> str | None:
        return self.names[number] if self.names else None


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "blocks": pair.blocks,
        **{name: _known(mean(getattr(pair, of))) for name, of in MEASURES.items()},
        **{of: [_known(value) for value in getattr(pair, of)] for of in MEASURES.values()},
    }


def _known(value: float) -> float | None:
    return value if isfinite(value) else None


def _contrast(found: Contrast | None) -> dict[str, Any] | None:
    return {**asdict(found), "difference": found.difference} if found else None


def explain_into(
    figure: str | Path,
    model: nn.Module,
    images: str | Path | Sequence[str | Path],
    config: ExplainConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Draw the relevance maps of ``model`` for ``images``, files or folders of them, and return them.

    ``Explanation.record`` is written as JSON beside ``figure``, which is PNG or SVG by its name. The model is not
    changed; ``progress`` is called with (images done, in all).
    """
    figure, config = Path(figure), config or ExplainConfig()
    files = picture_files([images] if isinstance(images, str | Path) else images, config.first)
    require_places(figure, config.overwrite, files)
    require_classifier(model)
    wants = preprocessing_of(model)
    given, names = prepared(files, wants), class_names(model)
    target = find_class(config.target, names) if isinstance(config.target, str) else config.target
    student = _pruned(model, config) if config.plan else None  # a plan that does not fit raises before all else
    found = explain(model, given, target, batch_size=config.batch_size, progress=progress)
    made = Explanation(
        model=config.name or type(model).__name__,
        plan=config.plan,
        files=tuple(files),
        checksums=tuple(map(sha256, files)),
        names=names,
        found=found,
        pruned=_without(student, given, found.classes, config.batch_size) if student is not None else None,
        layers=_layers(model, found, config.plan or Plan()),
    )
    _write(figure, made, as_seen(given[: config.drawn], wants))
    return made


def numbers_beside(figure: Path) -> Path:
    """Return the file for the numbers of ``figure``."""
    return figure.with_suffix(".json")


def require_places(figure: Path, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Raise ``FileError`` unless ``figure`` is named like one, and both it and its numbers may be written.

    Files that are ``read``, a plan or images, are never overwritten.
    """
    require_figure(figure)
    used = {file.resolve() for file in read}
    for file in (figure, numbers_beside(figure)):
        if file.resolve() in used:
            raise FileError(f"{file} would be overwritten, but it is an input; give the figure another name")
        if file.is_dir():
            raise FileError(f"{file} is a directory, but a file is to be written; give the figure another name")
        require_new(file, overwrite)


def _without(student: nn.Module, images: Tensor, classes: tuple[int, ...], batch_size: int) -> Relevance | None:
    """Return the maps of the model without the layers of the plan; None where no attention is left."""
    if not any(site.kind == "attention" for site in sites(student)):
        return None
    return explain(student, images, classes, batch_size=batch_size)


def _pruned(model: nn.Module, config: ExplainConfig) -> nn.Module:
    """Return a copy of the model without the layers of the plan, replacements fitted where there are images."""
    assert config.plan is not None
    if config.data is None or not config.plan.needs_images:
        return prune_(clone(model), config.plan)
    source = open_images(config.data, root=config.root)
    return calibrate_(
        clone(model), config.plan, ImageBatches(source, preprocessing_of(model), count=config.calibration)
    )


def _layers(model: nn.Module, found: Relevance, plan: Plan) -> tuple[Layer, ...]:
    record = record_of(model)
    linear = {*plan.activation, *(record.plan.activation if record else ())}
    return tuple(
        Layer(site.block, each is None or plan.removes(site), site.block in linear)
        for site, each in zip(found.sites, found.maps, strict=True)
    )


def _write(figure: Path, made: Explanation, seen: Any) -> None:
    values, wholes = made.record(), [("whole model", made.found)]
    if made.pruned:
        wholes.append(("pruned model", made.pruned))
    pictures = [
        Picture(
            title=title(values["images"][number]),
            image=image,
            wholes=tuple((name, one.whole[number].numpy()) for name, one in wholes if one.whole is not None),
            maps=tuple(None if each is None else each[number].numpy() for each in made.found.maps),
        )
        for number, image in enumerate(seen)
    ]
    try:
        figure.parent.mkdir(parents=True, exist_ok=True)
        with written(figure) as drawing, written(numbers_beside(figure)) as numbers:
            draw(pictures, made.layers, drawing)
            numbers.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{figure} cannot be written: {error.strerror or error}; give another path") from None
