"""Which layers go, and the model without them: choose, recover, merge."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, replace

from hetdpt.core.modules import clone
from hetdpt.core.plan import Budget, Plan
from hetdpt.core.tokens import read_tokens
from hetdpt.export.saved import load, save
from hetdpt.flow.resumable import recover_into, select_into
from hetdpt.flow.stages.task import Result, StageTask
from hetdpt.measurement.agreement import relative_difference
from hetdpt.reduce.tokens.reduce import reduce_tokens_
from hetdpt.selection.importance import Picked
from hetdpt.store.metrics import EPOCH, METRICS, Metrics
from hetdpt.store.run_directory import summary_of
from hetdpt.surgery.merge import merge_
from hetdpt.surgery.record import require_record
from hetdpt.training.trainer import Epoch

PLAN_FILE, FOLDER = "plan.json", "model"  # what a stage leaves in its own directory


def select(task: StageTask) -> Result:
    """Return the plan: which layers of the budget go, and by what scores."""
    config, picks = task.config, list[Picked]()
    budget = _budget(task)
    if budget in (0, Budget(0, 0)):  # all of the goal is for width to meet
        return {"method": config.method, "plan": asdict(Plan(removal=config.removal)), "picks": []}

    def watch(pick: Picked) -> None:
        picks.append(pick)
        task.note(f"{pick.site.kind} {pick.site.block} goes (score {pick.score:.4g})")

    task.directory.mkdir(exist_ok=True)
    plan = select_into(
        task.directory / PLAN_FILE,
        task.model,
        task.data,
        budget,
        config.method,
        config.select_config,
        overwrite=True,
        device=config.device,
        workers=config.workers,
        minutes=config.minutes,
        watch=watch,
        progress=task.progress,
    )
    scores = [{"kind": pick.site.kind, "block": pick.site.block, "score": pick.score} for pick in picks]
    return {"method": config.method, "plan": asdict(plan), "picks": scores}


def _budget(task: StageTask) -> Budget | int:
    """Return how many layers go: of each kind where that is given or allocated, else in all."""
    config = task.config
    if config.budget is not None:
        return Budget(*config.budget)
    if not config.is_split:
        return config.layers or 0
    return Budget(**task.results["balance" if config.is_balanced else "allocate"]["budget"])


def plan_of(task: StageTask) -> Plan:
    return Plan.from_json(json.dumps(task.results["select"]["plan"]))


def recover(task: StageTask) -> Result:
    """Return what the fine-tuning came to, epoch by epoch; the student is saved, not merged yet."""
    config, updates = task.config, task.part("fine-tuning")
    epochs = recover_into(
        task.directory,
        load(task.work_of("narrow") / FOLDER) if config.plus else deepcopy(task.model),
        task.model,
        task.data,
        config.recovery,
        plan=None if config.plus else plan_of(task),
        calibration=config.images,
        merges=False,
        device=config.device,
        workers=config.workers,
        minutes=config.minutes,
        watch=lambda now: updates(now.update, now.updates),
    )
    for epoch in epochs:
        task.note(_line(epoch), best=epoch.best)
    task.processes.wait_for_everyone()  # for the first to write what it came to
    return {**summary_of(task.directory), "epochs": Metrics(task.directory / METRICS).read(EPOCH)}


def _line(epoch: Epoch) -> str:
    if not epoch.number:
        return f"before training: {epoch.last:.2f} %"
    return f"epoch {epoch.number}/{epoch.epochs}: loss {epoch.loss:.4f}, {epoch.last:.2f} %"


def merge(task: StageTask) -> Result:
    """Return how many pairs of linear layers became one, and by how much that changed the outputs."""
    student = load(task.work_of("recover") / task.config.keep).to(next(task.model.parameters()).device)
    merged = merge_(clone(student))
    difference = relative_difference(student, merged, require_record(merged).survey.input_size)
    record = require_record(merged)
    save(deepcopy(merged).cpu(), task.directory / FOLDER, overwrite=True)
    plan = replace(record.plan, fits=())
    return {"merged": len(record.merged), "difference": difference, "plan": asdict(plan)}


def reduce(task: StageTask) -> Result:
    """Return how many tokens the blocks of the merged model hand on from now on."""
    assert task.config.tokens is not None
    tokens = read_tokens(task.config.tokens)
    model = reduce_tokens_(load(task.work_of("merge") / FOLDER), tokens)
    save(model, task.directory / FOLDER, overwrite=True)
    return {"tokens": asdict(tokens)}
