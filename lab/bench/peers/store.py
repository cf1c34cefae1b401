"""What was measured before, so that a run that was cut, or is made in parts, goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import penstock
from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import PeerEngine
from lab.bench.peers.workers_pool import WorkerSetup
from lab.common.results import processor

_CODE = ("config.py", "core", "engine", "serving")
"""Of the package: what a request passes through."""

About = Mapping[str, Any]


class Store:
    """A file with a JSON line for each thing measured, written as soon as it is: what it is about,
    on which machine, when, and the figures. Of two lines about the same the later one counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, dict[str, Any]] = {}
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                self._found[_text(entry["about"])] = entry
            except (ValueError, KeyError, TypeError):
                continue  # a line that was cut in the middle

    def get(self, about: About) -> dict[str, Any] | None:
        """An entry, its figures under "found" and their time under "when"."""
        return self._found.get(_text(_here(about)))

    def put(self, about: About, found: Any) -> None:
        entry = {
            "about": _here(about),
            "when": datetime.now().isoformat(" ", timespec="minutes"),
            "found": found,
        }
        self._found[_text(entry["about"])] = entry
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            # Behind a line that was cut there is no end of line.
            out.write("\n" + json.dumps(entry))


def about_model(model: PeerCheckpoint) -> About:
    """Its files, as they are now, and its prompts."""
    paths = {"target": model.target, **model.drafters}
    prompts = hashlib.sha256(_text(model.prompts).encode()).hexdigest()[:16]
    return {
        "model": model.name,
        "files": {name: _files(path) for name, path in paths.items()},
        "prompts": prompts,
    }


def about_engine(engine: PeerEngine) -> About:
    """The program's version; Penstock's is the digest of its code."""
    installed = [*engine.installs, dict(engine.build)] if engine.installs else _own_code()
    return {"engine": engine.name, "version": installed}


def about_setup(setup: WorkerSetup) -> About:
    return {
        "engine": setup.engine.name,
        "settings": dict(setup.settings),
        "drafter": setup.drafter,
        "draft_tokens": setup.draft_tokens,
    }


@cache
def _own_code() -> str:
    root, digest = Path(penstock.__file__).parent, hashlib.sha256()
    for part in (root / name for name in _CODE):
        files = [part] if part.is_file() else [*part.rglob("*.py"), *part.rglob("*.so")]
        for file in sorted(files):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[list[Any]]:
    files = [path] if path.is_file() else sorted(p for p in path.glob("*.safetensors"))
    return [[p.name, p.stat().st_size] for p in files]


def _here(about: About) -> dict[str, Any]:
    return {**about, "machine": f"{os.cpu_count()} cores, {processor()}"}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
