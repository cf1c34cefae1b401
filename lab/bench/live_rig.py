"""Real processes for `lab.bench.live_draft_servers`: servers, far-away links, users, a record.

    python -m lab.bench.live_rig CONFIG.yaml RECORD.jsonl

runs a verification server whose engine writes a line for every draft that comes and for every step
of the target.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import httpx
import psutil
import yaml
from tests.serving.links import Delay, sum_of
from tests.serving.scripted import free_port

from penstock.config import EngineConfig, parse_config, read_yaml
from penstock.core.loop import Clock, Executor, Loop, Turn
from penstock.core.scheduler import Scheduler
from penstock.core.types import TARGET, DraftReady, Event, Output, StepPlan, StepResult
from penstock.zoo.registry import load_prompts, model_path

_RECORD = "PENSTOCK_BENCHMARK_RECORD"
_FACTORY = "lab.bench.live_rig:load_recorded_engine"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_KV_TOKENS = 32_768
_START_S = 300

CLIENTS = {
    "instruction": "draft-tiny",
    "roleplay": "draft-lang",
    "summary": "draft-base",
    "qa": "draft-lang",
    "chat": "draft-tiny",
    "math": "draft-data",
    "sql": "draft-code",
    "entropy": "draft-base",
}
"""The drafter of each domain's draft server: generalists and specialists."""


# --- the verification server's process ------------------------------------------------------------


class _RecordedLoop(Loop):
    """A loop that keeps what came from draft servers, and what the target made of it."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, record: TextIO
    ) -> None:
        super().__init__(scheduler, executor, clock, (self,))
        self._now = clock.now
        self._record = record
        self._ordered: dict[tuple[str, int], tuple[float, int]] = {}

    def turn(self, events: Iterable[Event]) -> Turn:
        events = list(events)
        for event in events:
            if isinstance(event, DraftReady):
                ordered = self._ordered.pop((event.request_id, event.round), None)
                if ordered is not None:
                    asked_at, asked = ordered
                    self._write(
                        draft=client_of(event.request_id),
                        asked=asked,
                        tokens=event.num_draft_tokens,
                        seconds=self._now() - asked_at,
                    )
        return super().turn(events)

    def on_plan(self, plan: StepPlan) -> None:
        if plan.lane != TARGET:
            for order in plan.drafts:
                ordered = plan.created_at, order.max_draft_tokens
                self._ordered[order.request_id, order.round] = ordered

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        if plan.lane != TARGET:
            return
        now = self._now()
        sampled = [v for v in result.verdicts if v.token_ids]
        self._write(
            at=now,
            seconds=now - plan.created_at,
            work=result.work,
            verdicts=[
                (client_of(v.request_id), v.num_proposed, v.num_decided, len(v.token_ids))
                for v in sampled
            ],
        )

    def on_output(self, output: Output) -> None:
        """Outputs show in verdicts."""

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=self._record, flush=True)


def client_of(request_id: str) -> str:
    """The draft server in whose name a request of edge ingress was opened."""
    return request_id.rpartition("/")[0]


def load_recorded_engine(config: EngineConfig) -> Any:
    """The engine, with a record of what it does."""
    from penstock.engine.build import load_engine

    engine = load_engine(config)
    # Open until the process ends.
    record = Path(os.environ[_RECORD]).open("w", encoding="utf-8")  # noqa: SIM115
    loop = _RecordedLoop(engine.scheduler, engine.executor, engine.clock, record)
    return dataclasses.replace(engine, loop=loop)


def _serve(config: Path, record: Path) -> None:
    from penstock.api.server import serve

    os.environ[_RECORD] = str(record)
    settings = parse_config(read_yaml(config))
    asyncio.run(serve(settings, lambda line: print(line, flush=True), _FACTORY))


# --- processes ------------------------------------------------------------------------------------


class Process:
    """A command that says a line for each thing that is ready."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._arguments = arguments
        self._env = {**os.environ, **_ONE_THREAD, **(env or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._cpu_before = 0.0

    async def start(self, starts_with: str) -> str:
        """Start, and wait for a line that begins so; returns the rest of it."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", *self._arguments),
            stdout=asyncio.subprocess.PIPE,
            # A draft server says so whenever a verification server is gone.
            stderr=asyncio.subprocess.DEVNULL,
            env=self._env,
        )
        async with asyncio.timeout(_START_S):
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                if line.decode().startswith(starts_with):
                    return line.decode().removeprefix(starts_with).strip()
        raise RuntimeError(f"{' '.join(self._arguments)} has ended")

    def cpu_seconds(self) -> float:
        """CPU time of the process and its children."""
        return sum(sum(p.cpu_times()[:2]) for p in self._family())

    def memory_mib(self) -> float:
        """Resident memory of the process and its children."""
        return sum(float(p.memory_info().rss) for p in self._family()) / 2**20

    def _family(self) -> list[psutil.Process]:
        assert self._process is not None
        whole = psutil.Process(self._process.pid)
        return [whole, *whole.children(recursive=True)]

    async def end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


class Rig:
    """Eight draft servers behind links, and one verification server after the other."""

    def __init__(self, folder: Path, http: httpx.AsyncClient, family: Path) -> None:
        """family: folder of the target and of all drafters."""
        self._family = family
        self._config, self.record = folder / "serve.yaml", folder / "record.jsonl"
        self._http = http
        self._port, self._drafters_port = free_port(), free_port()
        self.links = {name: Delay(self._drafters_port) for name in CLIENTS}
        self._tokens = {name: secrets.token_hex(16) for name in CLIENTS}
        self._drafters: dict[str, Process] = {}
        self.urls: dict[str, str] = {}

    @asynccontextmanager
    async def verification_server(
        self, allocation: dict[str, Any], pipeline: str
    ) -> AsyncIterator[Process]:
        """A verification server under a policy, all draft servers connected."""
        self._config.write_text(yaml.safe_dump(self._settings(allocation, pipeline)))
        server = Process("lab.bench.live_rig", str(self._config), str(self.record))
        try:
            await server.start("http")
            yield server
        finally:
            await server.end()

    def _settings(self, allocation: dict[str, Any], pipeline: str) -> dict[str, Any]:
        digests = {n: hashlib.sha256(t.encode()).hexdigest() for n, t in self._tokens.items()}
        servers = {n: {"tenant": n, "token_sha256": d} for n, d in digests.items()}
        return {
            "engine": {
                "target": str(model_path("target-large", self._family)),
                "verification": "coupled",
                "pipeline": pipeline,
                "allocation": allocation,
                "kv_tokens": _KV_TOKENS,
                "num_threads": 1,
            },
            "drafters": {"listen": f"127.0.0.1:{self._drafters_port}", "servers": servers},
            "port": self._port,
            "shutdown_grace_s": 1,
        }

    async def start_drafters(self) -> None:
        """Start the draft servers; a verification server must be there."""
        await asyncio.gather(*(self._start(name) for name in CLIENTS))

    async def _start(self, name: str) -> None:
        drafter = self._drafters[name] = Process(
            "penstock.cli",
            *("draft", "--connect", f"127.0.0.1:{self.links[name].port}"),
            *("--model", str(model_path(CLIENTS[name], self._family))),
            *("--listen", "0", "--no-assignments"),
            env={"PENSTOCK_TOKEN": self._tokens[name]},
        )
        self.urls[name] = await drafter.start("penstock: serving on ")

    async def end_drafters(self) -> None:
        await asyncio.gather(*(drafter.end() for drafter in self._drafters.values()))

    async def until_connected(self) -> None:
        async with asyncio.timeout(_START_S):
            while sum_of(await self.metrics(), "draft_servers") < len(CLIENTS):  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def metrics(self) -> str:
        """The verification server's metrics."""
        return (await self._http.get(f"http://127.0.0.1:{self._port}/metrics")).text

    def cpu_seconds(self, server: Process) -> dict[str, float]:
        """CPU time so far: the verification server, all draft servers, this process."""
        return {
            "verification": server.cpu_seconds(),
            "drafting": sum(p.cpu_seconds() for p in self._drafters.values()),
            "links": time.process_time(),
        }

    async def use(self, name: str, temperature: float) -> None:
        """A user of one draft server: one request after the other, for ever."""
        url = f"{self.urls[name]}/v1/completions"
        for n, prompt in enumerate(itertools.cycle(load_prompts(name))):
            body = {"prompt": prompt.prompt, "max_tokens": 192, "temperature": temperature}
            answer = await self._http.post(url, json={**body, "seed": n})
            answer.raise_for_status()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
