"""Which model families hetdpt takes apart, tried one by one; writes docs/families.md.

    python benchmarks/families.py --out docs/families.md [--only MODULE ...] [--redo]

Of every module of timm the model with the fewest parameters is taken, a few telling ones besides (``TELLING``), and a
list of HuggingFace classes (``HUGGINGFACE``), all with random weights. Each row is written to ``RESULTS`` as soon as it
is known; a second run with the same versions only adds what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import hetdpt  # before timm: cures torchvision where its operators do not load

# isort: split
import timm
import torch
from torch import Tensor, nn

from hetdpt.adapters.anatomy import Survey, survey
from hetdpt.adapters.branches import Reading
from hetdpt.adapters.models import Base, build, input_size_of
from hetdpt.adapters.trace import trace
from hetdpt.core.errors import ModelError
from hetdpt.export.saved import versions
from hetdpt.measurement.agreement import outputs_of
from hetdpt.surgery.record import record_of

Size = tuple[int, int, int]

RESULTS = Path("benchmarks/results/families.json")
HF = "HuggingFace"
BATCH = 2
LIGHT_PARAMS, LIGHT_SIDE = 100e6, 300  # beyond these a model is cut down, or only surveyed
ROUNDING = 2e-5  # merged is no farther from pruned than this (as in tests/test_contract.py), dense is farther
# Names of models that are not the smallest of anything: to find that out would cost gigabytes.
LARGE = re.compile("giant|huge|gigantic|enormous|xlarge|_[1357]b_")

TELLING: dict[str, dict[str, str]] = {
    "beit": {"beitv2_base_patch16_224": "LayerScale, relative positions"},
    "byoanet": {"botnet26t_256": "attention instead of a 3 x 3 convolution", "lambda_resnet26t": "lambda layers"},
    "byobnet": {"resnet50_clip": "attention pool"},
    "coat": {"coat_lite_tiny": "serial blocks only"},
    "convnext": {"convnext_atto": "", "convnextv2_atto": "GRN between the layers"},
    "crossvit": {"crossvit_9_dagger_240": "convolutional embedding"},
    "deit": {
        "deit_tiny_distilled_patch16_224": "two heads",
        "deit3_small_patch16_224": "LayerScale",
    },
    "efficientvit_mit": {"efficientvit_l1": "larger kind"},
    "eva": {
        "eva02_tiny_patch14_224": "SwiGLU",
        "eva_giant_patch14_224": "plain MLP",
        "eva02_base_patch14_224": "SwiGLU with a norm inside",
        "vit_small_patch16_dinov3": "DINOv3",
        "vit_small_plus_patch16_dinov3": "DINOv3, SwiGLU",
        "vit_small_patch16_rope_224": "rotary positions",
        "vit_small_patch16_rope_mixed_224": "learned rotary positions",
        "vit_betwixt_patch16_rope_reg4_gap_256": "rotary positions, registers",
        "vit_pe_core_tiny_patch16_384": "attention pool",
    },
    "fastvit": {"fastvit_sa12": "attention in the last stage"},
    "levit": {"levit_conv_128s": "as convolutions"},
    "maxxvit": {"coatnet_nano_rw_224": "CoAtNet", "coatnext_nano_rw_224": "CoAtNet with ConvNeXt blocks"},
    "metaformer": {"caformer_s18": "attention in the last stages", "poolformer_s12": "pooling instead of attention"},
    "mlp_mixer": {"mixer_s32_224": "mixes tokens by an MLP too", "resmlp_12_224": "mixes tokens by one layer"},
    "mobilenetv3": {"mobilenetv4_hybrid_medium": "attention in the last stages"},
    "mobilevit": {"mobilevitv2_050": "separable attention"},
    "naflexvit": {"naflexvit_base_patch16_gap": "", "naflexvit_base_patch16_map": "attention pool"},
    "swin_transformer": {"swin_s3_tiny_224": "windows of several sizes"},
    "swin_transformer_v2_cr": {"swinv2_cr_tiny_ns_224": "norms per stage"},
    "tnt": {"tnt_s_patch16_224": "not the legacy kind"},
    "twins": {"twins_pcpvt_small": "no local attention"},
    "vision_transformer": {
        "vit_tiny_patch16_224": "plain",
        "vit_small_patch14_dinov2": "LayerScale",
        "vit_small_patch14_reg4_dinov2": "LayerScale, registers",
        "vit_giant_patch14_dinov2": "SwiGLU",
        "vit_medium_patch16_reg4_gap_256": "registers, no class token",
        "vit_base_patch16_siglip_224": "attention pool",
        "vit_base_patch32_clip_quickgelu_224": "QuickGELU",
        "vit_base_patch16_rpn_224": "norm behind each branch",
        "vit_small_patch16_36x1_224": "36 blocks",
        "vit_small_patch16_18x2_224": "two branches side by side",
        "vit_base_patch16_xp_224": "attention and FFN in one branch",
        "vit_pwee_patch16_reg1_gap_256": "attention and FFN side by side",
        "vit_dwee_patch16_reg1_gap_256": "differential attention",
        "aimv2_large_patch14_224": "SwiGLU, RMSNorm",
        "beit3_base_patch16_224": "norms inside attention and FFN",
        "flexivit_small": "",
    },
    "vision_transformer_hybrid": {"vit_small_r26_s32_224": "larger stem"},
    "vision_transformer_relpos": {
        "vit_relpos_small_patch16_224": "",
        "vit_relpos_medium_patch16_cls_224": "class token",
        "vit_relpos_small_patch16_rpn_224": "norm behind each branch",
    },
}
"""Beside the smallest model of a module, those that say more of it, and what they show."""

_LAYERS = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
_VIT = {**_LAYERS, "image_size": 64, "patch_size": 16}
_DINO = {**_VIT, "mlp_ratio": 2}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}

HUGGINGFACE: list[tuple[str, str, dict[str, Any]]] = [
    ("ViTForImageClassification", "", _VIT),
    ("ViTModel", "", _VIT),
    ("DeiTForImageClassification", "", _VIT),
    ("DeiTForImageClassificationWithTeacher", "two heads", _VIT),
    ("SwinForImageClassification", "", _SWIN),
    ("Swinv2ForImageClassification", "", _SWIN),
    ("Dinov2ForImageClassification", "LayerScale", _DINO),
    ("Dinov2ForImageClassification", "SwiGLU", {**_DINO, "use_swiglu_ffn": True}),
    ("Dinov2WithRegistersForImageClassification", "registers", _DINO),
    ("DINOv3ViTModel", "rotary positions", _VIT),
    ("DINOv3ViTModel", "SwiGLU", {**_VIT, "use_gated_mlp": True}),
    ("BeitForImageClassification", "LayerScale", _VIT),
    ("CLIPVisionModel", "QuickGELU", _VIT),
    ("CLIPVisionModelWithProjection", "", {**_VIT, "projection_dim": 16}),
    ("CLIPForImageClassification", "", {"vision_config": _VIT}),
    ("SiglipVisionModel", "attention pool", _VIT),
    ("SiglipForImageClassification", "", {"vision_config": _VIT}),
    ("ViTMSNForImageClassification", "", _VIT),
    ("Data2VecVisionForImageClassification", "", _VIT),
    ("IJepaForImageClassification", "", _VIT),
    ("YolosForObjectDetection", "", {**_VIT, "image_size": [64, 64]}),
    ("DPTForDepthEstimation", "ViT under a decoder", {**_VIT, "backbone_out_indices": [0, 1, 2, 3]}),
    ("PvtV2ForImageClassification", "", {"image_size": 64}),
    ("SegformerForImageClassification", "", {}),
    ("HieraForImageClassification", "", {"image_size": [64, 64], "embed_dim": 32}),
    ("LevitForImageClassification", "", {}),
    ("CvtForImageClassification", "", {}),
]
"""Class, what it shows, and its configuration."""


LOOKED_FOR = "looked for Linear - activation - Linear or a gated FFN"  # how the refusal of one FFN begins
SENTENCE = "looked for residual branches around attention and around Linear - activation - Linear"  # of a whole model

COLUMNS = f"""*attention* and *activation* count the sites, layers that can be removed; a gated FFN (SwiGLU) only goes
as a whole. The *contract* is tried with random values in all parameters and a plan that removes every second site of
each kind: it *held* if open gates and the restored model are bit-equal to the dense one, gated is bit-equal to pruned,
merged equals pruned up to rounding ({ROUNDING:.0e}), and pruned differs from dense by more; these last two relative
differences stand under *merged* (– if there was nothing to merge) and *pruned*. *not offered* counts the attention and
FFNs that were seen in the model and left alone, and says why."""
HF_NOTE = "Built from small configurations (see the list in `benchmarks/families.py`), not from checkpoints."
REFUSED_NOTE = f"""Models with attention, or with linear layers in a residual branch, that offer no site. hetdpt
{SENTENCE} (or a gated FFN); what it found instead:"""


@dataclass(frozen=True)
class Case:
    """A model to try, on images of ``size``; ``None`` until :func:`prepared` has found one."""

    family: str
    note: str
    base: Base
    size: Size | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.base.name, self.note


@dataclass(frozen=True)
class Row:
    """What was found out about one case; the JSON of a row has these keys."""

    family: str
    note: str
    base: Base
    outcome: str
    """``held``, ``failed``, ``surveyed`` (too large to run), ``refused``, or ``nothing`` (no attention, no FFN)."""
    has_attention: bool = False
    """Whether there is an attention product anywhere, offered or not."""
    size: Size | None = None
    blocks: int = 0
    attention: int = 0
    activation: int = 0
    gated: int = 0
    checks: dict[str, bool] = field(default_factory=dict)
    folded: int = 0
    """How many FFNs merging made one layer of."""
    merged: float | None = None
    """Relative difference of merged and pruned outputs."""
    changed: float | None = None
    """Relative difference of pruned and dense outputs."""
    why: str = ""
    not_offered: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.base.name, self.note

    @property
    def is_offering(self) -> bool:
        return self.attention + self.activation > 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        return cls(**{**values, "base": Base.from_dict(values["base"])})


def smallest(module: str) -> str:
    """Return the model of a timm module with the fewest parameters."""
    counts = {}
    for name in timm.list_models(module=module):
        if not LARGE.search(name):
            counts[name] = parameters(build(Base("timm", name), is_empty=True))
    return min(counts, key=counts.__getitem__)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def cases(smallest_of: dict[str, str]) -> Iterator[Case]:
    for module, name in sorted(smallest_of.items()):
        telling = TELLING.get(module, {})
        for model, note in {name: "", **telling}.items():
            yield Case(module, note, Base("timm", model))
    for name, note, config in HUGGINGFACE:
        yield Case(HF, note, Base("transformers", name, {**config, "num_labels": 100}))


def prepared(case: Case) -> tuple[Case, nn.Module]:
    """Return the case cut down to what runs in seconds, where the model lets itself be, and its empty model."""
    model = build(case.base, is_empty=True)
    size = size_of(model)
    if is_light(model, size):
        return replace(case, size=size), model
    for side in (224, 192):
        for changes in ({}, {"img_size": side}, {"depth": 3}, {"img_size": side, "depth": 3}):
            smaller = replace(case, base=replace(case.base, arguments=changes), size=(3, side, side))
            if found := accepted(smaller):
                return smaller, found
    return replace(case, size=size), model


def size_of(model: nn.Module) -> Size:
    try:
        return input_size_of(model)
    except ModelError:  # it says none and takes any
        return 3, 224, 224


def is_light(model: nn.Module, size: Size) -> bool:
    return parameters(model) <= LIGHT_PARAMS and max(size) <= LIGHT_SIDE


def accepted(case: Case) -> nn.Module | None:
    """Return the empty model of a case that can be built, takes its images and is light."""
    assert case.size is not None
    try:
        model = build(case.base, is_empty=True)
        trace(model, case.size)
    except ModelError:
        return None
    return model if is_light(model, case.size) else None


def tried(case: Case) -> Row:
    """Return the row of one case, whatever happens."""
    row = Row(case.family, case.note, case.base, "failed")
    try:
        case, model = prepared(case)
        row = replace(row, base=case.base, size=case.size)
        return examined(row, model)
    except Exception as error:  # any library may raise anything: a finding, and no reason to stop
        return replace(row, why=in_one_line(error))


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def has_attention(model: nn.Module, size: Size) -> bool:
    reading = Reading(model, trace(model, size))
    return any(reading.is_product(node.index) for node in reading.nodes)


def examined(row: Row, empty: nn.Module) -> Row:
    """Return the row with the sites of a model and, if it is light enough to run, the checks of the contract."""
    size = row.size
    assert size is not None
    try:
        found = survey(empty, size)
    except ModelError as error:
        outcome = "nothing" if "found neither" in str(error) else "refused"
        return replace(row, outcome=outcome, why=str(error), has_attention=has_attention(empty, size))
    row = replace(
        row,
        has_attention=bool(found.anatomy.attention) or any(why.startswith("attention") for why in found.refusals),
        blocks=found.anatomy.blocks,
        attention=len(found.anatomy.attention),
        activation=len(found.anatomy.activation),
        gated=sum(handle.site.is_gated for handle in found.handles),
        not_offered=dict(Counter(map(reason, found.refusals))),
    )
    return checked(row, found) if is_light(empty, size) else replace(row, outcome="surveyed")


def checked(row: Row, found: Survey) -> Row:
    """Return the row with the contract tried on a real model."""
    model = randomise_(build(row.base), torch.Generator().manual_seed(0))
    try:
        checks, merged, changed = contract(model, found.input_size, half(found))
    except Exception as error:  # as in tried, but what is known of the sites stays
        return replace(row, why=in_one_line(error))
    record = record_of(model)
    assert record is not None
    outcome = "held" if all(checks.values()) else "failed"
    return replace(row, outcome=outcome, checks=checks, folded=len(record.merged), merged=merged, changed=changed)


def half(found: Survey) -> hetdpt.Plan:
    """Return the plan that takes every second site of each kind; whole FFNs where some are gated."""
    anatomy = found.anatomy
    is_any_gated = any(handle.site.is_gated for handle in found.handles)
    removal = ("skip", "drop") if is_any_gated else "plain"
    return hetdpt.Plan(anatomy.attention[::2], anatomy.activation[::2], removal=removal)


@torch.no_grad()
def randomise_(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Put random values in every parameter, so that no branch is zero by initialisation."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_matrix = parameter.ndim > 1
        parameter.copy_(noise / parameter[0].numel() ** 0.5 if is_matrix else 0.5 + 0.1 * noise)
    return model.eval()


@torch.no_grad()
def contract(model: nn.Module, size: Size, plan: hetdpt.Plan) -> tuple[dict[str, bool], float, float]:
    """Return the checks by name, and how far merged is from pruned and pruned from dense."""
    images = torch.randn(BATCH, *size, generator=torch.Generator().manual_seed(1))

    def run() -> Tensor:
        return torch.cat([output.flatten() for output in outputs_of(model, images)])

    dense = run()
    hetdpt.gate_(model, hetdpt.Plan(removal=plan.removal), size)
    is_open_dense = torch.equal(run(), dense)
    hetdpt.gate_(hetdpt.restore_(model), plan, size)
    gated = run()
    hetdpt.restore_(model)
    is_restored = torch.equal(run(), dense)
    hetdpt.prune_(model, plan, size)
    pruned = run()
    hetdpt.merge_(model)
    merged, changed = difference(run(), pruned), difference(pruned, dense)
    checks = {
        "outputs are finite": bool(dense.isfinite().all() and pruned.isfinite().all()),
        "open gates = dense": is_open_dense,
        "restored = dense": is_restored,
        "gated = pruned": torch.equal(gated, pruned),
        "merged = pruned": merged < ROUNDING,
        "pruned ≠ dense": changed > ROUNDING,
    }
    return checks, merged, changed


def difference(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def reason(refusal: str) -> str:
    """Return a refusal without the names and shapes in which those of one kind differ."""
    where, _, why = refusal.partition(": ")
    if " turns " in why:
        why = "a module of the branch changes the shape"
    return f"{where.split()[0]}: {why.removeprefix(f'{LOOKED_FOR}, ')}"


@dataclass
class Book:
    """The rows known so far, and the file they are kept in."""

    path: Path
    date: str = field(default_factory=lambda: date.today().isoformat())
    versions: dict[str, str] = field(default_factory=versions)
    smallest: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> Book:
        """Return the book in a file; an empty one if there is none or it was written with other versions."""
        values = json.loads(path.read_text()) if path.exists() else {}
        if values.get("versions") != versions():
            return cls(path)
        return cls(path, smallest=values["smallest"], rows=[Row.from_dict(row) for row in values["rows"]])

    def find(self, case: Case) -> Row | None:
        return next((row for row in self.rows if row.key == case.key), None)

    def put(self, row: Row) -> None:
        self.rows = [*(other for other in self.rows if other.key != row.key), row]
        self.write()

    def write(self) -> None:
        values = {key: value for key, value in asdict(self).items() if key != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(values, indent=1) + "\n")


def fill(book: Book, only: list[str], redo: bool) -> None:
    """Try what the book lacks, of the families in ``only`` or of all."""
    for module in timm.list_modules():
        if module not in book.smallest and (not only or module in only):
            book.smallest[module] = smallest(module)
            print(f"{module}: smallest is {book.smallest[module]}", flush=True)
            book.write()
    for case in cases(book.smallest):
        is_wanted = not only or case.family in only
        if is_wanted and (redo or book.find(case) is None):
            book.put(row := tried(case))
            print(f"{case.family} {case.base.name}: {row.outcome}", flush=True)


def page(book: Book) -> str:
    """Return docs/families.md."""
    rows = [row for case in cases(book.smallest) if (row := book.find(case))]
    timm_rows = [row for row in rows if row.base.library == "timm"]
    hf_rows = [row for row in rows if row.base.library == "transformers"]
    parts = [
        *("# Families", opening(book, rows), COLUMNS),
        *("## timm", table(timm_rows, "family: model"), "## HuggingFace", HF_NOTE, table(hf_rows, "class")),
        *("## Refused", refused(rows), "## Nothing to remove", nothing(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def opening(book: Book, rows: list[Row]) -> str:
    """Return how many families pass, and how the page came about."""
    timm_rows = [row for row in rows if row.base.library == "timm"]
    held = [row for row in timm_rows if row.outcome == "held"]
    attending = families_of(row for row in timm_rows if row.has_attention)
    broken = families_of(row for row in timm_rows if row.outcome == "failed")
    passing = families_of(row for row in held if row.attention) - broken
    others = families_of(held) - passing - broken
    hf = [row for row in rows if row.base.library == "transformers"]
    outcomes = {outcome: [row for row in rows if row.outcome == outcome] for outcome in ("failed", "surveyed")}
    failed, surveyed = (listed(f"`{row.base.name}`" for row in found) for found in outcomes.values())
    version = ", ".join(f"{package} {number}" for package, number in book.versions.items())
    return (
        f"Of the {len(attending)} families (modules) of timm with attention, {len(passing)} have attention that can be "
        f"removed and keep the contract; none can be in {listed(sorted(attending - passing))}. {len(others)} families "
        f"offer activations only: {listed(sorted(others))}. Of {len(hf)} HuggingFace models, "
        f"{sum(row.outcome == 'held' for row in hf)} keep the contract. Broken or not readable: {failed}. "
        f"Too large to run and only surveyed: {surveyed}.\n\n"
        f"Generated by `python benchmarks/families.py --out docs/families.md` on {book.date} ({version}; CPU, float32, "
        f"batch {BATCH}), from `{RESULTS}`. Do not edit."
    )


def families_of(rows: Iterable[Row]) -> set[str]:
    return {row.family for row in rows}


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def table(rows: list[Row], first: str) -> str:
    """Return the models that offer sites, one line each."""
    head = [first, "images", "blocks", "attention", "activation", "contract", "merged", "pruned", "not offered"]
    marks = ["---", *["--:"] * 4, "---", "--:", "--:", "---"]
    return "\n".join([cells(head), cells(marks), *(line(row) for row in rows if row.is_offering)])


def cells(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def line(row: Row) -> str:
    assert row.size is not None
    gated = f" ({row.gated} gated)" if row.gated else ""
    merged = f"{row.merged:.0e}" if row.folded else "–"
    changed = "–" if row.changed is None else f"{row.changed:.1g}"
    left = "; ".join(f"{count} {why}" for why, count in row.not_offered.items())
    numbers = [str(row.size[1]), str(row.blocks), str(row.attention), f"{row.activation}{gated}"]
    return cells([model_cell(row), *numbers, verdict(row), merged, changed, shortened(left)])


def model_cell(row: Row) -> str:
    """Return the name of the model, what it shows, and how it was cut down."""
    cuts = row.base.arguments if row.base.library == "timm" else {}
    remarks = [row.note, *(f"{key}={value}" for key, value in cuts.items())]
    remark = ", ".join(filter(None, remarks))
    family = f"{row.family}: " if row.base.library == "timm" else ""
    return f"{family}`{row.base.name}`" + (f" ({remark})" if remark else "")


def verdict(row: Row) -> str:
    broken = [name for name, is_kept in row.checks.items() if not is_kept]
    if row.outcome == "failed":
        return f"**failed**: {shortened(row.why or ', '.join(broken))}"
    return {"held": "held", "surveyed": "surveyed only"}[row.outcome]


def refused(rows: list[Row]) -> str:
    """Return the models in which nothing of what was found can be removed, and why."""
    lines = [cells(["model", "found"]), cells(["---"] * 2)]
    lines += [
        cells([model_cell(row), finding(row.why)]) for row in rows if not row.is_offering and row.outcome != "nothing"
    ]
    return "\n".join([REFUSED_NOTE, "", *lines])


def finding(sentence: str) -> str:
    """Return what a refusal found, without what the note above the table says, and each reason once."""
    _, _, found = sentence.partition(f"{SENTENCE}, found ")
    if not found:
        return shortened(sentence)
    parts = found.partition("; give a")[0].split("; ")
    once = {reason(part): part for part in reversed(parts)}
    return shortened("; ".join(part.replace(f"{LOOKED_FOR}, ", "") for part in reversed(once.values())))


def shortened(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[:length].rpartition(" ")[0] + " …"


def nothing(rows: list[Row]) -> str:
    """Return a sentence that lists the families in which no model has attention or FFNs, and such models of others."""
    barren = [row for row in rows if row.outcome == "nothing"]
    others = families_of(row for row in rows if row.outcome != "nothing")
    models = [f"`{row.base.name}`" for row in barren if row.family in others]
    return (
        "In the models tried of these families neither attention nor Linear - activation - Linear was found in a "
        f"residual branch: {listed(sorted(families_of(barren) - others))}. The same is true of {listed(models)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/families.md"))
    parser.add_argument("--only", nargs="+", default=[], metavar="MODULE", help="modules of timm, or HuggingFace")
    parser.add_argument("--redo", action="store_true", help="repeat models that already have results")
    options = parser.parse_args()
    if unknown := sorted({*options.only} - {*timm.list_modules(), HF}):
        parser.error(f"--only takes modules of timm or HuggingFace, not {', '.join(unknown)}")
    warnings.simplefilter("ignore")  # the libraries' own, on models nobody trains here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    book = Book.open(RESULTS)
    fill(book, options.only, options.redo)
    options.out.write_text(page(book))


if __name__ == "__main__":
    main()
