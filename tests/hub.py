"""A small Hugging Face hub on loopback: its API as far as `huggingface_hub` asks for models."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

MAIN = "main"


@dataclass
class Hub:
    """Repositories and faults. Files of weights are in LFS.

    repos: files by repository and revision
    gated: repositories whose files need a token, that of somebody who accepted their terms
    busy: whether all answers are 429
    pace_s: seconds for each 100 kB of a file
    cuts: bytes after which the next download of a file is cut, by its name
    wrong: files whose content is not that of their SHA-256
    asked: method, file and range of each request for a file"""

    url: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    busy: bool = False
    pace_s: float = 0.0
    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def add(self, repo: str, files: Mapping[str, bytes] | Path, revision: str = MAIN) -> None:
        """files: by name, or a folder."""
        if isinstance(files, Path):
            files = {f.name: f.read_bytes() for f in files.iterdir() if f.is_file()}
        self.repos.setdefault(repo, {})[revision] = dict(files)

    def downloads(self) -> list[str]:
        return [file for method, file, _ in self.asked if method == "GET"]


def commit_of(repo: str, revision: str, files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(f"{repo} {revision} {sorted(files)}".encode()).hexdigest()


def _is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    told: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
    if _is_lfs(name):
        sha256 = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
    return told


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.hub.busy:
            self._refuse(429, "")
        elif api is not None:
            self._tell(api[1], api[2] or MAIN)
        elif file is not None:
            self._send(file[1], file[2], file[3])
        else:
            self._refuse(404, "")

    def _found(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        revisions = self.hub.repos.get(repo)
        if revisions is None:
            self._refuse(404, "RepoNotFound")
            return None
        for name, files in revisions.items():
            commit = commit_of(repo, name, files)
            if revision in (name, commit):
                return commit, files
        self._refuse(404, "RevisionNotFound")
        return None

    def _tell(self, repo: str, revision: str) -> None:
        found = self._found(repo, revision)
        if found is not None:
            siblings = [_sibling(name, content) for name, content in found[1].items()]
            told = {"id": repo, "modelId": repo, "sha": found[0], "siblings": siblings}
            self._answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _send(self, repo: str, revision: str, name: str) -> None:
        self.hub.asked.append((self.command, name, self.headers.get("Range")))
        found = self._found(repo, revision)
        if found is None:
            return
        if repo in self.hub.gated and "Authorization" not in self.headers:
            self._refuse(401, "GatedRepo")
            return
        if repo in self.hub.gated and self.headers["Authorization"] == "Bearer hf_stranger":
            self._refuse(403, "GatedRepo")
            return
        commit, files = found
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        content = files[name]
        digest = hashlib.sha256 if _is_lfs(name) else hashlib.sha1
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(content).hexdigest()}"'}
        if name in self.hub.wrong:
            content = bytes(len(content))
        part = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if part is not None:
            start, whole = int(part[1]), len(content)
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
            content = content[start:]
        cuts = self.hub.cuts.get(name) if self.command == "GET" else None
        self._answer(206 if part else 200, content, headers, cuts.pop(0) if cuts else None)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code} if code else {})

    def _answer(
        self, status: int, content: bytes, headers: Mapping[str, str], cut: int | None = None
    ) -> None:
        """cut: bytes of the content after which the connection ends."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            for start in range(0, len(content[:cut]), 100_000):
                self.wfile.write(content[start : start + 100_000][: cut and cut - start])
                time.sleep(self.hub.pace_s)
            self.close_connection = self.close_connection or cut is not None


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that this process and its children use, with an empty cache."""
    from huggingface_hub import constants

    home = tmp_path / "hf"
    with serving_hub() as made:
        for name, value in {"HF_ENDPOINT": made.url, "HF_HOME": str(home)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made
