import asyncio
import time

import pytest

from penstock.serving.messages import Heartbeat
from penstock.serving.process import Watchdog
from penstock.serving.worker import HeartbeatSender

LIMIT_S = 0.4


async def test_silence_is_noticed_and_then_the_end() -> None:
    changes: list[bool] = []
    watchdog = Watchdog(LIMIT_S, changes.append)
    watchdog.heard(Heartbeat(0.0))
    assert "no sign of life for 0.4 s" in await asyncio.wait_for(watchdog.until_frozen(), 20)
    assert changes == [True]
    watchdog.heard(Heartbeat(0.0))
    assert changes == [True, False]


async def test_nothing_is_expected_before_the_first_beat() -> None:
    watchdog = Watchdog(LIMIT_S, lambda is_silent: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watchdog.until_frozen(), 2 * LIMIT_S)


async def test_a_listener_that_stood_still_has_heard_nothing_wrong() -> None:
    """As after a machine has slept: the beats are there, but not read yet."""
    changes: list[bool] = []
    watchdog = Watchdog(LIMIT_S, changes.append)
    watchdog.heard(Heartbeat(0.0))
    watch = asyncio.create_task(watchdog.until_frozen())
    await asyncio.sleep(0)
    time.sleep(2 * LIMIT_S)  # noqa: ASYNC251
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not watch.done()
    assert changes == []
    watch.cancel()


async def test_a_step_without_end_is_noticed() -> None:
    """While it compiles kernels a loop that beats is not stuck, for ten minutes."""
    watchdog = Watchdog(LIMIT_S, lambda is_silent: None)
    watchdog.heard(Heartbeat(599.0))
    watch = asyncio.create_task(watchdog.until_frozen())
    await asyncio.sleep(LIMIT_S / 4)
    assert not watch.done()
    watchdog.heard(Heartbeat(601.0))
    assert "stuck in a step of 601 s" in await asyncio.wait_for(watch, 20)


def test_an_engine_beats_while_it_loads_and_works() -> None:
    beats: list[object] = []
    pulse = HeartbeatSender(LIMIT_S, beats.append)

    def last_step() -> float:
        time.sleep(LIMIT_S / 4)
        beat = beats[-1]
        assert isinstance(beat, Heartbeat)
        return beat.step_s

    assert last_step() == 0.0
    pulse.step_begins()
    assert last_step() > 0.0
    pulse.step_ends()
    assert last_step() == 0.0
