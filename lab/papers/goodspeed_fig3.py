"""GoodSpeed, figure 3 and table I: where the wall time of a round goes, for Fixed-S, Random-S and
GoodSpeed.

A round waits for all drafts (receiving), verifies them, and sends the verdicts. Configurations are
those of table I; a model's time follows from its weights and the devices' memory bandwidth: L4 for
drafters, H100 for targets. The network is assumed: 10 Gbit/s, a round trip of 1 ms, draft servers
that send whole distributions in float32. Acceptance jumps by 0.3 every hundred rounds. Times are
those of the same number of tokens. Controls: Fixed-S against itself with other luck, Random-S in
GoodSpeed's place, and verdicts that take longer to send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.report import Plot, draw, write_table
from lab.common.rounds import BarrierTimes, GeometricClients, jumping_rates, play
from lab.common.statistics import Interval, ratio
from penstock.core.policies.registry import make_policy

NAME = "goodspeed_fig3"

_H100_BYTES_PER_S, _H100_FLOPS = 3.35e12, 990e12
_L4_BYTES_PER_S = 300e9
_LINK_BYTES_PER_S, _ROUND_TRIP_S = 1.25e9, 1e-3
_ROUNDS, _DWELL = 1200, 100
_LONGEST = 16  # draft of `priced`, as by default of the others
_CLOSE, _RANDOM_COSTS, _VERIFIES_LESS, _SENDING = 0.05, (1.05, 1.25), 0.95, 0.001
FIXED, RANDOM, GOODSPEED, PRICED = "fixed", "random", "goodspeed", "priced"
NONE = "no drafts"
POLICIES = (FIXED, RANDOM, GOODSPEED, PRICED, NONE)


@dataclass(frozen=True)
class Configuration:
    """A line of table I: Qwen3 of 14B, or Llama 3 of 70B in four bits.

    target: parameters and bytes of weights. drafters: bytes of weights of each model, dealt to the
    clients in turn. budgets: C. vocabulary: entries of a distribution.
    """

    name: str
    target: tuple[float, float]
    drafters: tuple[float, ...]
    clients: int
    budgets: tuple[int, ...]
    vocabulary: int

    def times(self) -> BarrierTimes:
        """On the devices of the paper, each pass as long as its weights take to be read."""
        parameters, weights = self.target
        held = np.resize(np.array(self.drafters), self.clients)
        return BarrierTimes(
            round_trip=np.full(self.clients, _ROUND_TRIP_S),
            per_token=held / _L4_BYTES_PER_S + 4 * self.vocabulary / _LINK_BYTES_PER_S,
            verify_start=weights / _H100_BYTES_PER_S,
            verify_per_row=2 * parameters / _H100_FLOPS,
        )


_QWEN, _LLAMA = (14.8e9, 29.6e9), (70.6e9, 39.8e9)
TABLE_I = (
    Configuration("4 × 14B, 0.6B", _QWEN, (1.2e9,), 4, (24, 28), 151_936),
    Configuration("8 × 14B, 0.6B and 1.7B", _QWEN, (1.2e9, 3.4e9), 8, (16, 20), 151_936),
    Configuration("8 × 70B, 1B and 3B", _LLAMA, (2.5e9, 6.4e9), 8, (16, 20), 128_256),
)
Where = tuple[str, int]
"""A configuration's name and C."""


@dataclass(frozen=True)
class Spent:
    """Seconds for a thousand tokens of all clients together, and how many rounds they take."""

    receiving: float
    verification: float
    sending: float
    rounds: float

    @property
    def total(self) -> float:
        return self.receiving + self.verification + self.sending


Found = Mapping[Where, Mapping[str, list[Spent]]]


def run(job: Trial) -> list[ClaimVerdict]:
    rounds = min(_ROUNDS, job.effort.curve_arrivals // 10)
    seeds = range(job.effort.repetitions)
    where = [(c, budget) for c in TABLE_I for budget in c.budgets]
    played = job.by_cell(
        spend,
        [(p, *cell) for cell in where for p in POLICIES],
        seeds,
        rounds,
        what=lambda _, c, budget, *__: f"{NAME}: {c.name}, C = {budget}",
    )
    found: Found = {
        (c.name, budget): {p: played[p, c, budget] for p in POLICIES} for c, budget in where
    }
    write_table(
        job.out / f"{NAME}.csv",
        ("models", "C", "policy", "seed", "receiving_s", "verification_s", "sending_s", "rounds"),
        (
            (*where, policy, seed, s.receiving, s.verification, s.sending, s.rounds)
            for where, by_policy in found.items()
            for policy, spent in by_policy.items()
            for seed, s in enumerate(spent)
        ),
    )
    _draw(job, found)
    return verdicts(found)


def spend(policy: str, where: Configuration, budget: int, rounds: int, seed: int) -> Spent:
    """What a thousand tokens take under a policy, in one run of so many rounds."""
    options: dict[str, Any] = {"total": budget}
    if policy in (FIXED, NONE):
        options = {"k": 0} if policy == NONE else {**options, "k": budget}
    elif policy == PRICED:
        options = {"k_max": _LONGEST}
    world = GeometricClients(jumping_rates(rounds, where.clients, _DWELL, seed), seed)
    times = where.times()
    chosen = make_policy("allocation", FIXED if policy == NONE else policy, options)
    played = play(chosen, world.clients(), budget, rounds, times=times)
    waits = sum(float(times.drafts(lengths).max()) for lengths in played.lengths)
    per_thousand = 1000 / float(played.tokens.sum())
    return Spent(
        waits * per_thousand,
        (float(played.seconds.sum()) - waits) * per_thousand,
        rounds * _ROUND_TRIP_S / 2 * per_thousand,
        rounds * per_thousand,
    )


def verdicts(found: Found) -> list[ClaimVerdict]:
    """The claims of section IV-B2, over all configurations and budgets, and their premise."""
    ours, random, fixed = ([by[p] for by in found.values()] for p in (GOODSPEED, RANDOM, FIXED))
    none = [by[NONE] for by in found.values()]
    others = [runs[1:] + runs[:1] for runs in fixed]
    against = "Fixed-S against itself, with other luck"
    carried = [
        [Spent(s.receiving, s.verification, s.sending + 0.1 * s.total, s.rounds) for s in runs]
        for runs in ours
    ]
    return [
        check(
            f"total wall time comparable to Fixed-S (within {_CLOSE:.0%})",
            comparable,
            (ours, fixed),
            "Random-S in GoodSpeed's place",
            (random, fixed),
        ),
        check("Random-S takes 5 to 25% longer", longer, (random, fixed), against, (others, fixed)),
        check(
            "receiving takes longer for GoodSpeed than for Fixed-S",
            waits,
            (ours, fixed),
            against,
            (others, fixed),
        ),
        check(
            "verification takes 5% less for GoodSpeed than for Fixed-S, for the same tokens",
            verifies_less,
            (ours, fixed),
            against,
            (others, fixed),
        ),
        check(
            f"sending takes less than {_SENDING:.1%} of the time",
            sends_little,
            ours,
            "verdicts that carry a tenth of a round's time more",
            carried,
        ),
        check(
            "drafts pay: Fixed-S takes less than no drafts at all",
            pays,
            (fixed, none),
            "no drafts against themselves, with other luck",
            ([runs[1:] + runs[:1] for runs in none], none),
        ),
    ]


Pair = tuple[list[list[Spent]], list[list[Spent]]]
"""Of a policy and of Fixed-S: by configuration, a figure for each seed."""


def _ratios(given: Pair, seconds: Callable[[Spent], float] = lambda s: s.total) -> list[Interval]:
    """By configuration."""
    return [
        ratio([seconds(s) for s in a], [seconds(s) for s in b]) for a, b in zip(*given, strict=True)
    ]


def comparable(given: Pair) -> Measurement:
    found = _ratios(given)
    return Measurement(_span(found), tuple(abs(r.mean - 1) <= _CLOSE for r in found))


def longer(given: Pair) -> Measurement:
    found, (low, high) = _ratios(given), _RANDOM_COSTS
    return Measurement(_span(found), tuple(low <= r.mean <= high for r in found))


def waits(given: Pair) -> Measurement:
    found = _ratios(given, lambda s: s.receiving / s.rounds)
    return Measurement(f"in a round {_span(found)}", tuple(r.low > 1 for r in found))


def verifies_less(given: Pair) -> Measurement:
    found = _ratios(given, lambda s: s.verification)
    less = all(r.high < 1 for r in found)
    return Measurement(_span(found), (less, less and all(r.mean <= _VERIFIES_LESS for r in found)))


def pays(given: Pair) -> Measurement:
    found = _ratios(given)
    return Measurement(_span(found), tuple(r.high < 1 for r in found))


def sends_little(given: list[list[Spent]]) -> Measurement:
    shares = [float(np.mean([s.sending / s.total for s in runs])) for runs in given]
    return Measurement(
        f"{min(shares):.2%} to {max(shares):.2%} of the time",
        tuple(share < _SENDING for share in shares),
    )


def _span(found: list[Interval]) -> str:
    """Of all configurations."""
    return ", ".join(f"{r.mean:.2f}" for r in found) + " times"


def _draw(job: Trial, found: Found) -> None:
    """The paper's four plots: a point for each policy, in the order of the configurations."""
    parts = ("total", "receiving", "verification", "sending")
    ticks = list(range(len(found)))
    labels = [f"{name.split(',')[0]}\nC = {budget}" for name, budget in found]
    plots = []
    for part in parts:
        lines = {policy: (ticks, _means(found, policy, part)) for policy in POLICIES}
        axes = {"title": part, "ylabel": "s per 1,000 tokens", "ylim": (0, None), "xticks": ticks}
        plots.append(Plot(lines, {**axes, "xticklabels": labels}, "o"))
    title = "Where the time goes (GoodSpeed, figure 3)"
    draw(job.out / f"{NAME}.png", title, [plots[:2], plots[2:]])


def _means(found: Found, policy: str, part: str) -> list[float]:
    return [float(np.mean([getattr(s, part) for s in by[policy]])) for by in found.values()]


EXPERIMENT = Experiment(NAME, "Figure 3 and table I: where the wall time of a round goes", run)
