"""The best choice of drafters in hindsight, where it is known what a request would have had
accepted from every drafter: the best single one, and the best one for each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lab.common.statistics import FloatArray
from penstock.core.types import NO_DRAFTER

LONGEST = 8
"""Draft tokens that are looked ahead."""
Option = tuple[str, int]
"""A drafter and the length of its drafts."""
NONE: Option = (NO_DRAFTER, 0)


@dataclass(frozen=True)
class KnownText:
    """One request and its text by the target alone.

    runs[drafter][t]: how many tokens of a draft that begins at output position t are accepted.
    """

    domain: str
    prompt: tuple[int, ...]
    seed: int
    text: tuple[int, ...]
    runs: dict[str, list[int]]

    def num_rounds(self, drafter: str, length: int) -> int:
        """Verifications after the first token, which the prompt's own step makes."""
        runs, end = self.runs[drafter], len(self.text)
        at, count = 1, 0
        while at < end:
            at += min(length, runs[at], max(end - at - 1, 0)) + 1
            count += 1
        return count

    def acceptance(self, drafter: str) -> float:
        """The share of positions at which a drafter's first token would be accepted."""
        runs = np.array(self.runs[drafter])
        return float(((runs > 0).sum() + 0.5) / (len(runs) + 1))


@dataclass(frozen=True)
class Costs:
    """Seconds of steps. target: by rows. curves: of a drafter's token, by batch. reading: of a
    token of text. overhead: of the host in each step."""

    target: Callable[[int], float]
    curves: Mapping[str, Callable[[int], float]]
    reading: Mapping[str, float]
    overhead: float = 0.0

    def request(self, text: KnownText, option: Option, batch: int) -> float:
        """A request's share of the time, in a batch of requests like it."""
        drafter, length = option
        if drafter == NO_DRAFTER:
            return (len(text.text) - 1) * (self.overhead + self.target(batch)) / batch
        step = self.target(batch * (1 + length)) + length * self.curves[drafter](batch)
        rounds = text.num_rounds(drafter, length)
        reading = self.reading[drafter] * len(text.prompt)
        return rounds * (self.overhead + step) / batch + reading

    def of_options(self, texts: Sequence[KnownText], batch: int) -> dict[Option, FloatArray]:
        """[requests] seconds of each drafter at each length, and of none."""
        options = [NONE, *((n, k) for n in self.curves for k in range(1, LONGEST + 1))]
        return {o: np.array([self.request(t, o, batch) for t in texts]) for o in options}


def best_single(costs: Costs, texts: Sequence[KnownText], batch: int) -> Option:
    """One drafter and length for all."""
    seconds = costs.of_options(texts, batch)
    return min(seconds, key=lambda o: seconds[o].sum())


def clairvoyant(costs: Costs, texts: Sequence[KnownText], batch: int) -> list[Option]:
    """Each request's best drafter, each drafter at the length that is best for those that choose
    it; found by turns, from several beginnings."""
    seconds = costs.of_options(texts, batch)
    best: tuple[float, list[Option]] = (float("inf"), [])
    for start in range(1, LONGEST + 1):
        lengths = dict.fromkeys(costs.curves, start)
        for _ in range(20):
            options = [*lengths.items(), NONE]
            picks = np.stack([seconds[o] for o in options]).argmin(axis=0)
            better = dict(lengths)
            for j, name in enumerate(lengths):
                mine = picks == j
                if mine.any():
                    better[name] = min(
                        range(1, LONGEST + 1),
                        key=lambda k, n=name, m=mine: seconds[n, k][m].sum(),  # type: ignore[misc]
                    )
            if better == lengths:
                break
            lengths = better
        total = float(np.stack([seconds[o] for o in options]).min(axis=0).sum())
        if total < best[0]:
            best = total, [options[j] for j in picks]
    return best[1]
