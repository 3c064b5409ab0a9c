"""Where training runs: one process or many, which device, which precision; accelerate does the work."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env

from hetdpt.core.errors import TrainError
from hetdpt.core.modules import find_device
from hetdpt.core.processes import is_distributed
from hetdpt.training.bfloat16 import runs_bfloat16

__all__ = ["Accelerator", "is_sharded", "start"]

_NAMES = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def start(precision: str = "float32", device: str | None = None) -> Accelerator:
    """Join the processes that torchrun or ``accelerate launch`` started, or run as the only one.

    ``device`` is such as ``cpu`` or ``cuda:1``; the fastest available by default.
    """
    place = find_device(device)
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)
    is_cpu = place.type == "cpu"
    # A run before this one in the same process may have had another precision or device.
    AcceleratorState._reset_state(reset_partial_state=not is_distributed())
    name = _NAMES[_choose(precision, PartialState(cpu=is_cpu).device)]
    accelerator = Accelerator(cpu=is_cpu, mixed_precision=name)
    if int(os.environ.get("WORLD_SIZE", "1")) != accelerator.num_processes:
        raise TrainError(
            f"{os.environ['WORLD_SIZE']} processes were started, but accelerate runs only one on "
            f"{accelerator.device.type}; add --device cpu, or start one process"
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and is_cpu and accelerator.num_processes > 1:
        # accelerate shards on GPUs only; torch does so on CPUs too, which is how it is tested here.
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate does, else it is lost
    return accelerator


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the weights are spread over the processes (FSDP)."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def _choose(precision: str, device: torch.device) -> str:
    """Return the given precision or, for ``auto``, the launcher's if it names one, else the best for ``device``."""
    if precision == "auto":
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        precision = next((name for name, theirs in _NAMES.items() if theirs == launched != "no"), "auto")
    if precision == "auto":
        if device.type != "cuda":
            return "float32"
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if precision == "float16" and device.type == "cpu":
        raise TrainError("float16 training needs a GPU, as CPUs have no gradient scaling; use --precision float32")
    if precision == "bfloat16" and not _runs_bfloat16(device):
        raise TrainError(f"this machine's {device.type} does not support bfloat16; use --precision float32")
    return precision


def _runs_bfloat16(device: torch.device) -> bool:
    return bool(torch.cuda.is_bf16_supported()) if device.type == "cuda" else runs_bfloat16(device.type)
