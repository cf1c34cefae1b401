import gc
import multiprocessing
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakValueDictionary

import pytest
from tests.serving.fakes import TOKENIZER, ToyEngine, toy_engine

from penstock.config import EngineConfig, PolicyConfig
from penstock.core.loop import Turn
from penstock.core.types import Arrive, Cancel, Event, Request, SamplingParams, StopStrings
from penstock.engine.ends import LazyTokenizer
from penstock.serving.messages import EngineStats, Events, Outputs, StatsRequest, Stop
from penstock.serving.worker import (
    Channel,
    Disconnected,
    EngineServer,
    HeartbeatSender,
    idle_seconds,
)


@pytest.fixture
def engine() -> ToyEngine:
    return toy_engine(EngineConfig(target=TOKENIZER, allocation=PolicyConfig(name="fixed")))


def request(request_id: str = "a", max_tokens: int = 20) -> Request:
    return Request(request_id, 3, max_tokens, prompt_token_ids=(5, 6, 7))


def test_how_long_the_loop_may_sleep(engine: ToyEngine) -> None:
    now = engine.clock.now()
    assert idle_seconds(engine, Turn((), 1, 0, None)) == 0
    assert idle_seconds(engine, Turn((), 0, 1, None)) == 0
    assert idle_seconds(engine, Turn((), 0, 0, None)) is None
    assert idle_seconds(engine, Turn((), 0, 0, now - 1)) == 0
    soon = idle_seconds(engine, Turn((), 0, 0, now + 1))
    assert soon is not None
    assert 0.9 < soon <= 1


def test_a_turn_is_one_message(engine: ToyEngine) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        server = EngineServer(engine, Channel(theirs), HeartbeatSender(20.0, [].append))
        thread = threading.Thread(target=server.serve)
        thread.start()
        channel = Channel(ours)
        arrivals = tuple(Arrive(request(name)) for name in "abcd")
        channel.send(Events(arrivals))
        done: set[str] = set()
        sizes = []
        while len(done) < 4:
            for message in channel.receive(5.0):
                assert isinstance(message, Outputs)
                sizes.append(len(message.outputs))
                done |= {o.request_id for o in message.outputs if o.finish_reason}
        assert set(sizes) == {4}
        channel.send(StatsRequest())
        (stats,) = channel.receive(5.0)
        assert isinstance(stats, EngineStats)
        assert stats.num_steps >= len(sizes)
        assert stats.kv_usage == {"target": 0, "toy-drafter": 0}
        channel.send(Stop())
        thread.join(5)
        assert not thread.is_alive()


def test_events_in_one_frame_keep_their_order(engine: ToyEngine) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        server = EngineServer(engine, Channel(theirs), HeartbeatSender(20.0, [].append))
        ours.send(Events((Arrive(request()), Cancel("a"), Arrive(request("b")))))
        ours.send(Stop())
        server.serve()
    assert engine.scheduler.num_unfinished == 0


class SlowGrammars:
    """Compiles when a test says so."""

    def __init__(self) -> None:
        self.compiled: dict[str, Future[Any]] = defaultdict(Future)

    def compile(self, grammar: str) -> Future[Any]:
        return self.compiled[grammar]


def test_no_request_waits_for_the_grammar_of_another(engine: ToyEngine) -> None:
    grammars = SlowGrammars()
    engine.executor.grammars = grammars  # type: ignore[assignment]
    slow, cancelled = (
        replace(request(name), sampling=SamplingParams(grammar=name)) for name in ("slow", "gone")
    )
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        server = EngineServer(engine, Channel(theirs), HeartbeatSender(20.0, [].append))
        thread = threading.Thread(target=server.serve)
        thread.start()
        channel = Channel(ours)
        channel.send(Events((Arrive(slow), Arrive(cancelled), Arrive(request("quick")))))
        finished: list[str] = []

        def read_until(name: str) -> None:
            while name not in finished:
                for message in channel.receive(5.0):
                    finished.extend(o.request_id for o in message.outputs if o.finish_reason)

        read_until("quick")
        assert finished == ["quick"]
        channel.send(Events((Cancel("gone"),)))
        grammars.compiled["slow"].set_result(None)
        read_until("slow")
        channel.send(Stop())
        thread.join(5)
    assert finished == ["quick", "slow"]
    assert engine.scheduler.num_unfinished == 0


class RecordingChannel(Channel):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.timeouts: list[float | None] = []

    def receive(self, timeout: float | None, *others: Any) -> list[Any]:
        self.timeouts.append(timeout)
        return super().receive(timeout, *others)


def test_the_loop_sleeps_until_a_request_is_prepared(engine: ToyEngine) -> None:
    """For a grammar, and for the tokenizer that finds stop strings."""
    grammars, loading = SlowGrammars(), Future[Any]()
    loaded = engine.executor.tokenizer()
    engine.executor.grammars = grammars  # type: ignore[assignment]
    engine.executor.tokenizer = LazyTokenizer(lambda: loaded)
    engine.executor.tokenizer.__dict__["loading"] = loading
    asked = replace(
        request("a"), sampling=SamplingParams(grammar="g"), stop=StopStrings(("no such text",))
    )
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        watched = RecordingChannel(theirs)
        server = EngineServer(engine, watched, HeartbeatSender(20.0, [].append))
        thread = threading.Thread(target=server.serve)
        thread.start()
        channel = Channel(ours)
        channel.send(Events((Arrive(asked),)))
        channel.send(StatsRequest())
        (stats,) = channel.receive(5.0)
        assert stats.num_deferred == 1
        grammars.compiled["g"].set_result(None)
        channel.send(StatsRequest())
        (stats,) = channel.receive(5.0)
        assert stats.num_deferred == 1, "the tokenizer is still being loaded"
        loading.set_result(loaded)
        finished = False
        while not finished:
            for message in channel.receive(5.0):
                finished |= any(o.finish_reason for o in message.outputs)
        channel.send(Stop())
        thread.join(5)
    assert set(watched.timeouts) <= {None, 0.0}


class ForgetfulGrammars:
    """Keeps nothing that nobody else does."""

    def __init__(self) -> None:
        self.alive: WeakValueDictionary[str, Future[Any]] = WeakValueDictionary()

    def compile(self, grammar: str) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return self.alive.setdefault(grammar, done)


def test_a_grammar_is_kept_until_its_request_has_begun_or_is_gone(engine, monkeypatch) -> None:
    grammars = ForgetfulGrammars()
    engine.executor.grammars = grammars  # type: ignore[assignment]
    waiting, gone = (
        replace(request(name), sampling=SamplingParams(grammar=name))
        for name in ("waiting", "gone")
    )
    kept: list[set[str]] = []
    turn = engine.loop.turn

    def seen(events: Iterable[Event]) -> Turn:
        gc.collect()
        kept.append(set(grammars.alive))
        return turn(events)

    monkeypatch.setattr(engine.loop, "turn", seen)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        server = EngineServer(engine, Channel(theirs), HeartbeatSender(20.0, [].append))
        ours.send(Events((Arrive(waiting), Arrive(gone), Cancel("gone"))))
        thread = threading.Thread(target=server.serve)
        thread.start()
        outputs = [o for m in Channel(ours).receive(5.0) for o in m.outputs]
        ours.send(Stop())
        thread.join(5)
    assert outputs
    assert kept[0] == {"waiting"}
    gc.collect()
    assert not grammars.alive


def test_the_loop_ends_with_its_peer(engine: ToyEngine) -> None:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        ours.close()
        with pytest.raises(Disconnected):
            EngineServer(engine, Channel(theirs), HeartbeatSender(20.0, [].append)).serve()
