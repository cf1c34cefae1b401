"""Runs a trace through the scheduler on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.core.loop import Loop
from penstock.core.ports import Instrument
from penstock.core.scheduler import Scheduler
from penstock.core.types import Arrive, Event, FinishReason, Output, Request, StepPlan, StepResult
from penstock.sim.clock import VirtualClock
from penstock.sim.executor import SimulatedExecutor


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times are simulated seconds; None: that never came."""

    request: Request
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A whole run. `records` are by request id, in order of arrival; `kv_peak_tokens` counts the
    target's blocks that somebody reads, in tokens."""

    records: dict[str, RequestRecord]
    finished_at: float
    kv_peak_tokens: int
    num_preemptions: int


@dataclass(slots=True)
class _Recorder:
    """Watches the loop for `simulate`."""

    scheduler: Scheduler
    clock: VirtualClock
    records: dict[str, RequestRecord] = field(default_factory=dict)
    kv_peak_blocks: int = 0

    def on_plan(self, plan: StepPlan) -> None:
        self.kv_peak_blocks = max(self.kv_peak_blocks, self.scheduler.pool.num_used_blocks)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Results show in outputs."""

    def on_output(self, output: Output) -> None:
        record = self.records[output.request_id]
        if output.token_ids and record.first_token_time is None:
            record.first_token_time = self.clock.now()
        record.num_tokens += len(output.token_ids)
        record.num_proposed += output.num_proposed
        record.num_accepted += output.num_accepted
        if output.finish_reason is not None:
            record.finish_time = self.clock.now()
            record.finish_reason = output.finish_reason


def simulate(
    scheduler: Scheduler,
    executor: SimulatedExecutor,
    clock: VirtualClock,
    requests: Iterable[Request],
    events: Iterable[tuple[float, Event]] = (),
    instruments: Sequence[Instrument] = (),
) -> SimulationResult:
    """Let `requests` arrive at their `arrival_time`, and `events` happen at theirs, until all is
    done. Both must be in order of time.

    Raises: ValueError for a repeated request id; RuntimeError if the scheduler waits for nothing
    while requests are unfinished.
    """
    recorder = _Recorder(scheduler, clock)
    loop = Loop(scheduler, executor, clock, (recorder, *instruments))
    timeline = _Timeline(requests, events)
    while True:
        due = timeline.take(clock.now())
        for event in due:
            if isinstance(event, Arrive):
                _expect(recorder.records, event.request)
        turn = loop.turn(due)
        if turn.submitted or turn.collected:
            continue
        coming = (timeline.next_time, executor.next_completion)
        if scheduler.num_unfinished == 0 and coming == (None, None):
            break
        wanted = [t for t in (*coming, turn.wake_at) if t is not None]
        if not wanted or min(wanted) <= clock.now():
            raise RuntimeError(
                f"the scheduler idles at {clock.now()} s with {scheduler.num_unfinished} "
                "requests unfinished"
            )
        clock.advance_to(min(wanted))
    return SimulationResult(
        records=recorder.records,
        finished_at=clock.now(),
        kv_peak_tokens=recorder.kv_peak_blocks * scheduler.pool.block_size,
        num_preemptions=scheduler.num_preemptions,
    )


def _expect(records: dict[str, RequestRecord], request: Request) -> None:
    if request.id in records:
        raise ValueError(f"request id {request.id!r} is used twice in one trace")
    records[request.id] = RequestRecord(request)


class _Timeline:
    """Arrivals and other events, merged by time; at equal times arrivals come first."""

    def __init__(self, requests: Iterable[Request], events: Iterable[tuple[float, Event]]) -> None:
        arrivals: Iterator[tuple[float, Event]] = ((r.arrival_time, Arrive(r)) for r in requests)
        self._entries = heapq.merge(arrivals, events, key=lambda entry: entry[0])
        self._head = next(self._entries, None)

    @property
    def next_time(self) -> float | None:
        return None if self._head is None else self._head[0]

    def take(self, now: float) -> list[Event]:
        """Events that are due."""
        due = []
        while self._head is not None and self._head[0] <= now:
            due.append(self._head[1])
            self._head = next(self._entries, None)
        return due
