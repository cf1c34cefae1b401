"""Processes that a benchmark starts and asks, a JSON line in and one out.

The benchmark has a `Worker`; the process runs `answer_commands`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_S = 1800
"""No command takes so long; a worker that does hangs."""

_PR_SET_PDEATHSIG = 1


class WorkerError(RuntimeError):
    """What a worker answered instead of a result."""


class Worker:
    """A script in a process of this Python, stopped (SIGSTOP) but for the time of a command.

    An idle pool of threads may spin on the cores that another worker is measured on.
    """

    def __init__(self, script: Path, log: Path, **variables: str) -> None:
        """log: for what it says on standard error; variables: of its environment, beside ours."""
        path = os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": path} | variables,
                start_new_session=True,
            )

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises: WorkerError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], _MOST_S)[0]:
                self._signal(signal.SIGKILL)
                raise WorkerError(f"no answer within {_MOST_S} s")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"the worker ended with status {self.process.wait()}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a command that nobody read
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def answer_commands(answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """A JSON line out for each JSON line in, until the end of standard input. answer: of
    what a command wants done, and its other fields; raises any Exception, which is told."""
    # A worker stands still between commands, so it would not notice that its master is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print to standard output; only answers may appear there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            told = answer(do, command)
        except Exception as error:
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()
    # Some libraries hang or crash in their destructors, when everything is measured already.
    os._exit(0)
