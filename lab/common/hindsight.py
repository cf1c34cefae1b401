"""The best choice of drafters in hindsight, where it is known what a request would have had
accepted from every drafter: the best single one, and the best one for each request."""

from __future__ import annotations

import itertools
from collections import Counter
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
    """Each request's best drafter at its best length."""
    seconds = costs.of_options(texts, batch)
    options = list(seconds)
    return [options[i] for i in np.stack(list(seconds.values())).argmin(axis=0)]


def best_subset(
    names: Sequence[str], tokens: FloatArray, seconds: Callable[[Mapping[str, int]], float]
) -> list[str]:
    """Each request's drafter, where all wait for all: the set of drafters, of which each request
    has its best one, with which most tokens per second are made. tokens: of a round, [requests,
    drafters]; seconds: of a round, by the number of requests of each drafter."""
    best: tuple[float, list[str]] = (0.0, [])
    sets = (itertools.combinations(range(len(names)), n + 1) for n in range(len(names)))
    for chosen in itertools.chain.from_iterable(sets):
        own = tokens[:, chosen]
        drafters = [names[chosen[j]] for j in own.argmax(axis=1)]
        rate = float(own.max(axis=1).sum()) / seconds(Counter(drafters))
        best = max(best, (rate, drafters))
    return best[1]
