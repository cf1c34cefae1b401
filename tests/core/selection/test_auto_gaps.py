"""`auto` keeps looking at a request that is very long."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import RecordedAcceptance
from penstock.sim.drafters import DrafterCounts
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload

HEAD = DrafterProfile("head", (1,), (0.6e-3,), 20e-6)
LOOKUP = DrafterProfile("lookup", (1,), (20e-6,))
SHORT = 20
"""Requests from which it is learned that looking up is mostly of no use."""


class OwnRow(RecordedAcceptance):
    """Request i replays row i."""

    def _row(self, drafter: str, request_id: str) -> Sequence[int]:
        return self.records[drafter][int(request_id)]


@pytest.mark.slow
def test_what_a_late_replay_shows_is_used_before_it_has_faded() -> None:
    """A text that begins to repeat itself after 1,200 tokens: looking up is then far better."""
    rows = {
        "head": [[3] * 150] * SHORT + [[3] * 4000],
        "lookup": [[1 if i % 4 else 9] * 150 for i in range(SHORT)] + [[1] * 1200 + [9] * 2800],
    }
    lengths = np.array([len(row) for row in rows["head"]])
    counts = DrafterCounts()
    run(
        Setup(
            replace(load_profile("a100-llama2-7b"), drafters=(HEAD, LOOKUP)),
            admission=PolicyConfig.from_name("vllm_v1", max_num_seqs=1),
            selection=PolicyConfig.from_name("auto"),
            block_size=16,
            acceptance=OwnRow(rows),
            drafters=tuple(rows),
        ),
        Workload("one by one", np.full_like(lengths, 50), lengths, np.zeros(len(lengths))),
        instruments=[counts],
    )
    assert counts.accepted["lookup"] > 1500
