"""How long does a server take to start, and to its first token?

    python -m lab.bench.start [--repeats 5] [--state FOLDER] [--json] [-- TARGET.gguf --drafter ...]

`penstock serve` with what is behind `--`, one start after the other: seconds from the command to
the line with its address, and to the first token of a stream that is asked for then. Medians. CPU
seconds are of all its processes, until the line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from statistics import median

import psutil

from lab.common.results import Results, parser, table, tell

PROMPT = "def quicksort(values):"


def first_token(url: str) -> None:
    """Ask for a stream, and wait for its first token."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "stream": True, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        next(line for line in answer if line.startswith(b"data: "))


def start(arguments: Sequence[str]) -> dict[str, float]:
    """Start a server once, and end it. Raises: RuntimeError."""
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = next((x for x in process.stdout if "serving on http" in x), None)
            if said is None:
                raise RuntimeError("the server did not start")
            serving_s = time.perf_counter() - began
            own = psutil.Process(process.pid)
            times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
            first_token(said.split()[-1])
            first_s = time.perf_counter() - began
        finally:
            process.terminate()
    cpu_s = sum(one.user + one.system for one in times)
    return {"serving_s": serving_s, "first_token_s": first_s, "cpu_s": cpu_s}


def main() -> int:
    ours = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--state", default="none", help="as of the server; none: nothing learned")
    args = options.parse_args(sys.argv[1:ours])
    theirs = ["--state", args.state, *sys.argv[ours + 1 :]]
    runs = [start(theirs) for _ in range(args.repeats)]
    row = {name: median(run[name] for run in runs) for name in runs[0]}
    names = {"serving, s": "serving_s", "first token, s": "first_token_s", "CPU, s": "cpu_s"}
    columns = {"starts": str(args.repeats)}
    columns |= {title: f"{{{name}:.2f}}" for title, name in names.items()}
    return tell(args, Results({"each": runs, **row}, tables=[table("a start", [row], columns)]))


if __name__ == "__main__":
    sys.exit(main())
