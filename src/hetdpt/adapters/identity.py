"""What a model is known by wherever a run is continued. Says nothing of where a model lies or what it is called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn

from hetdpt.adapters.models import input_size_of
from hetdpt.adapters.preprocessing import preprocessing_of
from hetdpt.core.errors import ModelError
from hetdpt.core.modules import digest


def fingerprint(model: nn.Module) -> str:
    """Return a checksum of all that decides what ``model`` makes of an image: layers, weights, and the image's size.

    Swin for 224 and for 448 pixels prints alike and has the same weights, and the mean that is taken off an image is in
    no module; so the size and the preprocessing count beside what ``modules.digest`` sees.
    """
    wants = [_said(input_size_of, model), _said(lambda model: asdict(preprocessing_of(model)), model)]
    return hashlib.sha256(json.dumps([digest(model), *wants]).encode()).hexdigest()


def _said(ask: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """Return what ``model`` answers; None where it does not say, which is for those to refuse who need it."""
    try:
        return ask(model)
    except ModelError:
        return None
