"""`penstock serve` on the bundled family, as a process to measure or to break."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import yaml


@dataclass(frozen=True)
class BundledServer:
    """A server that answers at `url`, the file of its settings, and how long it took to start."""

    process: subprocess.Popen[str]
    url: str
    config: Path
    start_s: float

    def reload(self, settings: dict[str, Any]) -> None:
        """Have it read other settings."""
        self.config.write_text(yaml.safe_dump(settings))
        self.process.send_signal(signal.SIGHUP)

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
    *arguments: str, settings: dict[str, Any] | None = None, log: IO[str] | None = None
) -> Iterator[BundledServer]:
    """With these arguments and settings, until the end of the block. log: where it goes, if not
    where this program's own goes. Raises: RuntimeError."""
    started_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(settings or {}))
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0"]
        command += ["--config", str(config), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            try:
                said = next((x for x in process.stdout if "serving on http" in x), None)
                if said is None:
                    raise RuntimeError("the server did not start")
                took = time.perf_counter() - started_at
                yield BundledServer(process, said.split()[-1], config, took)
            finally:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
