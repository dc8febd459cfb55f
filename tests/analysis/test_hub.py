"""Tests of results on the Hub, with a small server on the loopback address."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
from tiny_checkpoints import save_tiny

import ropelens as rl
from ropelens.analysis.hub import escape
from ropelens.analysis.open_folder import rewrite_page

HOSTILE = "a\n\n# b <script>alert(1)</script> [c](javascript:d) ![e](https://f.g) | `h`"
COMMIT = "1" * 40

CLIENT = """
import json, sys
from unittest import mock
import pandas as pd, xarray as xr
import ropelens as rl

mock.patch("ropelens.analysis.analysis_result.render_page", return_value="a page").start()
others = []
def watch(event, args):
    if event == "socket.getaddrinfo" and args[0] not in ("127.0.0.1", "localhost"):
        others.append(args[0])
    if event == "socket.connect" and args[1][0] != "127.0.0.1":
        others.append(args[1])
sys.addaudithook(watch)

def fault(call, *args, **kwargs):
    try:
        return repr(call(*args, **kwargs))
    except rl.BadArgument as error:
        return error.line

analysis = rl.open(sys.argv[1])
analysis.profile.attrs["model"] = analysis.provenance["model"]["name"] = sys.argv[2]
found = {"address": analysis.push_to_hub("me/one"), "again": analysis.push_to_hub("me/one")}
for address in ("hf://datasets/me/one", "hf://datasets/me/one@v1"):
    read = rl.open(address)
    xr.testing.assert_identical(read.profile, analysis.profile)
    pd.testing.assert_frame_equal(read.heads, analysis.heads)
    assert read.findings == analysis.findings
    assert read.model is None and read.pages == []
for name in ("public", "foreign"):
    found[name] = fault(analysis.push_to_hub, f"me/{name}")
found["open"] = analysis.push_to_hub("me/public", private=False)
for name in ("missing", "foreign", "damaged", "one@v2"):
    found[f"read {name}"] = fault(rl.open, f"hf://datasets/me/{name}")
found["model"] = fault(rl.open, "hf://me/one")
print(json.dumps(found | {"others": others}))
"""


class Hub(ThreadingHTTPServer):
    """The requests of huggingface_hub that create, write and read datasets, in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.private = {"me/public": False, "me/foreign": True, "me/damaged": True}
        self.files: dict[str, dict[str, bytes]] = {name: {} for name in self.private}
        self.files["me/foreign"] = {"data.csv": b"1"}
        self.files["me/damaged"] = {
            "run.json": b'{"kind": "analysis"}',
            "profile.nc": b"cos\n",
        }
        self.created: list[dict[str, Any]] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        kind, *parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        parts = parts[kind == "api" and 1 :]
        repo = "/".join(parts[:2])
        rest = parts[2:]
        files = self.server.files.get(repo)
        if files is None or "models" in self.path:
            self.answer({}, 404, X_Error_Code="RepoNotFound")
        elif rest and rest[1] not in ("main", "v1", COMMIT):
            self.answer({}, 404, X_Error_Code="RevisionNotFound")
        elif kind == "api" and rest[:1] == ["tree"]:
            facts = {"type": "file", "oid": "0"}
            tree = [facts | {"path": n, "size": len(files[n])} for n in files]
            self.answer(tree)
        elif kind == "api":
            siblings = [{"rfilename": name} for name in files]
            facts = {"id": repo, "sha": COMMIT, "private": self.server.private[repo]}
            self.answer(facts | {"siblings": siblings})
        else:
            content = files["/".join(rest[2:])]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self.answer(content, X_Repo_Commit=COMMIT, ETag=etag)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path
        server = self.server
        repo = "/".join(path.removeprefix("/api").removesuffix(".git").split("/")[2:4])
        if path == "/api/repos/create":
            server.created.append(asked := json.loads(body))
            repo = f"{asked['organization']}/{asked['name']}"
            address = {"url": f"{server.address}/datasets/{repo}"}
            status = 409 if repo in server.files else 200
            server.private.setdefault(repo, asked["visibility"] == "private")
            server.files.setdefault(
                repo, {}
            )  # before the answer: the next request reads it
            self.answer(address, status)
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [file | mode for file in json.loads(body)["files"]]})
        else:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    server.files[repo][value["path"]] = base64.b64decode(
                        value["content"]
                    )
            commit = {"commitUrl": f"{server.address}/datasets/{repo}/commit/{COMMIT}"}
            self.answer(commit | {"commitOid": COMMIT})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.usefixtures("pageless")
def test_an_analysis_comes_back_from_the_hub(hub: Hub, tmp_path: Path):
    words = "the quick brown fox jumps over the lazy dog " * 20
    model = save_tiny(tmp_path / "tiny")
    rl.analyze(model, words, rl.Options(surrogates=2)).save(tmp_path / "out")
    changed = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_x",
    }
    changed["HF_HUB_DISABLE_XET"] = "1"
    changed["HF_HUB_DISABLE_TELEMETRY"] = "1"
    env = {n: v for n, v in os.environ.items() if n != "HF_HUB_OFFLINE"} | changed
    command = [sys.executable, "-c", CLIENT, str(tmp_path / "out"), HOSTILE]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["others"] == []
    assert found["address"] == found["again"] == f"{hub.address}/datasets/me/one"
    asked = [created["visibility"] for created in hub.created]
    assert asked == ["private"] * 4 + ["public"]
    assert found["public"].startswith(
        "The dataset me/public exists already: it is public, and"
    )
    assert "it holds files that ropelens did not write" in found["foreign"]
    assert hub.files["me/foreign"] == {"data.csv": b"1"}
    assert set(hub.files["me/public"]) == set(hub.files["me/one"])
    for name in ("missing", "one@v2"):
        assert found[f"read {name}"].startswith(
            f"hf://datasets/me/{name} could not be read"
        )
    assert "it has no run.json of ropelens" in found["read foreign"]
    assert "profile.nc is not a profile" in found["read damaged"]
    assert found["model"].startswith("hf://me/one could not be read")
    fetched = {path.name for path in (tmp_path / "hf").rglob("*") if path.is_symlink()}
    assert fetched == {"run.json", "profile.nc"}
    card = hub.files["me/one"]["README.md"].decode()
    assert card.startswith("---\n")
    assert escape(HOSTILE) in card
    for unsafe in ("<script", "](", "![", "\n# b", "`h`"):
        assert unsafe not in card
    assert "quick brown" not in card


def test_without_a_network_an_unknown_dataset_is_reported():
    with pytest.raises(
        rl.BadArgument,
        match=r"(?s)could not be read.*outgoing traffic has been disabled",
    ):
        rl.open("hf://datasets/me/one")


def test_commands_refuse_an_address_of_the_hub(tmp_path: Path):
    with pytest.raises(
        rl.BadArgument, match=r'is not a folder[^"]+"hf://datasets/..."'
    ):
        rewrite_page(Path("hf://datasets/me/one"))
