"""``RunConfig``: all settings of a run, in one typed value.

A recipe sets the defaults, a file overrides them, the command line overrides both. Names are the same everywhere, with
dots where a file has tables: ``recovery.training.epochs``. The line under a field is the help of its option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from hetdpt.core.errors import PlanError, PredictError, TrainError
from hetdpt.core.goals import BOUNDS, GOALS, GoalFields, Wanted, require_pruning
from hetdpt.core.plan import Plan, Removal, require_class_token
from hetdpt.core.styles import STYLES, ClassTokenChoice
from hetdpt.core.tokens import read_tokens
from hetdpt.data.images import is_unlabelled
from hetdpt.data.table import DEMO
from hetdpt.export.runtimes import EXPORTS, ExportRuntime, require_runtimes
from hetdpt.flow.frontier import FrontierConfig
from hetdpt.flow.recipes import quick
from hetdpt.flow.recipes import recipe as recipe_called
from hetdpt.reduce.width.narrow import WidthConfig
from hetdpt.results import Price
from hetdpt.selection.methods import METHODS, Method, method_called, require_budget, require_priced
from hetdpt.selection.moves import MOVES
from hetdpt.selection.predictor.samples import CollectConfig
from hetdpt.selection.select import SelectConfig
from hetdpt.store.settings import checked, made, read_settings, setting_types, spelled, write_yaml
from hetdpt.training.recover import RecoverConfig

RECIPE = "recipe"  # the key of a file that names the recipe
NEEDED = ("model", "data", "out")
ABOUT = "# Every setting of a run of hetdpt. The same run again: hetdpt run --config THIS_FILE\n"


@dataclass(frozen=True, kw_only=True)
class RunConfig(GoalFields):
    """What ``hetdpt.run`` does: from a dense model to a faster one that meets a goal.

    >>> RunConfig(model="demo", data="demo", out=Path("runs/demo"), layers=8).is_split
    True
    """

    model: str
    """A timm name, hf:NAME (hub name, directory or model type), a saved directory, or ``demo``."""
    data: str
    """A folder with train/ and val/, torch/cifar100, hfds/NAME, wds/FOLDER, or ``demo``."""
    out: Path
    """Run directory; the same command resumes an interrupted run."""
    weights: Path | None = None
    """Checkpoint (.safetensors or .pth) whose weights match the model exactly."""
    pretrained: bool = False
    """Download the pretrained weights of the library."""
    num_classes: int | None = None
    """Number of classes of the head, if not that of the model."""
    img_size: int | None = None
    """Side of the images in pixels, if not that of the model."""
    data_root: Path | None = None
    """Where torch/, hfds/ and wds/ data is kept; relative folders start there."""
    download: bool = False
    """Download torch/ data that is missing."""
    budget: tuple[int, int] | None = None
    """Remove this many attention layers and activations: nothing is sampled, and other goals are only checked."""
    method: str | None = None
    """How layers are chosen: a name from ``METHODS``; by default mixed for one goal of speed or MACs, else hetdpt.

    It is also hetdpt where a setting is given that mixed has no use for, such as compare, tail or tokens.
    """
    moves: tuple[str, ...] = tuple(MOVES)
    """What the method mixed may remove: attention, activation, tail, features, heads, head_dims, tokens."""
    compare: tuple[str, ...] = ()
    """Other methods to try with the same number of layers and the same fine-tuning, such as random,attention-only."""
    samples: Path | None = None
    """A CSV of samples, or a directory of hetdpt collect, to split the budget by; collected if not given."""
    removal: Removal = "calibrated"
    """What replaces removed layers: a name from ``styles.PRESETS`` or (attention style, activation style)."""
    class_token: ClassTokenChoice = "auto"
    """Whether the class token keeps its FFN where patches lose their activation; auto: with fitted replacements."""
    images: int = 256
    """Training images to fit replacements and compare layers on."""
    rounds: tuple[int, int, int] | None = None
    """Samples to collect in the chains attention, activation and interleaved, such as 8,8,3 for 12 blocks."""
    collection: RecoverConfig = field(default_factory=lambda: quick().collection)
    """Settings of the brief fine-tuning of each sample."""
    search: RecoverConfig = field(default_factory=lambda: quick().search)
    """Settings of the training that learns importances."""
    candidates: Literal["all", "te"] = "all"
    """Layers to search: all, or te for those with the least transfer entropy, twice as many as are removed."""
    explores: bool = True
    """Begin the search with a scan and try candidates closed, which the paper does not."""
    recovery: RecoverConfig = field(default_factory=lambda: quick().config)
    """Settings of the final fine-tuning."""
    plus: bool = False
    """HetDPT+: after layers, remove width until the goal is met."""
    width: WidthConfig = field(default_factory=WidthConfig)
    """Settings of the removal of width."""
    depths: tuple[int, ...] | None = None
    """With --plus, numbers of layers to try, such as 0,4,8; 0, a sixth, a third and half of all by default."""
    tail: int | None = 0
    """Blocks at the end in which patches are not updated, fitted before layers are chosen: 0, 2, ..., or auto.

    Auto compares the damage of tails and of layers, for a goal of speed or MACs and fitted replacements; else it is 0.
    The method calibrated-greedy does so for every block that it adds to the tail, as it does for every layer. The
    method mixed always does, unless ``moves`` leave tails out.
    """
    trim: bool = True
    """Do not compute tokens that no output depends on; outputs stay the same."""
    tokens: str | None = None
    """Reduce the tokens of the final model, such as tome:8 or gtp:8."""
    keep: Literal["auto", "last", "best", "ema"] = "auto"
    """Model of the fine-tuning to keep; auto: best if training images are held out for that, else last.

    Without held-out images, ``best`` is chosen by the validation images that it is reported on.
    """
    export: tuple[str, ...] = ()
    """Runtimes to export the model to as well, such as ``onnx``."""
    onnx: bool = False
    """Short for --export onnx."""
    device: str | None = None
    """cpu, cuda, cuda:1 or mps; the fastest available by default."""
    workers: int = 0
    """Worker processes that read images; on the command line one per core by default, at most 8."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints within an epoch."""
    batch: int | None = None
    """Batch size when speed is measured; by default 256 on a GPU, 8 on a CPU."""

    def __post_init__(self) -> None:
        self._settle()
        self._require_goal()
        self._require_methods()
        self._require_width()
        self._require_numbers()
        self._require_tail()
        require_runtimes(self.export)
        _ = self.collect_config, self.select_config, FrontierConfig(moves=self.moves)  # which may refuse
        require_class_token(self.class_token, self.removal)

    @property
    def chooser(self) -> Method:
        """The row of ``METHODS`` that chooses layers: the one of ``method`` or, without a name, by the goal."""
        return method_called(self.method or ("hetdpt" if self._unmixed else "mixed"))

    @property
    def is_mixed(self) -> bool:
        """Whether more than layers is removed, all of it from one search."""
        return not self.chooser.takes_budget

    @property
    def mixed_moves(self) -> tuple[str, ...] | None:
        """What such a search may remove; None if layers are chosen otherwise."""
        return self.moves if self.is_mixed else None

    @property
    def _unmixed(self) -> list[str]:
        """The settings that the method mixed does not have, as options."""
        names = ("layers", "params", "budget", "samples", "rounds", "depths", "tokens")
        given = {f"--{name}": getattr(self, name) is not None for name in names}
        given |= {"--plus": self.plus, "--compare": bool(self.compare), "--no-trim": not self.trim}
        given |= {"--tail": bool(self.tail), "one of --speedup and --macs": None not in (self.speedup, self.macs)}
        given["a removal without fits"] = not Plan(removal=self.removal).is_any_fitted
        return [name for name, is_given in given.items() if is_given]

    @property
    def priced_goal(self) -> dict[str, float | str]:
        """The goal until which layers are removed by what they save; empty if their number is given or allocated."""
        if self.layers is not None or self.budget is not None or self.plus or not self.chooser.is_priced:
            return {}
        return self.goals

    @property
    def has_free_tail(self) -> bool:
        """Whether a longer tail may be chosen in place of a layer, for ``priced_goal``."""
        return bool(self._is_tail_open and self.priced_goal and not self.is_mixed)

    @property
    def tail_goal(self) -> dict[str, float | str]:
        """The goals by which the length of the tail is chosen before layers are; empty if it is not."""
        if not self._is_tail_open or self.priced_goal:
            return {}
        if self.layers is not None or self.budget is not None or self.samples or self.plus or self.compare:
            return {}
        return {name: value for name, value in self.goals.items() if name in ("speedup", "macs")}

    @property
    def _is_tail_open(self) -> bool:
        return self.tail is None and self.trim and Plan(removal=self.removal).is_any_fitted

    @property
    def kept(self) -> Literal["last", "best", "ema"]:
        """The model of the fine-tuning that is kept."""
        if self.keep == "auto":
            return "best" if self.recovery.hold_out else "last"
        return self.keep

    @property
    def collect_config(self) -> CollectConfig:
        """How accuracy is sampled."""
        return CollectConfig(recovery=self.collection, rounds=self.rounds, removal=self.removal, images=self.images)

    @property
    def select_config(self) -> SelectConfig:
        """How layers are chosen."""
        return SelectConfig(
            search=self.search,
            removal=self.removal,
            images=self.images,
            candidates=self.candidates,
            explores=self.explores,
        )

    @property
    def is_split(self) -> bool:
        """Whether the accuracy predictor splits the budget between the kinds of layers."""
        return self.budget is None and self.layers != 0 and self.chooser.split == "map"

    @property
    def is_balanced(self) -> bool:
        """Whether numbers of layers are tried to find what is left to width."""
        return self.plus and self.is_split and self.layers is None

    @property
    def is_sampled(self) -> bool:
        """Whether samples of accuracy are collected."""
        return self.is_split and self.samples is None

    @property
    def sampled_layers(self) -> int | None:
        """How many layers samples of accuracy reach; None where that is not known, or ``rounds`` set it."""
        return self.layers if self.rounds is None else None

    @property
    def exports(self) -> tuple[ExportRuntime, ...]:
        """The rows of ``EXPORTS`` that the model is exported to."""
        return tuple(row for row in EXPORTS.values() if row.name in self.export or (self.onnx and row.name == "onnx"))

    @property
    def wanted(self) -> Wanted:
        """What a split has to meet, in numbers; percentages of the dense model become such by ``with_numbers``."""
        amounts = self.amounts()
        if shares := [name for name, amount in amounts.items() if amount.is_share]:
            raise PredictError(
                f"{shares[0]} is a percentage of the dense model, whose costs are not known yet; count them first"
            )
        layers = {} if self.budget is None else {"layers": sum(self.budget)}
        return Wanted({name: amount.value for name, amount in amounts.items()} | layers)

    @property
    def target(self) -> dict[str, float]:
        """What width has to meet, in numbers: the one goal that is not a number of layers."""
        return {name: value for name, value in self.wanted.conditions.items() if name in BOUNDS}

    def located(self) -> RunConfig:
        """Return this config with absolute paths, so that it means the same in any working directory."""
        paths = {name: value for name, value in vars(self).items() if isinstance(value, Path)}
        found: dict[str, Any] = {name: path.resolve() for name, path in paths.items()}
        for name in ("model", "data") if self.data_root is None else ("model",):
            folder = Path(getattr(self, name))
            if str(folder) != DEMO and folder.is_dir():  # that name does not mean a folder called demo
                found[name] = str(folder.resolve())
        return replace(self, **found)

    def with_numbers(self, dense: Price) -> RunConfig:
        """Return this config with numbers for percentages of the ``dense`` model.

        >>> config = RunConfig(model="demo", data="demo", out=Path("runs/demo"), macs="70%")
        >>> config.with_numbers(Price(macs=4e9, params=1e6)).macs
        2800000000.0
        """
        shares = {name: amount for name, amount in self.amounts().items() if amount.is_share}
        numbers: dict[str, Any] = {n: amount.of(GOALS[n].reached(dense.measures)) for n, amount in shares.items()}
        return replace(self, **numbers)

    @classmethod
    def resolve(
        cls,
        *,
        recipe: str | None = None,
        file: str | Path | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """Return the settings of ``changes`` over those of a ``file`` over those of a ``recipe``.

        A file (.toml, .yaml or .yml) has the names of the fields, tables for ``collection``, ``search`` and
        ``recovery``, and may name a ``recipe``; one given here replaces that, and ``quick`` is the default. Names in
        ``changes`` have dots. TOML cannot say null; YAML can. With images without labels, alpha is 1 by default.

        >>> changes = {"model": "demo", "data": "demo", "out": "runs/demo", "layers": 8, "recovery.training.epochs": 2}
        >>> RunConfig.resolve(changes=changes).recovery.training.epochs
        2
        """
        written = _by_name(read_settings(Path(file))) if file is not None else {}
        named = written.pop(RECIPE, None)
        if not isinstance(named, str | NoneType):
            raise TrainError(f"{RECIPE} is {named!r}, but {spelled(str)} was expected")
        begin = _settings_of(recipe or named or quick.__name__)
        if recipe is not None and begin.keys() <= written.keys():
            raise TrainError(f"{file} sets all that the recipe {recipe} would set; leave one of them out")
        given = written | _by_name(changes or {})
        if is_unlabelled(str(given.get("data") or ""), Path(given["data_root"]) if given.get("data_root") else None):
            begin |= {f"{part}.distillation.alpha": 1.0 for part in ("collection", "search", "recovery")}
        missing = [name for name in NEEDED if given.get(name) is None]
        types = setting_types(cls)
        values = {name: checked(types, name, value, [RECIPE]) for name, value in given.items() if name not in missing}
        if missing:
            raise TrainError(f"a run needs {', '.join(missing)}; give it on the command line or in a file (--config)")
        return made(cls, begin | values)

    def to_yaml(self) -> str:
        """Return every setting as YAML, which ``resolve`` reads again."""
        return ABOUT + write_yaml(asdict(self))

    def _settle(self) -> None:
        """Convert texts to paths and numbers, lists to tuples; refuse other types."""
        types = setting_types(type(self))
        for name, value in vars(self).items():
            if not is_dataclass(types[name]):
                object.__setattr__(self, name, checked(types, name, value))
            elif not isinstance(value, types[name]):
                raise TrainError(f"{name} is {value!r}, but a {types[name].__name__} was expected")
        for name, value in self.goals.items():
            if isinstance(value, str):
                amount = GOALS[name].parse(value)
                object.__setattr__(self, name, str(amount) if amount.is_share else amount.value)

    def _require_goal(self) -> None:
        if not self.amounts() and self.budget is None:
            examples = ", ".join(f"--{goal.name} {goal.example}" for goal in GOALS.values())
            raise PlanError(f"a run needs a goal; give one of {examples}")
        require_pruning({name: value for name, value in self.goals.items() if name in BOUNDS or not self.plus})

    def _require_methods(self) -> None:
        named = (self.chooser.name, *self.compare)
        for name in self.compare:
            require_budget(method_called(name))
        if twice := [name for name in METHODS if named.count(name) > 1]:
            raise PlanError(f"the method {twice[0]} would be compared with itself; name each method once")
        if self.is_mixed:
            return self._require_mixable()
        if self.is_split:
            if self.samples is not None and self.rounds is not None:
                raise PlanError("rounds say how to collect samples, but samples are given; leave one of them out")
            return
        if self.budget is not None:
            return self._require_budget(self.budget)
        if self.layers is None:
            self._require_priced()
        if split := [name for name in self.compare if method_called(name).split == "map"]:
            raise PlanError(
                f"{split[0]} splits its budget by samples of accuracy, which a run with the method {named[0]} does "
                f"not have; use the method {split[0]}, and compare {named[0]}"
            )
        if strays := [name for name in ("samples", "rounds") if getattr(self, name) is not None]:
            raise PlanError(
                f"the method {named[0]} splits no budget, so that {' and '.join(strays)} has no use; leave it out"
            )

    def _require_mixable(self) -> None:
        """Raise unless everything that can be removed may be removed until the one goal is met."""
        if self._unmixed:
            raise PlanError(
                "the method mixed removes what does the least damage for what it saves until one goal, --speedup or "
                f"--macs, is met; leave out {', '.join(self._unmixed)}, or give another method such as hetdpt"
            )

    def _require_priced(self) -> None:
        """Raise unless layers can be removed until the one goal is met."""
        require_priced(self.chooser)
        name = self.chooser.name
        if self.plus:
            raise PlanError(
                f"with --plus, width meets the goal after a number of layers; give --layers to the method {name}"
            )
        if len(self.goals) != 1:
            raise PlanError(
                f"the method {name} removes layers until one goal is met; expected exactly one of "
                f"{', '.join(BOUNDS)}, got {' and '.join(self.goals)}"
            )
        if self.compare:
            raise PlanError(
                f"methods are compared at the same number of layers, but {name} removes layers until a goal is "
                "met; give --layers, or leave out --compare"
            )

    def _require_width(self) -> None:
        if self.tokens is not None:
            read_tokens(self.tokens)
            if fixed := [name for name in Plan(removal=self.removal).styles if STYLES[name].is_per_position]:
                raise PlanError(
                    f"removal style {fixed[0]!r} has values for each position, which merged tokens do not have; use "
                    "'constant', or leave out --tokens"
                )
        if not self.plus:
            if self.depths is not None:
                raise PlanError(
                    "depths are numbers of layers to try before width is removed, but it is kept; add --plus"
                )
            if replace(self.width, seed=0, importance=WidthConfig().importance) != WidthConfig():  # recipes set both
                raise PlanError("width says how width is removed (--round-to, ...), but it is kept; add --plus")
            return
        if len(given := [name for name in self.goals if name in BOUNDS]) != 1:
            raise PlanError(
                f"with --plus, width is removed until a goal is met; expected exactly one of {', '.join(BOUNDS)}, "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.compare:
            raise PlanError(
                "other methods only remove layers, so that --compare cannot be used with --plus; leave one of them out"
            )
        if self.depths is not None and not self.is_balanced:
            raise PlanError("depths are numbers of layers to try, but the number is given; leave one of them out")
        depths = self.depths if self.depths is not None else (0,)
        if not depths or min(depths) < 0 or len(set(depths)) < len(depths):
            raise PlanError(f"depths are {depths}; expected different numbers of layers of at least 0, such as 0,4,8")

    def _require_budget(self, budget: tuple[int, int]) -> None:
        if min(budget) < 0 or not sum(budget):
            raise PlanError(
                f"budget is {budget}; expected how many attention layers and activations to remove, such as (3, 5)"
            )
        if self.layers not in (None, sum(budget)):
            raise PlanError(f"layers is {self.layers}, but the budget {budget} has {sum(budget)}; give one of them")
        if self.chooser.split != "map":
            raise PlanError(
                f"a budget is a number of layers of each kind, but the method {self.method} removes a number in all; "
                "give layers, or a method that takes a budget, such as hetdpt"
            )

    def _require_tail(self) -> None:
        Plan(tail=self.tail or 0)  # refuses one that is no length
        if self.tail and (self.plus or self.compare):
            other = "--plus" if self.plus else "--compare"
            raise PlanError(f"a run with --tail removes layers by one method and no width; leave out {other}")

    def _require_numbers(self) -> None:
        least = {"workers": 0, "checkpoint_minutes": 0, "batch": 1, "num_classes": 1, "img_size": 1}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and not value >= number:
                raise TrainError(f"{name} is {value}; expected at least {number}")
        for name in ("model", "data"):
            if not getattr(self, name):
                raise TrainError(f"{name} is empty; a run needs it")
        if self.keep == "ema" and not self.recovery.training.ema_decay:
            raise TrainError(
                "keep is 'ema', but recovery.training.ema_decay is 0, so that there is no average to keep; set it"
            )


def _settings_of(name: str) -> dict[str, Any]:
    row = recipe_called(name)
    parts = {"collection": asdict(row.collection), "search": asdict(row.search), "recovery": asdict(row.config)}
    parts["width"] = {"importance": row.importance}
    return _by_name({**parts, "removal": row.removal, "candidates": row.candidates, "explores": row.explores})


def _by_name(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of tables within tables by name; a table that is empty, or null in a file, sets nothing."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= _by_name(value, f"{name}.")
        elif not (is_dataclass(setting_types(RunConfig).get(name)) and value in (None, {})):
            found[name] = value
    return found
