"""Sharing: what ``push_to_hub`` uploads to a hub that runs here, and loading through ``timm.create_model``."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from torch import nn

import hetdpt

FILES = {"README.md", "config.json", "hetdpt.json", "model.safetensors"}
PUSH = """
import sys
from hetdpt.cli import main
main()
"""


class Hub(ThreadingHTTPServer):
    """As much of the hub as an upload needs: make a repository, look at its files, commit them in one request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.repositories: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.commits: list[dict[str, bytes]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Requests(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        path = self.path.partition("?")[0]
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
            url = f"{self.server.address}/someone/pruned/commit/{'0' * 40}"
            return self._answer(success=True, commitOid="0" * 40, commitUrl=url)
        self.send_error(404, f"this hub does not know POST {path}")

    def do_GET(self) -> None:
        self.send_error(404, f"this hub does not know GET {self.path}")

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


def pruned(model: nn.Module) -> nn.Module:
    return hetdpt.merge_(hetdpt.prune_(model, hetdpt.Plan(attention=(1,), activation=(0, 2))))


def push(hub: Hub, directory: Path, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``hetdpt push`` with ``hub`` as its hub; huggingface_hub reads the address when it is imported."""
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "hetdpt", "push", str(directory), "someone/pruned", *options]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(command, env=inherited | own, capture_output=True, text=True, timeout=120, check=False)
