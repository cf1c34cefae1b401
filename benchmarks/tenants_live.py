"""A quiet tenant beside a greedy one, on `penstock serve` with the bundled family: real sockets,
streaming clients in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from penstock.zoo.registry import load_prompts

CASES = ((80, 1.0), (400, 1.0), (80, 10.0), (400, 10.0))
"""Greedy clients, and the weight of the quiet tenant, whose clients are four."""
QUIET = 4
_DOMAINS = ("instruction", "chat", "qa", "math")


@dataclass(frozen=True)
class Seconds:
    """Of warming up and of measuring."""

    warm_up: float
    measured: float


@contextmanager
def serving(weight: float) -> Iterator[int]:
    """`penstock serve` with the keys of two tenants; its port."""
    settings = {
        "open_metrics": True,
        "engine": {
            "tenants": {
                "quiet": {"weight": weight, "api_keys": ["quiet-key"]},
                "greedy": {"weight": 1.0, "api_keys": ["greedy-key"]},
            },
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tenants.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "penstock.cli", "serve", "--config", str(config)]
        server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if "serving on" in line:
                    yield int(line.rsplit(":", 1)[1])
                    break
            else:
                raise RuntimeError("the server did not start")
        finally:
            server.terminate()
            server.wait(60)


def load(port: int, seconds: Seconds, shift: int, **clients: int) -> dict[str, Any]:
    """Figures by tenant of so many clients of each."""
    prompts = [p.prompt for domain in _DOMAINS for p in load_prompts(domain)[:40]]
    given = {
        "seconds": seconds.measured,
        "warm_up": seconds.warm_up,
        "max_tokens": 64,
        "prompts": prompts[shift:] + prompts[:shift],
        "tenants": [{"name": n, "key": f"{n}-key", "clients": c} for n, c in clients.items()],
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tenants_load", "127.0.0.1", str(port)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def steps_taken(port: int) -> float:
    """Target steps since the start."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("penstock:target_steps_total")
    )


def measure(port: int, greedy: int, weight: float, seconds: Seconds, seed: int) -> dict[str, Any]:
    """The quiet tenant alone, then beside the greedy one, in one run on one server."""
    alone = load(port, seconds, 7 * seed, quiet=QUIET)["quiet"]
    before, started = steps_taken(port), time.perf_counter()
    both = load(port, seconds, 7 * seed, quiet=QUIET, greedy=greedy)
    step_s = (time.perf_counter() - started) / max(1.0, steps_taken(port) - before)
    quiet, other = both["quiet"], both["greedy"]
    made = quiet["tokens_per_s"] + other["tokens_per_s"]
    share = weight / (weight + 1.0)
    due = min(alone["tokens_per_s"], share * made)
    ttft_alone, ttft = (float(np.percentile(f["ttft_s"] or [1e9], 99)) for f in (alone, quiet))
    return {
        "alone_tokens_per_s": alone["tokens_per_s"],
        "quiet_tokens_per_s": quiet["tokens_per_s"],
        "greedy_tokens_per_s": other["tokens_per_s"],
        "of_what_is_due": quiet["tokens_per_s"] / max(due, 1e-9),
        "of_all_tokens": quiet["tokens_per_s"] / max(made, 1e-9),
        "ttft_p99_s": ttft,
        "step_s": step_s,
        "ttft_over_bar": ttft / (1.5 * ttft_alone / share + 2 * step_s),
    }
