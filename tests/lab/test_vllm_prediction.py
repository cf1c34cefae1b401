"""The benchmark of predictions: that it predicts its own simulator, and what stays inconclusive."""

import argparse
import math
from typing import Any

from lab.bench import vllm_arrivals
from lab.bench.vllm_arrivals import Bench
from lab.bench.vllm_prediction import (
    CALIBRATION,
    LOADS,
    SCALES,
    compare,
    results,
    simulated,
    verdict,
)
from penstock.fluid.step_profile import StepProfile, StepWork

WORKS = [
    StepWork(p, p * (p + 7 * d % 50) / 2, d, (20 + 7 * p % 60) * d)
    for p in range(0, 130, 7)
    for d in range(0, 60, 3)
    if p + d
]


class Simulated:
    """A worker whose live engine is the simulator."""

    def __init__(self, *_about: Any) -> None:
        pass

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        if do == "load":
            self.arm = {"vllm": "default", "penstock": "engine"}[command["kind"]]
            self.profile = StepProfile(
                "", command["kv_tokens"], (1, 512), (0.004, 0.05), per_decode=1e-4
            )
            return {}
        found = simulated(self.arm, command["requests"], self.profile)
        steps = [(*work, self.profile.seconds(work)) for work in WORKS]
        return {key: list(found[key]) for key in ("ttft", "latency")} | {
            "seconds": found["seconds"],
            "steps": steps,
        }

    def close(self) -> None:
        pass


def test_its_own_simulator_is_predicted_and_not_served_again(monkeypatch, tmp_path) -> None:
    rows = [f"{2 * i + i % 3},{80 + 9 * (i % 40)},{16 + 5 * (i % 30)}" for i in range(200)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    monkeypatch.setattr(vllm_arrivals, "Worker", Simulated)
    monkeypatch.setattr(vllm_arrivals, "write_model", lambda folder: folder)
    args = argparse.Namespace(
        trace=trace, folder=tmp_path, out=tmp_path / "out.jsonl", minutes=math.inf
    )
    args.scale, args.stretches, args.requests = 8.0, 1, 60
    with Bench.opened(args) as bench:
        found = compare(bench, args)
    assert results(found).verdicts[0].line().startswith("[met] predicted within 10%: 24 of 24")
    args.minutes = -1
    with Bench.opened(args) as bench:
        assert compare(bench, args) == found


def test_a_figure_that_live_runs_do_not_repeat_cannot_be_told() -> None:
    even = dict.fromkeys(SCALES, 1.0)
    cells = [{"load": load, "ratio": even, "again": even} for load in (CALIBRATION, *LOADS, *LOADS)]
    assert verdict(cells).outcome == "met"
    cells[-1] = cells[-1] | {"again": dict.fromkeys(SCALES, 1.2)}
    assert verdict(cells).outcome == "inconclusive"
    cells[1] = cells[1] | {"ratio": dict.fromkeys(SCALES, 0.8)}
    assert verdict(cells).outcome == "missed"
