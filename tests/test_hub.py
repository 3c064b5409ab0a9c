"""Sharing: what ``push_to_hub`` uploads to a hub that runs here, and loading through ``timm.create_model``."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import hetdpt
from hetdpt.core.errors import FileError, HetDPTError
from hetdpt.export.hub import push_to_hub

FILES = {"README.md", "config.json", "hetdpt.json", "model.safetensors"}
COMMIT = "0" * 40
LOAD = """
import sys
import hetdpt.export.hub
import timm
import torch
model = timm.create_model("hf-hub:someone/pruned", pretrained=True).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[1])), sys.argv[2])
"""


class Hub(ThreadingHTTPServer):
    """As much of the hub as sharing needs: make a repository, commit its files in one request, give them back."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.repositories: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.commits: list[dict[str, bytes]] = []
        self.is_open = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        path = self.path.partition("?")[0]
        if not self.server.is_open:
            return self.send_error(403, "you may not write here")
        if path == "/api/repos/create":
            self.server.repositories.append(json.loads(body))
            return self._answer(url=f"{self.server.address}/someone/pruned")
        if path == "/api/validate-yaml":
            return self._answer(errors=[], warnings=[])
        if path == "/api/models/someone/pruned/preupload/main":
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return self._answer(files=[{"path": file["path"], **modes} for file in json.loads(body)["files"]])
        if path == "/api/models/someone/pruned/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.server.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            url = f"{self.server.address}/someone/pruned/commit/{COMMIT}"
            return self._answer(success=True, commitOid=COMMIT, commitUrl=url)
        self.send_error(404, f"this hub does not know POST {path}")

    def do_HEAD(self) -> None:
        self._give_file()

    def do_GET(self) -> None:
        if content := self._give_file():
            self.wfile.write(content)

    def _give_file(self) -> bytes | None:
        name = self.path.removeprefix("/someone/pruned/resolve/main/")
        content = self.server.commits[-1].get(name) if self.server.commits else None
        if content is None:
            return self.send_error(404, f"this hub does not know {self.path}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        return content

    def _answer(self, **values: Any) -> None:
        body = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pruned(model: nn.Module) -> nn.Module:
    return hetdpt.merge_(hetdpt.prune_(model, hetdpt.Plan(attention=(1,), activation=(0, 2))))


@pytest.fixture
def saved(pruned: nn.Module, tmp_path: Path) -> Path:
    return hetdpt.save(pruned, tmp_path / "saved")


def run(hub: Hub, home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with ``hub`` as its hub; huggingface_hub reads the address when it is imported."""
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_TOKEN": "hf_fake", "HF_HUB_DISABLE_XET": "1"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def run_model(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


@pytest.mark.slow
def test_what_is_pushed_comes_back_through_timm(
    hub: Hub, saved: Path, pruned: nn.Module, images: Tensor, tmp_path: Path
) -> None:
    result = run(hub, tmp_path / "home", "-m", "hetdpt", "push", saved, "someone/pruned", "--private")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{hub.address}/someone/pruned/commit/{COMMIT}\n"
    assert hub.tokens == {"Bearer hf_fake"}
    (repository,) = hub.repositories
    assert (repository["organization"], repository["name"], repository["visibility"]) == (
        "someone",
        "pruned",
        "private",
    )
    (files,) = hub.commits
    assert files == {path.name: path.read_bytes() for path in saved.iterdir()}
    assert set(files) == FILES

    given, got = tmp_path / "images.pt", tmp_path / "outputs.pt"
    torch.save(images, given)
    result = run(hub, tmp_path / "home", "-c", LOAD, given, got)
    assert result.returncode == 0, result.stderr
    assert torch.equal(torch.load(got), run_model(pruned, images))


def test_a_hub_that_refuses_is_one_sentence(hub: Hub, saved: Path, tmp_path: Path) -> None:
    hub.is_open = False
    result = run(hub, tmp_path / "home", "-m", "hetdpt", "push", saved, "someone/pruned")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: .*someone/pruned.*403.*\n", result.stderr), result.stderr
    assert hub.commits == []


def test_a_name_the_hub_cannot_have_is_refused(saved: Path) -> None:
    with pytest.raises(HetDPTError, match=r"some one/pruned.*Repo id must"):
        push_to_hub(saved, "some one/pruned")


def test_what_is_no_saved_model_is_not_pushed(tmp_path: Path) -> None:
    text = f"{tmp_path} has no hetdpt.json; save the model with hetdpt.save first"
    with pytest.raises(FileError, match=f"^{re.escape(text)}$"):
        push_to_hub(tmp_path, "someone/pruned")


def test_what_is_damaged_is_not_pushed(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    text = f"{weights} was altered or truncated since it was saved; save the model again"
    with pytest.raises(FileError, match=f"^{re.escape(text)}$"):
        push_to_hub(saved, "someone/pruned")


def test_timm_loads_a_saved_directory_bit_equal(saved: Path, pruned: nn.Module, images: Tensor) -> None:
    loaded = timm.create_model(f"local-dir:{saved}", pretrained=True).eval()
    assert torch.equal(run_model(loaded, images), run_model(pruned, images))
    assert hetdpt.sites(loaded) == hetdpt.sites(pruned)


def test_timm_builds_a_saved_directory_without_its_weights(saved: Path, pruned: nn.Module, images: Tensor) -> None:
    built = timm.create_model(f"local-dir:{saved}", pretrained=False).eval()
    assert hetdpt.count_params(built) == hetdpt.count_params(pruned)
    assert (run_model(built, images) - run_model(pruned, images)).abs().max() > 1e-3


def test_a_loaded_model_can_be_saved_again(saved: Path, images: Tensor, tmp_path: Path) -> None:
    loaded = timm.create_model(f"local-dir:{saved}", pretrained=True).eval()
    again = hetdpt.load(hetdpt.save(loaded, tmp_path / "again"))
    assert torch.equal(run_model(again, images), run_model(loaded, images))


def test_timm_arguments_are_honoured_or_refused(tmp_path: Path) -> None:
    import timm

    import hetdpt.export.hub
    from hetdpt.core.errors import ModelError

    model = timm.create_model("test_vit").eval()
    directory = hetdpt.save(hetdpt.prune_(model, hetdpt.Plan((0,))), tmp_path / "saved")
    assert timm.create_model(f"local-dir:{directory}", pretrained=True, num_classes=5).head.out_features == 5
    with pytest.raises(ModelError, match="leave out drop_path_rate"):
        timm.create_model(f"local-dir:{directory}", drop_path_rate=0.3)
