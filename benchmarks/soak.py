"""Many streaming clients, for long, against a server that is short of memory.

    python -m benchmarks.soak [--clients 256] [--seconds 600] [--bad 32] [--json]

Starts `penstock serve` on the bundled family, in float32, with a quarter of the KV memory that the
clients want, and everything in force that an operator may have: keys, tenants with limits that are
met, JSON logs to a file, the settings read again every minute. Every client asks, streams and asks
again, and waits for as long as a 429 says; one in eight asks for JSON by a schema. Seeds make the
text of a (prompt, seed) pair a fact, so a token that is lost, doubled or given to somebody else
shows as another text.

Memory is what the processes of the server have resident every two seconds, a page that several
share counted once, and those of files not at all: other programs have them, too. (Linux.)

--bad N: stretches alternate, without and with N clients that read a byte a second and N that leave
at any time, all of a tenant with a small weight and with requests like the others'. Rates are the
server's own count of the other tenants' tokens over its processor time, which other programs on
the machine do not change. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import psutil
from benchmarks.bundled_server import BundledServer, bundled_server
from benchmarks.soak_clients import Crowd

from penstock.config import hash_of_key
from penstock.lab.bench import Results, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar

WANTED_PER_CLIENT = 256
SHARES = {"app": 0.5, "batch": 0.25, "metered": 0.125, "few": 0.125}
"""Of the good clients, by tenant."""
TENANTS: dict[str, dict[str, Any]] = {
    "app": {"weight": 4.0},
    "batch": {"weight": 2.0, "max_running_requests": 48},
    "metered": {"weight": 1.0, "requests_per_minute": 60, "tokens_per_minute": 20_000},
    "few": {"weight": 1.0, "max_waiting_requests": 8, "max_output_tokens": 256},
    "strangers": {"weight": 0.5},
}
WARM_UP = 4
"""This part of the time."""
SETTLE_S, STRETCH_S = 8.0, 32.0
MOST_CHANGE = 0.02
MOST_SLOWER = 0.10


@dataclass
class Watch:
    """What is seen of the server from outside.

    memory: (time, MiB by process)
    rates:  tokens of each good tenant for each second of the server's processor time, in stretches
            without and with bad clients
    walls:  tokens a second of all of them, likewise
    """

    server: BundledServer
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    rates: dict[bool, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    walls: dict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))
    stretches: list[tuple[float, float, bool]] = field(default_factory=list)

    async def weigh(self) -> None:
        while True:
            self.memory.append((monotonic(), await asyncio.to_thread(resident_mib, self.server)))
            await asyncio.sleep(2)

    async def reload(self) -> None:
        while True:
            await asyncio.sleep(60)
            self.server.reload(settings())

    async def tokens(self, http: httpx.AsyncClient) -> dict[str, float]:
        """Made so far, by good tenant."""
        text = (await http.get(f"{self.server.url}/metrics")).text
        made: dict[str, float] = dict.fromkeys(SHARES, 0.0)
        for line in text.splitlines():
            for name in SHARES if line.startswith("penstock:generation_tokens_total{") else ():
                if f'tenant="{name}"' in line:
                    made[name] += float(line.rpartition(" ")[2])
        return made

    async def stretch(self, *, is_bad: bool) -> None:
        """One more, measured after it has settled."""
        async with httpx.AsyncClient(timeout=30) as http:
            await asyncio.sleep(SETTLE_S)
            before, begun, cpu = await self.tokens(http), monotonic(), cpu_seconds(self.server)
            await asyncio.sleep(STRETCH_S)
            after, end = await self.tokens(http), monotonic()
        cpu = cpu_seconds(self.server) - cpu
        made = {name: after[name] - before[name] for name in SHARES}
        self.rates[is_bad].append({name: num / cpu for name, num in made.items()})
        self.walls[is_bad].append(sum(made.values()) / (end - begun))
        self.stretches.append((begun, end, is_bad))

    def memory_between(self, begin: float, end: float) -> list[float]:
        return [sum(mib.values()) for at, mib in self.memory if begin <= at < end]


def resident_mib(server: BundledServer) -> dict[str, float]:
    """Of its processes."""
    process = psutil.Process(server.process.pid)
    found: Counter[str] = Counter()
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            role = "front" if one == process else "other" if one.children() else "engine"
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
            own = (line.split() for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
            found[role] += sum(int(kib) for _, kib, _ in own) / 1024
    return found


def cpu_seconds(server: BundledServer) -> float:
    """Of its processes until now, in the program and in the system."""
    process = psutil.Process(server.process.pid)
    processes = (process, *process.children(recursive=True))
    return sum(sum(one.cpu_times()[:2]) for one in processes)


async def soak(
    server: BundledServer, clients: int, bad: int, seconds: float
) -> tuple[Crowd, Watch]:
    """The clients at work for so long."""
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    async with httpx.AsyncClient(headers=_key("app"), timeout=60) as http:
        (model,) = (await http.get(f"{server.url}/v1/models")).json()["data"]
    now = monotonic()
    crowd = Crowd(address, model["drafters"], now + seconds / WARM_UP, now + seconds)
    watch = Watch(server)
    watching = [asyncio.create_task(watch.weigh()), asyncio.create_task(watch.reload())]
    names = [name for name, share in SHARES.items() for _ in range(round(share * clients))]
    good = [asyncio.create_task(crowd.good(n, f"{t}-key")) for n, t in enumerate(names)]
    if bad:
        await asyncio.sleep(seconds / WARM_UP)
        while monotonic() + 2 * (SETTLE_S + STRETCH_S) < crowd.end:
            for is_bad in (False, True) if len(watch.stretches) % 4 else (True, False):
                tasks = [asyncio.create_task(t) for t in _bad(crowd, bad)] if is_bad else []
                await watch.stretch(is_bad=is_bad)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*good)
    for task in watching:
        task.cancel()
    return crowd, watch


def _bad(crowd: Crowd, num: int) -> list[Any]:
    bodies = (crowd.sip, crowd.leave)
    return [
        crowd.bad(lambda body=body: body("strangers-key")) for body in bodies for _ in range(num)
    ]


# --- report ---------------------------------------------------------------------------------------


def memory_verdict(watch: Watch, began: float, seconds: float) -> ClaimVerdict:
    """Medians of every minute after the warm-up, against the first of them."""
    minute = min(60.0, seconds / 8)
    starts = [began + seconds / WARM_UP + i * minute for i in range(int(0.75 * seconds / minute))]
    medians = [
        statistics.median(found) for t in starts if (found := watch.memory_between(t, t + minute))
    ]
    change = max(abs(m / medians[0] - 1) for m in medians)
    last = medians[-1] / medians[0] - 1
    said = (
        f"{medians[0]:.0f} MiB in the first minute after warm-up, at most {100 * change:.1f}% off "
        f"it in any of {len(medians)}, {100 * last:+.1f}% in the last"
    )
    return bar("memory flat within 2%", said, change <= MOST_CHANGE)


def whole_verdict(crowd: Crowd, left: dict[str, float]) -> ClaimVerdict:
    seen = crowd.seen
    said = (
        f"{seen.counts['completed']} requests complete ({seen.counts['structured']} of them JSON "
        f"by a schema), {seen.counts['tokens']} tokens, {len(seen.errors)} errors"
    )
    if any(left.values()):
        said += f", left behind: {left}"
    return bar("every accepted request complete", said, not seen.errors and not any(left.values()))


def refused_verdict(crowd: Crowd) -> ClaimVerdict:
    said = ", ".join(f"{num} {code}" for code, num in sorted(crowd.seen.refused.items()))
    return bar("nothing but 429 refused", said or "none", not crowd.seen.errors)


def log_verdict(path: Path) -> ClaimVerdict:
    """Every line of the log is JSON, and none an error."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = [line for line in lines if line["level"] in ("ERROR", "CRITICAL")]
    return bar("the log", f"{len(lines)} lines, {len(wrong)} errors {wrong[:2] or ''}", not wrong)


def bad_verdicts(watch: Watch) -> list[ClaimVerdict]:
    pairs = list(zip(watch.rates[True], watch.rates[False], strict=True))
    ratios = {
        name: statistics.median(b[name] / g[name] for b, g in pairs if g[name]) for name in SHARES
    }
    all_of_them = sorted(sum(b.values()) / sum(g.values()) for b, g in pairs)
    both = zip(watch.walls[True], watch.walls[False], strict=True)
    walls = statistics.median(b / g for b, g in both)
    slowest = min(ratios, key=lambda name: ratios[name])
    rates = (
        f"{100 * (statistics.median(all_of_them) - 1):+.1f}% (pairs from "
        f"{100 * (all_of_them[0] - 1):+.1f} to {100 * (all_of_them[-1] - 1):+.1f}), "
        f"of {slowest} alone {100 * (ratios[slowest] - 1):+.1f}%; by the clock "
        f"{100 * (walls - 1):+.1f}%"
    )
    most = {
        is_bad: max(
            mib
            for b, e, bad in watch.stretches
            if bad == is_bad
            for mib in watch.memory_between(b, e)
        )
        for is_bad in (False, True)
    }
    grown = most[True] / most[False] - 1
    memory = f"at most {most[True]:.0f} MiB with them, {most[False]:.0f} without"
    return [
        bar("nobody else slower by 10%", rates, ratios[slowest] >= 1 - MOST_SLOWER),
        bar("buffers bounded", memory, grown <= 0.1),
    ]


def results(
    crowd: Crowd, watch: Watch, verdicts: list[ClaimVerdict], began: float, preemptions: float
) -> Results:
    seconds = sorted(s for _, s in crowd.seen.latencies)
    runs = {
        "completed": crowd.seen.counts["completed"],
        "refused": dict(crowd.seen.refused),
        "tokens_per_s": crowd.seen.counts["tokens"] / (crowd.end - began),
        "preemptions": int(preemptions),
        "median_s": statistics.median(seconds),
        "p99_s": seconds[int(0.99 * len(seconds))],
        "memory": [
            (round(at - began), {role: round(mib, 1) for role, mib in found.items()})
            for at, found in watch.memory[::5]
        ],
        "rates": {str(k): v for k, v in watch.rates.items()},
        "walls": {str(k): v for k, v in watch.walls.items()},
        "errors": crowd.seen.errors[:10],
    }
    columns = {
        "requests": "{completed}",
        "tokens/s": "{tokens_per_s:.0f}",
        "preemptions": "{preemptions}",
        "median s": "{median_s:.2f}",
        "99% s": "{p99_s:.2f}",
    }
    return Results(runs, verdicts, [table("", [runs], columns)])


def _key(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}-key"}


def settings() -> dict[str, Any]:
    tenants = {
        name: {**limits, "api_keys": [hash_of_key(f"{name}-key")]}
        for name, limits in TENANTS.items()
    }
    return {"open_metrics": True, "engine": {"tenants": tenants}}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--clients", type=int, default=256)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--bad", type=int, default=0, metavar="N")
    args = options.parse_args()
    kv = str(args.clients * WANTED_PER_CLIENT // 4)
    log = tempfile.NamedTemporaryFile("w", suffix=".log")  # noqa: SIM115
    with (
        log,
        bundled_server(
            *("--dtype", "float32", "--kv-tokens", kv, "--log-format", "json"),
            settings=settings(),
            log=log,
        ) as server,
    ):
        began = monotonic()
        crowd, watch = asyncio.run(soak(server, args.clients, args.bad, args.seconds))
        asyncio.run(asyncio.sleep(1))
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        left = {name: server.metric(name) for name in names}
        preemptions = server.metric("num_preemptions_total")
        verdicts = [
            refused_verdict(crowd),
            whole_verdict(crowd, left),
            memory_verdict(watch, began, args.seconds),
            log_verdict(Path(log.name)),
        ]
    verdicts += bad_verdicts(watch) if args.bad else []
    tell(args, results(crowd, watch, verdicts, began, preemptions))
    for error in crowd.seen.errors[:10]:
        print(error, file=sys.stderr)
    return int(any(v.outcome == "missed" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
