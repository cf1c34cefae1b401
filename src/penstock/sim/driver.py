"""Simulation loop: a trace through the scheduler on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.loop import Instrument, Loop
from penstock.core.scheduler import Scheduler
from penstock.core.types import Arrive, Event, FinishReason, Output, Request, StepPlan, StepResult
from penstock.sim.clock import VirtualClock
from penstock.sim.executor import SimulatedExecutor


@dataclass(slots=True)
class RequestRecord:
    """Result of one request. Times are simulated seconds; None: it did not happen."""

    request: Request
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a run. records: by request id, in order of arrival.

    kv_peak_tokens: of the target's blocks in use. stalled: the reason if requests never ran."""

    records: dict[str, RequestRecord]
    finished_at: float
    kv_peak_tokens: int
    num_preemptions: int
    num_steps: int
    stalled: str | None = None


@dataclass(slots=True)
class _Recorder(Instrument):
    clock: VirtualClock
    records: dict[str, RequestRecord] = field(default_factory=dict)
    num_steps: int = 0

    def expect(self, events: Iterable[Event]) -> None:
        """Begin the records of requests that arrive."""
        for event in events:
            if isinstance(event, Arrive):
                if event.request.id in self.records:
                    raise ValueError(f"request id {event.request.id!r} is used twice in one trace")
                self.records[event.request.id] = RequestRecord(event.request)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self.num_steps += result.repeats

    def on_output(self, output: Output) -> None:
        record = self.records[output.request_id]
        if output.token_ids and record.first_token_time is None:
            record.first_token_time = self.clock.now()
        record.num_tokens += output.num_tokens
        record.num_proposed += output.num_proposed
        record.num_accepted += output.num_accepted
        if output.finish_reason is not None:
            record.finish_time = self.clock.now()
            record.finish_reason = output.finish_reason


@dataclass(slots=True)
class FinishedRequests(Instrument):
    """Calls `advance` per 100 finished requests."""

    advance: Callable[[int], None]
    _num: int = 0

    def on_output(self, output: Output) -> None:
        self._num += output.finish_reason is not None
        if self._num == 100:
            self.advance(100)
            self._num = 0


def simulate(
    scheduler: Scheduler,
    executor: SimulatedExecutor,
    clock: VirtualClock,
    requests: Iterable[Request],
    events: Iterable[tuple[float, Event]] = (),
    instruments: Sequence[Instrument] = (),
    until: float = math.inf,
) -> SimulationResult:
    """Run `requests` and `events`, each at its time, until all is done or until a given time.

    Both must be sorted by time.

    Raises: ValueError for a repeated request id; RuntimeError if the scheduler idles with
    unfinished requests and gives no reason."""
    recorder = _Recorder(clock)
    loop = Loop(scheduler, executor, clock, (recorder, *instruments))
    timeline = _Timeline(requests, events, executor)
    stalled, is_busy = None, False
    while (now := clock.now()) <= until:
        due = timeline.pop_due(now)
        recorder.expect(due)
        # A turn cannot start anything while every lane is busy.
        turn = None
        if not is_busy:
            turn = loop.turn(due)
        elif loop.take_in(due):
            turn = loop.turn([])
        if turn is not None or due:
            is_busy = executor.num_busy == len(scheduler.lanes)
        if turn is not None and (turn.collected or (turn.submitted and not is_busy)):
            continue
        wanted = timeline.next_time
        if turn is not None:
            if wanted == math.inf and (scheduler.num_unfinished == 0 or turn.stalled):
                stalled = turn.stalled
                break
            if turn.wake_at is not None:
                wanted = min(wanted, turn.wake_at)
        if not now < wanted < math.inf:
            raise RuntimeError(
                f"the scheduler idles at {now} s with {scheduler.num_unfinished} "
                "requests unfinished"
            )
        clock.advance_to(wanted)
    return SimulationResult(
        records=recorder.records,
        finished_at=clock.now(),
        kv_peak_tokens=scheduler.pool.peak_used_blocks * scheduler.pool.block_size,
        num_preemptions=scheduler.table.counters.preemptions,
        num_steps=recorder.num_steps,
        stalled=stalled,
    )


class _Timeline:
    """Events by time: of draft servers, arrivals, others; the executor is told of the last two."""

    def __init__(
        self,
        requests: Iterable[Request],
        events: Iterable[tuple[float, Event]],
        executor: SimulatedExecutor,
    ) -> None:
        self._executor = executor
        self._requests = iter(requests)
        self._events = iter(events)
        self._request = next(self._requests, None)
        self._event = next(self._events, None)
        self._look_ahead()

    def _look_ahead(self) -> None:
        arrival = math.inf if self._request is None else self._request.arrival_time
        event = math.inf if self._event is None else self._event[0]
        self._executor.next_arrival, self._executor.next_event = arrival, event
        self._next_given = min(arrival, event)

    @property
    def next_time(self) -> float:
        """Time of the next event or completion of a plan; infinite if there is none."""
        executor = self._executor
        done = executor.next_completion
        coming = min(self._next_given, executor.remote.next_time)
        return coming if done is None else min(coming, done)

    def pop_due(self, now: float) -> list[Event]:
        due: list[Event] = []
        remote = self._executor.remote
        if remote.next_time <= now:
            due += remote.pop_due(now)
        while self._next_given <= now:
            request, event = self._request, self._event
            if event is None or (request is not None and request.arrival_time <= event[0]):
                assert request is not None
                due.append(Arrive(request))
                self._request = next(self._requests, None)
            else:
                due.append(event[1])
                self._event = next(self._events, None)
            self._look_ahead()
        return due
