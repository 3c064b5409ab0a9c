"""How fast pruned models are in the runtimes people deploy them with, and how much of the MAC ratio becomes speed.

    python benchmarks/runtimes.py [--quick] [--models NAME ...] [--runtimes NAME ...] [--batches 1 8 32] [--seconds 60]

A row is a model, a runtime and a size of batch. Dense, pruned and merged, and merged with its norms folded in
(``folded``) take turns in the same runtime; beside any other runtime, dense and pruned take their turns in eager torch
too, so that what the runtime gains is a ratio of the same rounds. Efficiency is the measured speedup over the ratio of
MACs. All runtimes compute with as many threads as torch does. Weights are random: no speed here depends on them.

Rows with an ``operation`` in their key say where the time of eager torch goes, by torch.profiler; that of ``all`` is
the time of the model as it runs without a profiler.

``--quick``: ViT-Tiny, 8 images, eager torch and ONNX Runtime.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# isort: off
import hetdpt  # before timm: cures torchvision where its operators do not load
import timm

# isort: on
import numpy as np
import torch
from evidence import RESULTS, Recorder, interval
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from hetdpt.core.modules import random_images
from hetdpt.core.plan import Plan
from hetdpt.core.published import published_plan
from hetdpt.measurement.costs import Costs
from hetdpt.measurement.speed import Rounds, _interleave, _ratio
from hetdpt.results import Ratio

Run = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to logits (B, classes)."""
Shape = tuple[int, int, int, int]
Times = dict[str, np.ndarray]
PLANS = {
    "vit_tiny_patch16_224": Plan(attention=(0, 10), activation=(3, 9, 10, 11)),
    "deit_small_distilled_patch16_224": published_plan("paper/deit_small-8"),
}
OPERATIONS = {
    "aten::scaled_dot_product_attention": "attention products and softmax",
    "aten::conv2d": "patch embedding",
    "aten::gelu": "GELU",
    "aten::layer_norm": "LayerNorm",
    "aten::add": "residual adds",
}
PYTHON = "Python between operations"
WARMUP = 2


@dataclass(frozen=True)
class Runtime:
    """A way to run a model: made ready for batches of one shape, with a directory for the files it needs."""

    prepare: Callable[[nn.Module, Shape, Path], Run]
    tolerance: float
    """How far its logits may be from those of eager torch, relative to the largest."""


def eager(model: nn.Module, shape: Shape, folder: Path) -> Run:
    """Return the model itself."""
    return model


def compiled(model: nn.Module, shape: Shape, folder: Path) -> Run:
    """Return the model compiled by inductor for batches of this one shape."""
    return torch.compile(model, dynamic=False)


def onnx_runtime(model: nn.Module, shape: Shape, folder: Path) -> Run:
    """Return the ONNX file that hetdpt exports, in ONNX Runtime."""
    return _in_onnx_runtime(onnx_file(model, folder))


def onnx_runtime_int8(model: nn.Module, shape: Shape, folder: Path) -> Run:
    """Return the ONNX file with the weights of its linear layers in int8, their inputs quantised as they come."""
    return _in_onnx_runtime(int8_file(model, folder))


def openvino(model: nn.Module, shape: Shape, folder: Path) -> Run:
    """Return the ONNX file in OpenVINO, compiled for batches of this one shape."""
    return _in_openvino(onnx_file(model, folder), shape)


def openvino_int8(model: nn.Module, shape: Shape, folder: Path) -> Run:
    """Return the ONNX file with linear layers in int8, in OpenVINO."""
    return _in_openvino(int8_file(model, folder), shape)


ROUNDING = 1e-4  # runtimes sum float32 in different orders
EIGHT_BITS = 0.05  # 1 / 127 of the largest weight and input of every layer, several layers after one another
RUNTIMES = {
    "eager": Runtime(eager, 0.0),
    "torch.compile": Runtime(compiled, ROUNDING),
    "ONNX Runtime": Runtime(onnx_runtime, ROUNDING),
    "OpenVINO": Runtime(openvino, ROUNDING),
    "ONNX Runtime, int8": Runtime(onnx_runtime_int8, EIGHT_BITS),
    "OpenVINO, int8": Runtime(openvino_int8, EIGHT_BITS),
}


def onnx_file(model: nn.Module, folder: Path) -> Path:
    """Return the model as an ONNX file in its folder; written once."""
    file = folder / "model.onnx"
    if not file.is_file():
        hetdpt.export_onnx(model, file)
    return file


def int8_file(model: nn.Module, folder: Path) -> Path:
    """Return the ONNX file, quantised dynamically by ONNX Runtime; written once."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    file, inferred = folder / "int8.onnx", folder / "inferred.onnx"
    if not file.is_file():
        quant_pre_process(onnx_file(model, folder), inferred)
        layers = ["MatMul", "Gemm"]  # linear layers; the patch embedding, a convolution, stays float32
        quantize_dynamic(inferred, file, weight_type=QuantType.QInt8, op_types_to_quantize=layers)
    return file


def _in_onnx_runtime(file: Path) -> Run:
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # threads wait busily for more work, at the cost of the model whose turn it is, unless told to stop when a run ends
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _in_openvino(file: Path, shape: Shape) -> Run:
    from openvino import Core

    core = Core()
    network = core.read_model(file)
    network.reshape(list(shape))
    threads = torch.get_num_threads()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = core.compile_model(network, "CPU", settings).create_infer_request()
    return lambda images: torch.from_numpy(request.infer(images.numpy())[0])


def variants_of(name: str, **arguments: Any) -> dict[str, nn.Module]:
    """Return the dense model of that name, and what its plan makes of it: merged, and with its norms folded in too."""

    def pruned() -> nn.Module:
        return hetdpt.prune_(timm.create_model(name, **arguments).eval(), PLANS[name])

    dense = timm.create_model(name, **arguments).eval()
    return {"dense": dense, "pruned": hetdpt.merge_(pruned()), "folded": hetdpt.merge_(pruned(), fold_norms=True)}


def times_in(runtime: str, models: dict[str, nn.Module], images: Tensor, rounds: Rounds, folder: Path) -> Times:
    """Return seconds of every model in ``runtime``, by rounds, and of dense and pruned in eager torch beside it."""
    runs: dict[str, Run] = {}
    for name, model in models.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        runs[name] = RUNTIMES[runtime].prepare(model, tuple(images.shape), place)
    if runtime != "eager":
        runs |= {f"eager {name}": models[name] for name in ("dense", "pruned")}
    try:
        return _interleave({name: partial(run, images) for name, run in runs.items()}, images.device, rounds)
    finally:
        torch.compiler.reset()  # what was compiled for this batch is not needed for the next


def row_of(times: Times, macs: dict[str, int]) -> dict[str, Any]:
    """Return the values of a row: speedups with intervals, and how much of the MAC ratio each is."""
    row: dict[str, Any] = {f"{name}_milliseconds": _milliseconds(times[name]) for name in macs}
    for name, before in (("", "pruned"), ("folded_", "folded")):
        speedup, ratio = _ratio(times["dense"] / times[before]), macs["dense"] / macs[before]
        row[f"{name}speedup"] = interval(speedup)
        row[f"{name}efficiency"] = interval(Ratio(*(end / ratio for end in (speedup.value, speedup.low, speedup.high))))
    if "eager dense" in times:
        row["dense_runtime_speedup"] = interval(_ratio(times["eager dense"] / times["dense"]))
        row["pruned_runtime_speedup"] = interval(_ratio(times["eager pruned"] / times["pruned"]))
        row["total_speedup"] = interval(_ratio(times["eager dense"] / times["pruned"]))
    return {**row, "mac_ratio": round(macs["dense"] / macs["pruned"], 4), "rounds": len(times["dense"])}


def profiled(models: dict[str, nn.Module], images: Tensor, runs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every kind of operation with the milliseconds that each model spends in it; the models take turns."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(runs + WARMUP):
            for name, model in models.items():
                with record_function(name):
                    model(images)
    passes = [event for event in profiler.events() if event.name in models and event.cpu_parent is None]
    found: dict[str, list[dict[str, list[Operation]]]] = {name: [] for name in models}
    for event in passes[WARMUP * len(models) :]:
        found[event.name].append(_by_kind(event))
    for kind in sorted({kind for rows in found.values() for row in rows for kind in row}):
        values: dict[str, Any] = {}
        for name, rows in found.items():
            spent = [sum(one.milliseconds for one in row.get(kind, [])) for row in rows]
            once = rows[0].get(kind, [])
            values[f"{name}_milliseconds"] = round(statistics.median(spent), 4)
            values |= {f"{name}_calls": len(once), f"{name}_macs": sum(one.macs for one in once)}
        yield kind, values


@dataclass(frozen=True)
class Operation:
    """One operation that ran."""

    milliseconds: float
    macs: int = 0


def _by_kind(event: FunctionEvent) -> dict[str, list[Operation]]:
    """Return the operations of one pass by kind, linear layers by their sizes; what none of them has is Python's."""
    found = defaultdict(list, {PYTHON: [Operation(event.self_cpu_time_total / 1e3)]})
    for child in event.cpu_children:
        kind, shapes = OPERATIONS.get(child.name, "other operations"), child.input_shapes
        if child.name == "aten::linear":
            outputs, inputs = shapes[1]
            kind = f"linear {inputs} to {outputs}"
        found[kind].append(Operation(child.cpu_time_total / 1e3, _macs(child.name, shapes)))
    return found


def _macs(operation: str, shapes: list[list[int]]) -> int:
    """Return the multiply-accumulates of one operation, by the shapes of what it is given; 0 for all but three."""
    if operation == "aten::linear":  # (..., inputs), (outputs, inputs)
        return math.prod(shapes[0]) * shapes[1][0]
    if operation == "aten::scaled_dot_product_attention":  # (B, heads, N, d) each of query, key and value
        return math.prod(shapes[0]) * (shapes[1][2] + shapes[2][2])
    if operation == "aten::conv2d":  # (B, C, H, W), (outputs, C, k, k): patches, so each pixel is seen once
        return math.prod(shapes[0]) * shapes[1][0]
    return 0


def _milliseconds(seconds: np.ndarray) -> list[float]:
    """Return the median with the quartiles."""
    low, middle, high = np.percentile(1e3 * seconds, (25, 50, 75))
    return [round(float(value), 4) for value in (middle, low, high)]


def measure(recorder: Recorder, name: str, runtimes: list[str], batches: list[int], rounds: Rounds) -> None:
    """Add the rows of one model that are not there yet."""
    models = variants_of(name)
    size = hetdpt.adapters.models.input_size_of(models["dense"])
    macs = {variant: Costs.of(model, size).macs for variant, model in models.items()}
    with TemporaryDirectory() as scratch:
        for runtime in runtimes:
            for batch in batches:
                key = {"model": name, "runtime": runtime, "batch": batch}
                if not recorder.has(**key):
                    images = random_images(models["dense"], size, batch)
                    recorder.add(key, **row_of(times_in(runtime, models, images, rounds, Path(scratch)), macs))


def explain(recorder: Recorder, name: str, batches: list[int], runs: int) -> None:
    """Add the rows that say where the time of one model goes, where they are not there yet."""
    models = variants_of(name)
    size = hetdpt.adapters.models.input_size_of(models["dense"])
    for batch in batches:
        if not recorder.has(model=name, batch=batch, operation="all"):
            images = random_images(models["dense"], size, batch)
            for kind, row in profiled(models, images, runs):
                recorder.add({"model": name, "batch": batch, "operation": kind}, **row)
            calls = {variant: partial(model, images) for variant, model in models.items()}
            times = _interleave(calls, images.device, Rounds(runs, WARMUP))
            spent = {f"{variant}_milliseconds": _milliseconds(row) for variant, row in times.items()}
            macs = {f"{variant}_macs": batch * Costs.of(model, size).macs for variant, model in models.items()}
            recorder.add({"model": name, "batch": batch, "operation": "all"}, **spent, **macs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ViT-Tiny, 8 images, eager torch and ONNX Runtime")
    parser.add_argument("--models", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=list(RUNTIMES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a row, which takes 5 to 100 rounds")
    parser.add_argument("--redo", action="store_true", help="repeat measurements that already have results")
    parser.add_argument("--out", type=Path, default=RESULTS / "runtimes.json")
    options = parser.parse_args()
    if options.quick:
        options.models, options.runtimes, options.batches = options.models[:1], ["eager", "ONNX Runtime"], [8]
        options.seconds = min(options.seconds, 10.0)
    logging.disable(logging.WARNING)  # ONNX Runtime's quantiser advises, inductor tells of what it tries
    packages = {package: version(package) for package in ("onnxruntime", "openvino")}
    recorder = Recorder(options.out, redo=options.redo, runtimes=packages, runtime_threads=torch.get_num_threads())
    for name in options.models:
        measure(recorder, name, options.runtimes, options.batches, Rounds(100, 3, options.seconds, settle=True))
        if "eager" in options.runtimes:
            explain(recorder, name, options.batches, runs=5 if options.quick else 15)


if __name__ == "__main__":
    main()
