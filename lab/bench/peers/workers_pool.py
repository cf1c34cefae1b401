"""Worker processes: started when needed, stopped while another one is measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import CHAINED, NGRAM, PeerEngine, Settings

_MOST_S = 1800
"""No command takes so long; a worker that does hangs."""


class WorkerError(RuntimeError):
    """What a worker answered instead of a result."""


@dataclass(frozen=True)
class WorkerSetup:
    """One way to run one model by one engine. draft_tokens: 0 is target-only."""

    engine: PeerEngine
    model: PeerCheckpoint
    settings: Settings
    drafter: str | None = None
    draft_tokens: int = 0

    @property
    def key(self) -> str:
        """Setups of one key are run by one process."""
        fixed = self.draft_tokens if self.engine.fixed_draft_tokens else 0
        settings = json.dumps(self.settings, sort_keys=True)
        return f"{self.engine.name} {self.model.name} {self.drafter} {fixed} {settings}"


def of_this_tree() -> dict[str, str]:
    """The environment of a worker that imports what this process does."""
    path = os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


class Worker:
    """One process, stopped (SIGSTOP) but for the time of a command.

    An idle pool of threads may spin on the cores that another engine is measured on.
    """

    def __init__(self, python: Path, script: Path, env: dict[str, str], log: Path) -> None:
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,
            )
        self.facts: dict[str, Any] = {}

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


class Pool:
    """The workers in memory. `max_batch`: most prompts of one call."""

    def __init__(self, folder: Path, max_batch: int) -> None:
        self.folder = folder
        self.max_batch = max_batch
        self._workers: dict[str, Worker] = {}

    def worker(self, setup: WorkerSetup) -> Worker:
        """The worker of `setup`, loaded. Raises: WorkerError."""
        if setup.key not in self._workers:
            self._workers[setup.key] = self._start(setup)
        return self._workers[setup.key]

    def keep(self, setups: Collection[WorkerSetup]) -> None:
        """Close the workers that none of `setups` needs."""
        needed = {setup.key for setup in setups}
        for key in [k for k in self._workers if k not in needed]:
            self._workers.pop(key).close()

    def _start(self, setup: WorkerSetup) -> Worker:
        engine, model = setup.engine, setup.model
        drafter = setup.drafter and setup.drafter.removesuffix(CHAINED)
        worker = Worker(
            engine.python(self.folder),
            engine.script,
            engine.environment(self.folder),
            self.folder / f"{engine.name}.stderr",
        )
        try:
            answer = worker.ask(
                do="load",
                target=str(model.target),
                drafter=drafter if drafter in (None, NGRAM) else str(model.drafters[drafter]),
                chained=drafter != setup.drafter,
                draft_tokens=setup.draft_tokens,
                batch=self.max_batch,
                work=str(self.folder / "converted"),
                settings=dict(setup.settings),
            )
        except WorkerError:
            worker.close()
            raise
        worker.facts = answer["facts"]
        return worker
