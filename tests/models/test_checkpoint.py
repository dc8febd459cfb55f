"""Where checkpoints lie: names, folders, the Hub and its cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from tiny_checkpoints import save_tiny

from ropelens.errors import BadCheckpoint
from ropelens.models.checkpoint import fingerprint, locate
from ropelens.models.load import load
from ropelens.models.loading import Loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    return save_tiny(tmp_path / "model")


def test_a_file_called_by_its_home_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate(f"~/{folder.name}", Loading()).path == folder


# The Hub.


def cached(folder: Path, hub: Path) -> None:
    """Lay `folder` into a Hub cache as the main revision of acme/tiny."""
    repository = hub / "models--acme--tiny"
    shutil.copytree(folder, repository / "snapshots" / ("c" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)


@pytest.mark.parametrize("local_files_only", [True, False])
def test_a_hub_id_is_read_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_files_only: bool
) -> None:
    cached(folder, tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model, tokenizer = load("acme/tiny", local_files_only=local_files_only)
    assert model.config._name_or_path == "acme/tiny"
    assert tokenizer is not None
    loading = Loading(local_files_only=local_files_only)
    assert locate("acme/tiny", loading).revision == "c" * 40


class Hub(ThreadingHTTPServer):
    """A Hub with one model, acme/tiny, on this machine: what the real client asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), HubRequest)


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        folder, commit = self.server.folder, "d" * 40
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        headers = {"X-Repo-Commit": commit}
        if path.startswith("/api/models/acme/tiny/tree"):
            answer = [
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size}
                | {"oid": hashlib.sha1(f.read_bytes()).hexdigest()}
                for f in files
            ]
            body = json.dumps(answer).encode()
        elif path.startswith("/api/models/acme/tiny/revision"):
            body = json.dumps({"id": "acme/tiny", "sha": commit}).encode()
        elif f"/resolve/{commit}/" in path:
            body = (folder / path.split(f"{commit}/")[1]).read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_hub_id_is_fetched_without_its_pickles(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    program = (
        "from ropelens.models.load import load\n"
        "model, tokenizer = load('acme/tiny', revision='main')\n"
        "print(model.config._name_or_path, tokenizer is not None)"
    )
    with Hub(folder) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | settings,
        )
        hub.shutdown()
    assert (done.returncode, done.stdout) == (0, "acme/tiny True\n"), done.stderr
    wanted = {p.name for p in folder.iterdir() if p.suffix in {".json", ".safetensors"}}
    assert {Path(path).name for path in hub.asked if "/resolve/" in path} == wanted
    snapshot = tmp_path / "cache" / "models--acme--tiny" / "snapshots" / ("d" * 40)
    assert {p.name for p in snapshot.rglob("*")} == wanted


# Names of nothing.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "/no/such/folder",
            ["no checkpoint called /no/such/folder", "no folder", "Repo id must be"],
        ),
        ("a" * 3000, ["There is no checkpoint called aaaa"]),
        ("~nobody-here/model", ["no checkpoint called ~nobody-here/model"]),
        (
            "acme/none",
            ["There is no checkpoint called acme/none", "no folder", "HF_HUB_OFFLINE"],
        ),
    ],
)
def test_a_name_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCheckpoint) as caught:
        load(name)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in caught.value.line


def test_a_file_of_weights_points_to_its_folder(folder: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"is a file") as caught:
        load(folder / "model.safetensors")
    assert f"{folder}\n" in f"{caught.value}\n"


# Fingerprints.


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_fingerprints_are_those_of_sha256sum(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    weights = folder / "model.safetensors"
    assert fingerprint(folder / "config.json") == sha256((folder / "config.json").read_bytes())
    assert fingerprint(folder) == sha256(weights.read_bytes())
    index = {"weight_map": {"two": "b.safetensors", "one": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(weights, folder / "b.safetensors")
    weights.rename(folder / "a.safetensors")
    one = sha256((folder / "a.safetensors").read_bytes())
    listing = f"{one}  a.safetensors\n{one}  b.safetensors\n"
    assert fingerprint(str(folder)) == sha256(listing.encode())
