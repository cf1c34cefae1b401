"""`penstock serve` on the bundled family, as a process to measure or to break."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml


@dataclass(frozen=True)
class BundledServer:
    """A server that answers at `url`, and how long it took to start."""

    process: subprocess.Popen[str]
    url: str
    start_s: float

    def metric(self, name: str) -> float:
        """Sum over all labels of a metric."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        lines = [x for x in text.splitlines() if x.startswith(f"penstock:{name}")]
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines)

    def engine_pid(self) -> int:
        """The process that would be missed: the largest of its descendants."""
        found = httpx.get(f"{self.url}/health", timeout=30).json()["engine"].get("pid")
        children = psutil.Process(self.process.pid).children(recursive=True)
        return int(found or max(children, key=lambda c: c.memory_info().rss).pid)


@contextmanager
def bundled_server(
    *arguments: str, settings: dict[str, Any] | None = None
) -> Iterator[BundledServer]:
    """With these arguments and settings, until the end of the block. Raises: RuntimeError."""
    started_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(settings or {}))
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0"]
        command += ["--config", str(config), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                said = next((x for x in process.stdout if "serving on http" in x), None)
                if said is None:
                    raise RuntimeError("the server did not start")
                yield BundledServer(process, said.split()[-1], time.perf_counter() - started_at)
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
