"""The long commands of hetdpt on a model and images so small that each takes seconds: what faults.py disturbs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from evidence import OLD_QUICK, settings
from PIL import Image

import hetdpt
from hetdpt.tasks.shapes import draw

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
NOW = ("--checkpoint-minutes", "0")  # a checkpoint after every update
LOOP = ("--epochs", "2", "--batch-size", "8", "--lr", "1e-3", "--workers", "0", *NOW)
FEW = ("--per-class", "4")
BRIEF = {"training.epochs": 1, "training.batch_size": 8, "training.lr": 5e-4, "per_class": 4}
LOSS = {name: value for name, value in OLD_QUICK.items() if name not in ("training.epochs", "training.lr")}


@dataclass(frozen=True)
class World:
    """What commands are about: a saved model, a plan, a folder of images, one of images with masks."""

    model: str
    plan: str
    images: Path
    masks: Path


def make_world(home: Path) -> World:
    """Write a model, a plan, images of ten classes and drawings with a class for every pixel."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZES).eval()
    hetdpt.save(model, home / "dense", base=hetdpt.Base("timm", "vit_tiny_patch16_224", SIZES))
    (home / "plan.json").write_text(hetdpt.Plan(attention=(1,), activation=(2,)).to_json())
    pixels = np.random.default_rng(0).integers(0, 255, (60, 16, 16, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        place = home / "images" / ("train" if number < 40 else "val") / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:02d}.png")
    for seed, (split, count) in enumerate({"train": 8, "val": 4}.items()):
        for number in range(count):
            drawing = draw(seed, number, 32)
            classes = (drawing.masks * (drawing.labels + 1)[:, None, None]).sum(axis=0).astype(np.uint8)
            for kind, picture in (("images", drawing.image), ("masks", classes)):
                place = home / "masks" / split / kind
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(picture).save(place / f"{number}.png")
    (home / "masks" / "classes.txt").write_text("background\nrectangle\ndisc\ntriangle\n")
    return World(str(home / "dense"), str(home / "plan.json"), home / "images", home / "masks")


def whole_run(world: World) -> list[str]:
    parts = [word for part in ("collection", "search", "recovery") for word in settings(f"{part}.", BRIEF)]
    parts += settings("recovery.", LOSS)
    return ["run", world.model, "--data", "demo", "--layers", "2", "--rounds", "2,2,1", "--images", "16", "--batch",
            "1", "--compare", "random", "--workers", "0", *parts, *NOW]  # fmt: skip


def segmentation(world: World) -> list[str]:
    head = settings("", {"head.width": 8, "head.pool_scales": "[1,2]", "head.auxiliary_width": 8, "pyramid": 16})
    return ["segment", "train", world.model, "--data", str(world.masks), "--size", "32", *LOOP, *head]


JOBS: dict[str, Callable[[World], list[str]]] = {
    "run": whole_run,
    "recover": lambda world: ["recover", world.model, "--plan", world.plan, "--data", "demo", *LOOP, *FEW,
                              *settings("", LOSS)],
    "train": lambda world: ["train", world.model, "--data", str(world.images), *LOOP, *settings("", LOSS)],
    "oneshot": lambda world: ["oneshot", world.model, "--data", "demo", "--layers", "3", "--images", "16",
                              "--judge-images", "16", "--batch-size", "8"],
    "collect": lambda world: ["collect", world.model, "--data", "demo", "--rounds", "2,1,1", "--images", "16", *LOOP,
                              *FEW, "--epochs", "1"],
    "select": lambda world: ["select", world.model, "--data", "demo", "--method", "importance-only", "--layers", "2",
                             "--images", "16", *LOOP, *FEW],
    "compare": lambda world: ["compare", world.model, "--data", "demo", "--layers", "2", "--methods",
                              "importance-only,random", "--images", "16", *LOOP, *FEW, "--epochs", "1",
                              *settings("", LOSS),
                              *settings("", {"training.epochs": 1, "per_class": 4}, "--search-set")],
    "observe": lambda world: ["observe", world.model, "--data", "demo", "--blocks", "0", "--removal", "plain",
                              "--images", "16", *LOOP, *FEW, "--epochs", "1"],
    "tokens": lambda world: ["tokens", world.model, "--r", "1,2", "--data", "demo", "--runs", "1", "--batch", "1",
                             "--workers", "0"],
    "transfer": lambda world: ["transfer", world.model, "--data", "demo", "--mode", "probe", "--plan", world.plan,
                               *FEW, "--workers", "0"],
    "segment": segmentation,
}  # fmt: skip
"""The words of each command, but for --out."""
