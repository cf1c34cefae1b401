"""`penstock serve` as a process to measure or to break, of the bundled family where nothing else is
said."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import yaml


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers at `url`, measured with its child processes."""

    process: subprocess.Popen[Any]
    url: str

    def memory_mib(self, *kinds: str) -> float:
        """Memory of these kinds (lines of smaps_rollup), a page that several share counted once."""
        found = 0.0
        with suppress(psutil.NoSuchProcess):
            for one in self._processes():
                with suppress(FileNotFoundError, ProcessLookupError):
                    lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
                    own = (x.split() for x in lines if x.startswith(kinds))
                    found += sum(int(kib) for _, kib, _ in own) / 1024
        return found

    def cpu_seconds(self) -> float:
        """Of all its processes until now, in the program and in the system."""
        return sum(sum(one.cpu_times()[:2]) for one in self._processes())

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


class Scrape(NamedTuple):
    """A server's answer to a scrape."""

    lines: list[str]

    def metric(self, name: str) -> float:
        """Sum over all labels of a metric."""
        return sum(value for _, value in self.named(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of a metric by the value of one of its labels."""
        found: dict[str, float] = {}
        for line, value in self.named(name):
            key = line.partition(f'{label}="')[2].partition('"')[0]
            found[key] = found.get(key, 0.0) + value
        return found

    def named(self, name: str) -> list[tuple[str, float]]:
        """Lines of a metric, and their values."""
        lines = [x for x in self.lines if x.startswith(f"penstock:{name}")]
        return [(x, float(x.rsplit(" ", 1)[1])) for x in lines]


@dataclass(frozen=True)
class BundledServer(ServerProcess):
    """Penstock's, with the file of its settings, and how long it took to start."""

    config: Path
    start_s: float

    def reload(self, settings: dict[str, Any]) -> None:
        """Have it read other settings."""
        self.config.write_text(yaml.safe_dump(settings))
        self.process.send_signal(signal.SIGHUP)

    def scrape(self) -> Scrape:
        """All metrics at one time."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        return Scrape(text.splitlines())

    def metric(self, name: str) -> float:
        """Sum over all labels of a metric."""
        return self.scrape().metric(name)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of a metric by the value of one of its labels."""
        return self.scrape().by_label(name, label)

    def resident_mib(self) -> float:
        """Memory of all its processes, a page that several share counted once, files left out."""
        return self.memory_mib("Pss_Anon", "Pss_Shmem")


@contextmanager
def stopping(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Stop the process at the end of the block."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--state", "none"]
        command += ["--config", str(config), *arguments]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
            stopping(process),
        ):
            assert process.stdout is not None
            said = next((x for x in process.stdout if "serving on http" in x), None)
            if said is None:
                raise RuntimeError("the server did not start")
            took = time.perf_counter() - started_at
            yield BundledServer(process, said.split()[-1], config, took)
