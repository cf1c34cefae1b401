"""Engine process: receives messages, runs the loop's turns, sends outputs."""

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
"""Heartbeats within the timeout of a silent process; a convention."""

_log = logging.getLogger(__name__)


def import_factory(name: str) -> Callable[[EngineConfig], Engine]:
    """Return the engine factory of the name "package.module:function"."""
    module, _, function = name.partition(":")
    factory: Callable[[EngineConfig], Engine] = getattr(importlib.import_module(module), function)
    return factory


def idle_seconds(engine: Engine, turn: Turn) -> float | None:
    """Return the seconds that the loop may sleep after `turn` without events (None: no limit)."""
    if turn.submitted or turn.collected:
        return 0.0
    if turn.wake_at is None:
        return None
    return max(turn.wake_at - engine.clock.now(), 0.0)


class Disconnected(Exception):
    """The other process is gone."""


class Channel:
    """The engine's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message, from any thread. Raises: Disconnected."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError as error:
            raise Disconnected from error

    def receive(self, timeout: float | None, *others: HasFileno) -> list[Any]:
        """Return messages, after at most `timeout` seconds (None: forever). Raises: Disconnected.

        Also returns once one of `others` is readable."""
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
    """Sends heartbeats from its own thread, with the time of the loop's current step.

    So neither a long step nor loading looks like death, and a stuck loop is noticed. A stopped
    process, or one that never releases the interpreter's lock, sends none."""

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
            except Exception:  # The other process is gone, which the main thread notices too.
                return
            time.sleep(self._interval_s)


class EngineServer:
    """Runs an engine's loop between messages, until it is told to stop."""

    def __init__(self, engine: Engine, channel: Channel, pulse: HeartbeatSender) -> None:
        self._engine = engine
        self._channel = channel
        self._pulse = pulse
        self._num_steps = 0
        self._busy_s = 0.0
        self._pace = TokenPace()
        self._stalled: str | None = None
        self._preparing: dict[str, tuple[Arrive, list[Future[Any]]]] = {}
        """Requests that wait for a compiled grammar, or for the tokenizer of stop strings."""
        self._grammars: dict[str, Future[Any]] = {}
        """Grammars of requests without output yet, which keeps them in the compiler's cache."""
        self._audits = False
        """True once a draft was given to the auditor."""
        engine.executor.remote.connect(self._send_orders)

    def serve(self) -> None:
        """Serve until told to stop. Raises: Disconnected."""
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
                    self._channel.send(finding)
            for message in messages:
                if isinstance(message, StatsRequest):
                    self._channel.send(self.stats())
            # The wake-up of a request that was prepared during the turn may be cleared.
            timeout = 0.0 if self._prepared_ids() else idle_seconds(self._engine, turn)

    def _turn(self, events: Iterable[Event]) -> Turn:
        started_at = self._engine.clock.now()
        turn = self._engine.loop.turn(events)
        for output in turn.outputs:
            self._grammars.pop(output.request_id, None)
        if turn.submitted or turn.collected:
            self._num_steps += turn.collected
            now, state = self._engine.clock.now(), self._engine.state
            self._busy_s += now - started_at
            if state is not None and state.is_due(now):
                state.save_soon(self._savers())
        if turn.stalled is not None and turn.stalled != self._stalled:
            _log.warning("no request can proceed: %s", turn.stalled)
        self._stalled = turn.stalled
        return turn

    def save(self) -> None:
        """Save what was learned, unless there was no step."""
        if self._engine.state is not None and self._num_steps:
            self._engine.state.save(self._savers())

    def _savers(self) -> list[str]:
        """Return the tenants whose outputs may be saved."""
        tenants = self._engine.scheduler.table.tenants
        return [name for name, tenant in tenants.items() if tenant.saves_outputs]

    def _broken(self) -> list[Event]:
        names = self._engine.executor.take_broken()
        for name in names:
            _log.error("drafter %s has failed several times in a row and is taken down", name)
        return [DrafterDown(name) for name in names]

    def _events(self, messages: Iterable[object]) -> list[Event]:
        """Return events in order. Arrival times are set here: clocks of two processes differ."""
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
        return [i for i, (_, waits) in self._preparing.items() if all(w.done() for w in waits)]

    def _prepared(self, arrive: Arrive) -> list[Arrive]:
        """Return a request that can begin; keep one that waits for its preparation."""
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
        # A late draft has a shorter prefix than the text verified by now.
        if draft.audit is not None and text is not None and text.length == draft.prefix_len:
            self._audits = True
            self._engine.auditor.submit(
                draft.drafter, draft.audit, text, draft.token_ids, draft.weights
            )
        return DraftReady(*key, draft.drafter, len(draft.token_ids))

    def _send_orders(self, orders: Sequence[DraftOrder], new: Mapping[str, TokenBuffer]) -> None:
        """Send at once: draft servers work while the target does."""
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
        """Return a snapshot of the engine's counters."""
        scheduler = self._engine.scheduler
        pools = scheduler.table.memory.pools
        return EngineStats(
            num_running=len(scheduler.table.running),
            num_waiting=len(scheduler.table.waiting) + len(self._preparing),
            num_preemptions=scheduler.table.counters.preemptions,
            kv_usage={n: p.num_used_blocks / p.num_blocks for n, p in pools.items()},
            num_steps=self._num_steps,
            busy_s=self._busy_s,
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
            gauges=scheduler.metrics,
            server_failures={n: s.num_failures for n, s in self._engine.executor.servers.items()},
            state_slots=self._engine.num_slots,
            state_bytes=self._engine.state_bytes,
        )

    def _kv_fluid(self) -> FluidKV | None:
        """Return the fluid KV memory, when idle at the last token rate, before that one a step."""
        scheduler, now = self._engine.scheduler, self._engine.clock.now()
        self._pace.look(scheduler.table.running.values(), now)
        step_s = self._busy_s / max(1, self._num_steps)
        return fluid_kv(scheduler.learn, now, self._pace.seconds or step_s)


def describe(engine: Engine) -> Ready:
    """Return the description of an engine for the other process."""
    description = dict(engine.describe())
    return Ready(
        tokenizer_path=engine.tokenizer_path,
        max_request_tokens=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=frozenset(engine.eos_token_ids),
        drafters=tuple(description["drafters"]),
        description={**description, "pid": os.getpid()},
        scores_prompts=engine.scores_prompts,
        pooling=engine.pooling,
        generates=engine.generates,
    )


def run_engine(
    connection: Connection, factory: str, config: EngineConfig, log_format: LogFormat = "text"
) -> None:
    """Run the engine process. `factory`: as for `import_factory`.

    It ignores SIGINT, SIGTERM and SIGHUP, which a terminal or a service manager sends to both, so
    that running requests can finish. It ends when told so, or when the other process is gone."""
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
        # Before it is ready: the first step may be slow.
        channel.send(server.stats())
        channel.send(describe(engine))
        # In a thread: a first request for statistics would otherwise delay steps.
        late = threading.Thread(target=importlib.import_module, args=("scipy.optimize",))
        late.start()
        # Otherwise every full collection traverses the loaded objects in the middle of a step.
        gc.collect()
        gc.freeze()
        gc.enable()
        try:
            server.serve()
        finally:
            server.save()
            engine.executor.close()


def _one_line(error: Exception) -> str:
    """Return the error in one line, with its type unless it is a ValueError, of settings."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
