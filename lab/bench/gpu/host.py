"""What the host does in a turn of the loop beside a GPU, and what of it is hidden, without a GPU.

    python -m lab.bench.gpu.host [--target-ms 4] [--draft-ms 1.4] [--json]

The engine runs as in `lab.bench.gpu --items loop`, but a graph is carried out once, and from
then on it takes the time that it is told: none, so that what is left of a turn is the host's work;
or so many milliseconds behind what was started before it, as on a device. Copies and launches, a
few tens of microseconds in all, are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lab.bench.gpu.loop import DRAFTER, LoopSpec, load, run_pass
from penstock.engine.build import Engine
from penstock.engine.gpu import graphs, rounds
from penstock.engine.models import random as random_models

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target-ms", type=float, default=4.0, help="of a target step (4)")
    parser.add_argument("--draft-ms", type=float, default=1.4, help="of a drafting loop (1.4)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if not 0 < options.target_ms < 1e4 or not 0 <= options.draft_ms < 1e4:
        parser.error("--target-ms and --draft-ms are milliseconds, between 0 and 10000")
    torch.set_num_threads(1)
    random_models._shapes = lambda: {"tiny": TINY}
    device = Device(options.target_ms / 1e3, options.draft_ms / 1e3)
    rows = [row(batch, k, device) for batch in (1, 16, 64) for k in (0, 4)]
    if options.json:
        print(json.dumps({"device": dataclasses.asdict(device), "rows": rows}))
        return 0
    print("batch  drafted  host, ms a turn [quartiles]  device, ms  idle  idle with rounds ahead")
    for r in rows:
        times = f"{r['ms']:.2f} [{r['low_ms']:.2f}, {r['high_ms']:.2f}]"
        print(
            f"{r['batch']:5d}  {r['num_drafted']:7d}  {times:27s}  {r['device_ms']:10.2f}  "
            f"{r['idle']:4.0%}  {r['idle_ahead']:.0%}"
        )
    return 0


@dataclass(frozen=True, slots=True)
class Device:
    """Seconds of a target step and of a drafting loop."""

    target: float
    draft: float


def row(batch: int, num_drafted: int, device: Device, passes: int = 5) -> dict[str, float]:
    """The times of a turn at a batch size and draft length."""
    cpu = torch.device("cpu")
    spec = LoopSpec("tiny", "tiny", cpu, torch.float32, "packed", batch, 200, 48, 0.7)
    engine = load(spec)
    busy = device.target + device.draft * (num_drafted > 0)

    def turns(*, ahead: bool, device: Device) -> list[float]:
        engine.executor.runs_ahead = ahead
        with _pretended(engine, device):
            run_pass(engine, spec, num_drafted)
            return [s for _ in range(passes) for s in run_pass(engine, spec, num_drafted)[1]]

    low, median, high = statistics.quantiles(turns(ahead=True, device=Device(0.0, 0.0)), n=4)
    waiting, ahead = (statistics.median(turns(ahead=a, device=device)) for a in (False, True))
    return {
        "batch": batch,
        "num_drafted": num_drafted,
        "ms": median * 1e3,
        "low_ms": low * 1e3,
        "high_ms": high * 1e3,
        "device_ms": busy * 1e3,
        "idle": max(0.0, 1 - busy / waiting),
        "idle_ahead": max(0.0, 1 - busy / ahead),
    }


@contextmanager
def _pretended(engine: Engine, device: Device) -> Iterator[None]:
    """Graphs that are carried out once, and answers that come when the device, which does one
    thing after the other, would be done."""
    replay, made, wait = graphs.CudaGraph.replay, rounds.Answer.__init__, rounds.Answer.wait
    drafter = engine.executor.drafters[DRAFTER].runner
    carried_out: set[graphs.CudaGraph] = set()
    done_at: dict[rounds.Answer, float] = {}
    free_at = 0.0

    def once(self: graphs.CudaGraph) -> None:
        nonlocal free_at
        if self not in carried_out:
            carried_out.add(self)
            replay(self)
        seconds = device.draft if self in drafter.graphs else device.target
        free_at = max(free_at, time.perf_counter()) + seconds

    def make(self: rounds.Answer, *args: Any) -> None:
        made(self, *args)
        done_at[self] = free_at

    def wait_for(self: rounds.Answer) -> list[int]:
        until = done_at.pop(self)
        while time.perf_counter() < until:
            pass
        return wait(self)

    patched = ((graphs.CudaGraph, "replay", once), (rounds.Answer, "__init__", make))
    for kind, name, instead in (*patched, (rounds.Answer, "wait", wait_for)):
        setattr(kind, name, instead)
    try:
        yield
    finally:
        for kind, name, before in (
            (graphs.CudaGraph, "replay", replay),
            (rounds.Answer, "__init__", made),
            (rounds.Answer, "wait", wait),
        ):
            setattr(kind, name, before)


if __name__ == "__main__":
    raise SystemExit(main())
