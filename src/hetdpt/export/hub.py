"""Sharing: upload to the hub, and loading through ``timm.create_model`` where timm allows it.

Importing this module registers the timm architecture ``hetdpt``, whose ``config.json`` lies beside every saved timm
model: ``timm.create_model("local-dir:DIR", pretrained=True)`` and ``"hf-hub:user/name"`` then work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.models import first_line, load_timm_weights, register_with_timm
from hetdpt.errors import FileError
from hetdpt.export.saved import RECIPE, Recipe, load


def hetdpt(pretrained: bool = False, pretrained_cfg: Any = None, recipe: Any = None, **_: Any) -> nn.Module:
    """Entry point of timm: the pruned model of a saved directory or hub repository, with or without its weights."""
    model = Recipe.from_dict(recipe, "config.json").build(is_empty=False)
    return load_timm_weights(model, pretrained_cfg) if pretrained else model


register_with_timm(hetdpt)


def push_to_hub(directory: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a saved model to the hub and return the address of the commit."""
    from huggingface_hub import HfApi

    if not (Path(directory) / RECIPE).is_file():
        raise FileError(f"{directory} holds no {RECIPE}; save the model with hetdpt.save first")
    load(directory)  # what is damaged is not shared
    api = HfApi(token=token, library_name="hetdpt")
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo.repo_id, folder_path=str(directory), commit_message="Add model")
    except Exception as error:  # of the name, the token, the network or the hub; each has its own class
        raise FileError(f"{directory} was not pushed to {repo_id}: {first_line(error)}") from error
    return str(commit.commit_url)
