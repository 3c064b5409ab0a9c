"""hetdpt makes Vision Transformers faster by removing whole layers.

Public names are imported when first used, so that ``import hetdpt`` itself is quick and needs no torch.

>>> import hetdpt
>>> len(hetdpt.Plan(attention=(1, 10), activation=(8,)))
3
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetdpt.adapters import torchvision_ops

if TYPE_CHECKING:
    from hetdpt.adapters.models import Base, create
    from hetdpt.core.errors import HetDPTError
    from hetdpt.core.plan import Budget, Measurement, Plan, Sample, Site
    from hetdpt.core.published import published_plan, published_plans
    from hetdpt.core.tokens import Tokens
    from hetdpt.data.augmentation import Augmentation
    from hetdpt.export.features import as_features
    from hetdpt.export.hub import push_to_hub
    from hetdpt.export.onnx import export_onnx
    from hetdpt.export.saved import load, save
    from hetdpt.flow.collection.collect import collect_into, recheck_into
    from hetdpt.flow.comparison.compare import CompareConfig, compare_into
    from hetdpt.flow.config import RunConfig
    from hetdpt.flow.execution import Execution
    from hetdpt.flow.frontier import FrontierConfig, frontier_into
    from hetdpt.flow.oneshot import oneshot_into
    from hetdpt.flow.pipeline import run
    from hetdpt.measurement.accuracy import evaluate
    from hetdpt.measurement.costs import count_macs, count_params, plan_costs
    from hetdpt.measurement.speed import latency_table, measure_throughput
    from hetdpt.reduce.apply import apply_
    from hetdpt.reduce.tokens.reduce import reduce_tokens_, restore_tokens_
    from hetdpt.reduce.width.choice import Ratios
    from hetdpt.reduce.width.narrow import WidthConfig, narrow_, narrow_to
    from hetdpt.results import Price, Prices, Scores, Split
    from hetdpt.selection.entropy import transfer_entropy
    from hetdpt.selection.goal import OneShotConfig
    from hetdpt.selection.methods import METHODS
    from hetdpt.selection.predictor.allocate import Allocation, allocate, best_splits
    from hetdpt.selection.predictor.polynomial import Predictor, fit_predictor
    from hetdpt.selection.predictor.pricing import measure_prices
    from hetdpt.selection.predictor.samples import CollectConfig
    from hetdpt.selection.select import SelectConfig, select
    from hetdpt.studies.observe import ObserveConfig, observe_into
    from hetdpt.studies.relevance import Relevance, explain
    from hetdpt.studies.scan import scan
    from hetdpt.studies.tokens import TokensConfig, tokens_into
    from hetdpt.studies.transfer import TransferConfig, transfer_into
    from hetdpt.surgery.calibrate import calibrate_
    from hetdpt.surgery.gate import gate_, gates_of, restore_
    from hetdpt.surgery.merge import merge_
    from hetdpt.surgery.record import sites
    from hetdpt.surgery.remove import prune_
    from hetdpt.surgery.tail import trim_, untrim_
    from hetdpt.tasks.backbone import Backbone
    from hetdpt.tasks.learning import LearnConfig
    from hetdpt.tasks.run import learn_into
    from hetdpt.tasks.saved import load_task, save_task
    from hetdpt.training.config import TrainConfig
    from hetdpt.training.objective import Distillation
    from hetdpt.training.recover import RecoverConfig, recover

__version__ = "0.1.0"

_HOMES = {
    "hetdpt.adapters.models": ("Base", "create"),
    "hetdpt.surgery.calibrate": ("calibrate_",),
    "hetdpt.flow.collection.collect": ("collect_into", "recheck_into"),
    "hetdpt.flow.execution": ("Execution",),
    "hetdpt.reduce.width.choice": ("Ratios",),
    "hetdpt.reduce.apply": ("apply_",),
    "hetdpt.reduce.tokens.reduce": ("reduce_tokens_", "restore_tokens_"),
    "hetdpt.reduce.width.narrow": ("WidthConfig", "narrow_", "narrow_to"),
    "hetdpt.flow.config": ("RunConfig",),
    "hetdpt.flow.frontier": ("FrontierConfig", "frontier_into"),
    "hetdpt.flow.oneshot": ("oneshot_into",),
    "hetdpt.data.augmentation": ("Augmentation",),
    "hetdpt.selection.entropy": ("transfer_entropy",),
    "hetdpt.core.errors": ("HetDPTError",),
    "hetdpt.studies.scan": ("scan",),
    "hetdpt.export.hub": ("push_to_hub",),
    "hetdpt.export.onnx": ("export_onnx",),
    "hetdpt.export.saved": ("load", "save"),
    "hetdpt.tasks.backbone": ("Backbone",),
    "hetdpt.tasks.learning": ("LearnConfig",),
    "hetdpt.tasks.run": ("learn_into",),
    "hetdpt.tasks.saved": ("load_task", "save_task"),
    "hetdpt.export.features": ("as_features",),
    "hetdpt.studies.relevance": ("Relevance", "explain"),
    "hetdpt.measurement.accuracy": ("evaluate",),
    "hetdpt.measurement.costs": ("count_macs", "count_params", "plan_costs"),
    "hetdpt.measurement.speed": ("latency_table", "measure_throughput"),
    "hetdpt.flow.pipeline": ("run",),
    "hetdpt.core.plan": ("Budget", "Measurement", "Plan", "Sample", "Site"),
    "hetdpt.selection.predictor.allocate": ("Allocation", "allocate", "best_splits"),
    "hetdpt.selection.predictor.polynomial": ("Predictor", "fit_predictor"),
    "hetdpt.results": ("Price", "Prices", "Scores", "Split"),
    "hetdpt.selection.predictor.pricing": ("measure_prices",),
    "hetdpt.selection.predictor.samples": ("CollectConfig",),
    "hetdpt.core.published": ("published_plan", "published_plans"),
    "hetdpt.training.recover": ("RecoverConfig", "recover"),
    "hetdpt.core.tokens": ("Tokens",),
    "hetdpt.flow.comparison.compare": ("CompareConfig", "compare_into"),
    "hetdpt.studies.observe": ("ObserveConfig", "observe_into"),
    "hetdpt.studies.tokens": ("TokensConfig", "tokens_into"),
    "hetdpt.studies.transfer": ("TransferConfig", "transfer_into"),
    "hetdpt.selection.goal": ("OneShotConfig",),
    "hetdpt.selection.methods": ("METHODS",),
    "hetdpt.selection.select": ("SelectConfig", "select"),
    "hetdpt.surgery.gate": ("gate_", "gates_of", "restore_"),
    "hetdpt.surgery.merge": ("merge_",),
    "hetdpt.surgery.record": ("sites",),
    "hetdpt.surgery.remove": ("prune_",),
    "hetdpt.surgery.tail": ("trim_", "untrim_"),
    "hetdpt.training.config": ("TrainConfig",),
    "hetdpt.training.objective": ("Distillation",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)

torchvision_ops.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hetdpt' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
