"""Does a server that started on a busy machine serve as fast, in the end, as one that did not?

    python -m lab.bench.noisy_start [MODEL] [--drafter NAME=PATH] [--requests 32] [--pairs 1]
        [--json]

Step times are measured at the start, and drafters are used where they pay by them. A pair is a
server that starts on a quiet machine and one that starts in some noise. Both serve the same
requests, one after the other, greedily, and then 16 more in turns, which neither has seen: caches
and drafters remember texts. Where two quiet servers differ by more than the bar allows, a verdict
is not shown. Without MODEL: the bundled family, with `draft-tiny` as its drafter and longer
answers. On two cores a pair of each kind takes 3 minutes, with a model of 1.5 B 42 minutes.

quiet    no noise at all: what two equal servers differ by
loops    three busy loops, until the server is up
loading  three other servers load and measure at the same time, then end
waves    three busy loops for 10 of each 20 seconds, until twice as many requests are served
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from lab.bench.bundled_server import BundledServer, bundled_server
from lab.bench.real_prompts import PARTS, mixed, real_prompts
from lab.common.claims import ClaimVerdict, Control, bar
from lab.common.results import Results, parser, table, tell
from penstock.zoo.registry import DOMAINS, load_prompts

NUM_TOKENS, NUM_TOKENS_BUNDLED = 64, 256
NUM_COMPARED, NUM_LOOPS = 16, 3
WAVE_S = 10.0
BAR = 0.97
KINDS = ("quiet", "loops", "loading", "waves")
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Served:
    """A request's answer. drafted: its draft tokens."""

    num_tokens: int
    seconds: float
    drafted: int

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """Requests of the server that started in noise, its first ones and those that both served, and
    of the quiet one."""

    early: Sequence[Served]
    late: Sequence[Served]
    quiet: Sequence[Served]

    @property
    def ratio(self) -> float:
        return _rate(self.late) / _rate(self.quiet)


class Client:
    """Asks one server after the other for the same texts. is_real: of a real model, by chat."""

    def __init__(self, is_real: bool) -> None:
        if is_real:
            prompts = [p for part in PARTS for p in mixed(real_prompts(), part)]
            self.texts = [p.message or p.text or "" for p in prompts]
        else:
            by_domain = [[p.prompt for p in load_prompts(d)] for d in DOMAINS]
            self.texts = [text for texts in zip(*by_domain, strict=False) for text in texts]
        self._is_real = is_real
        self._num_tokens = NUM_TOKENS if is_real else NUM_TOKENS_BUNDLED

    def ask(self, server: BundledServer, number: int) -> Served:
        """Raises: httpx.HTTPError."""
        text = self.texts[number]
        body = {"max_tokens": self._num_tokens, "temperature": 0, "ignore_eos": True}
        if self._is_real:
            path, body = (
                "chat/completions",
                body | {"messages": [{"role": "user", "content": text}]},
            )
        else:
            path, body = "completions", body | {"prompt": text}
        began = time.perf_counter()
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=600).raise_for_status()
        seconds = time.perf_counter() - began
        usage = answer.json()["usage"]
        drafted = (usage.get("speculation") or {}).get("num_draft_tokens", 0)
        return Served(usage["completion_tokens"], seconds, drafted)


# --- noise --------------------------------------------------------------------------------------


def _spin(busy_s: float, idle_s: float) -> None:
    """Busy and idle in turns; without `idle_s` busy for good."""
    while True:
        until = time.perf_counter() + busy_s
        while time.perf_counter() < until:
            pass
        time.sleep(idle_s)


@contextmanager
def loops(idle_s: float = 0.0) -> Iterator[None]:
    """Busy loops until the end of the block."""
    processes = [
        _SPAWN.Process(target=_spin, args=(WAVE_S, idle_s), daemon=True) for _ in range(NUM_LOOPS)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


@contextmanager
def loading(arguments: Sequence[str]) -> Iterator[None]:
    """Other servers that start; each ends once it is up, or with the block."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", *arguments]
    servers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(NUM_LOOPS)
    ]

    def end(server: subprocess.Popen[str]) -> None:
        assert server.stdout is not None
        for line in server.stdout:
            if "serving on http" in line:
                break
        server.terminate()
        server.wait()

    threads = [threading.Thread(target=end, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


# --- runs ---------------------------------------------------------------------------------------


def run(
    kind: str,
    arguments: Sequence[str],
    client: Client,
    num_requests: int,
    progress: Progress,
) -> Pair:
    """Start a server on a quiet machine and one in noise, let both serve, and compare them."""
    num = 2 * num_requests if kind == "waves" else num_requests
    task = progress.add_task(kind, total=2 * (num + NUM_COMPARED))

    def ask(server: BundledServer, number: int) -> Served:
        progress.advance(task)
        return client.ask(server, number)

    starts = {"loops": loops, "loading": lambda: loading(arguments)}
    at_start = starts.get(kind, nullcontext)
    all_along = loops(WAVE_S) if kind == "waves" else nullcontext()
    with ExitStack() as stack:
        quiet = stack.enter_context(bundled_server(*arguments))
        for number in range(num):
            ask(quiet, number)
        with all_along:
            with at_start():
                noisy = stack.enter_context(bundled_server(*arguments))
            early = [ask(noisy, number) for number in range(num)]
        served: dict[str, list[Served]] = {noisy.url: [], quiet.url: []}
        for number in range(num, num + NUM_COMPARED):
            for server in (noisy, quiet) if number % 2 else (quiet, noisy):
                served[server.url].append(ask(server, number))
    return Pair(early[:8], served[noisy.url], served[quiet.url])


def _rate(served: Sequence[Served]) -> float:
    return sum(s.num_tokens for s in served) / sum(s.seconds for s in served)


def results(pairs: Mapping[str, Sequence[Pair]]) -> Results:
    """By kind of noise, over all its pairs."""
    rows = [_row(kind, of_kind) for kind, of_kind in pairs.items()]
    shown = table(
        "Tokens a second of a server that started in noise, and of one that did not",
        rows,
        {
            "noise": "{kind}",
            "its first 8 requests": "{early:.1f}",
            "the compared ones": "{late:.1f}",
            "of the quiet one": "{quiet:.1f}",
            "ratio": "{ratio:.3f}",
            "by pair": "{by_pair}",
            "median by request": "{median:.3f}",
            "drafted a token": "{drafted:.2f}",
        },
    )
    control = next((row["ratio"] for row in rows if row["kind"] == "quiet"), None)
    verdicts = [_verdict(row, control) for row in rows if row["kind"] != "quiet"]
    return Results(rows, verdicts, [shown])


def _row(kind: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    late = [served for pair in pairs for served in pair.late]
    quiet = [served for pair in pairs for served in pair.quiet]
    return {
        "kind": kind,
        "early": _rate([served for pair in pairs for served in pair.early]),
        "late": _rate(late),
        "quiet": _rate(quiet),
        "ratio": _rate(late) / _rate(quiet),
        "by_pair": ", ".join(f"{pair.ratio:.3f}" for pair in pairs),
        "median": statistics.median(a.rate / b.rate for a, b in zip(late, quiet, strict=True)),
        "drafted": sum(s.drafted for s in late) / sum(s.num_tokens for s in late),
    }


def _verdict(row: Mapping[str, Any], control: float | None) -> ClaimVerdict:
    claim = f"{row['kind']}: at least {BAR} of a quiet start"
    found = bar(claim, f"{row['ratio']:.3f}", row["ratio"] >= BAR)
    if control is None:
        return found
    is_shown = BAR <= control <= 1 / BAR
    return replace(
        found,
        outcome=found.outcome if is_shown else "not shown",
        control=Control("two quiet starts", f"{control:.3f}", "met" if is_shown else "missed"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args_parser = parser(__doc__)
    args_parser.add_argument("model", nargs="?", help="a folder or GGUF file")
    args_parser.add_argument("--drafter", action="append", default=[], metavar="NAME=PATH")
    args_parser.add_argument("--requests", type=int, default=32, help="before the comparison")
    args_parser.add_argument("--pairs", type=int, default=1, help="of servers, for each noise")
    args_parser.add_argument("--kinds", default=",".join(KINDS), help="of noise, by commas")
    args = args_parser.parse_args(argv)
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        args_parser.error(f"no noise {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    drafters = args.drafter or ([] if args.model else ["draft-tiny"])
    arguments = [*([args.model] if args.model else [])]
    arguments += itertools.chain.from_iterable(("--drafter", d) for d in drafters)
    client = Client(args.model is not None)
    if args.pairs < 1:
        args_parser.error(f"--pairs {args.pairs}: at least 1")
    most = (len(client.texts) - NUM_COMPARED) // 2
    if not 8 <= args.requests <= most:
        args_parser.error(f"--requests {args.requests}: from 8 to {most}, so that none comes twice")
    pairs: dict[str, list[Pair]] = {kind: [] for kind in kinds}
    with Progress(console=Console(stderr=True)) as progress:
        for _ in range(args.pairs):
            for kind in kinds:
                pairs[kind].append(run(kind, arguments, client, args.requests, progress))
    return tell(args, results(pairs))


if __name__ == "__main__":
    sys.exit(main())
