"""Spin, figure 10: the whole system against one drafter for everybody, and its three parts.

Live, on the bundled family or a larger copy of it (`--family`). Every Vanilla is one drafter with
drafts of four tokens, padded attention and nothing beside the target. Then one part of Spin after
the other is added. As printed (the bundle `spin`): LBSS, decomposed verification, and micro-batches
by the paper's heuristic. With additions: LBSS with all `corrections`, packed verification, and as
many micro-batches as `auto` finds best. One drafter for all that has these parts, too, but for the
choice, is a rival as well. These run on PyTorch, the only path with several layouts of attention;
beside them stands what this project serves with. Requests of all domains are sampled with seeds at
temperature 1. All systems serve the same requests in turn, new ones in every turn.

The paper has a batch of eight on GPUs, where a verification of five positions a request hardly
takes longer than a step of one. On a processor that is so for one request at a time, and not for
eight: what it takes is part of each verdict.

The control is the whole system with drafters drawn at random. The oracle is the rival that is best
in hindsight, in each turn; `spin_fig10_simulated` has one that chooses for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.families import AS_PRINTED, SPIN, WITH_ADDITIONS
from lab.common.report import COLOURS, pyplot, save_figure, write_rates
from lab.common.statistics import FloatArray, ratio
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.policies.bundles import bundle
from penstock.core.types import NO_DRAFTER

if TYPE_CHECKING:
    from lab.common.live import LiveScene, LiveSystem
    from penstock.engine.build import Engine

NAME = "spin_fig10"

_BATCHES = (1, 8)
_DRAFTED = 4
_FIXED = PolicyConfig.from_name("fixed", k=_DRAFTED)
_SINGLE = PolicyConfig.from_name("single")
_RANDOM = policy_named("epsilon_greedy", explore=1.0)
_AUTO = PolicyConfig.from_name("auto")
_PAPER_GAIN = 2.28
CHOICE, FAST, WHOLE = "choice", "choice, fast verification", "choice, fast, pipeline"
UNPACKED = "choice, pipeline"
"""Parts of a Spin, which is named before them."""
VANILLA, ALL_ELSE = "Vanilla ", "fast, pipeline: "
"""One drafter for all, which is named after them."""
RANDOM = "random choice, fast, pipeline"
SERVED, NATIVE, NONE = "native: auto, priced", "native: no drafter", "no drafter, packed"


@dataclass(frozen=True)
class Batch:
    """rates: tokens per second by system, [turns]. verification: seconds of a padded verification
    over those of a step without drafts. oracle: its name and its rates."""

    rates: Mapping[str, FloatArray]
    verification: float
    oracle: tuple[str, FloatArray]

    def of(self, kind: str) -> list[FloatArray]:
        return [rates for name, rates in self.rates.items() if name.startswith(kind)]


def fastest(rates: Iterable[FloatArray]) -> FloatArray:
    """In the mean."""
    return max(rates, key=lambda own: float(own.mean()))


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
        singles = [own for name, own in rates.items() if name.startswith((VANILLA, ALL_ELSE))]
        oracle = "each turn's best single drafter", np.max(singles, axis=0)
        found[batch] = Batch(rates, target(batch * (1 + _DRAFTED)) / target(batch), oracle)
    rates_of = {batch: one.rates for batch, one in found.items()}
    write_rates(job.out / f"{NAME}.csv", "batch", rates_of)
    draw_systems(job.out / f"{NAME}.png", rates_of)
    return [v for batch, one in found.items() for v in verdicts(batch, one)]


class Engines(NamedTuple):
    """One for each layout of attention, those whose drafters work beside the target, and the one
    that is served with."""

    padded: Engine
    decomposed: Engine
    decomposed_beside: Engine
    packed: Engine
    packed_beside: Engine
    native: Engine

    @classmethod
    def from_scene(cls, scene: LiveScene) -> Engines:
        from lab.common.padded_attention import load_padded

        most = max(_BATCHES)
        eager = [
            scene.load(most, backend="eager", attention=attention, pipeline=pipeline)
            for attention in ("decomposed", "packed")
            for pipeline in ("off", "auto")
        ]
        return cls(*[load_padded(scene, most), *eager, scene.load(most)])


def systems_of(engines: Engines) -> list[LiveSystem]:
    """Schedulers that have learned nothing of requests yet."""
    from lab.common.live import LiveSystem, make_loop

    padded, decomposed, decomposed_beside, packed, beside, native = engines
    systems = []
    for kind, engine, pipeline in ((VANILLA, padded, "off"), (ALL_ELSE, beside, "auto")):
        for name in engine.executor.drafters:
            loop = make_loop(engine, _SINGLE, _FIXED, pipeline)
            systems.append(LiveSystem(kind + name, engine, loop, name))
    fast = ((decomposed, decomposed_beside, bundle("spin").pipeline), (packed, beside, "auto"))
    for (spin, selection), (alone, lanes, pipeline) in zip(SPIN.items(), fast, strict=True):
        for part, engine, chosen in (
            (CHOICE, padded, "off"),
            (FAST, alone, "off"),
            (WHOLE, lanes, pipeline),
        ):
            loop = make_loop(engine, selection, _FIXED, chosen)
            systems.append(LiveSystem(f"{spin}: {part}", engine, loop))
    systems.append(LiveSystem(RANDOM, beside, make_loop(beside, _RANDOM, _FIXED, "auto")))
    systems.append(LiveSystem(NONE, packed, make_loop(packed, _SINGLE), NO_DRAFTER))
    systems.append(LiveSystem(SERVED, native, make_loop(native, _AUTO)))
    systems.append(LiveSystem(NATIVE, native, make_loop(native, _SINGLE), NO_DRAFTER))
    return systems


def verdicts(batch: int, found: Batch) -> list[ClaimVerdict]:
    """Of both Spins: the paper's factor over its rivals, and what like rivals make."""
    name, best = found.oracle
    told = []
    where = f"batch {batch}, verification {found.verification:.2f} steps"
    for spin in SPIN:
        own = {p.removeprefix(f"{spin}: "): r for p, r in found.rates.items() if spin in p}
        whole, rest = own.pop(WHOLE), (own, found)
        for claim, test in (
            (f"{spin} makes {_PAPER_GAIN} times padded Vanillas' goodput ({where})", gain),
            (f"{spin} beats whatever lacks one part (batch {batch})", leads),
        ):
            random = "drafters drawn at random", (found.rates[RANDOM], *rest)
            told.append(check(claim, test, (whole, *rest), *random, (name, (best, *rest))))
    return told


Given = tuple[FloatArray, Mapping[str, FloatArray], Batch]
"""Of the whole, of a Spin that lacks a part, and all others."""


def gain(given: Given) -> Measurement:
    """The factor over the mean of all Vanillas, and whether it is ahead of each of them."""
    whole, _, found = given
    vanillas = found.of(VANILLA)
    mean = ratio(whole, np.exp(np.mean(np.log(vanillas), axis=0)))
    best = ratio(whole, fastest(vanillas))
    return Measurement(
        f"{mean.times} their mean, {best.times} the best",
        (mean.mean >= _PAPER_GAIN, best.low > 1),
    )


def leads(given: Given) -> Measurement:
    """Over what lacks one part each: the choice, which the best single drafter has in its place,
    fast verification and the pipeline."""
    whole, own, found = given
    lacking = {"choice": fastest(found.of(ALL_ELSE)), "pipeline": own[FAST]}
    if UNPACKED in own:
        lacking["fast verification"] = own[UNPACKED]
    over = {part: ratio(whole, rival) for part, rival in lacking.items()}
    part = min(over, key=lambda name: over[name].mean)
    return Measurement(f"{over[part].times} without {part}", (over[part].low > 1,))


def draw_systems(path: Path, found: Mapping[int, Mapping[str, FloatArray]]) -> None:
    """A bar for each system, by batch: the mean, and the lowest and highest turn; of the rivals
    that lack only the choice the best. Raises: LabError, OSError."""
    names = [name for name in next(iter(found.values())) if not name.startswith(ALL_ELSE)]
    figure, grid = pyplot().subplots(
        1,
        len(found),
        figsize=(3 + 4 * len(found), 1.2 + 0.26 * len(names)),
        layout="constrained",
        sharey=True,
    )
    for axes, (batch, rates) in zip(grid.flat, found.items(), strict=True):
        one = fastest(own for name, own in rates.items() if name.startswith(ALL_ELSE))
        shown = {f"{ALL_ELSE}best single": one, **{name: rates[name] for name in names}}
        means = np.array([own.mean() for own in shown.values()])
        ends = np.array([[own.min(), own.max()] for own in shown.values()]).T
        colours = [COLOURS[_kind(name)] for name in shown]
        axes.barh(list(shown), means, color=colours)
        axes.errorbar(means, list(shown), xerr=np.abs(ends - means), fmt="none", ecolor="k")
        axes.set(title=f"batch {batch}", xlabel="tokens/s")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    grid[0].invert_yaxis()
    figure.suptitle("The whole system and its parts (Spin, figure 10)")
    save_figure(figure, path)


def _kind(system: str) -> int:
    """One drafter for all, a Spin, what is served with, or another."""
    kinds = (VANILLA, ALL_ELSE), (AS_PRINTED,), ("native",), (), (WITH_ADDITIONS,)
    return next((i for i, kind in enumerate(kinds) if system.startswith(kind)), 6)


EXPERIMENT = Experiment(NAME, "Figure 10: the whole system, live", run, is_live=True)
