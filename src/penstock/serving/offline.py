"""Runs requests to their end in this process, without sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.core.loop import Loop
from penstock.core.types import Arrive, FinishReason, Output, Request
from penstock.serving.usage import Usage

_PAUSE_S = 1e-3
"""Wait for drafts that are on their way."""


@dataclass(slots=True)
class Completion:
    """Result of one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage = field(default_factory=Usage)

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.usage.on_output(output)
        self.finish_reason = output.finish_reason
        self.error = output.error


def complete(
    loop: Loop,
    requests: Iterable[Request],
    concurrency: int,
    on_output: Callable[[Output], None] | None = None,
) -> list[Completion]:
    """Run requests; completions in order. Raises: RuntimeError if the scheduler stalls."""
    waiting = deque(requests)
    completions = {r.id: Completion(r) for r in waiting}
    unfinished = 0
    while waiting or unfinished:
        events = []
        while waiting and unfinished < concurrency:
            events.append(Arrive(waiting.popleft()))
            unfinished += 1
        turn = loop.turn(events)
        for output in turn.outputs:
            completions[output.request_id].add(output)
            unfinished -= output.finish_reason is not None
            if on_output is not None:
                on_output(output)
        if events or turn.submitted or turn.collected:
            continue
        if loop.num_plans_in_flight:
            loop.wait()
        elif turn.wake_at is not None:
            loop.wait(_PAUSE_S)
        else:
            raise RuntimeError("the scheduler stands still with requests unfinished")
    return list(completions.values())
