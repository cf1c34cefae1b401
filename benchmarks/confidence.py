"""How many more draft tokens are accepted where a step's positions go to the tokens that survive.

    python -m benchmarks.confidence [--quick] [--json] [--out DIR] [--family DIR]

Recorded once on the engine, for every drafter and temperature: texts by the target, and what the
drafter makes of what follows each of their tokens: how many of its tokens are accepted, and how
sure it was of each. Then replayed (`--shuffles` times, with other requests in another order):
`--batches` requests at a time, and in every step as many verified positions as `--positions` for
each of them, shared out

mean        by the acceptance of each request's drafts so far
confidence  by the drafter's confidence in each token, as far as the engine learns to believe it
one price   so, too, but every draft ends by itself at the same survival, which holds the mean
            number of positions: what the engine does
regression  by confidence, margin, entropy, place in the draft and the request's acceptance so far
placebo     as `confidence`, which is shuffled between the tokens of a step: must gain nothing
hindsight   as if it were known what is accepted

Shown are accepted tokens over those of equal lengths. `--family`: a folder that `penstock zoo grow`
has written; default: the bundled family, of which that makes the same texts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.confidence_record import DraftedText, FloatArray, IntArray, recorded
from rich.console import Console
from rich.progress import Progress

from penstock.core.learn.acceptance import AcceptanceEstimator
from penstock.core.learn.confidence import EDGES, Calibration
from penstock.core.types import Verdict
from penstock.lab.bench import Results, ResultTable, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar
from penstock.lab.hindsight import LONGEST
from penstock.lab.statistics import Interval, ratio
from penstock.zoo.registry import DOMAINS, WEIGHTS, bundled_models

GAIN = 1.10
"""Wanted over equal lengths."""
DRAFTERS = "draft-tiny,draft-base,draft-code"


# --- replaying ------------------------------------------------------------------------------------


class Offered(NamedTuple):
    """The drafts of a step. texts: [requests] which they are; accepted: [requests]; the others
    [requests, LONGEST], as in `DraftedText`."""

    texts: IntArray
    accepted: IntArray
    confidence: FloatArray
    margin: FloatArray
    entropy: FloatArray


class Judge(ABC):
    """Says which draft tokens will survive."""

    @abstractmethod
    def survival(self, offered: Offered) -> FloatArray:
        """[requests, LONGEST], falling along a draft."""

    def learn(  # noqa: B027
        self, offered: Offered, decided: IntArray, accepted: IntArray
    ) -> None:
        """The first `decided` tokens of each draft were decided on, `accepted` of them for it."""

    def lengths(self, offered: Offered, budget: int) -> IntArray:
        """[requests] positions: so many in all, where survival is highest."""
        return likeliest(self.survival(offered), budget)


def likeliest(survival: FloatArray, budget: int) -> IntArray:
    """[requests] positions, as `Judge.lengths`. survival: [requests, LONGEST]."""
    # Along a draft no token comes before the one before it: places first, then requests.
    likely = np.argsort(-survival.T.ravel(), kind="stable")[:budget]
    return np.bincount(likely % len(survival), minlength=len(survival))


class Equal(Judge):
    """Nothing is known."""

    def survival(self, offered: Offered) -> FloatArray:
        return np.broadcast_to(-np.arange(LONGEST, dtype=float), offered.confidence.shape)


class Mean(Judge):
    """As `throughput` knows it."""

    def __init__(self) -> None:
        self._estimator = AcceptanceEstimator()

    def survival(self, offered: Offered) -> FloatArray:
        survival = self._estimator.survival
        return np.array([survival(str(t), "d", LONGEST) for t in offered.texts])

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        for text, n, a in zip(offered.texts, decided.tolist(), accepted.tolist(), strict=True):
            self._estimator.observe(Verdict(str(text), 0, 0, (), "d", n, a, n, float(a)))


class Confidence(Judge):
    """As drafters in the engine's process learn it."""

    def __init__(self) -> None:
        self._calibration = Calibration()

    def survival(self, offered: Offered) -> FloatArray:
        bins = np.searchsorted(EDGES, offered.confidence.astype(np.float32), side="right")
        return self._calibration.table[bins].cumprod(1)

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        for confidence, n, a in zip(offered.confidence, decided, accepted, strict=True):
            self._calibration.observe(confidence[:n].tolist(), int(a))


class OnePrice(Confidence):
    """Every draft ends where its survival is under a price, which rises with every position that is
    used too many."""

    STEP = 0.3

    def __init__(self) -> None:
        super().__init__()
        self._price = 0.5

    def lengths(self, offered: Offered, budget: int) -> IntArray:
        lengths: IntArray = (self.survival(offered) >= self._price).sum(1)
        self._price *= float(np.exp(self.STEP * (lengths.sum() / budget - 1)))
        return lengths


class Placebo(Confidence):
    """Confidence that is another token's."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._rng = rng

    def survival(self, offered: Offered) -> FloatArray:
        self._shuffled = self._rng.permuted(offered.confidence.ravel())
        return super().survival(self._of_others(offered))

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        super().learn(self._of_others(offered), decided, accepted)

    def _of_others(self, offered: Offered) -> Offered:
        return offered._replace(confidence=self._shuffled.reshape(offered.confidence.shape))


class Regression(Judge):
    """Logistic, by recursive Newton steps, over everything that a drafter could tell."""

    def __init__(self) -> None:
        self._mean = AcceptanceEstimator()
        self._weights = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
        self._covariance = np.eye(len(self._weights))

    def survival(self, offered: Offered) -> FloatArray:
        return _logistic(self._features(offered) @ self._weights).cumprod(1)

    def _features(self, offered: Offered) -> FloatArray:
        """[requests, LONGEST, features]."""
        shape = offered.confidence.shape
        mean = _log_odds(np.array([self._mean.mean(str(t), "d") for t in offered.texts]))
        values = (
            np.ones(shape),
            _log_odds(offered.confidence),
            np.log1p(offered.margin),
            offered.entropy,
            np.broadcast_to(np.log1p(np.arange(shape[1])), shape),
            np.broadcast_to(mean[:, None], shape),
        )
        return np.stack(values, -1)

    def learn(self, offered: Offered, decided: IntArray, accepted: IntArray) -> None:
        features = self._features(offered)
        for i, (n, a) in enumerate(zip(decided.tolist(), accepted.tolist(), strict=True)):
            for place in range(n):
                self._newton(features[i, place], float(place < a))
            verdict = Verdict(str(offered.texts[i]), 0, 0, (), "d", n, a, n, float(a))
            self._mean.observe(verdict)

    def _newton(self, x: FloatArray, accepted: float) -> None:
        expected = float(_logistic(x @ self._weights))
        spread = self._covariance @ x
        gain = spread / (1 / max(expected * (1 - expected), 1e-3) + x @ spread)
        self._covariance -= np.outer(gain, spread)
        self._weights += self._covariance @ x * (accepted - expected)


class Hindsight(Judge):
    """Knows."""

    def survival(self, offered: Offered) -> FloatArray:
        return (np.arange(LONGEST) < offered.accepted[:, None]).astype(float)


def _logistic(x: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -30, 30))))


def _log_odds(p: FloatArray) -> FloatArray:
    p = np.clip(p, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(p / (1 - p)))


JUDGES: Mapping[str, Callable[[np.random.Generator], Judge]] = {
    "mean": lambda rng: Mean(),
    "confidence": lambda rng: Confidence(),
    "one price": lambda rng: OnePrice(),
    "regression": lambda rng: Regression(),
    "placebo": Placebo,
    "hindsight": lambda rng: Hindsight(),
}


def replay(
    texts: Sequence[DraftedText], judge: Judge, batch: int, positions: int, order: Sequence[int]
) -> tuple[float, float]:
    """Accepted tokens, and verified positions, of a request in a step."""
    decide = partial(judge.lengths, budget=batch * positions)
    done = [(a.sum(), n.sum()) for n, a in steps(texts, decide, judge.learn, batch, order)]
    accepted, verified = np.sum(done, axis=0) / (len(done) * batch)
    return float(accepted), float(verified)


def steps(
    texts: Sequence[DraftedText],
    decide: Callable[[Offered], IntArray],
    learn: Callable[[Offered, IntArray, IntArray], None],
    batch: int,
    order: Sequence[int],
) -> Iterator[tuple[IntArray, IntArray]]:
    """Of each step, the lengths of its drafts, which are decided first, and how many of their
    tokens are accepted: `batch` requests at a time while there are so many, as long as drafts are
    recorded in full length."""
    waiting = list(reversed(order))
    live: list[tuple[int, int]] = []
    while True:
        while len(live) < batch and waiting:
            # The first token comes from the prompt.
            live.append((waiting.pop(), 1))
        if len(live) < batch:
            return
        offered = _offered(texts, live)
        lengths = decide(offered)
        kept = np.minimum(offered.accepted, lengths)
        learn(offered, np.minimum(kept + 1, lengths), kept)
        yield lengths, kept
        moved = [(i, t + int(k) + 1) for (i, t), k in zip(live, kept, strict=True)]
        live = [(i, t) for i, t in moved if t < len(texts[i].accepted) - LONGEST]


def _offered(texts: Sequence[DraftedText], live: Sequence[tuple[int, int]]) -> Offered:
    mine = [(texts[i], t) for i, t in live]
    return Offered(
        np.array([i for i, _ in live]),
        np.array([text.accepted[t] for text, t in mine]),
        np.array([text.confidence[t] for text, t in mine]),
        np.array([text.margin[t] for text, t in mine]),
        np.array([text.entropy[t] for text, t in mine]),
    )


def orders(args: argparse.Namespace) -> Iterator[list[int]]:
    """Of every shuffle, the texts that are served: equally many of every domain."""
    for seed in range(args.shuffles):
        rng = np.random.default_rng((24, seed))
        drawn = [
            d * args.prompts + i
            for d in range(len(DOMAINS))
            for i in rng.permutation(args.prompts)[: args.requests]
        ]
        yield rng.permutation(drawn).tolist()


# --- figures --------------------------------------------------------------------------------------


def cells(
    args: argparse.Namespace, progress: Progress
) -> list[tuple[float, str, list[DraftedText]]]:
    """A record of each temperature and drafter."""
    return [
        (temperature, drafter, texts)
        for temperature in args.temperatures
        for drafter, texts in recorded(args, temperature, progress).items()
    ]


def measure(args: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """A row for each drafter, temperature, batch and number of positions."""
    combined = list(itertools.product(cells(args, progress), args.batches, args.positions))
    rows = []
    for (temperature, drafter, texts), batch, positions in progress.track(combined):
        found: dict[str, list[float]] = {name: [] for name in JUDGES}
        rivals: dict[str, list[float]] = {name: [] for name in JUDGES}
        of_equal: list[float] = []
        for seed, order in enumerate(orders(args)):
            lengths = range(LONGEST + 1)
            equal = [replay(texts, Equal(), batch, n, order)[0] for n in lengths]
            of_equal.append(equal[positions])
            for name, make in JUDGES.items():
                judge = make(np.random.default_rng((25, seed)))
                accepted, verified = replay(texts, judge, batch, positions, order)
                found[name].append(accepted)
                # Of as many positions, where they are so many in the mean only.
                rivals[name].append(float(np.interp(verified, lengths, equal)))
        gains = {name: ratio(found[name], rivals[name]) for name in JUDGES}
        rows.append(
            {
                "drafter": drafter,
                "temperature": temperature,
                "batch": batch,
                "positions": positions,
                "accepted": float(np.mean(of_equal)),
                "gain": {n: g.mean for n, g in gains.items()},
                "interval": {n: (g.low, g.high) for n, g in gains.items()},
                "half": {n: g.half for n, g in gains.items()},
            }
        )
    return rows


def tables(rows: Sequence[dict[str, Any]], batches: Sequence[int]) -> list[ResultTable]:
    columns = {
        "drafter": "`{drafter}`",
        "temperature": "{temperature:g}",
        "positions": "{positions}",
        "accepted, equal lengths": "{accepted:.2f}",
        **{n: f"{{gain[{n}]:.3f}} ± {{half[{n}]:.3f}}" for n in JUDGES},
    }
    return [table(f"batch {b}", [r for r in rows if r["batch"] == b], columns) for b in batches]


def verdicts(rows: Sequence[dict[str, Any]], batches: Sequence[int]) -> list[ClaimVerdict]:
    """Of what the engine knows, in every cell and in the mean over cells."""
    found = []
    for batch in batches:
        mine = [r for r in rows if r["batch"] == batch]
        claim = f"batch {batch}"
        for name in ("confidence", "one price"):
            gains = [r["gain"][name] for r in mine]
            mean = float(np.exp(np.mean(np.log(gains))))
            text = f"`{name}`: {mean:.3f} of equal lengths (bar {GAIN}), {min(gains):.3f} at least"
            found.append(bar(claim, text, mean >= GAIN))
        least = min(
            Interval(r["gain"]["confidence"], *r["interval"]["confidence"]).low for r in mine
        )
        text = f"never behind: the lowest end of an interval is {least:.3f} (bar 1)"
        found.append(bar(claim, text, least >= 1))
        most = max(r["interval"]["placebo"][0] for r in mine)
        text = f"placebo: gains nothing, the lower ends of its intervals are at most {most:.3f}"
        found.append(bar(claim, text, most <= 1))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    quick = "two shuffles, one drafter, one number of positions"
    options = options_of_records(__doc__, quick, batches="16,64")
    options.add_argument("--positions", default="1,2,4", help="for each request in a step")
    args = parse_with_records(options, arguments)
    args.positions = [2] if args.quick else _numbers(args.positions)
    return args


def options_of_records(doc: str | None, quick: str, batches: str) -> argparse.ArgumentParser:
    """Of a benchmark that replays them."""
    options = parser(doc, quick=quick)
    options.add_argument("--out", type=Path, default=Path("choice"), help="folder for records")
    options.add_argument("--family", type=Path, default=WEIGHTS, help="folder of models")
    options.add_argument("--target", default="target-large")
    options.add_argument("--drafters", default=DRAFTERS)
    options.add_argument("--batches", default=batches)
    options.add_argument("--temperatures", default="0,1")
    options.add_argument("--prompts", type=int, default=32, help="of a domain, to draw from")
    options.add_argument("--requests", type=int, default=24, help="of a domain, in a shuffle")
    options.add_argument("--shuffles", type=int, default=5)
    options.add_argument("--new-tokens", type=int, default=96)
    return options


def parse_with_records(
    options: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Lists are parsed, and known to be right."""
    args = options.parse_args(arguments)
    if args.quick:
        args.shuffles, args.drafters = 2, args.drafters.partition(",")[0]
    args.drafters = args.drafters.split(",")
    args.batches = _numbers(args.batches)
    args.temperatures = [float(t) for t in args.temperatures.split(",")]
    known = bundled_models(args.family)
    if unknown := [d for d in args.drafters if d not in known or known[d].role != "drafter"]:
        names = ", ".join(n for n, card in known.items() if card.role == "drafter")
        options.error(f"--drafters: {unknown[0]!r}; choose from {names}")
    if args.requests > args.prompts:
        options.error("--requests: more than there are prompts (--prompts)")
    return args


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    with Progress(console=Console(file=sys.stderr)) as progress:
        rows = measure(args, progress)
    return tell(args, Results(rows, verdicts(rows, args.batches), tables(rows, args.batches)))


if __name__ == "__main__":
    sys.exit(main())
