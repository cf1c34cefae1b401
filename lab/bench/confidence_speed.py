"""Tokens per second of drafts that end by their own confidence, and of the best fixed length.

    python -m lab.bench.confidence_speed [--quick] [--json] [--out DIR] [--family DIR]

The records of `lab.bench.confidence`, replayed with step times of a profile. A step takes what the
target takes for the positions of all requests, each with `KV_TOKENS` of context, and what the
drafter takes: a step of it for each token of a fixed length; of drafts that end by themselves one
more than the longest has, since the token that ends a draft is sampled and dropped. Without a
drafter's measured times its step takes a share of the target's smallest one: `a100-llama2-7b` with
the twentieth that the simulator assumes, and with a third. What a drafter reads takes no time.

fixed        every draft is as long: the best length for all shuffles, none being one of them
one price    every draft ends where its predicted survival is under one price: the best for all
             shuffles, a price above 1, under which nobody drafts, being one of them
learned      nothing is known beforehand: the price is what one more position of every request
             takes, times the present tokens a second. Nobody drafts where steps with drafts have
             come to less than those without do, but for 0.5% of the time, or where the price is 1
slope        so, too, but a row's time is a mean from one position less of every request to one
             more: step times have stairs
kept         so, too, but the token that ends a draft is proposed if it is worth a row alone, and
             drafting goes on only where the next token, too, is expected to be worth its step
together     so, too, but a step of the drafter, which takes as long for one request as for all, is
             bought for all: drafting ends where what those who go on are expected to gain is less
rows         so, too, and of all tokens that are sampled the likeliest are proposed, as many as
             are worth the time of all of them
placebo      as `learned`, all confidences of the record shuffled: must not be ahead
"""

from __future__ import annotations

import argparse
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from lab.bench.confidence import (
    Confidence,
    Offered,
    cells,
    likeliest,
    options_of_records,
    orders,
    parse_with_records,
    steps,
)
from lab.bench.confidence_record import DraftedText, FloatArray, IntArray
from lab.common.claims import ClaimVerdict, bar
from lab.common.hindsight import LONGEST
from lab.common.results import Results, ResultTable, table, tell
from lab.common.statistics import ratio
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.profiles import load_profile

KV_TOKENS = 500
"""Of context, of every request."""
LEAST, TIMES = 48, 3
"""Requests of a shuffle that are served: so many at least, or so many times the batch."""
PRICES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
"""To choose from in hindsight."""
BEHIND = 0.98
"""Of the best fixed length: what must not be below it is the lower end of an interval."""
MEMORY = 500
"""Drafts that what is learned of steps is over, as `confident` counts them."""
TRIALS = 0.005
"""Share of the time for drafts that are not expected to gain, as `confident` has it."""
NOBODY: Mapping[str, float] = {"fixed": 0, "one price": 1.0}
"""Where nobody drafts."""


# --- what a step takes ----------------------------------------------------------------------------


class Machine(NamedTuple):
    """drafter_share: of the target's smallest step that a step of a drafter takes of which the
    profile has no times."""

    profile: StepProfile
    drafter_share: float

    @property
    def title(self) -> str:
        if self.profile.drafters:
            return f"`{self.profile.name}`, with its own drafters"
        return (
            f"`{self.profile.name}`, a drafter's step of {self.drafter_share:.2g} of the target's"
        )


MACHINES = (
    Machine(load_profile("a100-llama2-7b"), 1 / 20),
    Machine(load_profile("a100-llama2-7b"), 1 / 3),
    Machine(load_profile("zoo-grown"), 1 / 20),
)


class Costs:
    """Seconds of steps of so many requests, on a machine with a drafter."""

    def __init__(self, machine: Machine, drafter: str, batch: int) -> None:
        self.batch = batch
        self._profile = machine.profile
        # By draft tokens of all requests, and one more of each.
        most = batch * (LONGEST + 1)
        self.target = np.array([self._target(num) for num in range(most + 1)])
        own = {d.name: d.seconds(batch, 1) for d in machine.profile.drafters}
        self.drafting = own.get(drafter, machine.drafter_share * machine.profile.linear(1))
        """Of the drafter's step."""

    def _target(self, num_drafted: int) -> float:
        return self._profile.seconds(
            StepWork(
                num_decodes=self.batch,
                num_kv_tokens=KV_TOKENS * self.batch,
                num_draft_tokens=num_drafted,
            )
        )

    def of(self, step: Played) -> float:
        return float(self.target[step.num_drafted]) + step.num_steps * self.drafting

    def rate(self, played: Sequence[Played]) -> float:
        """Tokens a second."""
        return sum(s.num_tokens for s in played) / sum(map(self.of, played))

    @property
    def plain_rate(self) -> float:
        """Without drafts."""
        return self.batch / float(self.target[0])


# --- who ends drafts where ------------------------------------------------------------------------


class Played(NamedTuple):
    """A step. num_drafted: tokens that are verified; num_steps: of the drafter; num_tokens: that
    it yields."""

    num_drafted: int
    num_steps: int
    num_tokens: int


class Rule(ABC):
    """num_steps: of the drafter, in the step that was decided last."""

    num_steps = 0

    @abstractmethod
    def decide(self, offered: Offered) -> IntArray:
        """[requests] lengths."""

    def learn(  # noqa: B027
        self, offered: Offered, decided: IntArray, accepted: IntArray
    ) -> None:
        """As `Judge`."""


class Fixed(Rule):
    def __init__(self, length: int) -> None:
        self.num_steps = length

    def decide(self, offered: Offered) -> IntArray:
        return np.full(len(offered.texts), self.num_steps)


class OnePrice(Rule):
    def __init__(self, price: float) -> None:
        self.price = price
        self.confidence = Confidence()

    def decide(self, offered: Offered) -> IntArray:
        lengths: IntArray = (self.confidence.survival(offered) >= self.price).sum(1)
        self.num_steps = min(int(lengths.max()) + 1, LONGEST)
        return lengths

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        self.confidence.learn(offered, decided, accepted)


class Learned(OnePrice):
    """As `confident`, where all requests draft or none."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(0.5)
        self._costs = costs
        self._keep = max(0.0, 1 - costs.batch / MEMORY)
        self._for_trials = 0.0
        # Of steps with drafts: as if one had been made that is no better than those without.
        self._num, self._drafted = 1.0, float(costs.batch)
        self._tokens, self._seconds = float(costs.batch), costs.target[0]

    def decide(self, offered: Offered) -> IntArray:
        rate = self._tokens / self._seconds
        plain = self._costs.plain_rate
        # As the engine's gain, which is 1 behind a step without drafts.
        self._set_price(max(rate, plain) if self.num_steps else plain)
        self._for_trials += TRIALS * self._costs.target[0]
        lost = self._seconds / self._num * max(0.0, 1 - rate / plain)
        if self.price < 1 and lost <= self._for_trials:
            self._for_trials -= lost
            lengths = self._lengths(offered)
        else:
            self.num_steps, lengths = 0, np.zeros(len(offered.texts), dtype=np.int64)
        self._num_drafted = int(lengths.sum())
        return lengths

    def _set_price(self, rate: float) -> None:
        """One more position of every request, drafted and verified, in tokens of one of them."""
        self._rate = rate
        self._row_price = self._row_seconds(round(self._drafted / self._num)) * rate
        self.price = self._row_price + self._costs.drafting / self._costs.batch * rate

    def _row_seconds(self, drafted: int) -> float:
        """Of a row more, where so many tokens are drafted."""
        target, num = self._costs.target, self._costs.batch
        return max(0.0, float(target[drafted + num] - target[drafted])) / num

    def _lengths(self, offered: Offered) -> IntArray:
        return super().decide(offered)

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        super().learn(offered, decided, accepted)
        if not self.num_steps:
            return
        num_tokens = len(accepted) + int(accepted.sum())
        seconds = self._costs.of(Played(self._num_drafted, self.num_steps, num_tokens))
        self._num = self._num * self._keep + 1
        self._drafted = self._drafted * self._keep + self._num_drafted
        self._tokens = self._tokens * self._keep + num_tokens
        self._seconds = self._seconds * self._keep + seconds


class Slope(Learned):
    def _row_seconds(self, drafted: int) -> float:
        target, num = self._costs.target, self._costs.batch
        least = max(0, drafted - num)
        return max(0.0, float(target[drafted + num] - target[least])) / (drafted + num - least)


class Kept(Slope):
    """Neither which token is dropped nor who goes on depends on what is sampled there, where
    confidence is the likeliest token's, as in `ratio` drafts: these keep the distribution, too."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        # Of tokens that were decided on, and accepted.
        self._decided, self._accepted = 2.0, 1.0

    def _lengths(self, offered: Offered) -> IntArray:
        survival = self.confidence.survival(offered)
        expected = survival * self._accepted / self._decided
        # The first token comes before anything is known.
        sampled = np.minimum(1 + self._num_going_on(expected), LONGEST)
        self.num_steps = int(sampled.max())
        return self._proposed(survival, sampled)

    def _proposed(self, survival: FloatArray, sampled: IntArray) -> IntArray:
        """Of the tokens that are sampled."""
        # Survival falls along a draft: none but the last one can be worth less than its row.
        lengths: IntArray = np.minimum(sampled, (survival >= self._row_price).sum(1))
        return lengths

    def _num_going_on(self, expected: FloatArray) -> IntArray:
        """Tokens behind which each draft goes on. expected: survival of the token behind each."""
        num: IntArray = (expected >= self.price).sum(1)
        return num

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        super().learn(offered, decided, accepted)
        self._decided = self._decided * self._keep + int(decided.sum())
        self._accepted = self._accepted * self._keep + int(accepted.sum())


class Together(Kept):
    def _num_going_on(self, expected: FloatArray) -> IntArray:
        gains = np.maximum(0.0, expected - self._row_price)
        pays = gains.sum(0) >= (self.price - self._row_price) * len(expected)
        most = int(np.logical_and.accumulate(pays).sum())
        num: IntArray = np.minimum((gains > 0).sum(1), most)
        return num


class Rows(Together):
    """How many are proposed depends on tokens behind those that are: not for `ratio` drafts."""

    def _proposed(self, survival: FloatArray, sampled: IntArray) -> IntArray:
        known = np.where(np.arange(LONGEST) < sampled[:, None], survival, 0.0)
        gained = np.append(0.0, np.sort(known, axis=None)[::-1][: sampled.sum()].cumsum())
        worth = gained - self._rate * self._costs.target[: len(gained)]
        return likeliest(known, int(worth.argmax()))


LEARNED: Mapping[str, type[Learned]] = {
    "learned": Learned,
    "slope": Slope,
    "kept": Kept,
    "together": Together,
    "rows": Rows,
}
RULES = ("one price", *LEARNED, "placebo")


def play(
    texts: Sequence[DraftedText], rule: Rule, batch: int, order: Sequence[int]
) -> list[Played]:
    return [
        Played(int(lengths.sum()), rule.num_steps, batch + int(accepted.sum()))
        for lengths, accepted in steps(texts, rule.decide, rule.learn, batch, order)
    ]


def shuffled(texts: Sequence[DraftedText], rng: np.random.Generator) -> list[DraftedText]:
    """With confidences that are other tokens': within a step of one request, or a text, a shuffle
    would leave those of a good draft together."""
    values = rng.permuted(np.concatenate([t.confidence.ravel() for t in texts]))
    ends = np.cumsum([t.confidence.size for t in texts])[:-1]
    return [
        replace(t, confidence=v.reshape(t.confidence.shape))
        for t, v in zip(texts, np.split(values, ends), strict=True)
    ]


# --- figures --------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """A row for each drafter, temperature, batch and machine."""
    rows = []
    combined = list(itertools.product(cells(args, progress), args.batches))
    for (temperature, drafter, texts), batch in progress.track(combined):
        shuffles = [order[: max(LEAST, TIMES * batch)] for order in orders(args)]
        placebo = [shuffled(texts, np.random.default_rng((26, i))) for i in range(len(shuffles))]
        # What nobody learns of times is the same on every machine.
        known: dict[str, dict[float, list[list[Played]]]] = {
            "fixed": {
                n: [play(texts, Fixed(n), batch, o) for o in shuffles]
                for n in range(1, LONGEST + 1)
            },
            "one price": {
                p: [play(texts, OnePrice(p), batch, o) for o in shuffles] for p in PRICES
            },
        }
        for machine in MACHINES:
            costs = Costs(machine, drafter, batch)
            found = {
                name: [play(texts, rule(costs), batch, o) for o in shuffles]
                for name, rule in LEARNED.items()
            }
            found["placebo"] = [
                play(other, Learned(costs), batch, o)
                for other, o in zip(placebo, shuffles, strict=True)
            ]
            row = {"machine": machine.title, "drafter": drafter, "temperature": temperature}
            rows.append(row | {"batch": batch} | _figures(costs, known, found))
    return rows


def _figures(
    costs: Costs,
    known: Mapping[str, Mapping[float, Sequence[Sequence[Played]]]],
    found: Mapping[str, Sequence[Sequence[Played]]],
) -> dict[str, Any]:
    """known: steps of each shuffle, by what is the same in all of them; found: those of rules that
    learn."""
    rates = {name: list(map(costs.rate, played)) for name, played in found.items()}
    best: dict[str, float] = {}
    for name, by_value in known.items():
        options = {v: list(map(costs.rate, played)) for v, played in by_value.items()}
        options[NOBODY[name]] = [costs.plain_rate] * len(options[max(options)])
        best[name] = max(options, key=lambda v: float(np.mean(options[v])))
        rates[name] = options[best[name]]
    fixed = rates.pop("fixed")
    ratios = {name: ratio(rates[name], fixed) for name in RULES}
    return {
        "plain": costs.plain_rate,
        "fixed": float(np.mean(fixed)),
        "length": best["fixed"],
        "price": best["one price"],
        "ratio": {n: r.mean for n, r in ratios.items()},
        "interval": {n: (r.low, r.high) for n, r in ratios.items()},
        "half": {n: r.half for n, r in ratios.items()},
    }


def tables(rows: Sequence[dict[str, Any]]) -> list[ResultTable]:
    columns = {
        "batch": "{batch}",
        "drafter": "`{drafter}`",
        "temperature": "{temperature:g}",
        "no drafts, tokens/s": "{plain:.0f}",
        "best fixed": "{fixed:.0f}",
        "its length": "{length}",
        "best price": "{price:g}",
        **{n: f"{{ratio[{n}]:.3f}} ± {{half[{n}]:.3f}}" for n in RULES},
    }
    told = {"machine": "{machine}", "batch": "{batch}"}
    told |= {n: f"{{mean[{n}]:.3f}} ({{least[{n}]:.3f}})" for n in RULES}
    title = "Over drafters and temperatures, mean and lowest end of an interval"
    return [
        table(title, _overall(rows), told),
        *(
            table(machine, [r for r in rows if r["machine"] == machine], columns)
            for machine in dict.fromkeys(r["machine"] for r in rows)
        ),
    ]


def _overall(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each machine and batch, over drafters and temperatures."""
    found = []
    for machine, batch in sorted({(r["machine"], r["batch"]) for r in rows}):
        mine = [r for r in rows if (r["machine"], r["batch"]) == (machine, batch)]
        row = {"machine": machine, "batch": batch}
        row["mean"] = {
            n: float(np.exp(np.mean([np.log(r["ratio"][n]) for r in mine]))) for n in RULES
        }
        row["least"] = {n: min(r["interval"][n][0] for r in mine) for n in RULES}
        row["most"] = {n: max(r["interval"][n][0] for r in mine) for n in RULES}
        found.append(row)
    return found


def verdicts(rows: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    """Of the engine's rule, of the last one, and of the control."""
    found = []
    for row in _overall(rows):
        claim = f"{row['machine']}, batch {row['batch']}"
        for name in ("learned", "rows"):
            least = row["least"][name]
            text = (
                f"`{name}`: {row['mean'][name]:.3f} of the best fixed length in the mean; never "
                f"behind: the lowest end of an interval is {least:.3f} (bar {BEHIND})"
            )
            found.append(bar(claim, text, least >= BEHIND))
        most = row["most"]["placebo"]
        text = f"placebo: the lower ends of its intervals are at most {most:.3f} (bar 1)"
        found.append(bar(claim, text, most <= 1))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = options_of_records(__doc__, "two shuffles, one drafter", batches="1,8,32,64")
    return parse_with_records(options, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    with Progress(console=Console(file=sys.stderr)) as progress:
        rows = measure(args, progress)
    return tell(args, Results(rows, verdicts(rows), tables(rows)))


if __name__ == "__main__":
    sys.exit(main())
