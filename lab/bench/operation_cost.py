"""What it costs to be operable: a row for each thing that an operator may switch on.

    python -m lab.bench.operation_cost [--clients 8] [--rounds 12] [--seconds 1] [--tokens 128]
        [--only NAME ...] [--target MODEL] [--quick] [--json] [--result FILE]

A server for each row, on the same engine, of which one works at a time: in turns each gets the same
requests of so many clients, half of them streamed, one after the other for so many seconds. Two
servers with nothing on stand first and last in every round; what lies between is over the mean of
the two, and one over the other says how far two equal servers differ. Medians of the rounds.

Throughput is by the clock, and has in it what the clients cost on the same processor. The time of
the server's processes for each token is beside it: what costs throughput and no processor time is
a choice of who runs, not work. Half of the clients are of one tenant and half of another where
there are tenants; "weights" gives the second twice the weight of the first, which slows the first
on purpose: it stands alone and is not in "all of it".
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from lab.bench.bundled_server import BundledServer, bundled_server
from lab.bench.soak_clients import posted
from lab.common.claims import ClaimVerdict, bar
from lab.common.results import Results, parser, table, tell
from penstock.config.tenants import hash_of_key
from penstock.zoo.registry import DOMAINS, load_prompts

TENANTS = ("north", "south")
PLENTY = 10**9
LIMITS: dict[str, Any] = {
    "requests_per_minute": PLENTY,
    "tokens_per_minute": PLENTY,
    "max_running_requests": 64,
    "max_waiting_requests": 64,
    "max_prompt_tokens": 4096,
    "max_output_tokens": 4096,
    "allowed_drafters": ["none"],
}
OFF, AGAIN, ALL = "off", "off again", "all of it"
MOST_COST = 0.03


class Row(NamedTuple):
    """A server's settings, and what its clients do.

    weights: of the two tenants, if there are any; limits: of each of them
    """

    settings: dict[str, Any] = {}  # noqa: RUF012
    weights: tuple[float, float] | None = None
    limits: dict[str, Any] = {}  # noqa: RUF012
    has_ids: bool = False
    has_timeouts: bool = False
    reads_metrics: bool = False

    def config(self, collector: str) -> dict[str, Any]:
        """What the server is started with."""
        made = {k: collector if v == "COLLECTOR" else v for k, v in self.settings.items()}
        if self.weights is None:
            return made
        tenants = {
            name: {"weight": weight, "api_keys": [hash_of_key(f"{name}-key")], **self.limits}
            for name, weight in zip(TENANTS, self.weights, strict=True)
        }
        # The tokens of all rows are counted alike.
        return {**made, "open_metrics": True, "engine": {"tenants": tenants}}


LOGS = {"log_format": "json"}
DEADLINES = {"request_timeout_s": 600.0, "max_wait_s": 300.0}
TRACES = {"otlp_traces_endpoint": "COLLECTOR"}
EVEN = (1.0, 1.0)
ROWS = {
    OFF: Row(),
    "keys of two tenants": Row(weights=EVEN),
    "keys and every limit": Row(weights=EVEN, limits=LIMITS),
    "JSON logs, request ids of clients": Row(LOGS, has_ids=True),
    "metrics, read each second": Row(reads_metrics=True),
    "deadlines": Row(DEADLINES, has_timeouts=True),
    "traces, sent to a collector": Row(TRACES),
    ALL: Row({**LOGS, **DEADLINES, **TRACES}, EVEN, LIMITS, True, True, True),
    "weights 1 and 2": Row(weights=(1.0, 2.0)),
    AGAIN: Row(),
}


class Sample(NamedTuple):
    """tokens_per_s: by the clock. front_us, engine_us: processor time for each token of the process
    that speaks HTTP, and of the engine's."""

    tokens_per_s: float
    front_us: float
    engine_us: float


@contextmanager
def collector() -> Iterator[str]:
    """One that takes OpenTelemetry's traces and looks at none. Returns its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        server.shutdown()


async def ask_on(row: Row, server: BundledServer, number: int, num_tokens: int) -> None:
    """One client's requests, until it is cancelled. Raises: RuntimeError for any other answer."""
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    prompts = load_prompts(DOMAINS[number % len(DOMAINS)])
    for turn in itertools.count(number):
        body: dict[str, Any] = {
            "prompt": prompts[turn % len(prompts)].prompt, "max_tokens": num_tokens,
            "seed": number, "ignore_eos": True, "speculation": {"drafter": "none"},
            "stream": turn % 2 == 0,
        }  # fmt: skip
        if row.has_timeouts:
            body["timeout"] = 500.0
        request_id = f"client-{number}-{turn}" if row.has_ids else None
        key = f"{TENANTS[number % len(TENANTS)]}-key"
        async with posted(address, key, body, request_id=request_id) as (reader, _):
            begun = await reader.readline()
            if begun.split()[1:2] != [b"200"]:
                raise RuntimeError(f"{begun!r}: {(await reader.read())[-300:]!r}")
            while await reader.read(65536):
                pass


async def read_metrics(server: BundledServer) -> None:
    """As Prometheus does, but more often; until it is cancelled."""
    async with httpx.AsyncClient(timeout=30) as client:
        while True:
            (await client.get(f"{server.url}/metrics")).raise_for_status()
            await asyncio.sleep(1.0)


async def sample(row: Row, server: BundledServer, args: argparse.Namespace) -> Sample:
    """Of a server at work. Raises: RuntimeError if a client was refused."""
    work = [ask_on(row, server, number, args.tokens) for number in range(args.clients)]
    if row.reads_metrics:
        work.append(read_metrics(server))
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.sleep(0.3)  # all are at work by then
    before, cpu, began = await _made(server), cpu_seconds(server), time.perf_counter()
    await asyncio.sleep(args.seconds)
    made, used, end = await _made(server) - before, cpu_seconds(server), time.perf_counter()
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    # What was in flight is gone before the next server's turn.
    await asyncio.sleep(0.2)
    front, engine = (1e6 * (u - c) / made for u, c in zip(used, cpu, strict=True))
    return Sample(made / (end - began), front, engine)


async def _made(server: BundledServer) -> float:
    return await asyncio.to_thread(server.metric, "generation_tokens_total")


def cpu_seconds(server: BundledServer) -> tuple[float, float]:
    """Of the process that speaks HTTP and of those below it until now, in the program and in the
    system."""
    front = psutil.Process(server.process.pid)
    engine = sum(sum(one.cpu_times()[:2]) for one in front.children(recursive=True))
    return sum(front.cpu_times()[:2]), engine


def measure(args: argparse.Namespace) -> dict[str, Any]:
    common = ["--kv-tokens", str(args.clients * 1024)]
    if args.target is not None:
        common += [str(args.target)]
    names = [name for name in ROWS if name in (OFF, AGAIN) or name in (args.only or ROWS)]
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    with ExitStack() as stack:
        log = stack.enter_context(open("/dev/null", "w"))
        endpoint = stack.enter_context(collector())
        servers = {
            name: stack.enter_context(
                bundled_server(*common, settings=ROWS[name].config(endpoint), log=log)
            )
            for name in names
        }
        for turn in range(args.rounds + 1):
            # Backwards in every second round: a machine that slows down favours no row.
            for name in names[:: -1 if turn % 2 else 1]:
                one = asyncio.run(sample(ROWS[name], servers[name], args))
                if turn:  # the first round warms up
                    samples[name].append(one)
    return {"clients": args.clients, "rows": [_row(name, samples) for name in names]}


def _row(name: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians of a row's ratios over the two that have nothing on."""
    kept = [Sample(*map(statistics.mean, zip(*pair, strict=True)))
            for pair in zip(samples[OFF], samples[AGAIN], strict=True)]  # fmt: skip
    over = samples[OFF] if name in (OFF, AGAIN) else kept
    pairs = list(zip(samples[name], over, strict=True))
    ratios = sorted(one.tokens_per_s / off.tokens_per_s for one, off in pairs)
    return {
        "name": name,
        "tokens_per_s": statistics.median(one.tokens_per_s for one in samples[name]),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
        "front_us": statistics.median(one.front_us for one in samples[name]),
        "front_more": statistics.median(one.front_us - off.front_us for one, off in pairs),
        "engine_us": statistics.median(one.engine_us for one in samples[name]),
        "engine_more": statistics.median(one.engine_us - off.engine_us for one, off in pairs),
        "samples": samples[name],
    }


def verdicts(run: dict[str, Any]) -> list[ClaimVerdict]:
    found = [row for row in run["rows"] if row["name"] == ALL]
    return [
        bar(
            f"all of it costs at most 3% of throughput at {run['clients']} clients",
            f"{row['ratio']:.3f} by the clock",
            row["ratio"] >= 1 - MOST_COST,
        )
        for row in found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="four rounds")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--seconds", type=float, default=1.0, help="of each row in a round")
    options.add_argument("--tokens", type=int, default=128, help="of each output")
    options.add_argument("--only", nargs="+", choices=sorted(ROWS), metavar="NAME")
    options.add_argument("--target", type=Path)
    args = options.parse_args(arguments)
    if args.quick:
        args.rounds = 4
    run = measure(args)
    columns = {
        "on": "{name}", "tokens/s": "{tokens_per_s:.0f}", "over off": "{ratio:.3f}",
        "quartiles": "{low:.3f}–{high:.3f}",
        "µs a token of the HTTP process": "{front_us:.0f} ({front_more:+.0f})",
        "of the engine": "{engine_us:.0f} ({engine_more:+.0f})",
    }  # fmt: skip
    title = f"{args.clients} clients, outputs of {args.tokens} tokens, {args.rounds} rounds"
    return tell(args, Results(run, verdicts(run), [table(title, run["rows"], columns)]))


if __name__ == "__main__":
    sys.exit(main())
