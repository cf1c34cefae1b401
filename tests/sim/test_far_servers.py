"""Draft servers whose drafts come after several of the target's steps."""

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.links import DraftServer, Link
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload


def tokens(rates: list[float], step: float, round_trip: float, *, has_servers: bool = True) -> int:
    """Tokens of 20 seconds, with a request at each server."""
    names = [f"s{i}" for i in range(len(rates))]
    servers = [DraftServer(n, 0.01, Link(round_trip / 2), tenant=n) for n in names]
    num = len(names)
    setup = Setup(
        StepProfile("p", 10**9, (0, 1000), (step, step + 0.2)),
        draft_servers=tuple(servers) if has_servers else (),
        acceptance=GeometricAcceptance(dict(zip(names, rates, strict=True))),
        kv_tokens=4096 * 300 * num,
        block_size=4096,
        counted=False,
        allocation=PolicyConfig.from_name("priced"),
        pipeline="auto",
    )
    load = Workload("w", np.full(num, 8), np.full(num, 10**6), np.zeros(num), np.array(names))
    return int(run(setup, load, until=20.0).num_tokens.sum())


@pytest.mark.parametrize("step", [0.03, 0.1])
def test_trials_of_servers_that_cannot_pay_take_a_small_share_of_the_time(step: float) -> None:
    rates = [0.3, 0.4, 0.5, 0.6]
    assert tokens(rates, step, 0.4) > 0.985 * tokens(rates, step, 0.4, has_servers=False)


def test_no_request_waits_for_the_drafts_of_others() -> None:
    """Rounds of all would take 0.7 s, in which two steps without drafts make more tokens."""
    rates = [0.9, 0.3, 0.3, 0.3, 0.3, 0.3]
    assert tokens(rates, 0.3, 0.3) > 1.05 * tokens(rates, 0.3, 0.3, has_servers=False)
