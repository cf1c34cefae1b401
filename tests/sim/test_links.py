"""Draft servers and links on the virtual clock."""

from typing import Any

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import AcceptanceModel, DriftingAcceptance, GeometricAcceptance
from penstock.sim.links import DraftServer, Link
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload

VERIFY_S, ROW_S = 0.03, 2e-4


def report(
    servers: list[DraftServer],
    acceptance: AcceptanceModel,
    *,
    seconds: float = 20.0,
    **options: Any,
) -> Report:
    """A request without end at each server."""
    profile = StepProfile("p", 10**9, (0, 1000), (VERIFY_S, VERIFY_S + 1000 * ROW_S))
    setup = Setup(
        profile,
        allocation=options.pop("allocation", PolicyConfig.from_name("fixed", k=3)),
        draft_servers=tuple(servers),
        acceptance=acceptance,
        kv_tokens=4096 * 300 * len(servers),
        block_size=4096,
        **options,
    )
    num = len(servers)
    tenants = np.array([s.name for s in servers])
    workload = Workload("w", np.full(num, 8), np.full(num, 10**6), np.zeros(num), tenants)
    return run(setup, workload, until=seconds)


def server(name: str, draft_s: float = 0.01, one_way_s: float = 0.02, **more: Any) -> DraftServer:
    return DraftServer(name, draft_s, Link(one_way_s), tenant=name, **more)


def rates(result: Report) -> list[float]:
    return list(result.num_tokens / result.result.finished_at)


def test_a_round_takes_what_its_parts_take() -> None:
    found = report([server("a")], GeometricAcceptance({"a": 1.0}))
    seconds = 2 * 0.02 + 3 * 0.01 + VERIFY_S + 4 * ROW_S
    assert rates(found) == [pytest.approx(4 / seconds, rel=0.01)]


def test_rounds_wait_for_the_slowest_and_asynchrony_does_not() -> None:
    servers = [server("fast", 0.002, 0.001), server("slow", 0.1, 0.05)]
    acceptance = GeometricAcceptance({"fast": 1.0, "slow": 1.0})
    fast_off, slow_off = rates(report(servers, acceptance, pipeline="off"))
    assert fast_off == pytest.approx(slow_off, rel=0.02)
    fast, slow = rates(report(servers, acceptance, pipeline="async"))
    assert fast > 3 * fast_off
    assert slow > 0.85 * slow_off


def test_the_first_round_does_not_wait_for_a_link_that_is_too_long() -> None:
    """Its round trip is known from the connection on."""
    acceptance, priced = GeometricAcceptance({"far": 0.9}), PolicyConfig.from_name("priced")
    far = server("far", one_way_s=0.5)
    made = report([far], acceptance, seconds=0.4, allocation=priced).num_tokens[0]
    assert made >= 0.4 / (VERIFY_S + ROW_S) - 1


@pytest.mark.slow
def test_drafting_ahead_hides_the_round_trip_while_drafts_are_right() -> None:
    def rate(ahead: int, accepted: float) -> float:
        servers = [server("a", draft_ahead=ahead)]
        return rates(report(servers, GeometricAcceptance({"a": accepted})))[0]

    plain = 4 / (2 * 0.02 + 3 * 0.01 + VERIFY_S + 4 * ROW_S)
    assert rate(8, 1.0) == pytest.approx(4 / (2 * 0.02 + VERIFY_S + 4 * ROW_S), rel=0.01)
    assert rate(8, 1.0) > 1.3 * plain
    assert rate(8, 0.0) == pytest.approx(rate(0, 0.0)), "a wrong draft leaves nothing to keep"


def test_loss_and_bandwidth_cost_time() -> None:
    rng = np.random.default_rng(0)
    slow = Link(0.01, bandwidth=1000.0)
    assert slow.seconds(10, rng) == pytest.approx(0.01 + 0.1)
    lossy = [Link(0.01, loss=0.1).seconds(0, rng) for _ in range(4000)]
    resent = np.mean(np.array(lossy) > 0.02)
    assert resent == pytest.approx(0.1, abs=0.02)
    jittered = [Link(0.01, jitter=0.005).seconds(0, rng) for _ in range(4000)]
    assert np.mean(jittered) == pytest.approx(0.015, rel=0.05)


def test_drifting_acceptance_changes_every_dwell_rounds() -> None:
    drifting = DriftingAcceptance({"a": [1.0, 0.0]}, dwell=10_000)
    steady = GeometricAcceptance({"a": 1.0})
    assert rates(report([server("a")], drifting)) == rates(report([server("a")], steady))
    halves = DriftingAcceptance({"a": [1.0, 0.0]}, dwell=7)
    (mixed,) = rates(report([server("a")], halves))
    assert mixed == pytest.approx(rates(report([server("a")], steady))[0] * 2.5 / 4, rel=0.05)


def test_the_same_seed_gives_the_same_run() -> None:
    servers = [DraftServer(n, 0.01, Link(0.01, 0.01, 0.05), tenant=n) for n in "abc"]
    acceptance = GeometricAcceptance(dict.fromkeys("abc", 0.6), seed=3)
    runs = [
        rates(
            report(
                servers,
                acceptance,
                pipeline="async",
                allocation=PolicyConfig.from_name("priced"),
                seed=seed,
                seconds=4.0,
            )
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
