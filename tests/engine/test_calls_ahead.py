"""Calls ahead to a server that drafts: they fill the pauses between orders, and delay none."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tests.serving.fakes import TOKENIZER

from penstock.core.types import DraftAhead, DraftOrder, Request
from penstock.engine.drafters.completions import Completion
from penstock.engine.drafters.server import Answer, ServerDrafter
from penstock.engine.sequences import TokenBuffer
from penstock.engine.tokenizer import load_tokenizer

TOKEN_S = 0.01
TEXT = " One day a little dog went to the river and saw a big red boat near the old house."
AHEAD = 3
"""Tokens of a call ahead; an order's has five."""


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class SlowClient:
    """Goes on with the text at a fixed time a token. held: calls ahead wait until it is set."""

    def __init__(self, clock: Clock) -> None:
        self.calls: list[int] = []
        self.held = threading.Event()
        self.held.set()
        self._clock = clock

    def complete(self, prompt: str, max_tokens: int, seconds: float) -> Completion:
        self.calls.append(max_tokens)
        if max_tokens == AHEAD:
            assert self.held.wait(20)
        self._clock.at += TOKEN_S * max_tokens
        whole = TEXT * 40
        return Completion(whole[len(prompt) :][: 4 * max_tokens], has_ended=False)

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    """One request at a drafter whose server and clock are played by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.client = SlowClient(self.clock)
        loading: Future = Future()
        loading.set_result(load_tokenizer(TOKENIZER))
        self.drafter = ServerDrafter(
            "edge", self.client, loading, 4096, None, self.clock, lambda: None
        )  # type: ignore[arg-type]
        for _ in range(2):
            threading.Thread(target=self.drafter._work, daemon=True).start()
        ids = tuple(loading.result().encode(TEXT, False))
        self.text = TokenBuffer(Request("a", len(ids), 400, prompt_token_ids=ids))
        self.num_orders = 0
        self.events: list[object] = []
        self.order()  # the server reads the text
        self.wait(lambda: self.client.calls == [5])

    def wait(self, is_so) -> None:
        end = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < end
            self.events += self.drafter.take_events()
            time.sleep(0.002)

    def order(self) -> None:
        self.num_orders += 1
        order = DraftOrder("a", 0, self.num_orders, "edge", self.text.length, 0, 4)
        self.drafter.order([order], {"a": self.text})

    def answers(self) -> list[Answer]:
        self.events += self.drafter.take_events()
        return [e for e in self.events if isinstance(e, Answer)]

    def settle(self) -> None:
        """Wait until every order is answered and no call is made any more."""
        self.wait(lambda: len(self.answers()) == self.num_orders)
        self.wait(lambda: self.drafter._is_ahead.acquire(timeout=0.05))
        self.drafter._is_ahead.release()

    def ordered(self, pause: float) -> int:
        """Order after a pause; returns how many calls ahead follow."""
        self.settle()
        idle = self.drafter._idle_since
        assert idle is not None
        self.clock.at = max(self.clock.at, idle + pause)
        before = self.client.calls.count(AHEAD)
        self.order()
        self.settle()
        return self.client.calls.count(AHEAD) - before


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.client.held.set()
    made.drafter.close()


@pytest.mark.parametrize(("pause", "calls"), [(0.02, 0), (0.035, 1), (0.095, 3)])
def test_calls_fit_into_the_shortest_pause(rig: Rig, pause: float, calls: int) -> None:
    """A call ahead takes 0.03 s. The first pause is no guide: the server read the text then."""
    assert rig.ordered(pause) == calls
    assert rig.ordered(10 * pause) == calls, "the longest pause does not count"
    rig.answers()
    sent = [e for e in rig.events if isinstance(e, DraftAhead)]
    assert len(sent) == 1 + 2 * calls, "what was read, and a piece of each"


def test_an_order_waits_for_a_call_ahead_and_says_so(rig: Rig) -> None:
    rig.ordered(0.5)
    rig.settle()
    rig.client.held.clear()
    rig.order()
    rig.wait(lambda: rig.client.calls[-1] == AHEAD and rig.drafter._is_ahead.locked())
    asked = len(rig.client.calls)
    rig.order()
    time.sleep(0.1)
    assert len(rig.client.calls) == asked, "the server has one thing to do at a time"
    rig.clock.at += 2.0
    rig.client.held.set()
    rig.settle()
    waited = [answer.waited_s for answer in rig.answers()]
    assert waited[-1] == pytest.approx(2.0 + AHEAD * TOKEN_S)
    assert max(waited[:-1]) == 0.0
    assert rig.client.calls[asked] == 5, "the order is next"
