"""Tests of results on the Hub, with a small server on the loopback address."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
from tiny_checkpoints import save_tiny

import ropelens as rl
from ropelens.analysis.hub import card, escape
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


@dataclass(frozen=True)
class Address:
    """The parts of the address of a request about the datasets of the Hub."""

    of_api: bool
    repo: str
    rest: list[str]  # the kind of answer, the revision, and the path of a file

    @classmethod
    def read(cls, path: str) -> "Address":
        names = unquote(path.partition("?")[0]).strip("/").split("/")
        of_api = names[0] == "api"
        names = names[2:] if of_api else names[1:]
        return cls(of_api, repo="/".join(names[:2]), rest=names[2:])

    @property
    def revision_exists(self) -> bool:
        return not self.rest or self.rest[1] in ("main", "v1", COMMIT)

    @property
    def lists_files(self) -> bool:
        return self.of_api and self.rest[:1] == ["tree"]

    @property
    def file(self) -> str:
        return "/".join(self.rest[2:])


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        address = Address.read(self.path)
        files = self.server.files.get(address.repo)
        if files is None or "models" in self.path:
            self.answer({}, 404, X_Error_Code="RepoNotFound")
        elif not address.revision_exists:
            self.answer({}, 404, X_Error_Code="RevisionNotFound")
        elif address.lists_files:
            tree = []
            for name, content in files.items():
                entry = {"type": "file", "oid": "0", "path": name, "size": len(content)}
                tree.append(entry)
            self.answer(tree)
        elif address.of_api:
            description = {
                "id": address.repo,
                "sha": COMMIT,
                "private": self.server.private[address.repo],
                "siblings": [{"rfilename": name} for name in files],
            }
            self.answer(description)
        else:
            content = files[address.file]
            digest = hashlib.sha256(content).hexdigest()
            self.answer(content, X_Repo_Commit=COMMIT, ETag=f'"{digest}"')

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            for file in files:
                file["uploadMode"] = "regular"
                file["shouldIgnore"] = False
            self.answer({"files": files})
        else:
            self.commit([json.loads(line) for line in body.splitlines()])

    def create(self, asked: dict[str, Any]) -> None:
        server = self.server
        server.created.append(asked)
        repo = f"{asked['organization']}/{asked['name']}"
        status = 409 if repo in server.files else 200
        # Before the answer, because the next request reads them.
        server.private.setdefault(repo, asked["visibility"] == "private")
        server.files.setdefault(repo, {})
        self.answer({"url": f"{server.address}/datasets/{repo}"}, status)

    def commit(self, changes: list[dict[str, Any]]) -> None:
        repo = Address.read(self.path).repo
        for change in changes:
            if change["key"] == "file":
                file = change["value"]
                content = base64.b64decode(file["content"])
                self.server.files[repo][file["path"]] = content
        url = f"{self.server.address}/datasets/{repo}/commit/{COMMIT}"
        self.answer({"commitUrl": url, "commitOid": COMMIT})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run_client(hub: Hub, folder: Path, cache: Path) -> dict[str, Any]:
    """What the client saw: addresses, errors, and requests to other machines."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(cache),
        "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    del environment["HF_HUB_OFFLINE"]
    command = [sys.executable, "-c", CLIENT, str(folder), HOSTILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
@pytest.mark.usefixtures("pageless")
def test_an_analysis_comes_back_from_the_hub(hub: Hub, tmp_path: Path):
    words = "the quick brown fox jumps over the lazy dog " * 20
    model = save_tiny(tmp_path / "tiny")
    analysis = rl.analyze(model, words, rl.Options(surrogates=2))
    analysis.save(tmp_path / "out")
    cache = tmp_path / "hf"
    seen = run_client(hub, tmp_path / "out", cache)
    assert seen["others"] == []
    assert seen["address"] == f"{hub.address}/datasets/me/one"
    assert seen["again"] == seen["address"]
    asked = [created["visibility"] for created in hub.created]
    assert asked == ["private"] * 4 + ["public"]
    exists = "The dataset me/public exists already: it is public, and"
    assert seen["public"].startswith(exists)
    assert "it holds files that ropelens did not write" in seen["foreign"]
    assert hub.files["me/foreign"] == {"data.csv": b"1"}
    assert set(hub.files["me/public"]) == set(hub.files["me/one"])
    for name in ("missing", "one@v2"):
        unread = f"hf://datasets/me/{name} could not be read"
        assert seen[f"read {name}"].startswith(unread)
    assert "it has no run.json of ropelens" in seen["read foreign"]
    assert "profile.nc is not a profile" in seen["read damaged"]
    assert seen["model"].startswith("hf://me/one could not be read")
    assert hub.files["me/one"]["README.md"].startswith(b"---\n")
    fetched = {path.name for path in cache.rglob("*") if path.is_symlink()}
    assert fetched == {"run.json", "profile.nc"}


def test_the_card_of_a_dataset_is_escaped_and_quotes_no_text(tmp_path: Path):
    model = save_tiny(tmp_path / "tiny")
    words = "the quick brown fox jumps over the lazy dog " * 20
    analysis = rl.analyze(model, words, rl.Options(surrogates=2))
    analysis.provenance["model"]["name"] = HOSTILE
    text = card("me/one", analysis.provenance, analysis.findings)
    assert text.startswith("---\n")
    assert escape(HOSTILE) in text
    for unsafe in ("<script", "](", "![", "\n# b", "`h`"):
        assert unsafe not in text
    assert "quick brown" not in text


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
