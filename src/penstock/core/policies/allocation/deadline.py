"""Fair draft lengths per second, where a round waits for its slowest draft.

By the renewal-reward rule a round is worth Σ U'(x_i) [μ_i(S_i) − x_i T], with x_i in tokens a
second, U' = weight · x^(−a) (a = 0: total, 1: proportional) and T = max_i(S_i t_i + rtt_i) +
verify(rows). Given the deadline of the drafts and their total, the largest gains are best: both are
enumerated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.learn.times import round_seconds
from penstock.core.policies.allocation.parts.gradient import (
    Fairness,
    GoodputAverages,
    Streams,
    draft_budget,
    tokens_by_tenant,
)
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt
from penstock.core.state import Grant, Outcome

FloatArray = NDArray[np.float64]

_MAX_DEADLINES = 64  # quantiles beyond this many; bounds the host's time
_LEAST_SECONDS = 1e-4  # avoids division by zero on the virtual clock


class Deadline(AllocationPolicy):
    """Buys speculation while it is worth its time to all tenants together."""

    name: ClassVar[str] = "deadline"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        fairness: Fairness = 1.0  # exponent a of the utility
        total: NonNegativeInt | None = None  # draft tokens a round (C); None: by step times
        k_max: MaxDraftTokens = 16  # most draft tokens for one request

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._averages = GoodputAverages()
        self._streams = Streams()
        self._since: float | None = None

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        if not candidates:
            return []
        if self._since is None:
            self._since = view.now
        slopes, charge = self._utility(candidates, view)
        lengths = _best_lengths(
            self._tokens(candidates, slopes, view),
            len(candidates),
            charge,
            _verify_seconds(view, draft_budget(self.options.total, view)),
        )
        return [Grant(n) for n in lengths]

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._streams.add_outcomes(outcomes)
        if self._since is not None:
            seconds = max(now - self._since, _LEAST_SECONDS)
            self._averages.add_tokens(tokens_by_tenant(outcomes), seconds)
        self._since = now

    def _utility(
        self, candidates: Sequence[DraftCandidate], view: View
    ) -> tuple[dict[str, float], float]:
        """Return U' by tenant, and what a second costs: Σ U'(x) x."""
        waits = max(view.learn.times.draft_seconds(c.drafter, 1, 1) for c in candidates)
        step = max(round_seconds(float(_verify_seconds(view, 0)[0]), beside=waits), _LEAST_SECONDS)
        slopes = self._averages.slopes(candidates, view, self.options.fairness, step)
        return slopes, sum(slope * self._averages.goodput_of(n) for n, slope in slopes.items())

    def _tokens(
        self, candidates: Sequence[DraftCandidate], slopes: dict[str, float], view: View
    ) -> _Tokens:
        owners, gains, ready = [], [], []
        rates = self._streams.rates(candidates)
        for index, (candidate, rate) in enumerate(zip(candidates, rates, strict=True)):
            most = min(candidate.limit, self.options.k_max)
            start = view.learn.times.draft_seconds(candidate.drafter, 1, 0)
            each = view.learn.times.draft_seconds(candidate.drafter, 1, 1) - start
            places = np.arange(1, most + 1)
            owners.append(np.full(most, index))
            gains.append(slopes[candidate.state.request.tenant] * rate**places)
            ready.append(np.where(places <= candidate.num_at_hand, 0.0, start + each * places))
        return _Tokens(np.concatenate(owners), np.concatenate(gains), np.concatenate(ready))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Draft tokens that could be bought: request, gain and arrival time of each."""

    owners: NDArray[np.int64]
    gains: FloatArray
    ready: FloatArray


def _verify_seconds(view: View, budget: int) -> FloatArray:
    """Return seconds of a target step with 0, 1, …, `budget` draft positions."""
    rows = view.room.num_rows + np.arange(budget + 1, dtype=np.int64)
    return round_seconds(view.learn.times.target.at(rows), host=view.learn.times.overhead)


def _best_lengths(
    tokens: _Tokens, num_candidates: int, charge: float, verify: FloatArray
) -> list[int]:
    """Return the best lengths; `verify` has the seconds by number of draft tokens."""
    order = np.argsort(-tokens.gains, kind="stable")
    owners, gains, ready = tokens.owners[order], tokens.gains[order], tokens.ready[order]
    deadlines = np.unique(ready)
    if len(deadlines) > _MAX_DEADLINES:
        deadlines = np.quantile(deadlines, np.linspace(0, 1, _MAX_DEADLINES))
    in_time = ready <= deadlines[:, None]
    bought = in_time.cumsum(axis=1)
    affordable = in_time & (bought < len(verify))
    seconds = round_seconds(verify[np.minimum(bought, len(verify) - 1)], beside=deadlines[:, None])
    worth = np.where(in_time, gains, 0.0).cumsum(axis=1) - charge * seconds
    worth[~affordable] = -np.inf
    if not worth.size or worth.max() <= -charge * verify[0]:
        return [0] * num_candidates
    deadline, last = np.unravel_index(int(worth.argmax()), worth.shape)
    chosen = owners[: last + 1][in_time[deadline, : last + 1]]
    lengths: list[int] = np.bincount(chosen, minlength=num_candidates).tolist()
    return lengths


POLICY = Deadline
