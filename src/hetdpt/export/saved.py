"""``save`` and ``load``: a directory from which the same model is rebuilt, without pickle, network or base checkpoint.

``hetdpt.json`` says what the model was built from and how it was changed, ``model.safetensors`` has its weights,
``README.md`` is a model card. A model that cannot be rebuilt is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hetdpt.adapters.checkpoints import check_fit
from hetdpt.adapters.models import SIZE, Base, base_of, create, input_size_of, rebuild, unfuse_
from hetdpt.adapters.preprocessing import PREPROCESSING, Preprocessing, preprocessing_of
from hetdpt.adapters.timm_hub import timm_config
from hetdpt.core.errors import FileError, HetDPTError, ModelError, PlanError
from hetdpt.core.modules import clone
from hetdpt.core.plan import Plan
from hetdpt.export.card import model_card
from hetdpt.measurement.agreement import relative_difference
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.reduce.width.shapes import Widths, reshape_, widths_of
from hetdpt.store.atomic import new_directory, read_sealed_json, sha256, write_sealed_json
from hetdpt.surgery.gate import gates_of
from hetdpt.surgery.merge import merge_blocks_
from hetdpt.surgery.record import record_of
from hetdpt.surgery.remove import place_
from hetdpt.surgery.resize import resize_
from hetdpt.surgery.tail import trim_

RECIPE, WEIGHTS, CARD, TIMM_CONFIG = "hetdpt.json", "model.safetensors", "README.md", "config.json"
DEMO, DEMO_DIRECTORY = "demo", Path(__file__).parent / "demo_model"  # the model that comes with hetdpt
FORMAT = 1
LARGEST_SIDE, MOST_TENSORS = 2**14, 5000
"""Limits for the pixels of a side, and the number of tensors, in a file."""
DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class SavedRecipe:
    """How to rebuild a saved model, except for its weights."""

    base: Base
    plan: Plan
    merged: tuple[int, ...]
    folded_norms: tuple[int, ...]
    input_size: tuple[int, int, int]
    dtype: str
    preprocessing: Preprocessing | None = None
    """None where the model does not specify it."""
    folded_constants: tuple[int, ...] = ()
    widths: Widths | None = None
    is_trimmed: bool = False
    resized: tuple[int, int] | None = None
    """Height and width of its images, if they were changed after it was built and ``base`` does not say so."""

    @classmethod
    def of(cls, model: nn.Module, base: Base | None = None) -> SavedRecipe:
        record = record_of(model)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        base = base or base_of(model)
        wants, resized = _preprocessing(model), vars(model).get(SIZE)
        if record is None:
            return cls(base, Plan(), (), (), input_size_of(model), dtype, wants, resized=resized)
        recipe = cls(
            base=base,
            plan=record.plan,
            merged=record.merged,
            folded_norms=record.folded_norms,
            input_size=record.survey.input_size,
            dtype=dtype,
            preprocessing=wants,
            folded_constants=record.folded_constants,
            is_trimmed=record.is_trimmed,
            resized=resized,
        )
        return replace(recipe, widths=widths_of(model, recipe.build())) if record.is_narrowed else recipe

    @classmethod
    def from_dict(cls, values: Any, name: str) -> SavedRecipe:
        try:
            return cls(
                base=Base.from_dict(values["base"]),
                plan=Plan.from_dict(_with_tokens(values["plan"], values.get("tokens"))),
                merged=tuple(int(block) for block in values["merged"]),
                folded_norms=tuple(int(block) for block in values["folded_norms"]),
                input_size=_input_size(values["input_size"]),
                dtype=DTYPES[DTYPES.index(values["dtype"])],
                preprocessing=Preprocessing.from_dict(wants)
                if (wants := values.get("preprocessing")) is not None
                else None,
                folded_constants=tuple(int(block) for block in values.get("folded_constants", ())),
                widths=Widths.from_dict(sizes) if (sizes := values.get("widths")) is not None else None,
                is_trimmed=bool(values.get("is_trimmed", False)),
                resized=_input_size((1, *sides))[1:] if (sides := values.get("resized")) is not None else None,
            )
        except (PlanError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise FileError(f"{name} is not a recipe of hetdpt.save: {error!r} is wrong or missing") from None

    def build(self, is_empty: bool = True) -> nn.Module:
        """Return the pruned model; ``is_empty`` leaves its parameters without values."""
        model = rebuild(self.base, is_empty=is_empty)
        if not self.plan.is_empty or self.widths or self.is_trimmed:
            place_(model, replace(self.plan, tokens=None), None if self.resized else self.input_size)
            merge_blocks_(model, self.merged, self.folded_norms, self.folded_constants)
        if self.widths is not None:
            reshape_(model, self.widths)
        if self.resized is not None:
            resize_(model, self.resized)
        if self.is_trimmed:
            trim_(model)
        if self.plan.tokens is not None:
            reduce_tokens_(model, self.plan.tokens)
        if self.preprocessing is not None:
            vars(model)[PREPROCESSING] = self.preprocessing
        return model


def _with_tokens(plan: Any, tokens: Any) -> Any:
    """Return a plan with the ``tokens`` that recipes of before have beside it."""
    return plan if tokens is None else {**plan, "tokens": tokens}


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    base: Base | None = None,
    overwrite: bool = False,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write ``model``, pruned or not, to ``directory`` and return its path; the directory appears only when complete.

    First the model is rebuilt from its own recipe and must compute the same; ``base`` says how it was built where the
    model does not know (``hetdpt.Base("timm", name, {...})``). ``notes`` are additional text files by name; ``load``
    does not read them.
    """
    target, recipe = Path(directory), require_savable(model, base)
    with new_directory(target, RECIPE, overwrite) as scratch:
        write_tensors(model.state_dict(), scratch / WEIGHTS, target)
        values = {
            "format": FORMAT,
            **asdict(recipe),
            "weights": {"file": WEIGHTS, "sha256": sha256(scratch / WEIGHTS)},
            "versions": versions(),
        }
        write_sealed_json(scratch / RECIPE, values)
        (scratch / CARD).write_text(model_card(model, recipe.base, recipe.plan, recipe.input_size), encoding="utf-8")
        if recipe.base.library == "timm":
            (scratch / TIMM_CONFIG).write_text(timm_config(model, values), encoding="utf-8")
        for name, text in (notes or {}).items():
            assert not (scratch / name).exists(), f"{name} is a file of the saved model itself"
            (scratch / name).write_text(text, encoding="utf-8")
    return target


def require_savable(model: nn.Module, base: Base | None = None) -> SavedRecipe:
    """Return the recipe by which ``model`` is saved; ``ModelError`` if the model cannot be rebuilt from it."""
    if gates_of(model):
        raise ModelError("this model has gates on its layers; call restore_(model) before saving it")
    recipe = SavedRecipe.of(model, base)
    _require_same(model, recipe)
    return recipe


def load(directory: str | Path) -> nn.Module:
    """Return the model saved in ``directory``, in eval mode on the CPU; damaged files are refused by name."""
    source = Path(directory)
    values = read_sealed_json(source / RECIPE)
    if values.get("format") != FORMAT:
        raise FileError(f"{source / RECIPE} has format {values.get('format')!r}; this version reads {FORMAT}")
    weights = source / WEIGHTS
    require_sealed(weights, values)
    return with_weights(SavedRecipe.from_dict(values, str(source / RECIPE)), read_tensors(weights), str(weights))


def with_weights(recipe: SavedRecipe, state: dict[str, Tensor], name: str) -> nn.Module:
    """Return the model of ``recipe`` around the tensors of ``state``, which must fit exactly."""
    model = recipe.build()
    check_fit(model.state_dict(), state, name)
    model.load_state_dict(state, assign=True)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model = recipe.build(is_empty=False)  # a constant of this family is computed from its parameters
        model.load_state_dict(state, assign=True)
    device = next(iter(state.values())).device
    return model.to(device, getattr(torch, recipe.dtype)).eval()


def saved_directory(name: str) -> Path | None:
    """Return the directory in which the model called ``name`` is saved; None if it is a library's name.

    ``demo`` is the model that comes with hetdpt; it is refused if there is a saved model in a folder of that name.

    >>> saved_directory("demo").name, saved_directory("vit_tiny_patch16_224")
    ('demo_model', None)
    """
    is_saved = (Path(name) / RECIPE).is_file()
    if name == DEMO and is_saved:
        raise ModelError(
            f"{DEMO} is the model that comes with hetdpt, but there is also a saved model in the folder {DEMO}; write "
            f"./{DEMO} for that one, or run hetdpt from another folder for its own"
        )
    if name == DEMO:
        return DEMO_DIRECTORY
    return Path(name) if is_saved else None


def open_model(name: str, *, is_empty: bool = False, **options: Any) -> nn.Module:
    """Return the model called ``name``: ``demo``, a directory written by ``save``, or what ``create`` knows."""
    if directory := saved_directory(name):
        if given := ", ".join(key for key, value in options.items() if value):
            raise ModelError(f"{name} is a saved model with its own weights and sizes; leave out {given}")
        return load(directory)
    if Path(name).is_dir():
        raise FileError(f"{name} is a directory without {RECIPE}; give one written by hetdpt.save, or a model's name")
    return create(name, is_empty=is_empty, **options)


def versions() -> dict[str, str]:
    """Return the versions of the packages a saved model depends on."""
    found = {}
    for package in ("hetdpt", "torch", "timm", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _input_size(values: Any) -> tuple[int, int, int]:
    channels, height, width = (int(value) for value in values)
    if min(channels, height, width) < 1 or max(channels, height, width) > LARGEST_SIDE:
        raise ValueError(f"input_size {values}")
    return channels, height, width


def _preprocessing(model: nn.Module) -> Preprocessing | None:
    try:
        return preprocessing_of(model)
    except ModelError:
        return None


def _require_same(model: nn.Module, recipe: SavedRecipe) -> None:
    """Raise unless a model built from ``recipe`` with the same weights has the same modules and computes the same."""
    hint = (
        f"rebuilt from {recipe.base.name} it would not be the same; pass "
        "base=hetdpt.Base(library, name, arguments) with the arguments the model was built with"
    )
    weight = next(model.parameters())
    if weight.is_meta:
        raise ModelError("this model cannot be saved: it has no weights (its parameters are on the meta device)")
    try:
        twin = with_weights(recipe, model.state_dict(), "its state dict")
    except HetDPTError as error:
        raise ModelError(f"this model cannot be saved: {error}; {hint}") from None
    if name := _first_different_module(model, twin):
        raise ModelError(f"this model cannot be saved: its {name} is not part of its recipe, and {hint}")
    tolerance = 0.0 if weight.is_cpu else 1e-4  # kernels of a GPU may differ from run to run
    pair = unfuse_(clone(model)), unfuse_(twin)  # how attention is computed is not part of the function
    if not relative_difference(*pair, recipe.input_size, batch=1) <= tolerance:
        raise ModelError(f"this model cannot be saved: {hint}")


def _first_different_module(model: nn.Module, twin: nn.Module) -> str | None:
    """Return the path of the first module that is of another class or prints other settings (dropout rates, ...)."""
    others = dict(twin.named_modules())
    for path, module in model.named_modules():
        other = others.get(path, twin)
        if type(other) is not type(module) or other.extra_repr() != module.extra_repr():
            return f"{path or 'model'} ({type(module).__name__})"
    return None


def require_sealed(weights: Path, values: dict[str, Any]) -> None:
    """Raise ``FileError`` unless the weights file is the one that the recipe was written with."""
    if not weights.is_file():
        raise FileError(f"{weights} is missing; the directory is incomplete")
    kept = values.get("weights")
    if not isinstance(kept, dict) or sha256(weights) != kept.get("sha256"):
        raise FileError(f"{weights} was altered or truncated since it was saved; save the model again")


def write_tensors(state: dict[str, Tensor], file: Path, target: Path, notes: dict[str, str] | None = None) -> None:
    """Write tensors to ``file``, which errors call ``target``; ``notes`` are its metadata."""
    try:
        save_file(storable(state), file, notes)
    except SafetensorError as error:
        raise FileError(
            f"{target} cannot be written ({error}); is the disk full? "
            "Free some space and give the same command again, or give another path"
        ) from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, each in its own memory.

    The file is opened for each: what is read through one handle counts as memory until it is closed. And tensors of an
    open file are not aligned, so that some processors would sum them in another order.
    """
    try:
        with safe_open(file, "pt") as content:
            names = list(content.keys())
        if len(names) > MOST_TENSORS:  # finding each takes a search through all of them
            raise FileError(f"{file} has {len(names)} tensors; at most {MOST_TENSORS} were expected")
        return {name: _read_tensor(file, name) for name in names}
    except SafetensorError as error:
        raise FileError(f"{file} cannot be read: {error}") from None


def _read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name)
        return tensor.clone()


def storable(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors contiguous and without shared memory, as safetensors requires."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in state.items():
        tensor = tensor.contiguous()
        stored[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return stored
