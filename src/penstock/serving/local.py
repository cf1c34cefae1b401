"""One request on an engine in this process: no server, no second process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from penstock.core.types import Arrive, Event, Output, Request
from penstock.serving.worker import Engine, idle_seconds


def run_request(engine: Engine, request: Request) -> Iterator[Output]:
    """Turn the loop until the request has finished, yielding its outputs as they come."""
    events: list[Event] = [Arrive(request)]
    while True:
        turn = engine.loop.turn(events)
        events = []
        for output in turn.outputs:
            yield output
            if output.finish_reason is not None:
                return
        time.sleep(idle_seconds(engine, turn) or 0.0)
