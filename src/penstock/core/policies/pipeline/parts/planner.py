"""Choice of the number of micro-batches by profiled step times; pure functions.

With 0 micro-batches, no pipeline, drafters draft inside the target's step. With 1, rounds, all
drafters draft at the same time, then the target verifies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.learn import Estimators
from penstock.core.learn.times import round_seconds
from penstock.core.state import Drafter, RequestState
from penstock.fluid.step_profile import StepWork

MOST_MICRO_BATCHES = 8  # more would leave few requests to each at usual batches; chosen by hand
_UNEVEN = (0.125, 0.25, 0.375)  # shares of the first of two groups that are tried; chosen by hand
_ROUNDING = 1e-9  # tolerance of float shares
_WARM_CYCLES, _CYCLES = 4, 4
"""Cycles until a pipeline that began empty is steady, and cycles counted after them."""


@dataclass(frozen=True)
class Lane:
    """One drafter's part of a round."""

    batch: int  # requests that it drafts for
    seconds: Callable[[int], float]  # of the whole draft for a batch, alone
    slowdown: float = 1.0  # factor of its time beside a working target
    target_slowdown: float = 1.0  # factor of the target's time beside it
    beside: bool = False  # always works beside the target (a draft server)


@dataclass(frozen=True)
class Round:
    """One round of all requests."""

    lanes: tuple[Lane, ...]
    verify: Callable[[tuple[int, ...]], float]  # seconds alone, by each lane's batch
    host: float = 0.0  # seconds of the engine itself for every plan

    @property
    def batch(self) -> int:
        """Requests of all lanes."""
        return sum(lane.batch for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """A number of micro-batches, or 0 or 1 (see above).

    share: batch share of the first of two, if uneven: where a phase has a large fixed cost, a small
    group beside a large one fills the pipeline at less expense."""

    num: int = 0
    share: float | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the batch of each micro-batch."""
        if self.share is not None:
            return (self.share, 1 - self.share)
        return (1 / self.num,) * self.num


def split(batches: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Split each lane's batch evenly between micro-batches (Spin, section V-B)."""
    groups = [[0] * len(batches) for _ in shares]
    total = sum(batches)
    for lane, batch in enumerate(batches):
        quotas = [batch * share for share in shares]
        for group, quota in zip(groups, quotas, strict=True):
            group[lane] = int(quota + _ROUNDING)
        for _ in range(batch - sum(group[lane] for group in groups)):
            least = min(
                range(len(groups)),
                key=lambda g: (
                    groups[g][lane] - math.ceil(quotas[g] - _ROUNDING) >= 0,
                    sum(groups[g]) - total * shares[g],
                ),
            )
            groups[least][lane] += 1
    return [tuple(group) for group in groups]


def cycle_seconds(work: Round, setting: PipelineSetting) -> float:
    """Return the seconds in which every request is drafted for and verified once.

    Without micro-batches: the drafts, then the verification. With them the cycle is as long as the
    busiest of four: the target, the drafters, the groups' ways (each verified after its draft and
    in its turn), and the engine, which writes a plan for every group and lane. Smaller batches
    together never take less time than one whole batch: measurements that say so are noise.

    Two that work at once slow each other: with D and V the seconds of both alone, σ and τ their
    slowdowns, the target is the busier one if V τ ≥ D σ, and takes V + D σ (1 - 1/τ); otherwise the
    drafters take D + V τ (1 - 1/σ). σ = τ = 2 is a shared core. D is the longest of several
    drafters, plus the share σ - 1 of the others."""
    if setting.num == 0:
        beside = (lane.seconds(lane.batch) for lane in work.lanes if lane.beside)
        inside = sum(lane.seconds(lane.batch) for lane in work.lanes if not lane.beside)
        waiting = max(beside, default=0.0)
        whole = work.verify(_batches(work))
        return round_seconds(whole, inside=inside, beside=waiting, host=work.host)
    groups = [group for group in split(_batches(work), setting.shares) if any(group)]
    draft = functools.cache(lambda lane, n: work.lanes[lane].seconds(n) if n else 0.0)
    verify = functools.cache(lambda group: work.verify(group) + work.host)
    drafts = [[draft(lane, n) for lane, n in enumerate(group)] for group in groups]
    verifications = [verify(group) for group in groups]
    by_lane = [
        max(sum(each), draft(lane, work.lanes[lane].batch))
        for lane, each in enumerate(zip(*drafts, strict=True))
    ]
    saturated = _saturated(work.lanes, by_lane, max(sum(verifications), verify(_batches(work))))
    way = max(_drafting(work.lanes, d) + v for d, v in zip(drafts, verifications, strict=True))
    if setting.num == 1:
        return way + work.host * len(work.lanes)
    turns = _in_turn(drafts, verifications)
    return max(saturated, way, turns, work.host * len(groups) * (1 + len(work.lanes)))


def _batches(work: Round) -> tuple[int, ...]:
    return tuple(lane.batch for lane in work.lanes)


def _in_turn(drafts: Sequence[Sequence[float]], verifications: Sequence[float]) -> float:
    """Return the seconds of a cycle that takes the groups in turn; `drafts` by group and lane."""
    lane_free = [0.0] * len(drafts[0])
    verified = [0.0] * len(drafts)
    ends = []
    for _ in range(_WARM_CYCLES + _CYCLES):
        for group, (mine, seconds) in enumerate(zip(drafts, verifications, strict=True)):
            for lane, draft in enumerate(mine):
                lane_free[lane] = max(lane_free[lane], verified[group]) + draft
            verified[group] = max(*lane_free, verified[group - 1]) + seconds
        ends.append(verified[-1])
    return (ends[-1] - ends[_WARM_CYCLES - 1]) / _CYCLES


def _drafting(lanes: Sequence[Lane], drafts: Sequence[float]) -> float:
    """Return the seconds of all lanes at the same time, by those of each alone."""
    longest = max(range(len(lanes)), key=drafts.__getitem__)
    return drafts[longest] + sum(
        d * min(1.0, max(0.0, lane.slowdown - 1))
        for i, (lane, d) in enumerate(zip(lanes, drafts, strict=True))
        if i != longest
    )


def _saturated(lanes: Sequence[Lane], drafts: Sequence[float], verify: float) -> float:
    """Return the seconds of a cycle without unnecessary waits."""
    drafting = _drafting(lanes, drafts)
    slowdown = max(1.0, lanes[max(range(len(lanes)), key=drafts.__getitem__)].slowdown)
    of_target = max(1.0, *(lane.target_slowdown for lane in lanes))
    if verify * of_target >= drafting * slowdown:
        return verify + drafting * slowdown * (1 - 1 / of_target)
    return drafting + verify * of_target * (1 - 1 / slowdown)


def settings(most: int) -> list[PipelineSetting]:
    """Return the settings with at most `most` micro-batches, the simplest first."""
    uneven = [PipelineSetting(2, share) for share in _UNEVEN] if most > 1 else []
    return [*(PipelineSetting(num) for num in range(most + 1)), *uneven]


def best_setting(
    seconds: Callable[[PipelineSetting], float], most: int, gain: float = 0.0
) -> PipelineSetting:
    """Return the setting with the shortest cycle; a later one must gain the share `gain`."""
    best, shortest = PipelineSetting(), seconds(PipelineSetting())
    for setting in settings(most):
        found = seconds(setting)
        if found < (1 - gain) * shortest:
            best, shortest = setting, found
    return best


def round_of(
    states: Sequence[RequestState],
    drafters: Mapping[str, Drafter],
    estimators: Estimators,
    lengths: Mapping[str, float],
    host: float,
) -> Round:
    """Return the costs of one round, by draft `lengths` of each drafter."""
    by_drafter: dict[str, list[RequestState]] = {}
    for state in states:
        if state.drafter is not None and state.drafter in drafters:
            by_drafter.setdefault(state.drafter, []).append(state)
    names = list(by_drafter)
    num_kv_tokens = sum(s.num_known_tokens for mine in by_drafter.values() for s in mine)
    num = sum(len(mine) for mine in by_drafter.values())

    def verify(group: tuple[int, ...]) -> float:
        in_group = sum(group)
        drafted = sum(n * lengths[name] for n, name in zip(group, names, strict=True))
        return estimators.times.profile.seconds(
            StepWork(
                num_decodes=in_group,
                num_kv_tokens=num_kv_tokens * in_group // num,
                num_draft_tokens=round(drafted),
            )
        )

    lanes = [
        _lane(drafters[name], len(mine), lengths[name], estimators)
        for name, mine in by_drafter.items()
    ]
    return Round(tuple(lanes), verify, host)


def _lane(drafter: Drafter, batch: int, length: float, estimators: Estimators) -> Lane:
    """Return a drafter's lane; without a profile it counts as sharing the target's core."""
    if drafter.remote:
        seconds = estimators.links.seconds(drafter.name, round(length))
        return Lane(batch, lambda n: seconds, beside=True)
    profiles = estimators.times.profile.drafters
    profile = next((p for p in profiles if p.name in (drafter.name, drafter.model)), None)
    if profile is None:
        curve = estimators.times.curve_of(drafter.name)
        return Lane(batch, lambda n: length * curve(n), slowdown=2.0, target_slowdown=2.0)
    step = profile.seconds
    return Lane(batch, lambda n: length * step(n, 1), profile.slowdown, profile.target_slowdown)
