"""So many clients on the virtual clock, each of which sends when it has its answer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.core.loop import Loop
from penstock.core.types import NO_DRAFTER, Arrive, Event
from penstock.sim.clock import VirtualClock
from penstock.sim.executor import SimulatedExecutor
from penstock.sim.run import Setup, make_executor, make_scheduler, requests_of
from penstock.sim.workloads import Workload

IntArray = npt.NDArray[np.int64]


def served(
    setup: Setup,
    load: Workload,
    batch: int,
    ends: Sequence[float],
    kind: Callable[..., SimulatedExecutor] = SimulatedExecutor,
    prompts: Sequence[tuple[int, ...]] | None = None,
    plain: Container[str] = (),
) -> dict[str, IntArray]:
    """Tokens by tenant in consecutive spans of time. ends: of the spans, in seconds; kind: makes
    the executor; prompts: tokens of the requests' prompts, where they matter; plain: tenants whose
    requests ask for no drafter."""
    # Counted requests tell of their tokens when they end.
    clock, scheduler = VirtualClock(), make_scheduler(replace(setup, counted=False))
    executor = make_executor(setup, load, clock, kind)
    loop, requests = Loop(scheduler, executor, clock), list(requests_of(load, setup))
    if prompts is not None:
        told = zip(requests, prompts, strict=True)
        requests = [replace(request, prompt_token_ids=prompt) for request, prompt in told]
    requests = [replace(r, drafter=NO_DRAFTER) if r.tenant in plain else r for r in requests]
    for server in setup.draft_servers:
        scheduler.apply(server.up(), clock.now())
    owner = {request.id: request.tenant for request in requests}
    made = {tenant: np.zeros(len(ends), dtype=np.int64) for tenant in owner.values()}
    coming = {t: iter([r for r in requests[batch:] if r.tenant == t]) for t in made}
    due: list[Event] = [Arrive(request) for request in requests[:batch]]
    while (now := clock.now()) < ends[-1]:
        span = bisect.bisect_right(ends, now)
        executor.next_event = ends[span]
        turn = loop.turn([*executor.remote.pop_due(now), *due])
        due = []
        for output in turn.outputs:
            tenant = owner[output.request_id]
            made[tenant][span] += output.num_tokens
            if output.finish_reason is not None:
                due.append(Arrive(replace(next(coming[tenant]), arrival_time=now)))
        if due or turn.collected or turn.submitted:
            continue
        coming_at = [executor.remote.next_time, executor.next_completion, turn.wake_at]
        wanted = min(t for t in coming_at if t is not None)
        if wanted == math.inf:
            raise RuntimeError(f"no request runs any more: {turn.stalled}")
        clock.advance_to(wanted)
    return made


def second_half(
    setup: Setup,
    load: Workload,
    batch: int,
    seconds: float,
    kind: Callable[..., SimulatedExecutor] = SimulatedExecutor,
    plain: Container[str] = (),
) -> dict[str, int]:
    """Tokens by tenant in the second half of the time."""
    made = served(setup, load, batch, (seconds / 2, seconds), kind, plain=plain)
    return {tenant: int(tokens[1]) for tenant, tokens in made.items()}


def log_normal(rng: np.random.Generator, num: int, mean: float, spread: float) -> IntArray:
    """Lengths with this median."""
    return np.exp(rng.normal(math.log(mean), spread, num)).astype(np.int64)
