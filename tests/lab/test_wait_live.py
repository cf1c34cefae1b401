"""Verdicts of the live admission comparison, on known figures."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.bench import wait_live as live
from penstock.fluid.step_profile import StepWork
from penstock.sim.profiles import load_profile
from penstock.zoo.registry import DEFAULT_TARGET, model_path

NOISE = np.array([0.99, 1.0, 1.01, 1.0])


def found(bound: float, **gains: float) -> live.Found:
    """`vllm` sustains 10 requests/s. gains: throughput over its own, and latency under it."""
    known = {"vllm": 1.0, "sarathi": 1.0, live.AGAIN: 1.0, live.ALL_MEMORY: 2.0, "auto": 1.0}
    known |= gains
    model: Any = SimpleNamespace(
        sustained=dict.fromkeys(live.POLICIES, 10.0),
        memory=lambda name: 300 if name == live.ALL_MEMORY else 100,
        bound=lambda kv_tokens: 22.0 if kv_tokens > 100 else bound,
    )
    measured = {
        (load, name): {
            "tokens_per_s": (100 * gain * NOISE**turn).tolist(),
            "latency_s": (1 / gain * NOISE**turn).tolist(),
            "ttft_p99_s": [1.0] * 4,
        }
        for load in (0.0, 0.95)
        for turn, (name, gain) in enumerate(known.items())
    }
    told = {key: {**of, "latency_s": [10 / bound] * 4} for key, of in measured.items()}
    told[0.95, "vllm"]["latency_s"] = [1.0] * 4
    return live.Found(model, measured, told, 10.0)


def outcomes(*args: Any, **gains: float) -> list[str]:
    verdicts = live.verdicts(found(*args, **gains))
    assert all(v.control.outcome == "does not hold" and v.oracle for v in verdicts if v.control)
    return [v.outcome for v in verdicts[:2]]


@pytest.mark.parametrize(
    ("bound", "gain", "outcome"),
    [
        (13.0, 1.2, "holds"),
        (13.0, 1.08, "holds in part"),
        (13.0, 0.9, "does not hold"),
        (11.0, 1.2, "inconclusive"),
    ],
)
def test_half_of_what_is_allowed_is_the_bar(bound: float, gain: float, outcome: str) -> None:
    assert outcomes(bound, wait=gain) == [outcome, outcome]


def test_a_world_in_which_memory_gains_nothing_cannot_tell() -> None:
    assert outcomes(13.0, wait=0.9, **{live.ALL_MEMORY: 1.0})[0] == "inconclusive"


def steps() -> list[list[float]]:
    profile = load_profile("zoo-large")
    works = [StepWork(0, 0.0, b, b * c, 0) for b in (1, 2, 4, 8, 16, 32) for c in (64, 256)]
    works += [StepWork(n, n * n / 2, b, 100 * b, 0) for n in (16, 64, 256) for b in (0, 4, 16)]
    return [[*work, profile.seconds(work)] for work in works]


def test_memory_is_a_third_of_what_the_fluid_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LONG_RUN", 48)
    kinds = [live.Kind(64, 32), live.Kind(256, 128)]
    stretches = live.Stretches(model_path(DEFAULT_TARGET), kinds, 24)
    model = live.Model(stretches, steps())
    assert model.kv_tokens == pytest.approx(model.demand / 3, abs=live.BLOCK_SIZE)
    assert 0 < model.wait_bound() < model.bound(model.kv_tokens) < model.bound(model.all_memory)
    assert max(model.sustained.values()) < model.bound(model.kv_tokens)
    once = [model.served(p, 1, 0.0)["tokens_per_s"] for p in ("vllm", live.ALL_MEMORY)]
    assert once[0] < once[1]
    light, heavy = (model.served("auto", 1, rate)["latency_s"] for rate in (0.1, 100.0))
    assert light < heavy
