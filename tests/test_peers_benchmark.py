"""Every peer: near its target, the same student again from what was noted, the model untouched."""

from __future__ import annotations

import argparse
import json
from copy import deepcopy
from pathlib import Path

import peers
import pytest
import timm
import torch
from evidence import Recorder
from peers import BY_NAME, ORDERS, PEERS, Bench, Job, Peer
from torch import nn

import hetdpt
from hetdpt.core.modules import clone

TARGET = 0.8
COARSE = 0.09  # of the MACs: half a block of six
SMALL = {"depth": 6, "embed_dim": 48, "num_heads": 3, "patch_size": 32, "num_classes": 10}


class SmallBench(Bench):
    """A small model that knows nothing, and images that show nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
        self.batches, self.judge = [torch.randn(8, 3, 224, 224) for _ in range(4)], [torch.randn(4, 3, 224, 224)]
        self.val = [(torch.randn(8, 3, 224, 224), torch.arange(8))]
        self.labelled = self.val


def options(**changes: object) -> argparse.Namespace:
    defaults = {"peers": list(BY_NAME), "targets": [TARGET], "seeds": [0, 1], "parts": ["one-shot", "recover"]}
    return argparse.Namespace(**{**defaults, **changes})


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose orders are found."""
    job = Job(Recorder(tmp_path_factory.mktemp("peers") / "peers.json"), options())
    job._bench = SmallBench()
    for order in ORDERS:
        task = {"part": "order", "of": order}
        job.recorder.add(task, **job.order(task))
    return job


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_comes_near_its_target_and_is_built_again_alike(peer: Peer, job: Job) -> None:
    before = deepcopy(job.bench.model.state_dict())
    key = {"peer": peer.name, "target": TARGET}
    values = job.score({"part": "one-shot", **key})
    assert abs(values["macs_ratio"] - TARGET) < COARSE
    assert values["macs"] == hetdpt.count_macs(peer.build(job.bench, json.loads(values["made"])), peers.SIZE)
    job.recorder.add({"part": "one-shot", **key}, **values)
    student = job.student({"part": "recovered", **key, "seed": 0})
    assert peers.scores(job.bench, student)["right"] == values["right"]
    images = job.bench.val[0][0]
    answers = student(images)
    assert answers.isfinite().all()
    answers.square().sum().backward()
    assert any(weight.grad is not None for weight in student.parameters()), "it cannot be trained"
    assert all(weight.grad is None for weight in job.bench.model.parameters()), "training it trains the dense model"
    assert all(torch.equal(before[name], weight) for name, weight in job.bench.model.state_dict().items())


@pytest.mark.slow
def test_layers_and_something_else_is_the_mixture_of_least_damage(job: Job) -> None:
    asked = list[int]()

    def build(bench: Bench, made: peers.Made) -> nn.Module:
        asked.append(len(made["layers"]))
        return clone(bench.model) if len(made["layers"]) == 2 else timm.create_model("vit_tiny_patch16_224", **SMALL)

    made = peers.with_layers(job.bench, 0.7 * job.bench.dense_macs, lambda *_: {"r": 1}, build)
    assert made["layers"] == job.bench.order("layers")[:2]
    assert asked == [*range(1, 1 + len(asked))]
    assert made["r"] == 1


def test_influence_finds_the_block_that_does_nothing() -> None:
    bench = SmallBench()
    nn.init.zeros_(bench.model.blocks[3].attn.proj.weight)
    nn.init.zeros_(bench.model.blocks[3].mlp.fc2.weight)
    assert peers.order_of_influence(bench, 0.3)[0] == 3


def test_narrower_heads_divide_by_what_they_did() -> None:
    attention = SmallBench().model.blocks[0].attn
    narrow = clone(attention)
    half = attention.head_dim // 2
    kept = torch.cat([torch.arange(half) + head * attention.head_dim for head in range(3 * attention.num_heads)])
    with torch.no_grad():
        for parameter in attention.qkv.parameters():  # the other half says nothing
            parameter[[i for i in range(len(parameter)) if i not in kept]] = 0
        narrow.qkv = nn.Linear(48, len(kept))
        narrow.qkv.weight.copy_(attention.qkv.weight[kept])
        narrow.qkv.bias.copy_(attention.qkv.bias[kept])
        narrow.proj = nn.Linear(len(kept) // 3, 48)
        narrow.proj.weight.copy_(attention.proj.weight[:, kept[: len(kept) // 3]])
        narrow.proj.bias.copy_(attention.proj.bias)
    peers.keep_temperature_(narrow)
    tokens = torch.randn(2, 5, 48)
    torch.testing.assert_close(narrow(tokens), attention(tokens))


def test_what_others_need_comes_first(tmp_path: Path) -> None:
    job = Job(Recorder(tmp_path / "peers.json"), options())
    tasks = list(job.tasks())
    assert len({task.key for task in tasks}) == len(tasks)
    assert len(tasks) == len(ORDERS) + 1 + len(PEERS) * (1 + 2)
    needs = {task.key: task.needs for task in tasks}
    one_shot = {"part": "one-shot", "peer": "ToMe", "target": TARGET}
    assert needs[job.name(one_shot)] == ()
    assert needs[job.name(one_shot | {"part": "recovered", "seed": 0})] == (job.name(one_shot),)
    order = {"part": "order", "of": peers.BY_NAME["hetdpt"].order}
    assert needs[job.name(one_shot | {"peer": "hetdpt"})] == (job.name(order),)
    seen = set[str]()
    for task in tasks:
        assert seen.issuperset(task.needs)
        seen.add(task.key)
