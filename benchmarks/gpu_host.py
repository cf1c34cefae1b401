"""What the host does in a turn of the loop beside a GPU, measured without one.

    python -m benchmarks.gpu_host [--json]

The engine runs as in `benchmarks.gpu --items loop`, with rounds begun before they are planned, but
a recording is carried out once and costs nothing from then on: what is left of a turn is the host's
work. On a GPU that is hidden where the device takes longer. Copies to and from a device and
launches, a few tens of microseconds in all, are not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from benchmarks.gpu_loop import LoopSpec, load, run_pass

from penstock.engine import graphs
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
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random_models._shapes = lambda: {"tiny": TINY}
    rows = [row(batch, k) for batch in (1, 16, 64) for k in (0, 4)]
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    print("batch  drafted  ms a turn [quartiles]  begun before planned")
    for r in rows:
        times = f"{r['ms']:.2f} [{r['low_ms']:.2f}, {r['high_ms']:.2f}]"
        print(f"{r['batch']:5d}  {r['num_drafted']:7d}  {times:21s}  {r['share_ahead']:.0%}")
    return 0


def row(batch: int, num_drafted: int, passes: int = 5) -> dict[str, float]:
    """The times of a turn at a batch size and draft length."""
    cpu = torch.device("cpu")
    spec = LoopSpec("tiny", "tiny", cpu, torch.float32, "packed", batch, 200, 48, 0.7)
    with _free_recordings():
        engine = load(spec)
        executor = engine.executor
        executor.runs_ahead = True
        run_pass(engine, spec, num_drafted)
        steps, ahead = executor.num_target_steps, executor.num_rounds_ahead
        seconds = [s for _ in range(passes) for s in run_pass(engine, spec, num_drafted)[1]]
    low, median, high = statistics.quantiles(seconds, n=4)
    steps, ahead = executor.num_target_steps - steps, executor.num_rounds_ahead - ahead
    return {
        "batch": batch,
        "num_drafted": num_drafted,
        "ms": median * 1e3,
        "low_ms": low * 1e3,
        "high_ms": high * 1e3,
        "share_ahead": ahead / steps,
    }


@contextmanager
def _free_recordings() -> Iterator[None]:
    replay, done = graphs.Graph.replay, set[graphs.Graph]()

    def once(self: graphs.Graph) -> None:
        if self not in done:
            done.add(self)
            replay(self)

    graphs.Graph.replay = once  # type: ignore[method-assign]
    try:
        yield
    finally:
        graphs.Graph.replay = replay  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
