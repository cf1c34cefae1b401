"""Spin, figure 4: what speculative decoding gains, by batch.

Live, on the bundled family or a larger copy of it (`--family`). As in the paper one drafter drafts
for everybody, four tokens a round, attention is padded, and the rival is decoding without drafts
(padding it saves it nothing: all its requests have one position). Beside it stands what this
project does: packed rows, and lengths by `priced`, which drafts as much as pays. A quick run
serves only the batches that are judged, and half as many tokens as other live figures.

The control is decoding without drafts against its own next turn. The oracle's four tokens are
always accepted, at the measured times of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import QUICK, Experiment, Trial
from lab.common.report import Plot, draw, write_rates
from lab.common.statistics import FloatArray, Interval, ratio
from penstock.config import PolicyConfig
from penstock.core.types import NO_DRAFTER
from penstock.zoo.registry import DEFAULT_DRAFTER

if TYPE_CHECKING:
    from lab.common.live import LiveSystem
    from penstock.engine.build import Engine

NAME = "spin_fig4"

_BATCHES = (1, 2, 4, 8, 16, 32)
_JUDGED = (1, 8, 32)
_PAPER_GAIN = 1.61
_CLOSE = 0.1
_PAPER_LOSS, _SERVED_AT = 0.3, 8
PADDED, PLAIN = "padded, four drafted", "padded, no drafter"
FIXED, SERVED, NATIVE = "native, four drafted", "native, priced", "native, no drafter"
RIGHT, RIGHT_NATIVE = "padded, never wrong", "native, never wrong"
_SINGLE = PolicyConfig.from_name("single")
_DRAFTED = 4
_FOUR = PolicyConfig.from_name("fixed", k=_DRAFTED)
_PAYS = PolicyConfig.from_name("priced")

Rates = Mapping[int, Mapping[str, FloatArray]]
"""Tokens per second by batch and system: [turns]."""


def run(job: Trial) -> list[ClaimVerdict]:
    from lab.common.live import LiveScene
    from lab.common.padded_attention import load_padded

    scene = LiveScene.from_trial(job, NAME)
    batches: tuple[int, ...] = _BATCHES
    if job.effort.seeds <= QUICK.seeds:
        scene, batches = replace(scene, new_tokens=scene.new_tokens // 2), _JUDGED
    job.tell(f"{NAME}: loading")
    padded = load_padded(scene, max(batches))
    native = scene.load(max(batches))
    found = {}
    for batch in batches:
        systems = systems_of(padded, native)
        per_domain = -(-batch // len(scene.prompts))
        found[batch] = scene.rates(
            systems, batch, lambda what: job.tell(f"{NAME}: {what}"), per_domain
        )
        for right, plain, i in ((RIGHT, PLAIN, 0), (RIGHT_NATIVE, NATIVE, 2)):
            found[batch][right] = never_wrong(systems[i], batch) * found[batch][plain]
    write_rates(job.out / f"{NAME}.csv", "batch", found)
    _draw(job, found)
    return verdicts(found)


def systems_of(padded: Engine, native: Engine) -> list[LiveSystem]:
    from lab.common.live import LiveSystem, make_loop

    return [
        LiveSystem(name, engine, make_loop(engine, _SINGLE, lengths), drafter)
        for name, engine, lengths, drafter in (
            (PADDED, padded, _FOUR, DEFAULT_DRAFTER),
            (PLAIN, padded, _FOUR, NO_DRAFTER),
            (FIXED, native, _FOUR, DEFAULT_DRAFTER),
            (SERVED, native, _PAYS, DEFAULT_DRAFTER),
            (NATIVE, native, _FOUR, NO_DRAFTER),
        )
    ]


def never_wrong(system: LiveSystem, batch: int) -> float:
    """Gain over no drafts if every draft token were accepted."""
    times, positions = system.loop.scheduler.learn.times, _DRAFTED + 1
    drafting = _DRAFTED * times.curve_of(system.drafter)(batch)
    return positions * times.target(batch) / (times.target(positions * batch) + drafting)


Gains = Mapping[int, tuple[FloatArray, FloatArray]]
"""With drafts and without, by batch."""


def verdicts(found: Rates) -> list[ClaimVerdict]:
    def against(system: str, rival: str) -> Gains:
        return {batch: (rates[system], rates[rival]) for batch, rates in found.items()}

    control = "no drafts against no drafts, next turn"
    right, right_native = (
        ("drafts that are never wrong", against(*pair))
        for pair in ((RIGHT, PLAIN), (RIGHT_NATIVE, NATIVE))
    )
    padded = {b: (np.roll(r[PLAIN], 1), r[PLAIN]) for b, r in found.items()}
    native = {b: (np.roll(r[NATIVE], 1), r[NATIVE]) for b, r in found.items()}
    alone = f"without batching drafts gain {_PAPER_GAIN} times"
    return [
        check(alone, at_one, against(PADDED, PLAIN), control, padded, right),
        check(
            "the gain falls with the batch", falls, against(PADDED, PLAIN), control, padded, right
        ),
        check(
            f"{alone} (native kernels)",
            at_one,
            against(FIXED, NATIVE),
            control,
            native,
            right_native,
        ),
        check(
            "the gain falls with the batch (native kernels)",
            falls,
            against(FIXED, NATIVE),
            control,
            native,
            right_native,
        ),
        check(
            "it does not fall below 1 where lengths are chosen (no claim of the paper's)",
            stays,
            against(SERVED, NATIVE),
            "drafts of four tokens",
            against(FIXED, NATIVE),
            right_native,
        ),
        check(
            f"batching degrades the gain by about {_PAPER_LOSS:.0%} (batch {_SERVED_AT})",
            degrades,
            against(PADDED, PLAIN),
            control,
            padded,
            right,
        ),
    ]


def at_one(gains: Gains) -> Measurement:
    """At least nine tenths of the paper's."""
    found = ratio(*gains[min(gains)])
    return Measurement(found.times, (found.mean >= (1 - _CLOSE) * _PAPER_GAIN,))


def falls(gains: Gains) -> Measurement:
    """From the smallest batch to the largest, with certainty."""
    found = {batch: ratio(*pair) for batch, pair in gains.items()}
    return Measurement(_by_batch(found), (found[min(found)].low > found[max(found)].high,))


def degrades(gains: Gains) -> Measurement:
    """Against one request at a time, to a tenth of the gain."""
    alone, together = (ratio(*gains[batch]) for batch in (min(gains), _SERVED_AT))
    loss = 1 - together.mean / alone.mean
    return Measurement(
        f"by {loss:.0%}, {alone.times} to {together.times}", (abs(loss - _PAPER_LOSS) <= _CLOSE,)
    )


def stays(gains: Gains) -> Measurement:
    """Nowhere with certainty."""
    found = {batch: ratio(*pair) for batch, pair in gains.items()}
    return Measurement(_by_batch(found), (all(f.high >= 1 for f in found.values()),))


def _by_batch(found: Mapping[int, Interval]) -> str:
    return "; ".join(f"batch {batch}: {gain.times}" for batch, gain in found.items())


def _draw(job: Trial, found: Rates) -> None:
    lines = {
        name: (list(found), [float(rates[name].mean()) for rates in found.values()])
        for name in found[min(found)]
    }
    axes = {"xlabel": "batch", "ylabel": "tokens/s", "xscale": "log", "ylim": (0, None)}
    batches = list(found.values())
    bands = {
        n: ([float(b[n].min()) for b in batches], [float(b[n].max()) for b in batches])
        for n in lines
    }
    title = "Speculative decoding by batch (Spin, figure 4)"
    draw(job.out / f"{NAME}.png", title, [[Plot(lines, axes, "o-", {}, bands)]])


EXPERIMENT = Experiment(NAME, "Figure 4: gain of speculation by batch, live", run, is_live=True)
