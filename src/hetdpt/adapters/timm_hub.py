"""How timm itself opens a saved model: ``config.json`` and the entry point that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import nn


def timm_config(model: nn.Module, recipe: dict[str, Any]) -> str:
    """Return the ``config.json`` with which timm builds a saved model through the entry point ``hetdpt``."""
    shown = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std", "num_classes")
    config = {key: value for key, value in (getattr(model, "pretrained_cfg", None) or {}).items() if key in shown}
    config["num_classes"] = getattr(model, "num_classes", config.get("num_classes"))
    values = {
        "architecture": "hetdpt",
        "num_classes": config["num_classes"],
        "model_args": {"recipe": recipe},
        "pretrained_cfg": config,
    }
    return json.dumps(values, indent=1) + "\n"


def register_with_timm(entry_point: Callable[..., nn.Module]) -> None:
    """Register ``entry_point`` with ``timm.create_model`` under its own name."""
    import timm

    if not timm.is_model(entry_point.__name__):
        timm.models.register_model(entry_point)


def load_timm_weights(model: nn.Module, pretrained_cfg: dict[str, Any]) -> nn.Module:
    """Load the weights that timm found next to a ``config.json``, on disk or on the hub."""
    from timm.models import load_pretrained

    load_pretrained(model, pretrained_cfg=pretrained_cfg, num_classes=pretrained_cfg["num_classes"])
    return model
