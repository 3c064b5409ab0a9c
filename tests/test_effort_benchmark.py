"""What pruning costs: the units, the extrapolation and the exponents are right, and nothing is measured twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import effort
import numpy as np
import pruning_tasks
import pytest
import torch
from effort import COMPOSED, EXPECTED, GROWING, PARTS, PEAKS, STAGES, UNIT, Bench, Scale
from evidence import VIT_TINY, Recorder, Results
from naive_ways import (
    FITS,
    apart_by,
    compare_gates,
    compare_loops,
    compare_scans,
    compare_students,
    in_turns,
    largest_difference,
)
from pruning_tasks import TASKS, Noise, Setting, apart, measure, spread_plan, stretched

import hetdpt
from hetdpt.core.plan import Site

TINY = {"depth": 4, "embed_dim": 48, "num_heads": 3, "img_size": 32, "patch_size": 8}
SCALE = Scale(model=TINY, batch=4, updates=2, epoch=80, large=VIT_TINY, large_arguments=TINY, plan=None, large_batch=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("images")
    effort.write_images(place, 24, size=(40, 40), classes=2)
    return str(place)


@pytest.fixture
def setting(folder: str) -> Setting:
    return Setting(folder, arguments=TINY, images=6, judge=2, batch=4, updates=1)


@pytest.fixture
def bench(tmp_path: Path, folder: str) -> Bench:
    return Bench(Recorder(tmp_path / "effort.json"), SCALE, folder, is_apart=False)


# numbers that are made of others


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_that_was_planted_is_found(power: float) -> None:
    sizes = np.array([12, 24, 40])
    noise = np.array([1.02, 0.98, 1.01])
    assert effort.exponent(sizes, 7 * sizes**power) == pytest.approx(power, abs=1e-9)
    assert effort.exponent(sizes, 7 * sizes**power * noise) == pytest.approx(power, abs=0.05)


def test_time_on_more_images_keeps_what_does_not_grow_with_them(
    monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    monkeypatch.setitem(TASKS, "planted", lambda given: lambda: 3.0 + 0.5 * given.images + 2.0 * given.judge)
    monkeypatch.setattr(pruning_tasks, "seconds_of", lambda call: call())
    found = stretched("planted", replace(setting, images=256), few=8, some=16, judge=0.5)
    assert found == {"seconds": 3.0 + 0.5 * 256 + 2.0 * 128, "measured_seconds": 3.0 + 0.5 * 16 + 2.0 * 8}


def test_stages_are_in_units_of_a_dense_epoch_and_composed_ones_are_the_sums(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(effort, "measure", lambda task, *_: {"seconds": 4.0 if task == "dense_update" else 2.0})
    monkeypatch.setattr(effort, "stretched", lambda *_: {"seconds": 20.0, "measured_seconds": 1.0})
    effort.stages(bench)
    updates = 2 * 4  # images of the updates measured, of 80 of an epoch
    rows = {row.key["stage"]: row.values for row in Results.read(bench.recorder.file).where(batch=4, data="noise")}
    assert rows.keys() == {*STAGES, *COMPOSED}
    dense = rows[UNIT]
    assert (dense["seconds"], dense["epochs_of_dense"], dense["images_measured"]) == (4.0 * 80 / updates, 1.0, updates)
    units = {name: row["epochs_of_dense"] for name, row in rows.items()}
    assert units["recovery epoch"] == 0.5  # two seconds for the updates that took the dense model four
    assert units["calibration of 6 layers"] == 20 / 40
    assert units["merge"] == 2 / 40
    for name, parts in COMPOSED.items():
        assert units[name] == pytest.approx(sum(times * units[part] for part, times in parts.items()), rel=1e-4)


def test_what_is_below_the_asked_for_is_said_in_words(bench: Bench) -> None:
    bench.add({"part": "naive", "what": "scan"}, speedup=[1.4, 1.3, 1.6], largest_difference=1e-6)
    bench.add({"part": "naive", "what": "loop"}, efficiency=[0.99, 0.95, 1.0])
    results = Results.read(bench.recorder.file)
    values = "values of the scan are 1.0e-06 apart from those of full passes, not 1e-09"
    assert effort.unmet(results, is_quick=False) == ["the scan is 1.40 times faster than full passes, not 1.54", values]
    assert effort.unmet(results, is_quick=True) == [values]


# a run that was killed


def test_a_killed_run_goes_on_without_measuring_rows_again(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    done: list[tuple[Any, ...]] = []
    patience = [5]

    def measured(task: str, setting: Setting, *_: Any) -> dict[str, float]:
        if not patience[0]:
            raise KeyboardInterrupt
        patience[0] -= 1
        done.append((task, str(setting.arguments), setting.images))
        return {"seconds": 1.0 + setting.images, "peak_bytes": 1 << 20}

    monkeypatch.setattr(effort, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        effort.growth(bench)
    assert len(Results.read(bench.recorder.file).where(part="growth")) >= 5  # what was measured is there
    patience[0] = 1000
    effort.growth(bench)
    effort.growth(bench)
    sizes = {(task, *size.items()) for task in GROWING for some in effort.series(SCALE, task).values() for size in some}
    assert len(done) == len(set(done)) == len(sizes)
    rows = Results.read(bench.recorder.file).where(part="growth")
    assert sum("against" in row.key for row in rows) == sum(map(len, EXPECTED.values()))


def test_exponents_of_growth_are_fitted_again_when_a_row_is_new(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    def planted(power: int) -> Callable[..., dict[str, float]]:
        return lambda _, setting, *__: {"seconds": setting.arguments["depth"] ** power, "peak_bytes": 0}

    key = {"part": "growth", "task": "merge", "pixels": 64, "width": 192, "against": "layers"}
    monkeypatch.setattr(effort, "measure", planted(1))
    effort.growth(bench)
    first = bench.row(**key)
    assert (first["exponent_of_seconds"], first["expected_of_seconds"]) == (pytest.approx(1), 1)
    assert "exponent_of_peak_bytes" not in first  # of nothing there is none
    monkeypatch.setattr(effort, "measure", planted(2))
    effort.growth(replace(bench, scale=replace(SCALE, layers=(12, 24, 48))))
    assert bench.row(**key)["exponent_of_seconds"] > 1.1


# the tasks


@pytest.mark.parametrize("name", [name for name in TASKS if name != "every_style"])
def test_every_task_can_be_done(name: str, setting: Setting, bench: Bench) -> None:
    assert bench.measure(name, setting, patience=0.0)["seconds"] > 0


@pytest.mark.slow
def test_the_scan_of_every_style_can_be_done(setting: Setting) -> None:
    assert measure("every_style", setting, patience=0.0)["seconds"] > 0


@pytest.mark.slow
def test_quick_and_full_have_no_row_in_common(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(effort, "measure", lambda *_: {"seconds": 1.0, "peak_bytes": 1 << 20})
    monkeypatch.setattr(effort, "stretched", lambda *_: {"seconds": 1.0})
    counts = []
    for scale in (effort.FULL, effort.QUICK):
        for part in ("stages", "growth", "memory"):
            PARTS[part](replace(bench, scale=scale))
        counts.append(len(Results.read(bench.recorder.file).rows))
    fresh = Bench(Recorder(bench.recorder.file.with_name("quick.json")), effort.QUICK, bench.folder, is_apart=False)
    for part in ("stages", "growth", "memory"):
        PARTS[part](fresh)
    assert counts[1] == counts[0] + len(Results.read(fresh.recorder.file).rows)


def test_every_stage_names_a_task() -> None:
    assert {stage.task for stage in STAGES.values()} | {*GROWING} | {*PEAKS} <= TASKS.keys()
    assert {part for parts in COMPOSED.values() for part in parts} <= STAGES.keys()
    assert set(PARTS) == {"stages", "naive", "growth", "memory"}


def test_six_layers_of_twelve_blocks_go(folder: str) -> None:
    plan = spread_plan(Setting(folder, arguments={**TINY, "depth": 12}).network())
    assert (plan.attention, plan.activation) == ((1, 5, 9), (3, 7, 11))


def test_noise_is_the_same_each_time_and_not_kept() -> None:
    noise = Noise((3, 8, 8), images=5, batch=2)
    once, twice = torch.cat([*noise]), torch.cat([*noise])
    assert once.shape == (5, 3, 8, 8)
    assert torch.equal(once, twice)
    assert not torch.equal(once, torch.cat([*replace(noise, seed=1)]))


def hold(megabytes: int) -> int:
    """Return the peak of memory that so many megabytes cause."""
    before = pruning_tasks.settled_peak()
    kept = torch.ones(megabytes << 20, dtype=torch.uint8)
    return pruning_tasks.peak() - before - (kept.nbytes - (megabytes << 20))


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own(setting: Setting) -> None:
    assert apart(os.getpid) != os.getpid()
    found = [apart(hold, megabytes) / (1 << 20) for megabytes in (200, 20)]
    assert found == [pytest.approx(200, abs=8), pytest.approx(20, abs=8)]  # pages of libraries come and go
    assert apart(measure, "dense_update", setting, 0.0)["peak_bytes"] > 0


# against naive ways


def test_the_scan_and_full_passes_give_the_same_values(setting: Setting) -> None:
    found = compare_scans(setting, rounds=1)
    assert found["largest_difference"] <= effort.SAME
    assert found["sites"] == 8
    assert found["speedup"][0] == pytest.approx(found["naive_seconds"] / found["seconds"], rel=1e-4)


def test_values_that_differ_are_seen() -> None:
    one, other = Site("attention", 0, "a"), Site("attention", 1, "b")
    assert largest_difference({one: 2.0, other: 5.0}, {one: 2.0, other: 4.0}) == 0.25
    with pytest.raises(ValueError, match="has 1 sites, the full passes have 2"):
        largest_difference({one: 2.0}, {one: 2.0, other: 4.0})


def test_a_fit_in_a_stream_is_that_of_all_activations(setting: Setting) -> None:
    model = setting.network()
    sites = [site for site in hetdpt.sites(model) if site.kind == "activation"]
    batches = Noise((3, 32, 32), images=10, batch=4)
    lines = {(way, site): fit(model, site, batches) for way, fit in FITS.items() for site in sites[:2]}
    first, second = sites[:2]
    assert apart_by(lines["ours", first], lines["naive", first]) < 1e-9  # float64, summed up in another order
    assert apart_by(lines["ours", first], lines["naive", second]) > 0.1


def test_calls_that_train_take_turns() -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        weight.square().backward()  # which inference mode would not let it do

    times = in_turns({"one": lambda: call("one"), "other": lambda: call("other")}, rounds=2, warmup=1)
    assert weight.grad == 12
    assert sorted(order[:2]) == ["one", "other"]
    assert [len(row) for row in times.values()] == [2, 2]


def test_training_is_compared_with_gates_without_layers_and_with_a_bare_loop(setting: Setting) -> None:
    gates = compare_gates(setting, rounds=1)
    assert [*gates] == ["gated", "gated, exploring"]
    assert gates["gated"]["efficiency"][0] == pytest.approx(
        gates["gated"]["plain_milliseconds"] / gates["gated"]["milliseconds"], rel=1e-3
    )
    students = compare_students(setting, None, rounds=1)
    assert {name: row["against"] for name, row in students.items()} == {
        "two layers": "dense",
        "merged": "dense",
        "two layers, teacher cached": "two layers, teacher asked",
        "merged, teacher asked": "two layers, teacher asked",
        "merged, teacher cached": "two layers, teacher asked",
    }
    assert students["merged"]["mac_ratio"] > students["two layers"]["mac_ratio"] > 1
    loops = compare_loops(replace(setting, updates=2))
    assert loops["rounds"] == 2
    assert loops["efficiency"][0] > 0
