"""What identifies a model when a run is resumed, independent of its name and of where it is stored."""

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
    """Return a checksum of everything that decides a model's output for an image: layers, weights, and image size.

    Swin for 224 and for 448 pixels prints alike and has the same weights, and the mean that is subtracted is in no
    module; so the size and the preprocessing count in addition to what ``modules.digest`` sees.
    """
    wants = [_known(input_size_of, model), _known(lambda model: asdict(preprocessing_of(model)), model)]
    return hashlib.sha256(json.dumps([digest(model), *wants]).encode()).hexdigest()


def _known(question: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """Return what ``question`` finds out; None where the model does not say, which callers refuse if they need it."""
    try:
        return question(model)
    except ModelError:
        return None
