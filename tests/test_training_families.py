"""What training asks of every family: a pruned student learns from its dense teacher, whatever the library answers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from families import FAMILIES, KINDS, Family, by_label, sparing
from torch.nn import functional as F

import hetdpt
from hetdpt.adapters.heads import logits_of
from hetdpt.adapters.models import num_classes_of
from hetdpt.core.errors import ModelError
from hetdpt.data.views import Batch
from hetdpt.training.config import TrainConfig
from hetdpt.training.drop_paths import drop_paths
from hetdpt.training.hidden import HiddenLoss
from hetdpt.training.objective import Distillation, Objective

PLAIN = TrainConfig(mixup=0, cutmix=0, smoothing=0, ema_decay=0)
TOWERS = {family.label for family in FAMILIES if family.label.endswith(("VisionModel", "WithProjection", "ViTModel"))}


@pytest.mark.parametrize("family", sparing([f for f in FAMILIES if f.label not in TOWERS], KINDS))
def test_a_pruned_student_gets_a_gradient_everywhere(family: Family) -> None:
    student = family.build()
    teacher = deepcopy(student)
    hetdpt.prune_(student, family.plan(hetdpt.sites(student, family.size)), family.size)
    targets = torch.arange(2) % num_classes_of(student)
    objective = Objective(student, PLAIN, Distillation(kind="soft", alpha=1.0), teacher)
    assert objective.model.is_distilling
    batch = Batch(family.images(), targets, torch.arange(2))
    with torch.no_grad():
        answers = logits_of(student(batch.images)), logits_of(teacher(batch.images))
    expected = F.kl_div(*(answer.log_softmax(1) for answer in answers), reduction="batchmean", log_target=True)
    assert objective(batch).item() == pytest.approx(expected.item(), rel=1e-4)
    with drop_paths(student, 0.1):
        objective.model.train()
        objective(batch).backward()
    idle = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    # masked-image tokens have no part in a classification; ConViT's class token joins after its first blocks
    assert all(name.endswith(("mask_token", "cls_token")) for name in idle)
    assert any(parameter.grad.abs().max() > 0 for parameter in student.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("family", sparing([f for f in FAMILIES if f.label not in TOWERS], KINDS))
@torch.no_grad()
def test_hidden_states_differ_after_pruning_and_not_before(family: Family) -> None:
    teacher = family.build()
    student = hetdpt.prune_(deepcopy(teacher), family.plan(hetdpt.sites(teacher, family.size)), family.size)
    loss = HiddenLoss(student, teacher)
    with loss.student.watch(2) as ours, loss.teacher.watch(2) as theirs:
        student(family.images())
        teacher(family.images())
    targets = loss.targets(theirs)
    assert ours.keys() == theirs.keys() == loss.teacher.last.keys()
    assert all(stream.ndim == 3 and len(stream) == 2 for stream in theirs.values())
    assert loss(theirs, targets).abs() < 1e-6
    assert 1e-3 < loss(ours, targets) < 2


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.label in TOWERS], ids=by_label)
def test_a_tower_without_a_head_is_refused(family: Family) -> None:
    with pytest.raises(ModelError, match="has no classification head"):
        Objective(family.build(), PLAIN)
