"""hetdpt makes Vision Transformers faster by removing whole layers.

Public names are imported when first used, so that ``import hetdpt`` itself is quick and needs no torch.

>>> import hetdpt
>>> len(hetdpt.Plan(attention=(1, 10), activation=(8,)))
3
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetdpt import torchvision_ops

if TYPE_CHECKING:
    from hetdpt.adapters.models import Base, create
    from hetdpt.calibration import calibrate_
    from hetdpt.collection.collect import collect_into, recheck_into
    from hetdpt.collection.work import Workplace
    from hetdpt.combine.choice import Ratios
    from hetdpt.combine.tokens import reduce_tokens_, restore_tokens_
    from hetdpt.combine.width import WidthConfig, narrow_, narrow_to
    from hetdpt.config import RunConfig
    from hetdpt.data.augmentation import Augmentation
    from hetdpt.downstream.backbone import Backbone
    from hetdpt.downstream.learning import LearnConfig
    from hetdpt.downstream.run import learn_into
    from hetdpt.downstream.saved import load_task, save_task
    from hetdpt.entropy import transfer_entropy
    from hetdpt.errors import HetDPTError
    from hetdpt.export.features import as_features
    from hetdpt.export.hub import push_to_hub
    from hetdpt.export.onnx import export_onnx
    from hetdpt.export.saved import load, save
    from hetdpt.insight.relevance import Relevance, explain
    from hetdpt.insight.scan import scan
    from hetdpt.measurement.accuracy import Scores, evaluate
    from hetdpt.measurement.costs import count_macs, count_params
    from hetdpt.measurement.speed import latency_table, measure_throughput
    from hetdpt.pipeline import run
    from hetdpt.plan import Budget, Measurement, Plan, Sample, Site
    from hetdpt.predictor.allocate import Allocation, Split, allocate, frontier
    from hetdpt.predictor.polynomial import Predictor, fit_predictor
    from hetdpt.predictor.prices import Price, Prices
    from hetdpt.predictor.pricing import measure_prices
    from hetdpt.predictor.samples import CollectConfig
    from hetdpt.published import published_plan, published_plans
    from hetdpt.recovery import RecoverConfig, recover
    from hetdpt.reductions import Tokens
    from hetdpt.selection.methods import METHODS
    from hetdpt.selection.select import SelectConfig, select
    from hetdpt.studies.compare import CompareConfig, compare_into
    from hetdpt.studies.observe import ObserveConfig, observe_into
    from hetdpt.studies.tokens import TokensConfig, tokens_into
    from hetdpt.studies.transfer import TransferConfig, transfer_into
    from hetdpt.surgery import gate_, gates_of, merge_, prune_, restore_, sites
    from hetdpt.training.config import TrainConfig
    from hetdpt.training.objective import Distillation

__version__ = "0.1.0"

_HOMES = {
    "hetdpt.adapters.models": ("Base", "create"),
    "hetdpt.calibration": ("calibrate_",),
    "hetdpt.collection.collect": ("collect_into", "recheck_into"),
    "hetdpt.collection.work": ("Workplace",),
    "hetdpt.combine.choice": ("Ratios",),
    "hetdpt.combine.tokens": ("reduce_tokens_", "restore_tokens_"),
    "hetdpt.combine.width": ("WidthConfig", "narrow_", "narrow_to"),
    "hetdpt.config": ("RunConfig",),
    "hetdpt.data.augmentation": ("Augmentation",),
    "hetdpt.entropy": ("transfer_entropy",),
    "hetdpt.errors": ("HetDPTError",),
    "hetdpt.insight.scan": ("scan",),
    "hetdpt.export.hub": ("push_to_hub",),
    "hetdpt.export.onnx": ("export_onnx",),
    "hetdpt.export.saved": ("load", "save"),
    "hetdpt.downstream.backbone": ("Backbone",),
    "hetdpt.downstream.learning": ("LearnConfig",),
    "hetdpt.downstream.run": ("learn_into",),
    "hetdpt.downstream.saved": ("load_task", "save_task"),
    "hetdpt.export.features": ("as_features",),
    "hetdpt.insight.relevance": ("Relevance", "explain"),
    "hetdpt.measurement.accuracy": ("Scores", "evaluate"),
    "hetdpt.measurement.costs": ("count_macs", "count_params"),
    "hetdpt.measurement.speed": ("latency_table", "measure_throughput"),
    "hetdpt.pipeline": ("run",),
    "hetdpt.plan": ("Budget", "Measurement", "Plan", "Sample", "Site"),
    "hetdpt.predictor.allocate": ("Allocation", "Split", "allocate", "frontier"),
    "hetdpt.predictor.polynomial": ("Predictor", "fit_predictor"),
    "hetdpt.predictor.prices": ("Price", "Prices"),
    "hetdpt.predictor.pricing": ("measure_prices",),
    "hetdpt.predictor.samples": ("CollectConfig",),
    "hetdpt.published": ("published_plan", "published_plans"),
    "hetdpt.recovery": ("RecoverConfig", "recover"),
    "hetdpt.reductions": ("Tokens",),
    "hetdpt.studies.compare": ("CompareConfig", "compare_into"),
    "hetdpt.studies.observe": ("ObserveConfig", "observe_into"),
    "hetdpt.studies.tokens": ("TokensConfig", "tokens_into"),
    "hetdpt.studies.transfer": ("TransferConfig", "transfer_into"),
    "hetdpt.selection.methods": ("METHODS",),
    "hetdpt.selection.select": ("SelectConfig", "select"),
    "hetdpt.surgery": ("gate_", "gates_of", "merge_", "prune_", "restore_", "sites"),
    "hetdpt.training.config": ("TrainConfig",),
    "hetdpt.training.objective": ("Distillation",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "METHODS",
    "Allocation",
    "Augmentation",
    "Backbone",
    "Base",
    "Budget",
    "CollectConfig",
    "CompareConfig",
    "Distillation",
    "HetDPTError",
    "LearnConfig",
    "Measurement",
    "ObserveConfig",
    "Plan",
    "Predictor",
    "Price",
    "Prices",
    "Ratios",
    "RecoverConfig",
    "Relevance",
    "RunConfig",
    "Sample",
    "Scores",
    "SelectConfig",
    "Site",
    "Split",
    "Tokens",
    "TokensConfig",
    "TrainConfig",
    "TransferConfig",
    "WidthConfig",
    "Workplace",
    "allocate",
    "as_features",
    "calibrate_",
    "collect_into",
    "compare_into",
    "count_macs",
    "count_params",
    "create",
    "evaluate",
    "explain",
    "export_onnx",
    "fit_predictor",
    "frontier",
    "gate_",
    "gates_of",
    "latency_table",
    "learn_into",
    "load",
    "load_task",
    "measure_prices",
    "measure_throughput",
    "merge_",
    "narrow_",
    "narrow_to",
    "observe_into",
    "prune_",
    "published_plan",
    "published_plans",
    "push_to_hub",
    "recheck_into",
    "recover",
    "reduce_tokens_",
    "restore_",
    "restore_tokens_",
    "run",
    "save",
    "save_task",
    "scan",
    "select",
    "sites",
    "tokens_into",
    "transfer_entropy",
    "transfer_into",
]

torchvision_ops.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetdpt' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
