"""Spin, figure 10: the whole system against one drafter for everybody, and its three parts.

Live, on the bundled family or a larger copy of it (`--family`). Every Vanilla is one drafter with
drafts of four tokens, padded attention and nothing beside the target. Then one part of Spin after
the other is added: the choice of drafter by LBSS, packed verification, and the pipeline with as
many micro-batches as `auto` finds best. These run on PyTorch, the only path with several layouts of
attention; beside them stands what this project serves with. Requests of all domains are sampled
with seeds at temperature 1. All systems serve the same requests in turn, new ones in every turn.

The paper has a batch of eight on GPUs, where a verification of five positions a request hardly
takes longer than a step of one. On a processor that is so for one request at a time, and not for
eight: what it takes is part of each verdict.

The control is the whole system with drafters drawn at random. The oracle is the Vanilla that is
best in hindsight, in each turn; `spin_fig10_simulated` has one that chooses for each request.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.report import COLOURS, pyplot, save_figure, write_rates
from lab.common.statistics import FloatArray, ratio
from penstock.config import PolicyConfig
from penstock.core.types import NO_DRAFTER

if TYPE_CHECKING:
    from lab.common.live import LiveScene, LiveSystem
    from penstock.engine.build import Engine

NAME = "spin_fig10"

_BATCHES = (1, 8)
_DRAFTED = 4
_FIXED = PolicyConfig.from_name("fixed", k=_DRAFTED)
_SINGLE = PolicyConfig.from_name("single")
_LBSS = PolicyConfig.from_name("lbss")
_RANDOM = PolicyConfig.from_name("epsilon_greedy", explore=1.0)
_AUTO = PolicyConfig.from_name("auto")
_PAPER_GAIN = 2.28
CHOICE, FAST, WHOLE = "choice", "choice, fast verification", "choice, fast, pipeline"
RANDOM = "random choice, fast, pipeline"
SERVED, NATIVE, NONE = "native: auto, priced", "native: no drafter", "no drafter, packed"


@dataclass(frozen=True)
class Batch:
    """rates: tokens per second by system, [turns]. verification: seconds of a padded verification
    over those of a step without drafts. oracle: its name, and rates of its choice, of that with
    fast verification, and of all."""

    rates: Mapping[str, FloatArray]
    verification: float
    oracle: tuple[str, list[FloatArray]] | None = None

    @property
    def vanillas(self) -> list[FloatArray]:
        return [rates for name, rates in self.rates.items() if name.startswith("Vanilla")]

    @property
    def best(self) -> FloatArray:
        """Of the Vanilla that is fastest in the mean."""
        return max(self.vanillas, key=lambda rates: float(rates.mean()))


def run(job: Trial) -> list[ClaimVerdict]:
    from lab.common.live import LiveScene

    scene = LiveScene.from_trial(job, NAME)
    job.tell(f"{NAME}: loading")
    engines = Engines.from_scene(scene)
    found = {}
    for batch in _BATCHES:
        systems = systems_of(engines)
        per_domain = -(-batch // len(scene.prompts))
        rates = scene.rates(systems, batch, lambda what: job.tell(f"{NAME}: {what}"), per_domain)
        target = systems[0].loop.scheduler.learn.times.target
        found[batch] = Batch(rates, target(batch * (1 + _DRAFTED)) / target(batch))
    rates_of = {batch: one.rates for batch, one in found.items()}
    write_rates(job.out / f"{NAME}.csv", "batch", rates_of)
    draw_systems(job.out / f"{NAME}.png", rates_of)
    return [v for batch, one in found.items() for v in verdicts(batch, one)]


class Engines(NamedTuple):
    """One for each layout of attention, one whose drafters work beside the target, and the one that
    is served with."""

    padded: Engine
    packed: Engine
    beside: Engine
    native: Engine

    @classmethod
    def from_scene(cls, scene: LiveScene) -> Engines:
        from lab.common.padded_attention import load_padded

        most = max(_BATCHES)
        return cls(
            load_padded(scene, most),
            scene.load(most, backend="eager"),
            scene.load(most, backend="eager", pipeline="auto"),
            scene.load(most),
        )


def systems_of(engines: Engines) -> list[LiveSystem]:
    """Schedulers that have learned nothing of requests yet."""
    from lab.common.live import LiveSystem, make_loop

    padded, packed, beside, native = engines
    systems = [
        LiveSystem(f"Vanilla {name}", padded, make_loop(padded, _SINGLE, _FIXED), name)
        for name in padded.executor.drafters
    ]
    for name, engine, selection, pipeline in (
        (CHOICE, padded, _LBSS, "off"),
        (FAST, packed, _LBSS, "off"),
        (WHOLE, beside, _LBSS, "auto"),
        (RANDOM, beside, _RANDOM, "auto"),
    ):
        systems.append(LiveSystem(name, engine, make_loop(engine, selection, _FIXED, pipeline)))
    systems.append(LiveSystem(NONE, packed, make_loop(packed, _SINGLE), NO_DRAFTER))
    systems.append(LiveSystem(SERVED, native, make_loop(native, _AUTO)))
    systems.append(LiveSystem(NATIVE, native, make_loop(native, _SINGLE), NO_DRAFTER))
    return systems


def verdicts(batch: int, found: Batch) -> list[ClaimVerdict]:
    where = f"batch {batch}, where verification takes {found.verification:.2f} times a plain step"
    turns = np.max(found.vanillas, axis=0)
    name, oracle = found.oracle or ("the best Vanilla of each turn", [turns] * 3)
    return [
        check(
            f"Spin makes {_PAPER_GAIN} times the goodput of its rivals ({where})",
            gain,
            (found.rates[WHOLE], found),
            "drafters drawn at random",
            (found.rates[RANDOM], found),
            (name, (oracle[-1], found)),
        ),
        check(
            f"each of its parts adds to it (batch {batch})",
            parts,
            (found.best, found.rates[CHOICE], found.rates[FAST], found.rates[WHOLE]),
            "the best Vanilla against its own next turns",
            tuple(np.roll(found.best, n) for n in range(4)),
            (name, (found.best, *oracle)),
        ),
    ]


def gain(given: tuple[FloatArray, Batch]) -> Measurement:
    """The factor over the mean of all Vanillas, and whether it is ahead of each of them."""
    whole, found = given
    mean = ratio(whole, np.exp(np.mean(np.log(found.vanillas), axis=0)))
    best, plain = ratio(whole, found.best), ratio(whole, found.rates[NONE])
    return Measurement(
        f"{mean.times} the Vanillas in the mean, {best.times} the best of them, "
        f"{plain.times} no drafter",
        (mean.mean >= _PAPER_GAIN, best.low > 1),
    )


def parts(given: tuple[FloatArray, ...]) -> Measurement:
    """Each over the one before it."""
    steps = [ratio(after, before) for before, after in itertools.pairwise(given)]
    names = ("choice over the best Vanilla", "fast verification", "pipeline")
    return Measurement(
        ", ".join(f"{n} {s.times}" for n, s in zip(names, steps, strict=True)),
        tuple(s.low > 1 for s in steps),
    )


def draw_systems(path: Path, found: Mapping[int, Mapping[str, FloatArray]]) -> None:
    """A bar for each system, by batch: the mean, and the lowest and highest turn. Raises: LabError,
    OSError."""
    figure, grid = pyplot().subplots(
        1, len(found), figsize=(5 * len(found), 4.6), layout="constrained", sharey=True
    )
    for axes, (batch, rates) in zip(grid.flat, found.items(), strict=True):
        means = np.array([own.mean() for own in rates.values()])
        ends = np.array([[own.min(), own.max()] for own in rates.values()]).T
        colours = [COLOURS[_kind(name)] for name in rates]
        axes.barh(list(rates), means, color=colours)
        axes.errorbar(means, list(rates), xerr=np.abs(ends - means), fmt="none", ecolor="k")
        axes.set(title=f"batch {batch}", xlabel="tokens/s")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    grid[0].invert_yaxis()
    figure.suptitle("The whole system and its parts (Spin, figure 10)")
    save_figure(figure, path)


def _kind(system: str) -> int:
    """A Vanilla, Spin or its control, without a drafter or what is served with."""
    if system.startswith("Vanilla"):
        return 0
    if system.startswith("native"):
        return 2
    return 3 if system == NONE else 1


EXPERIMENT = Experiment(NAME, "Figure 10: the whole system, live", run, is_live=True)
