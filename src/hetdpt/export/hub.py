"""Upload to the hub, and loading through ``timm.create_model``.

Importing this module registers the timm architecture ``hetdpt``, whose ``config.json`` is part of every saved timm
model: ``timm.create_model("local-dir:DIR", pretrained=True)`` and ``"hf-hub:user/name"`` then work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hetdpt.adapters.timm_hub import load_timm_weights, register_with_timm
from hetdpt.core.errors import FileError, ModelError, first_line
from hetdpt.export.features import as_features
from hetdpt.export.saved import RECIPE, SavedRecipe, load


def hetdpt(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    recipe: Any = None,
    num_classes: int | None = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    features_only: bool = False,
    out_indices: Any = 3,
    **others: Any,
) -> nn.Module:
    """Entry point of timm: the pruned model of a saved directory or hub repository, with or without its weights.

    With ``features_only`` it returns the maps of ``out_indices``.
    """
    if others:
        raise ModelError(f"a pruned model is built as it was saved; of timm's arguments, leave out {', '.join(others)}")
    made = SavedRecipe.from_dict(recipe, "config.json")
    if made.base.library != "timm":
        raise ModelError(f"timm only opens pruned models of timm, not {made.base.name}; open this one with hetdpt.load")
    model: Any = made.build(is_empty=False)
    try:
        if pretrained:
            load_timm_weights(model, pretrained_cfg)
        if num_classes is not None and num_classes != model.num_classes:
            model.reset_classifier(num_classes)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"the model in config.json cannot be opened: {first_line(error)}") from error
    return as_features(model, out_indices) if features_only else model


register_with_timm(hetdpt)


def push_to_hub(directory: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a saved model to the hub and return the address of the commit."""
    from huggingface_hub import HfApi

    if not (Path(directory) / RECIPE).is_file():
        raise FileError(f"{directory} has no {RECIPE}; save the model with hetdpt.save first")
    load(directory)  # damaged files are not shared
    api = HfApi(token=token, library_name="hetdpt")
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo.repo_id, folder_path=str(directory), commit_message="Add model")
    except Exception as error:  # of the name, the token, the network or the hub; each has its own class
        raise FileError(f"{directory} was not pushed to {repo_id}: {first_line(error)}") from error
    return str(commit.commit_url)
