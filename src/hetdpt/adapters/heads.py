"""Heads of image classifiers: logits from the output of any library, a new head for other classes, names of classes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.adapters.huggingface import is_hf
from hetdpt.core.errors import DataError, ModelError
from hetdpt.core.modules import tensors_in
from hetdpt.core.randomness import seeded

HEAD_STD = 0.02  # of the weights of a new head, as timm and transformers initialise them


class Classifier(nn.Module):
    """``model``, returning logits (B, classes); while it distils and trains, a pair of them.

    The pair is (class head, distillation head). A model with one head gives its logits twice.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.is_distilling = False
        self.is_apart = True
        """Whether two heads learn apart, one from labels and one from a teacher; otherwise their mean learns."""

    def set_distilled_training(self, enable: bool = True) -> None:
        """Return pairs from now on, or not; timm calls this method of its own models by the same name."""
        self.is_distilling = enable
        if hasattr(self.model, "set_distilled_training"):  # only timm's models with two heads have it
            self.model.set_distilled_training(enable)  # type: ignore[operator]

    def forward(self, images: Tensor) -> Any:
        answer = self.model(images)
        if not (self.is_distilling and self.training):
            return logits_of(answer)
        return pair_of(answer if self.is_apart else logits_of(answer))


def logits_of(answer: Any) -> Tensor:
    """Return the logits (B, classes) in a classifier's output."""
    if isinstance(answer, Tensor):
        return answer
    if isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(head, Tensor) for head in answer):
        return torch.stack(answer).mean(0)  # two heads of timm, which averages them in eval mode
    logits = getattr(answer, "logits", None)  # an output of transformers
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"expected logits of an image classifier, but this model returns {type(answer).__name__}; "
            "build it with a classification head (num_classes of timm, ...ForImageClassification of transformers)"
        )
    return logits


def pair_of(answer: Any) -> tuple[Tensor, Tensor]:
    """Return (class head, distillation head) in a classifier's output; one head counts for both."""
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer
    heads = getattr(answer, "cls_logits", None), getattr(answer, "distillation_logits", None)
    if isinstance(heads[0], Tensor) and isinstance(heads[1], Tensor):
        return heads[0], heads[1]
    logits = logits_of(answer)
    return logits, logits


def answer_tensors(answer: Any) -> list[Tensor]:
    """Return the tensors of a model's output that are its answer: not the hidden states that come with an embedding."""
    embeddings = getattr(answer, "image_embeds", None)  # of a vision tower of transformers with its projection
    return tensors_in(answer) if embeddings is None else [embeddings]


def with_head_(model: nn.Module, classes: int, heads: tuple[str, ...], seed: int = 0) -> nn.Module:
    """Give ``model`` a new head for ``classes`` classes and return it; everything before the head stays.

    ``heads`` are the paths of the linear layers that compute its logits. Each is replaced by a new one with normal
    weights of standard deviation 0.02 and biases 0. Without any, a timm model gets the head that timm makes for it.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
    >>> with_head_(model, 7, ("head",)).head
    Linear(in_features=192, out_features=7, bias=True)
    """
    with seeded(seed):
        heads = heads or _add_head(model, classes)
        for path in heads:
            old = model.get_submodule(path)
            assert isinstance(old, nn.Linear)
            new = nn.Linear(old.in_features, classes, bias=old.bias is not None)
            nn.init.normal_(new.weight, std=HEAD_STD)
            if new.bias is not None:
                nn.init.zeros_(new.bias)
            model.set_submodule(path, new.to(old.weight).train(old.training))
    _tell_classes(model, classes, heads)
    return model


def _add_head(model: nn.Module, classes: int) -> tuple[str, ...]:
    """Add a head to a timm model that has none and return its paths; ``ModelError`` for any other model."""
    reset: Any = getattr(model, "reset_classifier", None)  # timm's method that replaces the head
    if reset is None:
        raise ModelError(
            f"{type(model).__name__} has no head that could be replaced for other classes; give a classifier, such as "
            "...ForImageClassification of transformers"
        )
    reset(classes)
    made: Any = model.get_classifier()  # type: ignore[operator]
    layers = made if isinstance(made, tuple) else (made,)
    return tuple(path for path, module in model.named_modules() if any(module is layer for layer in layers))


def _tell_classes(model: nn.Module, classes: int, heads: tuple[str, ...]) -> None:
    """Set the number of classes that a model, and each module around its heads, reports."""
    config: Any = getattr(model, "config", None)
    if config is not None:  # of transformers, which makes the names of classes from it
        config.num_labels = classes
    for path in heads:
        owners = ("", *accumulate(path.split(".")[:-1], "{}.{}".format))
        for owner in map(model.get_submodule, owners):
            for name in ("num_classes", "num_labels"):
                if name in vars(owner):
                    setattr(owner, name, classes)


IMAGENET = 1000


def class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return a name for each class; None where they are not known.

    The labels in the config of a transformers model, if each class has one; of a timm model with 1,000 classes, those
    of ImageNet.
    """
    if is_hf(model):
        config: Any = model.config
        if set(config.id2label) != set(range(config.num_labels)):
            return None
        names = tuple(str(config.id2label[number]) for number in range(config.num_labels))
        return None if all(name == f"LABEL_{number}" for number, name in enumerate(names)) else names
    is_timm = isinstance(getattr(model, "pretrained_cfg", None), dict)
    return _imagenet() if is_timm and getattr(model, "num_classes", 0) == IMAGENET else None


@cache
def _imagenet() -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(number) for number in range(IMAGENET))


def find_class(text: str, names: Sequence[str] | None) -> int:
    """Return the class that ``text`` means: a number, or a name, whole or in part, that only one class has.

    >>> find_class("7", None), find_class("tabby", ["tabby, tabby cat", "tiger cat"])
    (7, 0)
    """
    if text.removeprefix("-").isdecimal():
        return int(text)
    if names is None:
        raise DataError(f"the names of this model's classes are not known; give the number of a class, not {text!r}")
    word = text.casefold()
    synonyms = {number: [part.strip().casefold() for part in name.split(",")] for number, name in enumerate(names)}
    whole = [number for number, parts in synonyms.items() if word in parts or word == names[number].casefold()]
    near = whole or [number for number, name in enumerate(names) if word in name.casefold()]
    if len(near) == 1:
        return near[0]
    if not near:
        known = {part: number for number, parts in synonyms.items() for part in parts}
        near = [known[part] for part in difflib.get_close_matches(word, known, 3)]
    hint = ", ".join(f"{number} ({names[number]})" for number in near[:4])
    raise DataError(
        f"no single class is called {text!r}; {'did you mean ' + hint + '?' if hint else 'give its number'}"
    )
