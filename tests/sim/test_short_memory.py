"""Short memory: `fluid_guided` gives it out as fast as it empties, with drafts too, and lets it run
out as often as computing a text again is worth."""

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.core.policies.admission.fluid_guided import FluidGuided
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload

NUM, OUTPUT = 600, 24


def tokens_per_s(policy: str) -> float:
    """Of requests that are all there from the beginning, in a memory that holds some forty."""
    lengths = np.full(NUM, 40), np.full(NUM, OUTPUT)
    load = Workload("waiting", *lengths, np.zeros(NUM))
    setup = Setup(
        PAPER_LINEAR,
        PolicyConfig.from_name(policy),
        PolicyConfig.from_name("fixed", k=4),
        kv_tokens=3000,
        block_size=16,
        drafters=("draft",),
        acceptance=GeometricAcceptance({"draft": 0.9}, seed=1),
    )
    return later_rate(run(setup, load), load)


def later_rate(report: Report, load: Workload) -> float:
    """Tokens per second of the second half: the first is to learn in."""
    order = np.argsort(report.finished_at)
    late = order[len(order) // 2 :]
    ends = report.finished_at[late]
    return float(load.output_len[late[1:]].sum() / (ends[-1] - ends[0]))


@pytest.mark.slow
def test_memory_is_refilled_as_fast_as_it_empties() -> None:
    assert tokens_per_s("fluid_guided") > 0.95 * tokens_per_s("vllm_v1")


def short_of_memory(profile: str, policy: str) -> float:
    """Tokens per second where memory holds a quarter of 32 requests."""
    rng = np.random.default_rng(1)
    prompts, outputs = (rng.lognormal(m, 0.6, 200).clip(16, 1000) for m in (5.5, 5.1))
    load = Workload("short", prompts.astype(int), outputs.astype(int), np.zeros(200))
    setup = Setup(
        load_profile(profile), PolicyConfig.from_name(policy), kv_tokens=4000, block_size=16
    )
    return later_rate(run(setup, load), load)


@pytest.mark.parametrize(("profile", "wrong"), [("a100-llama2-7b", 4.0), ("zoo-grown", -1.0)])
def test_memory_runs_out_as_often_as_it_pays(profile, wrong, monkeypatch) -> None:
    """Computing again is cheap on a GPU, where idle memory costs more, and dear on a processor."""
    ours, rival = short_of_memory(profile, "fluid_guided"), short_of_memory(profile, "vllm_v1")
    assert ours > 0.98 * rival
    # The control: another price.
    monkeypatch.setattr(FluidGuided, "_confidence", lambda self, step: wrong)
    assert short_of_memory(profile, "fluid_guided") < 0.96 * ours
