"""Any image classifier as one that answers with logits, whatever its library returns and however many heads it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetdpt.errors import ModelError


class Classifier(nn.Module):
    """``model``, answering with logits (B, classes); while it distils and trains, with a pair of them.

    The pair is (class head, distillation head). A model with one head gives its logits twice.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.is_distilling = False

    def set_distilled_training(self, enable: bool = True) -> None:
        """Ask for pairs, under the name by which timm asks its own models."""
        self.is_distilling = enable
        if hasattr(self.model, "set_distilled_training"):  # how timm marks its models with two heads
            self.model.set_distilled_training(enable)  # type: ignore[operator]

    def forward(self, images: Tensor) -> Any:
        answer = self.model(images)
        return pair_of(answer) if self.is_distilling and self.training else logits_of(answer)


def logits_of(answer: Any) -> Tensor:
    """Return the logits (B, classes) in what a classifier answered."""
    if isinstance(answer, Tensor):
        return answer
    if isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(head, Tensor) for head in answer):
        return torch.stack(answer).mean(0)  # two heads of timm, which averages them in eval mode
    logits = getattr(answer, "logits", None)  # an output of transformers
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"an image classifier answers with logits, but this model gives {type(answer).__name__}; "
            "build it with a classification head (num_classes of timm, ...ForImageClassification of transformers)"
        )
    return logits


def pair_of(answer: Any) -> tuple[Tensor, Tensor]:
    """Return (class head, distillation head) in what a classifier answered; one head counts for both."""
    if isinstance(answer, tuple) and len(answer) == 2:
        return answer
    heads = getattr(answer, "cls_logits", None), getattr(answer, "distillation_logits", None)
    if isinstance(heads[0], Tensor) and isinstance(heads[1], Tensor):
        return heads[0], heads[1]
    logits = logits_of(answer)
    return logits, logits
