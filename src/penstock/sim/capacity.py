"""Largest load that a policy sustains, by bisection on the virtual clock.

A load is judged on the second half of its arrivals; the first fills the server. It is sustained if
the backlog does not grow: the prompt and output tokens of requests that have arrived and are not
finished. Batch means over ten time spans give its mean increment a Student interval.

Within that interval a load above the capacity looks sustained, but no more than the capacity is
completed in it. So the answer is the work completed each second at the largest sustained load, with
the Student interval of the same spans."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from penstock.sim.parallel import HERE, Workers
from penstock.sim.run import FloatArray, Report, Setup, run
from penstock.sim.workloads import Workload

_SPANS = 10
"""Batch means of a run; the convention of the method."""
_TURNOVERS = 5
"""Least length of the second half, in mean service times of a request."""
_LEAST_REQUESTS = 400
"""Convention: forty requests, half of them in the second half, for each span."""
_LEAST_LATE = 10
"""Requests beyond the 99th percentile that an estimate of it needs."""
_PRECISION = 0.1
"""Largest half-width of the interval that counts as an answer, as a share of the answer."""
_STEP_DOWN, _LOWEST = 0.95, 0.5
"""Search below the answer for a load that surely meets its targets: factor, and where it ends."""
_MARGIN = 3
"""Allowance for requests in service that still grow in number in a trace that is too short."""


class TooShort(ValueError):
    """The trace cannot tell which loads are sustained. estimate: provisional, if there is one."""

    def __init__(self, message: str, estimate: MeasuredCapacity | None = None) -> None:
        super().__init__(message)
        self.estimate = estimate


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half-width of its 95% Student interval (NaN for one value)."""

    mean: float
    half: float

    @classmethod
    def from_values(cls, values: Sequence[float] | FloatArray) -> Estimate:
        num = len(values)
        if num < 2:
            return cls(float(np.mean(values)), math.nan)
        error = float(np.std(values, ddof=1)) / math.sqrt(num)
        return cls(float(np.mean(values)), float(stdtrit(num - 1, 0.975)) * error)

    def one_of(self, num: int) -> list[float]:
        """Return what the next of such values is within, in 95% of cases. num: of the values."""
        half = self.half * math.sqrt(num + 1)
        return [self.mean - half, self.mean + half]

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """Judgement of one load by the second half of a run's arrivals.

    growth: of the backlog, as a share of the offered work. completed: work a second, in requests of
    the mean size. beyond: by target, the share of requests beyond it, less 1%. in_service: mean
    number of requests between their first token and their last."""

    growth: Estimate
    completed: Estimate
    beyond: tuple[Estimate, ...]
    in_service: float

    @property
    def sustained(self) -> bool:
        # Most of the work left behind is overload, however wide the interval.
        keeps_up = self.growth.low <= 0 and self.growth.mean < 0.5 and self.completed.mean > 0
        return keeps_up and all(share.mean <= 0 for share in self.beyond)

    def requests_needed(self, margin: float = 1.0) -> int:
        """Return the least trace length for such a load, with `margin` times as many in service."""
        served = margin * 2 * _TURNOVERS * self.in_service
        return math.ceil(max(served, _LEAST_REQUESTS, 200 * _LEAST_LATE if self.beyond else 0))


@dataclass(frozen=True)
class Criterion:
    """Condition of a sustained load: no backlog growth, and optional p99 targets in seconds."""

    ttft_p99: float | None = None
    tpot_p99: float | None = None

    def judge(self, report: Report) -> LoadVerdict:
        """Return the verdict on a run that ended with its last arrival."""
        end = float(report.arrived_at[-1])
        spans = np.linspace(end / 2, end, _SPANS + 1)
        size = np.where(
            report.refused, 0, report.workload.prompt_len + report.workload.output_len
        ).astype(np.float64)
        finished = np.where(np.isnan(report.finished_at), math.inf, report.finished_at)
        arrived = np.diff(_total(report.arrived_at, size, spans))
        completed = np.diff(_total(finished, size, spans))
        offered = max(float(arrived.mean()), 1e-12)
        seconds_a_request = max(float(size.mean()), 1e-12) * end / (2 * _SPANS)
        speed = Estimate.from_values(completed / seconds_a_request)
        # All that one step finishes falls into one span or the next.
        step = _largest_step(finished, size, spans) / _SPANS / seconds_a_request
        return LoadVerdict(
            growth=Estimate.from_values((arrived - completed) / offered),
            completed=Estimate(speed.mean, speed.half + step),
            beyond=tuple(self._beyond(report, spans)),
            in_service=_in_service(report, finished, end),
        )

    def _beyond(self, report: Report, spans: FloatArray) -> list[Estimate]:
        known = []
        if self.ttft_p99 is not None:
            known.append((~report.refused, _waits(report) > self.ttft_p99))
        if self.tpot_p99 is not None:
            several = report.completed & (report.num_tokens > 1)
            known.append((several, report.token_seconds > self.tpot_p99))
        return [_share(report.arrived_at, spans, among, late) for among, late in known]


def _total(times: FloatArray, size: FloatArray, until: FloatArray) -> FloatArray:
    """Return the summed size of all events up to each time of `until`."""
    order = np.argsort(times, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(size[order])])
    return np.asarray(sums[np.searchsorted(times[order], until, side="right")])


def _largest_step(finished: FloatArray, size: FloatArray, spans: FloatArray) -> float:
    inside = (finished > spans[0]) & (finished <= spans[-1])
    if not inside.any():
        return 0.0
    _, step = np.unique(finished[inside], return_inverse=True)
    return float(np.bincount(step, size[inside]).max())


def _in_service(report: Report, finished: FloatArray, end: float) -> float:
    first = np.where(np.isnan(report.first_token_at), math.inf, report.first_token_at)
    inside = np.minimum(finished, end) - np.maximum(first, end / 2)
    return float(inside.clip(0).sum() / max(end / 2, 1e-12))


def _waits(report: Report) -> FloatArray:
    """Return seconds to the first token, or to the last arrival: late requests must count."""
    until = np.where(np.isnan(report.first_token_at), report.arrived_at[-1], report.first_token_at)
    return np.asarray(until - report.arrived_at)


def _share(
    arrived_at: FloatArray, spans: FloatArray, among: NDArray[np.bool_], late: NDArray[np.bool_]
) -> Estimate:
    """Return the share of requests that are late, less 1%, by arrival time."""
    all_, beyond = (
        np.diff(_total(arrived_at, rows.astype(np.float64), spans))
        for rows in (among, among & late)
    )
    return Estimate.from_values(beyond / max(float(all_.mean()), 1e-12) - 0.01)


@dataclass(frozen=True, slots=True)
class MeasuredCapacity:
    """Capacity in requests a second (0: no load is sustained), with its 95% interval."""

    requests_per_s: float
    low: float
    high: float


def judge_load(setup: Setup, workload: Workload, criterion: Criterion = Criterion()) -> LoadVerdict:
    """Simulate a workload and judge its load. Raises: ValueError without arrivals."""
    if workload.arrival_time is None:
        raise ValueError(f"workload {workload.name!r} has no arrival times")
    return criterion.judge(run(setup, workload, until=float(workload.arrival_time[-1])))


SetupAt = Setup | Callable[[float], Setup | None]


def capacity(
    setup: SetupAt,
    workload_at: Callable[[float], Workload],
    low: float,
    high: float,
    *,
    criterion: Criterion = Criterion(),
    tolerance: float = 0.005,
    on_try: Callable[[float, bool], None] | None = None,
    workers: Workers = HERE,
) -> MeasuredCapacity:
    """Return the largest sustained load in requests a second, and its interval. Raises: TooShort.

    It is searched between `low` and `high` to within a relative `tolerance`; the range is widened
    upwards where `high` is sustained, and the answer is 0 where `low` is not. `workload_at(rate)`
    must give the same requests at another rate. setup: fixed, or a function of the load; its None
    counts as not sustained. With several workers both functions must be picklable."""
    search = _Search(setup, workload_at, criterion, on_try, workers)
    return search.answer(*search.bisect(low, high, tolerance))


def _bisection(
    low: float, high: float, tolerance: float
) -> Generator[float, bool, tuple[float, float]]:
    """Yield loads to judge; return the largest sustained one (or 0) and the smallest other."""
    while (yield high):
        low, high = high, 2 * high
    while high - low > tolerance * high:
        middle = 0.5 * (low + high)
        if (yield middle):
            low = middle
        else:
            high = middle
    return (low if (yield low) else 0.0), high


def _judge(
    setup: SetupAt, workload_at: Callable[[float], Workload], criterion: Criterion, rate: float
) -> tuple[int, LoadVerdict | None]:
    """Return the number of requests and the verdict: None without a setup or with too few."""
    workload = workload_at(rate)
    if len(workload) < _LEAST_REQUESTS:
        return len(workload), None
    server = setup if isinstance(setup, Setup) else setup(rate)
    return len(workload), None if server is None else judge_load(server, workload, criterion)


class _Search:
    def __init__(
        self,
        setup: SetupAt,
        workload_at: Callable[[float], Workload],
        criterion: Criterion,
        on_try: Callable[[float, bool], None] | None,
        workers: Workers,
    ) -> None:
        self._job = setup, workload_at, criterion
        self._on_try = on_try
        self._workers = workers
        self._begun: dict[float, Future[tuple[int, LoadVerdict | None]]] = {}
        self._tried: dict[float, LoadVerdict | None] = {}
        self._num_requests = 0

    def bisect(self, low: float, high: float, tolerance: float) -> tuple[float, float]:
        """Return the largest sustained load, or 0, and the smallest that is not sustained."""
        bounds, answers = (low, high, tolerance), list[bool]()
        search = _bisection(*bounds)
        load = next(search)
        while True:
            others = itertools.islice(self._may_follow(bounds, answers), self._workers.num)
            answers.append(self.sustains(load, others))
            try:
                load = search.send(answers[-1])
            except StopIteration as end:
                best, beyond = end.value
                return best, beyond

    def _may_follow(
        self, bounds: tuple[float, float, float], answers: Sequence[bool]
    ) -> Iterator[float]:
        """Yield loads that a bisection may ask for after some answers, the soonest first.

        Then the likeliest: a search begins at a load that is not sustained and ends not far
        below."""
        paths = deque([list(answers)])
        while paths:
            path = paths.popleft()
            search = _bisection(*bounds)
            try:
                load = next(search)
                for answer in path:
                    load = search.send(answer)
            except StopIteration:
                continue
            likely = [True, False] if path else [False, True]
            known = [self.sustains(load)] if load in self._tried else likely
            paths += [[*path, answer] for answer in known]
            yield load

    def sustains(self, rate: float, others: Iterable[float] = ()) -> bool:
        """Judge a load, and meanwhile `others`, as far as there are workers for them."""
        if rate not in self._tried:
            self._num_requests, verdict = self._judged(rate, list(others))
            self._refuse_below(_LEAST_REQUESTS)
            self._tried[rate] = verdict
            if self._on_try is not None:
                self._on_try(rate, self.sustains(rate))
        verdict = self._tried[rate]
        return verdict is not None and verdict.sustained

    def _judged(self, rate: float, others: Iterable[float]) -> tuple[int, LoadVerdict | None]:
        self._begin(rate)
        while not self._begun[rate].done():
            for load in others:
                if len(self._unfinished()) < self._workers.num:
                    self._begin(load)
            wait(self._unfinished(), return_when=FIRST_COMPLETED)
        return self._begun[rate].result()

    def _begin(self, rate: float) -> None:
        if rate not in self._begun:
            self._begun[rate] = self._workers.submit(_judge, *self._job, rate)

    def _unfinished(self) -> list[Future[tuple[int, LoadVerdict | None]]]:
        return [judged for judged in self._begun.values() if not judged.done()]

    def answer(self, best: float, beyond: float) -> MeasuredCapacity:
        """Return the capacity from the bisection's two bounds. Raises: TooShort."""
        at_best, at_beyond = self._tried.get(best), self._tried[beyond]
        estimate, needed = MeasuredCapacity(0.0, 0.0, beyond), 0
        for verdict in (at_best, at_beyond):
            if verdict is not None and self._num_requests < verdict.requests_needed():
                needed = max(needed, verdict.requests_needed(_MARGIN))
        if at_best is not None:
            found = self._completed(at_best, at_beyond)
            width = found.half / found.mean
            # A recorded trace with more work in its second half completes more than the load.
            answer = min(best, found.mean)
            estimate = MeasuredCapacity(answer, answer * (1 - width), answer * (1 + width))
            if width > _PRECISION:
                needed = max(needed, math.ceil((width / _PRECISION) ** 2 * self._num_requests))
        self._refuse_below(needed, estimate)
        if at_best is None or (at_beyond is not None and at_beyond.growth.low > 0):
            return estimate
        return self._between_targets(best, estimate.requests_per_s)

    @staticmethod
    def _completed(at_best: LoadVerdict, at_beyond: LoadVerdict | None) -> Estimate:
        """Return the completed work, of the overloaded run if it is more precise."""
        found = at_best.completed
        if at_beyond is not None and at_beyond.growth.low > 0:
            busy = at_beyond.completed
            if busy.half < found.half and busy.high >= found.low:
                return busy
        return found

    def _between_targets(self, best: float, answer: float) -> MeasuredCapacity:
        """Return the answer with an interval of loads that surely meet and miss the targets."""
        met = missed = best
        while met > _LOWEST * best and not self._surely(met, meets=True):
            met *= _STEP_DOWN
        while not self._surely(missed, meets=False):
            missed /= _STEP_DOWN
            if missed > best / _LOWEST:
                self._refuse_below(2 * self._num_requests)
        return MeasuredCapacity(answer, min(met, answer), max(missed, answer))

    def _surely(self, rate: float, *, meets: bool) -> bool:
        """Return whether targets are met (or missed) at a load, beyond chance."""
        sustained = self.sustains(rate)
        verdict = self._tried[rate]
        if verdict is None or verdict.growth.low > 0:
            return not meets
        if meets:
            return sustained and all(share.high <= 0 for share in verdict.beyond)
        return any(share.low > 0 for share in verdict.beyond)

    def _refuse_below(self, needed: int, estimate: MeasuredCapacity | None = None) -> None:
        if self._num_requests < needed:
            raise TooShort(
                f"{self._num_requests} requests are too few to tell which load is sustained: "
                f"it takes about {_rounded_up(needed)}",
                estimate,
            )


def _rounded_up(number: int) -> int:
    """Round up to two significant digits."""
    unit: int = 10 ** max(len(str(number)) - 2, 0)
    return math.ceil(number / unit) * unit
