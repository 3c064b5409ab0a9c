"""A dry run: what a run will do, and about how long, from steps that are tried and timed (``stages.timing``).

It writes nothing to the run directory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from hetdpt.core.errors import TrainError
from hetdpt.core.host import peak_memory
from hetdpt.core.progress import StageProgress
from hetdpt.data.sources import Data
from hetdpt.flow.config import RunConfig
from hetdpt.flow.pipeline import settled, stages_of
from hetdpt.flow.stages.stage import StageEstimate
from hetdpt.flow.stages.timing import Trials
from hetdpt.measurement.speed import machine_of
from hetdpt.results import Machine
from hetdpt.training.processes import start


@dataclass(frozen=True, kw_only=True)
class Estimate(Machine):
    """What a run will do, and what that takes on this machine."""

    stages: tuple[StageEstimate, ...]
    memory: int
    """Bytes in use at most while steps were tried."""
    memory_of: str
    """What uses them."""
    layers: int
    """How many are assumed to be removed."""
    is_guess: bool
    """Whether that is a guess, since the goal is not a number of layers."""

    @property
    def seconds(self) -> float:
        """Of all stages that are not done."""
        return sum(stage.seconds or 0.0 for stage in self.stages if not stage.is_done)

    @property
    def disk(self) -> int:
        """Bytes in the run directory at most."""
        left, most = 0, 0
        for stage in self.stages:
            most = max(most, left + stage.most)
            left += stage.left
        return max(most, left)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {**asdict(self), "seconds": self.seconds, "disk": self.disk}


def estimate(
    config: RunConfig,
    model: nn.Module,
    data: Data,
    progress: StageProgress | None = None,
    *,
    done: Collection[str] = (),
) -> Estimate:
    """Return what a run of ``config`` will do, stage by stage, and about how long that takes on this device.

    ``model`` is moved to the device and otherwise left alone. ``done`` names stages that will not run again. The
    trials take about as long as a dozen updates of the weights.

    >>> import hetdpt
    >>> from hetdpt.data.sources import open_data
    >>> config = RunConfig(model="test_vit", data="demo", out="nowhere", layers=2, method="random", images=4)
    >>> found = estimate(config, hetdpt.create(config.model, img_size=32, num_classes=10), open_data("demo"))
    >>> {stage.stage: stage.updates for stage in found.stages if stage.updates}
    {'recover': 400}
    """
    processes = start(config.recovery.training.precision, config.device)
    if processes.num_processes > 1:
        raise TrainError("a dry run is one process; leave out torchrun or accelerate launch")
    config, device = settled(config, model), processes.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trials = Trials(config, model.to(device), data, progress)
    trials.require_possible()
    stages = (replace(stage.estimate(trials), is_done=stage.name in done) for stage in stages_of(config))
    return Estimate(
        stages=tuple(stages),
        **asdict(machine_of(device)),
        **_memory(device),
        layers=trials.layers,
        is_guess=trials.is_guess,
    )


def _memory(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"memory": torch.cuda.max_memory_allocated(device), "memory_of": "tensors on the GPU"}
    whose = "this process with its libraries; processes that read images need more"
    return {"memory": peak_memory(), "memory_of": whose}
