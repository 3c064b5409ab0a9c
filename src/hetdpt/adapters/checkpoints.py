"""Checkpoints: read without running code, and required to fit exactly."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetdpt.core.errors import FileError, first_line


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a checkpoint (safetensors, or a torch file without code) that fits ``model`` exactly."""
    from timm.models import load_state_dict

    path = Path(path)
    if not path.is_file():
        raise FileError(f"the checkpoint {path} does not exist; give a .safetensors or .pth file")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, on a pickle that it then refuses
            state = load_state_dict(str(path), weights_only=True)
    except Exception as error:  # torch and timm raise many classes on files that are not checkpoints
        why = first_line(error)
        if isinstance(error.__cause__ or error, pickle.UnpicklingError):
            why = "it contains objects that are not tensors and could run code"
        elif isinstance(error, KeyError | AttributeError | TypeError):
            why = "it is not a dictionary of tensors"
        raise FileError(f"the checkpoint {path} cannot be read: {why}; give a file with a state dict") from None
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise FileError(f"the checkpoint {path} contains more than named tensors; save only the state_dict")
    check_fit(model.state_dict(), state, str(path))
    model.load_state_dict(state)
    return model


def check_fit(expected: dict[str, Any], given: dict[str, Any], name: str) -> None:
    """Raise ``FileError`` for the first tensor of ``given`` that is missing, unknown or of another shape or dtype."""
    for key in expected:
        if key not in given:
            raise FileError(f"{name} does not fit the model: {key} is missing; was it saved from another model?")
        shapes = tuple(expected[key].shape), tuple(given[key].shape)
        if shapes[0] != shapes[1]:
            raise FileError(
                f"{name} does not fit the model: {key} should be {shapes[0]} and is {shapes[1]}; "
                "check the model's name, number of classes and image size"
            )
        if given[key].is_complex() or given[key].is_floating_point() != expected[key].is_floating_point():
            kinds = expected[key].dtype, given[key].dtype
            raise FileError(f"{name} does not fit the model: {key} should be {kinds[0]} and is {kinds[1]}")
    if unknown := [key for key in given if key not in expected]:
        raise FileError(f"{name} does not fit the model: it has {unknown[0]}, which the model lacks")
