"""The engine process: messages in, turns of the loop, outputs out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from penstock.config import EngineConfig
from penstock.core.learn.memory import FluidKV, TokenPace, fluid_kv
from penstock.core.loop import Turn
from penstock.core.types import Arrive, Cancel, DrafterDown, DraftOrder, DraftReady, Event
from penstock.serving.logs import LogFormat, configure_logging
from penstock.serving.messages import (
    AuditFinding,
    DraftOrders,
    EngineStats,
    Events,
    Failed,
    Heartbeat,
    Outputs,
    Ready,
    RemoteDraft,
    RequestText,
    StatsRequest,
    Stop,
)

if TYPE_CHECKING:
    from _typeshed import HasFileno

    from penstock.engine.build import Engine
    from penstock.engine.sequences import TokenBuffer

HEARTBEATS_PER_TIMEOUT = 20
"""Within the time after which a process without any is given up."""

_log = logging.getLogger(__name__)


def import_factory(name: str) -> Callable[[EngineConfig], Engine]:
    """The engine factory that `name`, "package.module:function", stands for."""
    module, _, function = name.partition(":")
    factory: Callable[[EngineConfig], Engine] = getattr(importlib.import_module(module), function)
    return factory


def idle_seconds(engine: Engine, turn: Turn) -> float | None:
    """How long the loop may sleep after `turn` unless an event comes, or a lane has ended; None:
    until then."""
    if turn.submitted or turn.collected:
        return 0.0
    if turn.wake_at is None:
        return None
    return max(turn.wake_at - engine.clock.now(), 0.0)


class Disconnected(Exception):
    """The other process is no longer there."""


class Channel:
    """The engine's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """From any thread. Raises: Disconnected."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError as error:
            raise Disconnected from error

    def receive(self, timeout: float | None, *others: HasFileno) -> list[Any]:
        """What has come, after waiting at most `timeout` seconds (None: for ever) for something, or
        until one of `others` can be read.

        Raises: Disconnected.
        """
        messages: list[Any] = []
        sources = [self._connection, *others]
        while self._connection in select.select(sources, [], [], timeout)[0]:
            try:
                messages.append(pickle.loads(self._connection.recv_bytes()))
            except (EOFError, OSError) as error:
                raise Disconnected from error
            timeout = 0.0
        return messages


class HeartbeatSender:
    """Sends heartbeats from a thread of its own, so that a long step or the loading of models does
    not look like death, and says how long the loop's step has taken, so that a loop that is stuck
    is found out, too. A stopped process, or one that holds the interpreter's lock for ever, beats
    no more."""

    def __init__(self, limit_s: float, send: Callable[[object], None]) -> None:
        self._interval_s = limit_s / HEARTBEATS_PER_TIMEOUT
        self._send = send
        self._step_began_at: float | None = None
        threading.Thread(target=self._beat, daemon=True, name="penstock-pulse").start()

    def step_begins(self) -> None:
        self._step_began_at = time.monotonic()

    def step_ends(self) -> None:
        self._step_began_at = None

    def _beat(self) -> None:
        while True:
            began_at = self._step_began_at
            step_s = 0.0 if began_at is None else time.monotonic() - began_at
            try:
                self._send(Heartbeat(step_s))
            except Exception:  # The other process is gone; the main thread finds that out itself.
                return
            time.sleep(self._interval_s)


class EngineServer:
    """Runs an engine's loop between messages, until it is told to stop."""

    def __init__(self, engine: Engine, channel: Channel, pulse: HeartbeatSender) -> None:
        self._engine = engine
        self._channel = channel
        self._pulse = pulse
        self._started_at = engine.clock.now()
        self._num_steps = 0
        self._busy_s = 0.0
        self._pace = TokenPace()
        self._stalled: str | None = None
        self._preparing: dict[str, tuple[Arrive, list[Future[Any]]]] = {}
        """Requests that have come, and what they wait for: a grammar to be compiled, or the
        tokenizer that finds stop strings. No step waits for those."""
        self._grammars: dict[str, Future[Any]] = {}
        """Of requests that have not said anything yet: what is held is not compiled again when
        they begin."""
        self._audits = False
        """Whether a draft was given to the auditor."""
        engine.executor.remote.connect(self._send_orders)

    def serve(self) -> None:
        """Raises: Disconnected."""
        timeout: float | None = None
        while True:
            self._pulse.step_ends()
            messages = self._channel.receive(timeout, self._engine.executor)
            self._pulse.step_begins()
            if any(isinstance(m, Stop) for m in messages):
                return
            turn = self._turn([*self._events(messages), *self._broken()])
            if turn.outputs:
                self._channel.send(Outputs(turn.outputs))
            if self._audits:
                for finding in self._engine.auditor.findings():
                    self._channel.send(AuditFinding(*finding))
            for message in messages:
                if isinstance(message, StatsRequest):
                    self._channel.send(self.stats())
            # The sign of one that was prepared during the turn may be gone.
            timeout = 0.0 if self._prepared_ids() else idle_seconds(self._engine, turn)

    def _turn(self, events: Iterable[Event]) -> Turn:
        started_at = self._engine.clock.now()
        turn = self._engine.loop.turn(events)
        for output in turn.outputs:
            self._grammars.pop(output.request_id, None)
        if turn.submitted or turn.collected:
            self._num_steps += turn.collected
            self._busy_s += self._engine.clock.now() - started_at
        if turn.stalled is not None and turn.stalled != self._stalled:
            _log.warning("no request can go on: %s", turn.stalled)
        self._stalled = turn.stalled
        return turn

    def _broken(self) -> list[Event]:
        """Drafters of this process that do nothing but fail are used no more."""
        names = self._engine.executor.take_broken()
        for name in names:
            _log.error("drafter %s has failed several times in a row and is taken down", name)
        return [DrafterDown(name) for name in names]

    def _events(self, messages: Iterable[object]) -> list[Event]:
        """Events in order; arrivals get their time here, because clocks of two processes differ."""
        now = self._engine.clock.now()
        events: list[Event] = [self._preparing.pop(i)[0] for i in self._prepared_ids()]
        for message in messages:
            if not isinstance(message, Events):
                continue
            for event in message.events:
                if isinstance(event, RemoteDraft):
                    events.append(self._hold(event))
                elif isinstance(event, Arrive):
                    request = dataclasses.replace(event.request, arrival_time=now)
                    events += self._prepared(Arrive(request))
                elif isinstance(event, Cancel):
                    self._grammars.pop(event.request_id, None)
                    if self._preparing.pop(event.request_id, None) is None:
                        events.append(event)
                else:
                    events.append(event)
        return events

    def _prepared_ids(self) -> list[str]:
        """Ids of requests that were kept back, and now can begin."""
        return [i for i, (_, waits) in self._preparing.items() if all(w.done() for w in waits)]

    def _prepared(self, arrive: Arrive) -> list[Arrive]:
        """A request that can begin; one that something is prepared for is kept back meanwhile."""
        request, executor = arrive.request, self._engine.executor
        waits: list[Future[Any]] = []
        grammar = request.sampling.grammar
        if grammar is not None and executor.grammars is not None:
            compiled = self._grammars[request.id] = executor.grammars.compile(grammar)
            waits.append(compiled)
        if request.stop is not None and executor.tokenizer is not None:
            waits.append(executor.tokenizer.loading)
        waits = [wait for wait in waits if not wait.done()]
        if not waits:
            return [arrive]
        self._preparing[request.id] = arrive, waits
        for wait in waits:
            wait.add_done_callback(lambda _: executor.wake())
        return []

    def _hold(self, draft: RemoteDraft) -> DraftReady:
        key = (draft.request_id, draft.epoch, draft.round)
        executor = self._engine.executor
        executor.hold_remote(*key, draft.token_ids, draft.weights)
        text = executor.text_of(draft.request_id)
        # A draft that comes too late stands behind less than what is verified by now.
        if draft.audit is not None and text is not None and text.length == draft.prefix_len:
            self._audits = True
            self._engine.auditor.submit(
                draft.drafter, draft.audit, text, draft.token_ids, draft.weights
            )
        return DraftReady(*key, draft.drafter, len(draft.token_ids))

    def _send_orders(self, orders: Sequence[DraftOrder], new: Mapping[str, TokenBuffer]) -> None:
        """At once: the draft servers work while the target does."""
        described = {
            request_id: RequestText(
                text.request.tenant,
                text.request.sampling,
                tuple(text.span(0, text.length).tolist()),
            )
            for request_id, text in new.items()
        }
        self._channel.send(DraftOrders(tuple(orders), described))

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        scheduler = self._engine.scheduler
        pools = scheduler.table.memory.pools
        return EngineStats(
            num_running=len(scheduler.table.running),
            num_waiting=len(scheduler.table.waiting) + len(self._preparing),
            num_preemptions=scheduler.table.counters.preemptions,
            kv_usage={n: p.num_used_blocks / p.num_blocks for n, p in pools.items()},
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            uptime_s=self._engine.clock.now() - self._started_at,
            num_target_steps=self._engine.executor.totals.num_target_steps,
            phases=self._engine.executor.totals.phases,
            drafter_seconds=self._engine.executor.totals.drafter_seconds,
            num_ahead=scheduler.table.counters.ahead,
            num_ahead_used=scheduler.table.counters.ahead_used,
            plan_s=self._engine.executor.totals.plan_s,
            kv_capacity_tokens=scheduler.pool.capacity_tokens,
            kv_fluid=self._kv_fluid(),
            tenant_weights={n: t.weight for n, t in scheduler.table.tenants.items()},
            num_deferred=len(self._preparing),
            kv_block_size=scheduler.pool.block_size,
            steps_by_tokens=tuple(self._engine.executor.totals.steps_by_tokens),
            num_step_tokens=self._engine.executor.totals.num_step_tokens,
        )

    def _kv_fluid(self) -> FluidKV | None:
        """While nothing runs tokens are taken to come as fast as they were last seen to, and before
        that one a step."""
        scheduler, now = self._engine.scheduler, self._engine.clock.now()
        self._pace.look(scheduler.table.running.values(), now)
        step_s = self._busy_s / max(1, self._num_steps)
        return fluid_kv(scheduler.learn, now, self._pace.seconds or step_s)


def describe(engine: Engine) -> Ready:
    """What the other process must know of an engine."""
    capacity = engine.scheduler.pool.capacity_tokens
    description = dict(engine.describe())
    return Ready(
        tokenizer_path=engine.tokenizer_path,
        max_request_tokens=min(engine.max_model_len, capacity),
        vocab_size=engine.vocab_size,
        eos_token_ids=frozenset(engine.eos_token_ids),
        drafters=tuple(description["drafters"]),
        description={**description, "pid": os.getpid()},
        scores_prompts=engine.scores_prompts,
    )


def run_engine(
    connection: Connection, factory: str, config: EngineConfig, log_format: LogFormat = "text"
) -> None:
    """Body of the engine process. `factory`: as for `import_factory`.

    It ignores SIGINT, SIGTERM and SIGHUP: a terminal or a service manager sends them to both
    processes, and requests that run must outlive them. It ends when the other process says so, or
    is gone.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    configure_logging(log_format)
    channel = Channel(connection)
    pulse = HeartbeatSender(config.heartbeat_timeout_s, channel.send)
    with contextlib.suppress(Disconnected):
        try:
            engine = import_factory(factory)(config)
        except Exception as error:
            if not isinstance(error, ValueError):
                _log.exception("loading the engine failed")
            channel.send(Failed(_one_line(error)))
            return
        server = EngineServer(engine, channel, pulse)
        # Before it is ready, so that there are statistics while its first step is slow.
        channel.send(server.stats())
        channel.send(describe(engine))
        # For statistics, beside the first steps: the first who asked for them would hold those up.
        late = threading.Thread(target=importlib.import_module, args=("scipy.optimize",))
        late.start()
        # What is loaded stays; otherwise every full collection walks it in the middle of a step.
        gc.collect()
        gc.freeze()
        try:
            server.serve()
        finally:
            engine.executor.close()


def _one_line(error: Exception) -> str:
    """Bad settings explain themselves; anything else needs its type as well."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
