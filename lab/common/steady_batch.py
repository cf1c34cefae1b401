"""A steady batch on several drafters, simulated with one setting of the pipeline.

Requests never end and no others come, so that a run shows the cycle alone. Every drafter has a
device of its own and is told its requests by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators, seed_estimators
from penstock.core.learn.times import drafter_profiles
from penstock.core.policies.pipeline.parts.planner import Round, cycle_seconds, round_of
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, RequestState
from penstock.core.types import Request
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.clock import VirtualClock
from penstock.sim.driver import simulate
from penstock.sim.executor import ProfiledStepTimes, SimulatedExecutor

PROMPT_TOKENS = 100
_ENDLESS = 100_000
_BLOCK = 4096


@dataclass(frozen=True)
class SteadyBatch:
    """requests: of each drafter that `profile` knows. length: draft tokens a round. acceptance:
    probability of each, by drafter."""

    profile: StepProfile
    requests: Mapping[str, int]
    length: int
    acceptance: Mapping[str, float]

    @property
    def size(self) -> int:
        return sum(self.requests.values())

    def round(self) -> Round:
        """What the planner is told."""
        states = []
        for name, count in self.requests.items():
            for _ in range(count):
                state = RequestState(Request("r", PROMPT_TOKENS, 1), 0)
                state.drafter = name
                states.append(state)
        lengths = dict.fromkeys(self.requests, float(self.length))
        drafters = {name: Drafter(name) for name in self.requests}
        return round_of(states, drafters, Estimators(self.profile), lengths)


def play(
    batch: SteadyBatch, pipeline: str, *, beside: bool | None = None, rounds: int = 50
) -> float:
    """Tokens a second, simulated for as long as so many rounds take without a pipeline. beside:
    whether drafters work beside the target; default: where there is a pipeline."""
    names = list(batch.requests)
    own_lanes = pipeline != "off" if beside is None else beside
    drafters = [Drafter(name, has_lane=own_lanes) for name in names]
    estimators = Estimators(batch.profile)
    seed_estimators(estimators, batch.profile, drafters)
    blocks = -(-_ENDLESS // _BLOCK) * batch.size * 2
    scheduler = Scheduler(
        BlockPool(blocks, _BLOCK),
        drafters,
        admission=make_policy("admission", "vllm_v1", {"max_num_seqs": max(batch.size, 1)}),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed", {"k": batch.length}),
        pipeline=make_pipeline(pipeline),
        max_model_len=2 * _ENDLESS,
        learn=estimators,
    )
    clock = VirtualClock()
    profiles = drafter_profiles(batch.profile, drafters)
    executor = SimulatedExecutor(
        clock,
        ProfiledStepTimes(batch.profile, profiles=profiles),
        GeometricAcceptance(batch.acceptance),
        drafters=drafters,
        profiles=profiles,
    )
    of_request = [name for name in names for _ in range(batch.requests[name])]
    requests = [
        Request(str(i), PROMPT_TOKENS, _ENDLESS, drafter=name) for i, name in enumerate(of_request)
    ]
    until = rounds * cycle_seconds(batch.round(), 0)
    result = simulate(scheduler, executor, clock, requests, until=until)
    tokens = sum(r.num_tokens for r in result.records.values())
    return tokens / until
