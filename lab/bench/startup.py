"""From `penstock serve` to the first token, and what it takes of processor and memory.

    python -m lab.bench.startup [MODEL] [--repeats 3] [--drafter NAME=PATH] [--json]

Starts the server so many times (the bundled family without MODEL; no drafter without `--drafter`)
and streams one short chat; the first run, which reads files from disk, is not counted. Processor
seconds and the most memory that was resident are each process's own, until the first token.
Memory is read from /proc (Linux).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from lab.bench.bundled_server import bundled_server
from lab.common.results import Results, parser, table, tell

CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "temperature": 0,
    "stream": True,
}


@dataclass(frozen=True)
class ProcessUse:
    """Seconds of processor time, in the program and in the system, and the most memory."""

    role: str
    user_s: float
    system_s: float
    peak_mib: float


@dataclass(frozen=True)
class Start:
    """serving_s: until the address is announced; first_token_s: until a chat's first text."""

    serving_s: float
    first_token_s: float
    processes: tuple[ProcessUse, ...]


def start(arguments: Sequence[str]) -> Start:
    """One server, from nothing. Raises: RuntimeError, httpx.HTTPError."""
    started_at = time.perf_counter()
    with bundled_server(*arguments) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=CHAT, timeout=300
        ) as stream:
            stream.raise_for_status()
            next(line for line in stream.iter_lines() if has_text(line))
            first_token_s = time.perf_counter() - started_at
            engine = server.engine_pid()
            front = psutil.Process(server.process.pid)
            uses = tuple(
                use(p, "front" if p == front else "engine" if p.pid == engine else "other")
                for p in (front, *front.children(recursive=True))
            )
        return Start(server.start_s, first_token_s, uses)


def has_text(line: str) -> bool:
    """Whether an event of the stream brings text."""
    if not line.startswith("data: {"):
        return False
    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
    return bool(choice["delta"].get("content"))


def use(process: psutil.Process, role: str) -> ProcessUse:
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    times = process.cpu_times()
    return ProcessUse(role, times.user, times.system, peak_kib / 1024)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", help="what `penstock serve` takes")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--drafter", action="append", default=[])
    args = made.parse_args()
    arguments = [args.model] if args.model else []
    arguments += [f"--drafter={d}" for d in args.drafter] or ["--no-speculation"]
    console = Console(stderr=True)
    starts = []
    for i in range(args.repeats + 1):
        one = start(arguments)
        console.print(f"start {i} of {args.repeats}: first token after {one.first_token_s:.1f} s")
        starts += [one] if i else []
    median = sorted(starts, key=lambda s: s.first_token_s)[len(starts) // 2]
    spans = [
        {
            "name": name,
            "median": statistics.median(getattr(s, key) for s in starts),
            "least": min(getattr(s, key) for s in starts),
            "most": max(getattr(s, key) for s in starts),
        }
        for name, key in (("serving", "serving_s"), ("first token", "first_token_s"))
    ]
    tables = [
        table(
            "Seconds since `penstock serve`",
            spans,
            {"": "{name}", "median": "{median:.2f}", "least": "{least:.2f}", "most": "{most:.2f}"},
        ),
        table(
            "Its processes until the first token, in the run of the median",
            [asdict(p) for p in median.processes],
            {
                "": "{role}",
                "processor s": "{user_s:.2f}",
                "system s": "{system_s:.2f}",
                "peak MiB": "{peak_mib:.0f}",
            },
        ),
    ]
    return tell(args, Results([asdict(s) for s in starts], tables=tables))


if __name__ == "__main__":
    sys.exit(main())
