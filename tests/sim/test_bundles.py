"""What each paper says of its system, of its bundle on the virtual clock."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.config import EngineConfig, PolicyConfig
from penstock.core.scheduler import Scheduler
from penstock.core.types import TARGET, Output, StepPlan, StepResult
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.links import DraftServer
from penstock.sim.run import Setup, run
from penstock.sim.workloads import Workload

MACHINE = StepProfile("toy", 100_000, (1, 512), (0.02, 0.04), per_kv_token=1e-8)


class Watch:
    """Drafter of every verified draft, and the policies' gauges after every step of the target."""

    def __init__(self) -> None:
        self.drafters: list[str] = []
        self.gauges: list[dict[str, Any]] = []

    def __call__(self, scheduler: Scheduler) -> Sequence["Watch"]:
        self._scheduler = scheduler
        return [self]

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_output(self, output: Output) -> None:
        pass

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self.drafters += [v.drafter for v in result.verdicts if v.drafter is not None]
        if plan.lane == TARGET:
            self.gauges.append(self._scheduler.gauges)


def bundled(policy: str, **more: Any) -> Setup:
    """A setup with the bundle's four policies."""
    config = EngineConfig.model_validate({"target": "nowhere", "policy": policy})
    names = ("admission", "selection", "allocation", "pipeline")
    return Setup(**{"profile": MACHINE, **{n: getattr(config, n) for n in names}, **more})


def requests(num: int, output_len: int, arrived_at: Any = None, **more: Any) -> Workload:
    times = np.zeros(num) if arrived_at is None else np.asarray(arrived_at, dtype=float)
    return Workload("toy", np.full(num, 8), np.full(num, output_len), times, **more)


@pytest.mark.slow
def test_goodspeed_has_more_utility_than_equal_drafts() -> None:
    """Clients of unlike acceptance share C = 12 (eq. 1, tokens a round, U = log; figure 4)."""
    rates = {"a": 0.9, "b": 0.8, "c": 0.4, "d": 0.2}

    def served(allocation: PolicyConfig) -> tuple[float, dict[str, Any]]:
        servers = tuple(DraftServer(name, 1e-3, tenant=name) for name in rates)
        acceptance = GeometricAcceptance(rates)
        more: dict[str, Any] = {"draft_servers": servers, "acceptance": acceptance}
        setup = bundled("goodspeed", allocation=allocation, **more)
        clients = requests(len(rates), 20_000, tenants=np.array(list(rates)))
        watch = Watch()
        found = run(setup, clients, until=40.0, watch=watch)
        return float(np.log(found.num_tokens / len(watch.gauges)).sum()), watch.gauges[-1]

    utility, gauges = served(PolicyConfig.from_name("goodspeed", total=12))
    of_equal, nothing = served(PolicyConfig.from_name("fixed", total=12))
    assert utility > of_equal + 0.1
    found = gauges["acceptance_estimate"]
    assert sorted(found, key=found.__getitem__) == ["d", "c", "b", "a"]
    assert all(1 <= tokens <= 13 for tokens in gauges["goodput_estimate"].values())
    assert "goodput_estimate" not in nothing


def test_spin_moves_to_the_better_drafter() -> None:
    """Exploration draws both alike; the stages that exploit double (Algorithm 1)."""
    drafters = tuple(DrafterProfile(n, (1, 64), (1e-3, 1e-3)) for n in ("weak", "strong"))
    profile = StepProfile("toy", 100_000, (1, 512), (0.02, 0.04), drafters=drafters)
    acceptance = GeometricAcceptance({"weak": 0.2, "strong": 0.8})
    more: dict[str, Any] = {"drafters": ("weak", "strong"), "acceptance": acceptance}
    watch = Watch()
    run(bundled("spin", profile=profile, **more), requests(8, 600), watch=watch)
    tenth = len(watch.drafters) // 10
    first, last = (Counter(part)["strong"] / tenth for part in
                   (watch.drafters[:tenth], watch.drafters[-tenth:]))  # fmt: skip
    assert first < 0.8 < last
    found = watch.gauges[-1]["drafter_goodput_estimate"]
    assert found["strong"] > 1.3 * found["weak"]


def test_wait_batches_by_thresholds_of_the_traffic() -> None:
    """Eq. 11: the first threshold exceeds λ ΔT, the others are the shares that go on."""
    rng = np.random.default_rng(5)
    num, rate = 1500, 60.0
    arrived_at = np.sort(rng.uniform(0, num / rate, num))
    arrived_at[0] = 0
    outputs = np.where(rng.random(num) < 0.75, 20, 100)
    workload = Workload("two types", np.full(num, 8), outputs, arrived_at)
    watch = Watch()
    found = run(bundled("wait"), workload, watch=watch)
    assert found.completed.all()
    assert np.quantile(found.ttft, 0.99) < 0.6
    halfway = watch.gauges[len(watch.gauges) // 2 :]
    plans = [list(g["segment_threshold"].values()) for g in halfway]
    ends = [list(g["segment_end"].values()) for g in halfway]
    busy = [i for i, end in enumerate(ends) if 18 <= end[0] <= 22]
    assert len(busy) > 0.9 * len(halfway), "the first segment ends with the short type"
    assert all(1 <= plans[i][0] < 4 for i in busy)
    shares = [plans[i][1] / plans[i][0] for i in busy]
    assert np.median(shares) == pytest.approx(0.25, abs=0.08)
    held = [list(g["segment_requests"].values()) for g in halfway]
    over = [h[0] > 1.5 * p[0] * e[0] + p[0] + 2 for h, p, e in zip(held, plans, ends, strict=True)]
    assert not any(over), "no segment holds more than its stages do"


@pytest.mark.parametrize("policy", ["goodspeed", "spin", "wait"])
def test_one_client_is_answered_as_well_as_many(policy: str) -> None:
    """A lone prompt starts at once, also after others; of many at once all end."""
    drafters = (DrafterProfile("small", (1, 64), (1e-3, 1e-3)),)
    more: dict[str, Any] = {
        "drafters": ("small",),
        "acceptance": GeometricAcceptance({"small": 0.6}),
    }
    profile = StepProfile("toy", 100_000, (1, 512), (0.02, 0.04), drafters=drafters)
    arrived_at = [0.0, *[20.0] * 32, 60.0]
    found = run(bundled(policy, profile=profile, **more), requests(34, 50, arrived_at))
    assert found.completed.all()
    assert max(found.ttft[0], found.ttft[-1]) < 0.05
    assert found.ttft.max() < 2.0
