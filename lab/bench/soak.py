"""Does a server that is short of memory serve hundreds of streams whole, in flat memory, also
beside bad clients?

    python -m lab.bench.soak [--clients 256] [--seconds 600] [--bad 32] [--json]

`penstock serve` on the bundled family in float32, with a quarter of the KV memory that the clients
want, keys, tenants with limits that are met, JSON logs, settings read again every minute. Every
client asks, streams and asks again, and waits as a 429 says; one in eight asks for JSON by a
schema. A (prompt, seed) pair has one text, so a lost, doubled or misplaced token shows.

--bad N: stretches take turns: no others; N clients that read a byte a second and N that leave at
any time, of a tenant with a small weight; 2 N good clients of that tenant, whose tokens are its
fair share. Rates are tokens over the server's processor time. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from lab.bench.bundled_server import BundledServer, bundled_server
from lab.bench.soak_clients import Crowd
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, ResultTable, parser, table, tell
from penstock.config import hash_of_key

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
SETTLE_S, STRETCH_S = 8.0, 18.0
ALONE, BAD, GOOD = "alone", "bad", "good"
"""Who else is there in a stretch."""
MOST_CHANGE = 0.02
MOST_SLOWER = 0.10


@dataclass(frozen=True)
class Stretch:
    """A time with one kind of others. rates: tokens of each tenant for each second of the server's
    processor time; wall: tokens a second of the good tenants; most_mib: memory."""

    kind: str
    rates: dict[str, float]
    wall: float
    most_mib: float

    @property
    def good(self) -> float:
        return sum(self.rates[name] for name in SHARES)


@dataclass
class Watch:
    """What is seen of the server from outside. memory: (time, MiB)."""

    server: BundledServer
    memory: list[tuple[float, float]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    async def weigh(self) -> None:
        while True:
            self.memory.append((monotonic(), await asyncio.to_thread(self.server.resident_mib)))
            await asyncio.sleep(2)

    async def reload(self) -> None:
        while True:
            await asyncio.sleep(60)
            self.server.reload(settings())

    async def stretch(self, kind: str) -> None:
        """One more, measured after it has settled."""

        async def tokens() -> dict[str, float]:
            return await asyncio.to_thread(
                self.server.by_label, "generation_tokens_total", "tenant"
            )

        await asyncio.sleep(SETTLE_S)
        before, begun, cpu = await tokens(), monotonic(), self.server.cpu_seconds()
        await asyncio.sleep(STRETCH_S)
        after, end = await tokens(), monotonic()
        cpu = self.server.cpu_seconds() - cpu
        made = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in TENANTS}
        rates = {name: num / cpu for name, num in made.items()}
        wall = sum(made[name] for name in SHARES) / (end - begun)
        most = max(self.memory_between(begun, end))
        self.stretches.append(Stretch(kind, rates, wall, most))

    def memory_between(self, begin: float, end: float) -> list[float]:
        return [mib for at, mib in self.memory if begin <= at < end]

    def stretches_of(self, kind: str) -> list[Stretch]:
        return [s for s in self.stretches if s.kind == kind]


async def soak(
    server: BundledServer, clients: int, bad: int, seconds: float
) -> tuple[Crowd, Watch]:
    """The clients at work for so long."""
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    async with httpx.AsyncClient(headers={"Authorization": "Bearer app-key"}, timeout=60) as http:
        (model,) = (await http.get(f"{server.url}/v1/models")).json()["data"]
    now = monotonic()
    crowd = Crowd(address, model["drafters"], now + seconds / WARM_UP, now + seconds)
    watch = Watch(server)
    watching = [asyncio.create_task(watch.weigh()), asyncio.create_task(watch.reload())]
    names = [name for name, share in SHARES.items() for _ in range(round(share * clients))]
    good = [asyncio.create_task(crowd.good(n, f"{t}-key")) for n, t in enumerate(names)]
    if bad:
        await asyncio.sleep(seconds / WARM_UP)
        kinds = (ALONE, BAD, GOOD)
        while monotonic() + len(kinds) * (SETTLE_S + STRETCH_S) < crowd.end:
            for kind in kinds[:: -1 if len(watch.stretches) % (2 * len(kinds)) else 1]:
                tasks = [asyncio.create_task(t) for t in _others(crowd, bad, kind)]
                await watch.stretch(kind)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*good)
    for task in watching:
        task.cancel()
    return crowd, watch


def _others(crowd: Crowd, num: int, kind: str) -> list[Any]:
    """What they do. Numbers of good ones are such that none of them asks for JSON."""
    if kind == GOOD:
        return [crowd.good(8 * n + 1, "strangers-key") for n in range(2 * num)]
    bodies = (crowd.sip, crowd.leave) if kind == BAD else ()
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
    pairs = list(zip(watch.stretches_of(BAD), watch.stretches_of(ALONE), strict=True))
    ratios = {
        name: statistics.median(b.rates[name] / a.rates[name] for b, a in pairs if a.rates[name])
        for name in SHARES
    }
    slowest = min(ratios, key=lambda name: ratios[name])
    rates = (
        f"{_slower(watch, BAD, ALONE)}, of {slowest} alone {100 * (ratios[slowest] - 1):+.1f}%; "
        f"beside as many of that tenant that are not bad {_slower(watch, GOOD, ALONE)}; bad over "
        f"those {_slower(watch, BAD, GOOD)}"
    )
    most = {kind: max(s.most_mib for s in watch.stretches_of(kind)) for kind in (ALONE, BAD)}
    memory = f"at most {most[BAD]:.0f} MiB with them, {most[ALONE]:.0f} without"
    return [
        bar("nobody else slower by 10%", rates, ratios[slowest] >= 1 - MOST_SLOWER),
        bar("buffers bounded", memory, most[BAD] / most[ALONE] - 1 <= 0.1),
    ]


def _slower(watch: Watch, one: str, other: str) -> str:
    """How much more the good tenants get in stretches of one kind, as it is told."""
    pairs = list(zip(watch.stretches_of(one), watch.stretches_of(other), strict=True))
    changes = sorted(100 * (a.good / b.good - 1) for a, b in pairs)
    walls = statistics.median(100 * (a.wall / b.wall - 1) for a, b in pairs)
    return (
        f"{statistics.median(changes):+.1f}% (from {changes[0]:+.1f} to {changes[-1]:+.1f}; by the "
        f"clock {walls:+.1f})"
    )


def others_table(watch: Watch) -> ResultTable:
    """What each kind of stretch came to."""
    rows = [
        {
            "kind": kind,
            "good": statistics.median(s.good for s in watch.stretches_of(kind)),
            "others": statistics.median(s.rates["strangers"] for s in watch.stretches_of(kind)),
            "wall": statistics.median(s.wall for s in watch.stretches_of(kind)),
        }
        for kind in (ALONE, BAD, GOOD)
    ]
    columns = {
        "others": "{kind}",
        "good tenants' tokens a second of processor time": "{good:.0f}",
        "the others'": "{others:.0f}",
        "good tenants' by the clock": "{wall:.0f}",
    }
    return table("Medians of the stretches", rows, columns)


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
        "memory": [(round(at - began), round(mib, 1)) for at, mib in watch.memory[::5]],
        "stretches": [asdict(s) for s in watch.stretches],
        "errors": crowd.seen.errors[:10],
    }
    columns = {
        "requests": "{completed}",
        "tokens/s": "{tokens_per_s:.0f}",
        "preemptions": "{preemptions}",
        "median s": "{median_s:.2f}",
        "99% s": "{p99_s:.2f}",
    }
    tables = [table("", [runs], columns)]
    return Results(runs, verdicts, tables + ([others_table(watch)] if watch.stretches else []))


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
            *("--dtype", "float32", "--kv-tokens", kv, "--set", "log_format=json"),
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
