"""The whole loop at once, live: as `whole_loop`, on this machine.

On the bundled family or a larger copy of it (`--family`). In the calm one request is served at a
time, in the rush eight; requests of all domains are sampled with seeds at temperature 1. All
systems serve the same requests in turn, new ones in every turn, with drafters inside the step. The
base drafts four tokens with the default drafter. Before anything counts each system has served 64
requests, one at a time, and goes into the rush with what it knows by then.

The placebo is the base once more, with a scheduler of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lab.common.claims import ClaimVerdict
from lab.common.experiment import Experiment, Trial
from lab.common.report import write_rates
from lab.papers.whole_loop import PHASES, SYSTEMS, Latencies, draw_gains, verdicts
from penstock.config import PolicyConfig
from penstock.core.types import AUTO_DRAFTER
from penstock.zoo.registry import DEFAULT_DRAFTER

if TYPE_CHECKING:
    from lab.common.live import LiveSystem
    from penstock.engine.build import Engine

NAME = "whole_loop_live"

_BATCHES = dict(zip(PHASES, (1, 8), strict=True))
_TO_LEARN = 8
"""Requests of each domain."""
_MACHINE = "live"


def run(job: Trial) -> list[ClaimVerdict]:
    from lab.common.live import LiveScene

    scene = LiveScene.from_trial(job, NAME)
    job.tell(f"{NAME}: loading")
    engine = scene.load(max(_BATCHES.values()))
    systems = systems_of(engine)

    def tell(what: str) -> None:
        job.tell(f"{NAME}: {what}")

    # What a request's prompt was like is remembered, so that the rush has other ones.
    rates = {
        phase: scene.rates(systems, batch, tell, to_learn=to_learn, first=i * scene.num_turns)
        for i, ((phase, batch), to_learn) in enumerate(
            zip(_BATCHES.items(), (_TO_LEARN, None), strict=True)
        )
    }
    write_rates(job.out / f"{NAME}.csv", "phase", rates)
    # What a token takes, as a latency.
    found: Latencies = {
        (_MACHINE, system): 1 / np.stack([rates[phase][system] for phase in PHASES], axis=1)
        for system in SYSTEMS
    }
    draw_gains(job.out / f"{NAME}.png", "The parts alone and together, live (95% intervals)", found)
    return verdicts(_MACHINE, found)


def systems_of(engine: Engine) -> list[LiveSystem]:
    """Schedulers that have learned nothing of requests yet."""
    from lab.common.live import VLLM_V1, LiveSystem, make_loop

    systems = []
    for name, parts in SYSTEMS.items():
        loop = make_loop(
            engine,
            parts.get("selection", PolicyConfig.from_name("single")),
            parts.get("allocation", PolicyConfig.from_name("fixed", k=4)),
            admission=parts.get("admission", VLLM_V1),
        )
        drafter = AUTO_DRAFTER if "selection" in parts else DEFAULT_DRAFTER
        systems.append(LiveSystem(name, engine, loop, drafter))
    return systems


EXPERIMENT = Experiment(NAME, "All three papers' parts in one loop, live", run, is_live=True)
