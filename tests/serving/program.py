"""`penstock serve` as people start it, in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START = [sys.executable, "-c", "from penstock.cli import main; main()", "serve"]
LONG = 600.0
"""Seconds in which everything that may happen on a busy machine has happened."""


@dataclass(frozen=True)
class Program:
    """log: its standard error."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def text(self, prompt: str, **fields: Any) -> str:
        return text(self.url, prompt, **fields)

    def stop(self) -> str:
        """Returns what it has logged."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(LONG) == 0
        return self.log.read_text()


def announced(process: subprocess.Popen[str], log: Path) -> str:
    """The address for users, as it says when it serves."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("penstock: serving on http://"):
            return line.split()[-1]
    raise AssertionError(log.read_text()[-4000:])


def text(url: str, prompt: str, **fields: Any) -> str:
    """24 greedy tokens, unless the fields say otherwise."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LONG)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@contextmanager
def program(
    log: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """arguments: of `penstock serve`; the port is a free one and there is no state, unless
    they name them."""
    command = [*START, "--port", "0", "--state", "none", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        try:
            yield Program(process, announced(process, log), log)
        finally:
            process.kill()
