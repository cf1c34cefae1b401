"""A draft process that dies, hangs or slows tenfold, among three: what the others notice.

    python -m lab.bench.draft_faults [--pairs 3] [--seconds 5] [--json]

A verification server (the small bundled target, float32, `pipeline: async`) and three draft
processes over real sockets. Four users ask for drafts of `ann` and `ben` by name, two leave the
choice open, and get `cleo`. Then something happens to `cleo`:

dies     SIGKILL
hangs    SIGSTOP
slows    stopped for nine tenths of every 50 ms

Rates are of the users of `ann` and `ben`, in a window after the fault over one before it; the
median of several pairs counts. In every second pair nothing happens: the control. Every text is
compared with what the target says alone, and must be whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from tests.serving.fault_rig import Child, draft_process, url_of, verification_process
from tests.serving.scripted import free_port

from lab.common.results import Results, parser, table, tell
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

SERVERS = ("ann", "ben", "cleo")
VICTIM = "cleo"
USERS = ("ann", "ann", "ben", "ben", "auto", "auto")
FAULTS = ("dies", "hangs", "slows")
NUM_TOKENS = 64
SETTLE_S = 1.0
CYCLE_S, RUNNING_SHARE = 0.05, 0.1


@dataclass
class Users:
    """Each asks for one completion after the other, and checks what comes."""

    url: str
    expected: dict[str, str] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_lost: int = 0

    async def learn(self) -> None:
        """What the target says alone."""
        async with httpx.AsyncClient(timeout=60) as http:
            for domain in DOMAINS:
                prompt = load_prompts(domain)[0].prompt
                self.expected[prompt] = await self._ask(http, prompt, "none") or ""

    async def ask_for_ever(self, number: int, drafter: str) -> None:
        prompts = list(self.expected)
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                prompt = prompts[number % len(prompts)]
                text = await self._ask(http, prompt, drafter)
                self.num_lost += text is None
                self.num_wrong += text is not None and text != self.expected[prompt]
                self.tokens[drafter] += NUM_TOKENS
                number += 1

    async def _ask(self, http: httpx.AsyncClient, prompt: str, drafter: str) -> str | None:
        body = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": {"drafter": drafter},
        }
        answer = await http.post(f"{self.url}/v1/completions", json=body)
        if answer.status_code != 200:
            return None
        data = answer.json()
        whole = data["usage"]["completion_tokens"] == NUM_TOKENS
        return str(data["choices"][0]["text"]) if whole else None


@dataclass(frozen=True, slots=True)
class Window:
    """rest: tokens a second of the users of `ann` and `ben`; own: of those who leave the choice
    open. cpu_share: of the verification server and the draft processes, CPU seconds a second."""

    rest: float
    own: float
    cpu_share: float


async def window(users: Users, seconds: float, processes: list[psutil.Process]) -> Window:
    before, cpu, start = Counter(users.tokens), cpu_seconds(processes), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - start
    made = users.tokens - before
    own = made.pop("auto", 0)
    cpu = cpu_seconds(processes) - cpu
    return Window(sum(made.values()) / took, own / took, cpu / took)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    total += sum(one.cpu_times()[:2])
    return total


@asynccontextmanager
async def fault(kind: str | None, victim: Child) -> AsyncIterator[None]:
    """Something that happens to a process, and is over afterwards, unless it is dead."""
    slowing = None
    if kind == "dies":
        await victim.end(signal.SIGKILL)
    elif kind == "hangs":
        victim.send(signal.SIGSTOP)
    elif kind == "slows":
        slowing = asyncio.create_task(slow(victim))
    yield
    if slowing is not None:
        slowing.cancel()
        with suppress(asyncio.CancelledError):
            await slowing
    if kind in ("hangs", "slows"):
        victim.send(signal.SIGCONT)


async def slow(victim: Child) -> None:
    while True:
        victim.send(signal.SIGSTOP)
        await asyncio.sleep(CYCLE_S * (1 - RUNNING_SHARE))
        victim.send(signal.SIGCONT)
        await asyncio.sleep(CYCLE_S * RUNNING_SHARE)


def start_server(name: str, port: int) -> Child:
    return draft_process(model_path("draft-tiny"), port, token=name)


def tokens(name: str) -> dict[str, str]:
    return {"token_sha256": hashlib.sha256(name.encode()).hexdigest()}


async def measure(kind: str, pairs: int, seconds: float) -> dict[str, Any]:
    port, http_port = free_port(), free_port()
    servers = {"servers": {name: tokens(name) for name in SERVERS}}
    target = model_path("target-small")
    with verification_process(target, port, http_port, drafters=servers) as verifier:
        await verifier.start(1)
        users = Users(url_of(verifier))
        await users.learn()
        children = {name: start_server(name, port) for name in SERVERS}
        try:
            for child in children.values():
                await child.start(2)
            asking = [asyncio.create_task(users.ask_for_ever(i, d)) for i, d in enumerate(USERS)]
            found = []
            for number in range(2 * pairs):
                happens = kind if number % 2 else None
                pids = [c.process.pid for c in (verifier, *children.values()) if c.process]
                processes = [psutil.Process(p) for p in pids if p]
                await asyncio.sleep(SETTLE_S)
                before = await window(users, seconds, processes)
                async with fault(happens, children[VICTIM]):
                    await asyncio.sleep(SETTLE_S)
                    after = await window(users, seconds, processes)
                found.append((happens, before, after))
                if happens == "dies":
                    children[VICTIM] = start_server(VICTIM, port)
                    await children[VICTIM].start(2)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        finally:
            for child in children.values():
                child.__exit__()
    return summary(kind, found, users)


def summary(
    kind: str, found: list[tuple[str | None, Window, Window]], users: Users
) -> dict[str, Any]:
    """Medians of the ratios, after over before, with and without the fault."""
    with_fault = [(b, a) for k, b, a in found if k]
    control = [(b, a) for k, b, a in found if not k]
    return {
        "fault": kind,
        "rest": statistics.median(a.rest / b.rest for b, a in with_fault),
        "rest_control": statistics.median(a.rest / b.rest for b, a in control),
        "own": statistics.median(a.own / b.own for b, a in with_fault),
        "num_wrong": users.num_wrong,
        "num_lost": users.num_lost,
        "cpu_share": statistics.median(w.cpu_share for _, *both in found for w in both),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--seconds", type=float, default=5.0)
    args = options.parse_args()
    found = [asyncio.run(measure(kind, args.pairs, args.seconds)) for kind in FAULTS]
    columns = {
        "fault": "{fault}",
        "the rest": "{rest:.2f}",
        "control": "{rest_control:.2f}",
        "its own": "{own:.2f}",
        "wrong": "{num_wrong}",
        "lost": "{num_lost}",
        "CPU s/s": "{cpu_share:.2f}",
    }
    title = "one of three draft processes fails: rates after over before"
    tell(args, Results(found, tables=[table(title, found, columns)]))


if __name__ == "__main__":
    main()
