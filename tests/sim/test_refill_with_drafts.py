"""While memory is short `fluid_guided` gives it out as fast as it empties: with drafts that is
faster, for a request makes several tokens in a step."""

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.core.learn.traffic import OutputLengths
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.run import Setup, run
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
    report = run(setup, load)
    # Of the second half: the first is to learn in.
    ends = np.sort(report.finished_at)
    return float(OUTPUT * (NUM / 2) / (ends[-1] - ends[NUM // 2 - 1]))


@pytest.mark.slow
def test_memory_is_refilled_as_fast_as_it_empties(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = tokens_per_s("vllm_v1")
    assert tokens_per_s("fluid_guided") > 0.95 * at_once
    # The control: each step is taken to make one token of each.
    monkeypatch.setattr(OutputLengths, "stepped", lambda self, num_tokens: None)
    assert tokens_per_s("fluid_guided") < 0.6 * at_once
