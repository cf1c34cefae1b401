"""Measure the scheduler's CPU time of a step, by decoding requests and drafters.

    python -m lab.bench.scheduler_host [--requests 1,32,256] [--drafters 0 1 3]

CPU time of the scheduler's own calls in decoding steps with drafts inside them, against a simulated
executor, which is not counted. All passes take the same steps: of each step the least time counts,
as other programs only add to it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lab.common.results import Results, count, counts, parser, table, tell
from penstock.core.types import Arrive, Request
from penstock.fluid.step_profile import DrafterProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.clock import VirtualClock
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup, make_executor, make_scheduler
from penstock.sim.workloads import Workload

ACCEPTANCE = {"small": 0.7, "middle": 0.75, "large": 0.8}
SECONDS = {"small": 0.0004, "middle": 0.0006, "large": 0.0008}
"""Seconds of a drafter's step for one request."""
PROMPT, WARM, STEPS = 4, 64, 240
"""Tokens of a prompt, and steps of the full batch before and within the measurement."""


def seconds(num_requests: int, num_drafters: int) -> Iterator[float]:
    """CPU time of each step on."""
    names = tuple(ACCEPTANCE)[:num_drafters]
    drafters = [DrafterProfile(n, (1, 64), (SECONDS[n], 1.5 * SECONDS[n]), 5e-6) for n in names]
    setup = Setup(
        replace(load_profile("a100-llama2-7b"), drafters=tuple(drafters)),
        kv_tokens=1 << 21,
        block_size=16,
        acceptance=GeometricAcceptance(ACCEPTANCE),
        drafters=names,
        counted=False,
    )
    clock, lengths = VirtualClock(), np.array([PROMPT])
    executor = make_executor(setup, Workload("", lengths, lengths), clock)
    scheduler = make_scheduler(setup)
    for i in range(num_requests):
        scheduler.apply(Arrive(Request(str(i), PROMPT, 1 << 12)), 0.0)
    while True:
        begun = time.thread_time()
        plan = scheduler.schedule(clock.now())
        planned = time.thread_time()
        executor.submit(plan)
        end = executor.next_completion
        assert end is not None
        clock.advance_to(end)
        (result,) = executor.collect()
        answered = time.thread_time()
        scheduler.update(plan, result)
        taken = planned - begun + time.thread_time() - answered
        num_decoding = sum(item.start >= PROMPT for item in plan.items)
        if num_decoding == num_requests:
            yield taken


def one_pass(num_requests: int, num_drafters: int) -> npt.NDArray[np.float64]:
    """CPU time of each measured step."""
    steps = seconds(num_requests, num_drafters)
    for _ in range(WARM):
        next(steps)
    gc.collect()
    gc.freeze()  # as the engine process does
    taken = [next(steps) for _ in range(STEPS)]
    gc.unfreeze()
    return np.array(taken)


def main() -> int:
    options = parser(__doc__)
    most = len(ACCEPTANCE)
    options.add_argument("--requests", type=counts, default=[1, 32, 256], metavar="N,N")
    options.add_argument(
        "--drafters", type=int, nargs="+", default=[0, 1, most], choices=range(most + 1)
    )
    options.add_argument("--passes", type=count, default=5)
    args = options.parse_args()
    rows = []
    for num_requests in args.requests:
        for num_drafters in args.drafters:
            passes = [one_pass(num_requests, num_drafters) for _ in range(args.passes)]
            steps = 1e3 * np.min(passes, axis=0)
            mean, median = float(steps.mean()), float(np.median(steps))
            case = dict(requests=num_requests, drafters=num_drafters)
            rows.append(dict(**case, mean_ms=mean, median_ms=median))
    columns = {"requests": "{requests}", "drafters": "{drafters}"}
    columns |= {"mean": "{mean_ms:.3f}", "median": "{median_ms:.3f}"}
    title = "the scheduler's part of a decoding step, ms of CPU time"
    return tell(args, Results(rows, tables=[table(title, rows, columns)]))


if __name__ == "__main__":
    sys.exit(main())
