"""Does a server that started on a busy machine serve as fast, in the end, as one that did not?

    python -m benchmarks.noisy_start [MODEL] [--drafter NAME=PATH] [--requests 32] [--json]

Step times are measured at the start, and drafters are used where they pay by them. For each kind of
noise one server starts on a quiet machine, and another one in that noise. Each serves the same
requests, one after the other, greedily; then both serve 16 more in turns, which neither has seen:
caches and drafters remember texts. Without MODEL: the bundled family, with `draft-tiny` as its
drafter and longer answers. About 30 minutes with a model of 1.5 B on two cores.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import httpx
from benchmarks.bundled_server import BundledServer, bundled_server
from benchmarks.real_prompts import PARTS, mixed, real_prompts
from rich.console import Console
from rich.progress import Progress, TaskID

from penstock.lab.bench import Results, parser, table, tell
from penstock.lab.claims import bar
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
class Outcome:
    """One kind of noise. early, late: tokens a second of the server that started in it, over its
    first eight requests and over those that both served; ratios: over the quiet one's, by request;
    drafted: its draft tokens for each token of those."""

    kind: str
    early: float
    late: float
    quiet: float
    ratios: tuple[float, ...]
    drafted: float

    @property
    def ratio(self) -> float:
        return self.late / self.quiet


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
) -> Outcome:
    """Start a server on a quiet machine and one in noise, let both serve, and compare them."""
    num = 2 * num_requests if kind == "waves" else num_requests
    task = progress.add_task(kind, total=2 * (num + NUM_COMPARED))
    with ExitStack() as stack:
        quiet = stack.enter_context(bundled_server(*arguments))
        for number in range(num):
            client.ask(quiet, number)
            progress.advance(task)
        server, before = _start_in_noise(kind, arguments, client, num, stack, progress, task)
        pairs = []
        for number in range(num, num + NUM_COMPARED):
            both = (server, quiet) if number % 2 else (quiet, server)
            answers = {s.url: client.ask(s, number) for s in both}
            pairs.append((answers[server.url], answers[quiet.url]))
            progress.advance(task, 2)
    return Outcome(
        kind,
        _rate(before[:8]),
        _rate([own for own, _ in pairs]),
        _rate([other for _, other in pairs]),
        tuple(own.rate / other.rate for own, other in pairs),
        sum(own.drafted for own, _ in pairs) / sum(own.num_tokens for own, _ in pairs),
    )


def _start_in_noise(
    kind: str,
    arguments: Sequence[str],
    client: Client,
    num: int,
    stack: ExitStack,
    progress: Progress,
    task: TaskID,
) -> tuple[BundledServer, list[Served]]:
    """A server, and the requests that it has served."""
    with ExitStack() as noise:
        if kind == "waves":
            noise.enter_context(loops(WAVE_S))
        with ExitStack() as at_start:
            if kind == "loops":
                at_start.enter_context(loops())
            elif kind == "loading":
                at_start.enter_context(loading(arguments))
            server = stack.enter_context(bundled_server(*arguments))
        before = []
        for number in range(num):
            before.append(client.ask(server, number))
            progress.advance(task)
    return server, before


def _rate(served: Sequence[Served]) -> float:
    return sum(s.num_tokens for s in served) / sum(s.seconds for s in served)


def results(outcomes: Sequence[Outcome]) -> Results:
    rows = [asdict(o) | {"ratio": o.ratio, "median": statistics.median(o.ratios)} for o in outcomes]
    shown = table(
        "Tokens a second of a server that started in noise, and of one that did not",
        rows,
        {
            "noise": "{kind}",
            "its first 8 requests": "{early:.1f}",
            "the compared ones": "{late:.1f}",
            "of the quiet one": "{quiet:.1f}",
            "ratio": "{ratio:.3f}",
            "median by request": "{median:.3f}",
            "drafted a token": "{drafted:.2f}",
        },
    )
    verdicts = [
        bar(f"{o.kind}: at least {BAR} of a quiet start", f"{o.ratio:.3f}", o.ratio >= BAR)
        for o in outcomes
    ]
    return Results(rows, verdicts, [shown])


def main(argv: Sequence[str] | None = None) -> int:
    args_parser = parser(__doc__)
    args_parser.add_argument("model", nargs="?", help="a folder or GGUF file")
    args_parser.add_argument("--drafter", action="append", default=[], metavar="NAME=PATH")
    args_parser.add_argument("--requests", type=int, default=32, help="before the comparison")
    args_parser.add_argument("--kinds", default=",".join(KINDS), help="of noise, by commas")
    args = args_parser.parse_args(argv)
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        args_parser.error(f"no noise {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    drafters = args.drafter or ([] if args.model else ["draft-tiny"])
    arguments = [*([args.model] if args.model else [])]
    arguments += itertools.chain.from_iterable(("--drafter", d) for d in drafters)
    client = Client(args.model is not None)
    most = (len(client.texts) - NUM_COMPARED) // 2
    if not 8 <= args.requests <= most:
        args_parser.error(f"--requests {args.requests}: from 8 to {most}, so that none comes twice")
    with Progress(console=Console(stderr=True)) as progress:
        outcomes = [run(kind, arguments, client, args.requests, progress) for kind in kinds]
    return tell(args, results(outcomes))


if __name__ == "__main__":
    sys.exit(main())
