"""GoodSpeed, figure 3 and table I: where the wall time of a round goes, for Fixed-S, Random-S and
GoodSpeed.

A round waits for all drafts (receiving), verifies them, and sends the verdicts. Configurations are
those of table I, with three kinds of times. `bandwidth`: a model's pass takes as long as
its weights take to be read, on an L4 for drafters and an H100 for targets; draft servers send whole
distributions in float32 over 10 Gbit/s with a round trip of 1 ms. `figure`: the same devices,
slower in proportion, so that Fixed-S receives and verifies for what the largest ticks of figure 3
say, over the rounds of figure 2: 0.5 and 0.8 times as much receiving as verification, where
`bandwidth` has 2.6 to 4.2 times. `measured`: steps of Qwen3's shapes on an H100 for drafters and
target, by `lab.bench.gpu_steps`. Acceptance jumps by 0.3 every hundred rounds. Times are those of
the same number of tokens.

Controls: Fixed-S against itself with other luck, Random-S in GoodSpeed's place, and verdicts that
take longer to send. Oracles know acceptance: one drafts for most tokens per second, one for most
tokens of C. For Random-S it is one whose drafts are at most a token longer than Fixed-S's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.oracles import Fastest, Told
from lab.common.report import Plot, draw, write_table
from lab.common.rounds import (
    BarrierTimes,
    FloatArray,
    GeometricClients,
    PlayedRounds,
    jumping_rates,
    play,
)
from lab.common.statistics import Interval, ratio
from lab.rivals import policy_named
from penstock.core.policies.base import AllocationPolicy

NAME = "goodspeed_fig3"

_H100_BYTES_PER_S, _H100_FLOPS = 3.35e12, 990e12
_L4_BYTES_PER_S = 300e9
_LINK_BYTES_PER_S, _ROUND_TRIP_S = 1.25e9, 1e-3
_ROUNDS, _DWELL = 1200, 100
_CLOSE, _RANDOM_COSTS, _VERIFIES_LESS, _SENDING = 0.05, (1.05, 1.25), 0.95, 0.001
FIXED, RANDOM, GOODSPEED, NONE = "fixed", "random", "goodspeed", "no drafts"
MILD, MOST, FASTEST = "random, hardly longer", "most tokens", "fastest"
SHOWN = (FIXED, RANDOM, GOODSPEED, NONE)
POLICIES = (*SHOWN, MILD, MOST, FASTEST)
BANDWIDTH, FIGURE, MEASURED = "bandwidth", "figure", "measured"
KINDS = (BANDWIDTH, FIGURE, MEASURED)


@dataclass(frozen=True)
class Configuration:
    """A line of table I: Qwen3 of 14B, or Llama 3 of 70B in four bits.

    target: parameters and bytes of weights. drafters: bytes of weights of each model, dealt to the
    clients in turn. budgets: C. vocabulary: entries of a distribution. printed: seconds of a round
    in figure 3, receiving and verification; None: it has no such configuration. measured: seconds
    of a draft token of each model, of a verification and of a row more.
    """

    name: str
    target: tuple[float, float]
    drafters: tuple[float, ...]
    clients: int
    budgets: tuple[int, ...]
    vocabulary: int
    printed: tuple[float, float] | None = None
    measured: tuple[tuple[float, ...], float, float] | None = None

    def times(self, budget: int) -> dict[str, BarrierTimes]:
        """Of each kind."""
        parameters, weights = self.target
        held = np.resize(np.array(self.drafters), self.clients)
        sent = 4 * self.vocabulary / _LINK_BYTES_PER_S
        found = BarrierTimes(
            round_trip=np.full(self.clients, _ROUND_TRIP_S),
            per_token=held / _L4_BYTES_PER_S + sent,
            verify_start=weights / _H100_BYTES_PER_S,
            verify_per_row=2 * parameters / _H100_FLOPS,
        )
        kinds = {BANDWIDTH: found}
        if self.measured is not None:
            drafting, *verifying = self.measured
            own = np.resize(np.array(drafting), self.clients) + sent
            kinds[MEASURED] = BarrierTimes(found.round_trip, own, *verifying)
        if self.printed is None:
            return kinds
        receiving, verification = self.printed
        slower = verification / found.verify(self.clients + budget)
        equal = -(-budget // self.clients)
        longer = (receiving - _ROUND_TRIP_S) / (equal * found.per_token.max())
        printed = BarrierTimes(
            found.round_trip,
            found.per_token * longer,
            found.verify_start * slower,
            found.verify_per_row * slower,
        )
        return {**kinds, FIGURE: printed}


_QWEN, _LLAMA = (14.8e9, 29.6e9), (70.6e9, 39.8e9)
_QWEN_PRINTED, _LLAMA_PRINTED = (4000 / 3500, 5000 / 3500), (1000 / 2500, 2000 / 2500)
# Medians on an H100: a draft token of 0.6 B and of 1.7 B; a line through 4 to 32 rows of 14 B.
_DRAFTED_S, _VERIFIED_S = (1.90e-3, 2.62e-3), (11.50e-3, 0.278e-3)
TABLE_I = (
    Configuration(
        "4 × 14B, 0.6B",
        *(_QWEN, (1.2e9,), 4, (24, 28), 151_936),
        measured=(_DRAFTED_S[:1], *_VERIFIED_S),
    ),
    Configuration(
        "8 × 14B, 0.6B and 1.7B",
        *(_QWEN, (1.2e9, 3.4e9), 8, (16, 20), 151_936),
        printed=_QWEN_PRINTED,
        measured=(_DRAFTED_S, *_VERIFIED_S),
    ),
    Configuration(
        "8 × 70B, 1B and 3B", _LLAMA, (2.5e9, 6.4e9), 8, (16, 20), 128_256, _LLAMA_PRINTED
    ),
)
Where = tuple[str, str, int]
"""Kind of times, a configuration's name and C."""


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
        (kind, c.name, budget): {p: [s[kind] for s in played[p, c, budget]] for p in POLICIES}
        for kind in KINDS
        for c, budget in where
        if kind in c.times(budget)
    }
    write_table(
        job.out / f"{NAME}.csv",
        (
            *("times", "models", "C", "policy", "seed"),
            *("receiving_s", "verification_s", "sending_s", "rounds"),
        ),
        (
            (*where, policy, seed, s.receiving, s.verification, s.sending, s.rounds)
            for where, by_policy in found.items()
            for policy, spent in by_policy.items()
            for seed, s in enumerate(spent)
        ),
    )
    _draw(job, found)
    return verdicts(found)


def spend(
    policy: str, where: Configuration, budget: int, rounds: int, seed: int
) -> dict[str, Spent]:
    """Time for a thousand tokens under a policy in one run of so many rounds, by kind of times."""
    rates = jumping_rates(rounds, where.clients, _DWELL, seed)
    world = GeometricClients(rates, seed)
    found: dict[str, Spent] = {}
    played = None
    for kind, times in where.times(budget).items():
        if played is None or policy == FASTEST:
            chosen = made(policy, rates, times, budget)
            played = play(chosen, world.clients(), budget, rounds)
        found[kind] = spent(played, times)
    return found


def made(policy: str, rates: FloatArray, times: BarrierTimes, budget: int) -> AllocationPolicy:
    if policy == FASTEST:
        return Fastest(rates, times, budget)
    if policy == MOST:
        return Told(rates, total=budget, k_max=budget, fairness=0.0)
    equal = budget // rates.shape[1]
    options = {
        FIXED: {"total": budget, "k": budget},
        NONE: {"k": 0},
        MILD: {"total": budget, "k_max": equal + 1},
    }.get(policy, {"total": budget})
    names = {NONE: FIXED, MILD: RANDOM}
    named = policy_named(names.get(policy, policy), **options)
    chosen: AllocationPolicy = named.make("allocation")
    return chosen


def spent(played: PlayedRounds, times: BarrierTimes) -> Spent:
    rounds, clients = played.lengths.shape
    per_thousand = 1000 / float(played.tokens.sum())
    return Spent(
        float(times.drafts(played.lengths).max(axis=1).sum()) * per_thousand,
        float(times.verify(clients + played.lengths.sum(axis=1)).sum()) * per_thousand,
        rounds * _ROUND_TRIP_S / 2 * per_thousand,
        rounds * per_thousand,
    )


def verdicts(found: Found) -> list[ClaimVerdict]:
    """By kind of times, over all configurations and budgets."""
    kinds = dict.fromkeys(kind for kind, *_ in found)
    return [
        verdict
        for kind in kinds
        for verdict in _of_kind(kind, {w: by for w, by in found.items() if w[0] == kind})
    ]


def _of_kind(kind: str, found: Found) -> list[ClaimVerdict]:
    """The claims of section IV-B2 and of the abstract, and their premise."""
    ours, random, fixed, none, mild, most, fastest = (
        [by[p] for by in found.values()]
        for p in (GOODSPEED, RANDOM, FIXED, NONE, MILD, MOST, FASTEST)
    )
    others = [runs[1:] + runs[:1] for runs in fixed]
    itself = "Fixed-S against itself, with other luck", (others, fixed)
    carried = [
        [Spent(s.receiving, s.verification, s.sending + 0.1 * s.total, s.rounds) for s in runs]
        for runs in ours
    ]
    quickest = "most tokens per second, by known acceptance"
    return [
        check(
            f"{kind}: total wall time comparable to Fixed-S (at most {_CLOSE:.0%} longer)",
            comparable,
            (ours, fixed),
            "Random-S in GoodSpeed's place",
            (random, fixed),
            (quickest, (fastest, fixed)),
        ),
        check(
            f"{kind}: end-to-end latency is reduced against Fixed-S and Random-S (abstract)",
            shorter,
            (ours, fixed, random),
            "Fixed-S in its place, with other luck",
            (others, fixed, random),
            (quickest, (fastest, fixed, random)),
        ),
        check(
            f"{kind}: Random-S takes 5 to 25% longer",
            longer,
            (random, fixed),
            *itself,
            ("drafts at most a token longer than Fixed-S's", (mild, fixed)),
        ),
        check(
            f"{kind}: receiving takes longer for GoodSpeed than for Fixed-S",
            waits,
            (ours, fixed),
            *itself,
            ("most tokens of C, by known acceptance", (most, fixed)),
        ),
        check(
            f"{kind}: verification takes 5% less for GoodSpeed than for Fixed-S, for the same "
            "tokens",
            verifies_less,
            (ours, fixed),
            *itself,
            ("most tokens of C, by known acceptance", (most, fixed)),
        ),
        check(
            f"{kind}: sending takes less than {_SENDING:.1%} of the time",
            sends_little,
            ours,
            "verdicts that carry a tenth of a round's time more",
            carried,
            ("longer rounds, for most tokens of C", most),
        ),
        check(
            f"{kind}: drafts pay: Fixed-S takes less than no drafts at all",
            pays,
            (fixed, none),
            "no drafts against themselves, with other luck",
            ([runs[1:] + runs[:1] for runs in none], none),
            (quickest, (fastest, none)),
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
    return Measurement(_span(found), tuple(r.mean <= 1 + _CLOSE for r in found))


def shorter(given: tuple[list[list[Spent]], ...]) -> Measurement:
    """Against each, with certainty."""
    ours, *rivals = given
    by_rival = [_ratios((ours, theirs)) for theirs in rivals]
    told = (f"{_span(r)} {name}'s" for r, name in zip(by_rival, (FIXED, RANDOM), strict=True))
    return Measurement("; ".join(told), tuple(all(x.high < 1 for x in r) for r in by_rival))


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
    """Over all configurations."""
    return f"{min(r.mean for r in found):.2f} to {max(r.mean for r in found):.2f} times"


def _draw(job: Trial, found: Found) -> None:
    """The paper's four plots for each kind of times: a point for each policy, in the order of the
    configurations."""
    parts = ("total", "receiving", "verification", "sending")
    rows = []
    for kind in KINDS:
        shown = {where: by for where, by in found.items() if where[0] == kind}
        ticks = list(range(len(shown)))
        labels = [f"{name.split(',')[0]}\nC = {budget}" for _, name, budget in shown]
        lines = {part: {p: (ticks, _means(shown, p, part)) for p in SHOWN} for part in parts}
        axes = {"ylabel": "s per 1,000 tokens", "ylim": (0, None), "xticks": ticks}
        rows.append(
            [
                Plot(lines[part], {**axes, "title": f"{kind}: {part}", "xticklabels": labels}, "o")
                for part in parts
            ]
        )
    draw(job.out / f"{NAME}.png", "Where the time goes (GoodSpeed, figure 3)", rows)


def _means(found: Found, policy: str, part: str) -> list[float]:
    return [float(np.mean([getattr(s, part) for s in by[policy]])) for by in found.values()]


EXPERIMENT = Experiment(NAME, "Figure 3 and table I: where the wall time of a round goes", run)
