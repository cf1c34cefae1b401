"""Choice of the number of micro-batches by profiled step times; pure functions.

With 0 micro-batches drafters draft inside the target's step. With 1 all drafters draft at the same
time beside the target, which then verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.learn import Estimators
from penstock.core.learn.times import round_seconds
from penstock.core.state import Drafter, RequestState
from penstock.fluid.step_profile import StepWork

MOST_MICRO_BATCHES = 8  # more would leave few requests to each at usual batches; chosen by hand
MIN_GAIN = 0.05  # predicted gain from which on the number is changed; chosen by hand
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
    def batches(self) -> tuple[int, ...]:
        """Requests of each lane."""
        return tuple(lane.batch for lane in self.lanes)


def split(batches: Sequence[int], num: int) -> list[tuple[int, ...]]:
    """Split each lane's batch evenly between micro-batches (Spin, section V-B)."""
    groups = [[batch // num for batch in batches] for _ in range(num)]
    for lane, batch in enumerate(batches):
        for group in sorted(groups, key=sum)[: batch % num]:
            group[lane] += 1
    return [tuple(group) for group in groups]


def cycle_seconds(work: Round, num: int) -> float:
    """Return the seconds in which every request is drafted for and verified once.

    Without micro-batches: the drafts, then the verification. With them the cycle is as long as the
    busiest of four: the target, the drafters, the groups in turn (each verified after its draft),
    and the engine, which writes a plan for every group and lane. Smaller batches together never
    take less time than one whole batch: measurements that say so are noise.

    Two that work at once slow each other: with D and V the seconds of both alone, σ and τ their
    slowdowns, the target is the busier one if V τ ≥ D σ, and takes V + D σ (1 - 1/τ); otherwise the
    drafters take D + V τ (1 - 1/σ). σ = τ = 2 is a shared core. D is the longest of several
    drafters, plus the share σ - 1 of the others."""
    lanes, host = work.lanes, work.host
    whole = work.verify(work.batches)
    alone = [lane.seconds(lane.batch) for lane in lanes]
    if num == 0:
        waiting = max((s for lane, s in zip(lanes, alone, strict=True) if lane.beside), default=0.0)
        inside = sum(s for lane, s in zip(lanes, alone, strict=True) if not lane.beside)
        return round_seconds(whole, inside=inside, beside=waiting, host=host)
    if num == 1:
        return round_seconds(whole, beside=_drafting(lanes, alone), host=host * (1 + len(lanes)))
    groups = [group for group in split(work.batches, num) if any(group)]
    drafts = [
        [lane.seconds(n) if n else 0.0 for lane, n in zip(lanes, group, strict=True)]
        for group in groups
    ]
    verifications = [work.verify(group) + host for group in groups]
    by_lane = [max(sum(own), s) for own, s in zip(zip(*drafts, strict=True), alone, strict=True)]
    saturated = _saturated(lanes, by_lane, max(sum(verifications), whole + host))
    turns = _in_turn(drafts, verifications)
    return max(saturated, turns, host * len(groups) * (1 + len(lanes)))


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
    longest = max(drafts)
    shared = [min(1.0, max(0.0, lane.slowdown - 1)) for lane in lanes]
    added = [share * draft for share, draft in zip(shared, drafts, strict=True)]
    return longest + sum(added) - added[list(drafts).index(longest)]


def _saturated(lanes: Sequence[Lane], drafts: Sequence[float], verify: float) -> float:
    """Return the seconds of a cycle without unnecessary waits."""
    drafting = _drafting(lanes, drafts)
    slowdown = max(1.0, lanes[max(range(len(lanes)), key=drafts.__getitem__)].slowdown)
    of_target = max(1.0, *(lane.target_slowdown for lane in lanes))
    if verify * of_target >= drafting * slowdown:
        return verify + drafting * slowdown * (1 - 1 / of_target)
    return drafting + verify * of_target * (1 - 1 / slowdown)


def best_num(seconds: Callable[[int], float], most: int, gain: float = 0.0) -> int:
    """Return the number with the shortest cycle; a larger one must gain the share `gain`."""
    best, shortest = 0, seconds(0)
    for num in range(1, most + 1):
        found = seconds(num)
        if found < (1 - gain) * shortest:
            best, shortest = num, found
    return best


def spin_num(work: Round, most: int, drop: float) -> int:
    """Return the number of micro-batches by Spin's heuristic (section V-B).

    One more, from 2 on, as long as the target's throughput in the groups of `split` is less than
    the share `drop` below that of the whole batch. Drafters do not count."""
    whole = work.verify(work.batches)
    for num in range(2, most + 1):
        divided = sum(work.verify(group) for group in split(work.batches, num) if any(group))
        if whole <= (1 - drop) * divided:
            return num - 1
    return max(1, most)


def round_of(
    states: Sequence[RequestState],
    drafters: Mapping[str, Drafter],
    learn: Estimators,
    lengths: Mapping[str, float],
) -> Round:
    """Return the costs of one round, by draft `lengths` of each drafter."""
    batches: dict[str, int] = {}
    for state in states:
        if state.drafter is not None and state.drafter in drafters:
            batches[state.drafter] = batches.get(state.drafter, 0) + 1
    num_kv_tokens = sum(s.num_known_tokens for s in states if s.drafter in batches)
    num = sum(batches.values())
    known = [lengths[name] for name in batches]

    def verify(group: tuple[int, ...]) -> float:
        in_group = sum(group)
        drafted = round(sum(n * length for n, length in zip(group, known, strict=True)))
        work = StepWork(0, 0.0, in_group, num_kv_tokens * in_group // num, drafted)
        return learn.times.profile.seconds(work)

    lanes = [_lane(drafters[name], n, lengths[name], learn) for name, n in batches.items()]
    return Round(tuple(lanes), verify, learn.times.overhead)


def _lane(drafter: Drafter, batch: int, length: float, learn: Estimators) -> Lane:
    """Return a drafter's lane; without a profile it counts as sharing the target's core."""
    if drafter.is_remote:
        seconds = learn.links.seconds(drafter.name, round(length))
        return Lane(batch, lambda n: seconds, beside=True)
    profiles = learn.times.profile.drafters
    profile = next((p for p in profiles if p.name in (drafter.name, drafter.model)), None)
    if profile is None:
        curve = learn.times.curve_of(drafter.name)
        return Lane(batch, lambda n: length * curve(n), slowdown=2.0, target_slowdown=2.0)
    step = profile.seconds
    return Lane(batch, lambda n: length * step(n, 1), profile.slowdown, profile.target_slowdown)
