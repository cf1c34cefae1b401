"""vLLM's adaptive verification in the simulator.

It cuts drafts by their confidence after the scheduler has planned the step, in vLLM's model runner:
so it is a part of the executor here (`CuttingExecutor`), not an allocation policy.

`AdaptiveVerification` follows vLLM 0.32 and 0.33, `vllm/v1/worker/gpu/spec_decode/`:

- Every request drafts `num_speculative_tokens` in every step, and that time is always spent; only
  verification is cut. The scheduler's part is therefore `fixed`.
- `acceptance_estimator.py`, `OnlineAcceptanceEstimator`: the probability that a draft token is
  accepted is a logistic function of the log-odds of the drafter's likeliest token, with one slope
  and an intercept for each position, shared by all requests. It starts at slope 0.5 and intercepts
  -0.2; every 100 steps one damped Newton step on the accepted tokens and the first rejected one.
- `adaptive_verification.py`, `get_num_tokens`: the budget b maximises (tokens that are sampled in
  any case + the b largest survivals) / (seconds of drafting for so many requests + seconds of the
  target over so many tokens), with survivals one step old and 1 for a new request.
- `_assign_draft_token_budget`: the b slots of largest survival now are verified.
- `batches_to_profile`, `build_cost_tables_from_curves`, `GPUModelRunner._dummy_run`: seconds are
  measured at the start and never again, at the sizes of captured graphs (a step function), at 1.5
  times the largest and at its doublings (interpolated). A step of n tokens has n requests, at
  most as many as may run, each with a context of 8192 tokens or what the model can read
  (`VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN`).

Records have no confidences. `Signal` makes them up: normal log-odds of unit variance, shifted by
whether the token is right, and scaled to be right in the mean, the same for every system."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lab.common.statistics import FloatArray
from penstock.core.types import StepPlan, StepResult, VerifyItem
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.executor import SimulatedExecutor

IntArray = npt.NDArray[np.int64]

LONGEST = 8
"""Draft tokens at most, for all."""
_REFIT, _DAMPING, _RIDGE = 100, 50.0, 1e-3
_MAX_REQUESTS, _MAX_TOKENS = 256, 2048
"""`max_num_seqs` and `max_num_batched_tokens`."""
_GRAPHS, _ABOVE = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)), (768, 1024, _MAX_TOKENS)
"""Tokens of captured graphs, vLLM's defaults, and of what else is timed."""
_MEAN_LOG_ODDS = 0.85  # of a confidence: 0.7


class Signal:
    """Confidences as log-odds. separation: of the means of right and wrong tokens, in standard
    deviations; with 0 they say nothing."""

    def __init__(self, separation: float, seed: int) -> None:
        rng = np.random.default_rng((7, seed))
        self._noise = rng.standard_normal((4099, LONGEST))
        # A drafter does not know that the text before is wrong.
        self._guessed = rng.random((4099, LONGEST)) < 1 / (1 + np.exp(-_MEAN_LOG_ODDS))
        self.separation = separation

    def log_odds(self, keys: Sequence[str], right: IntArray) -> FloatArray:
        """Return [drafts, LONGEST]. keys: of the drafts; right: their first tokens that are."""
        rows = [zlib.crc32(key.encode()) % len(self._noise) for key in keys]
        place = np.arange(LONGEST)
        is_right = np.where(place > right[:, None], self._guessed[rows], place < right[:, None])
        shift = self.separation * (is_right - 0.5)
        return np.asarray(_MEAN_LOG_ODDS + self.separation * (shift + self._noise[rows]))


class Drafts(NamedTuple):
    """The drafts of a step. log_odds: [drafts, LONGEST]; right: [drafts], which only an oracle may
    read. num_other: target positions besides drafts, of which `num_sampled` yield a token."""

    items: Sequence[VerifyItem]
    limits: IntArray
    log_odds: FloatArray
    right: IntArray
    num_other: int
    num_sampled: int


class Cutter:
    """Decides how many tokens of each draft are made and verified; this one cuts none."""

    def cut(self, drafts: Drafts) -> tuple[IntArray, IntArray]:
        """Return the tokens that are verified, and those that are drafted: [drafts] each."""
        return drafts.limits, drafts.limits

    def learn(self, drafts: Drafts, verified: IntArray) -> None:
        """Take in the verdicts."""


class CuttingExecutor(SimulatedExecutor):
    """A simulated executor that verifies what its cutter leaves of the drafts."""

    def __init__(self, *args: Any, cutter: Cutter, signal: Signal) -> None:
        super().__init__(*args)
        self._cutter, self._signal = cutter, signal

    def _result(self, plan: StepPlan) -> StepResult:
        drafted = [i for i, item in enumerate(plan.items) if item.num_draft_tokens]
        if not drafted:
            return super()._result(plan)
        drafts = self._drafts(plan, [plan.items[i] for i in drafted])
        verified, made = self._cutter.cut(drafts)
        items = list(plan.items)
        for i, num, steps in zip(drafted, verified.tolist(), made.tolist(), strict=True):
            order = items[i].draft
            assert order is not None
            order = order._replace(max_draft_tokens=steps) if steps else None
            items[i] = items[i]._replace(num_draft_tokens=num, draft=order)
        self._cutter.learn(drafts, verified)
        return super()._result(plan._replace(items=tuple(items)))

    def _drafts(self, plan: StepPlan, items: Sequence[VerifyItem]) -> Drafts:
        keys, right = [], []
        for item in items:
            position = item.start + item.num_scheduled_tokens - self._prompt_len[item.request_id]
            keys.append(f"{item.request_id}/{position}/{item.drafter}")
            whole = item._replace(num_draft_tokens=LONGEST)
            right.append(self._acceptance.num_accepted(whole, position))
        limits = np.array([item.num_draft_tokens for item in items])
        log_odds = self._signal.log_odds(keys, np.array(right))
        num_sampled = sum(item.samples for item in plan.items)
        num_other = plan.num_rows - int(limits.sum())
        return Drafts(items, limits, log_odds, np.array(right), num_other, num_sampled)


class AcceptanceEstimator:
    """Online logistic regression with one slope and an intercept for each position."""

    def __init__(self) -> None:
        self._slope, self._intercepts = 0.5, np.full(LONGEST, -0.2)
        self._sums = np.zeros((6, LONGEST))
        self._num_steps = 0

    def predict(self, log_odds: FloatArray) -> FloatArray:
        return np.asarray(1 / (1 + np.exp(-self._slope * log_odds - self._intercepts)))

    def learn(self, log_odds: FloatArray, accepted: IntArray, verified: IntArray) -> None:
        place = np.arange(LONGEST)
        seen = (place <= accepted[:, None]) & (place < verified[:, None])
        predicted = self.predict(log_odds)
        weight = np.where(seen, predicted * (1 - predicted), 0.0)
        residual = np.where(seen, (place < accepted[:, None]) - predicted, 0.0)
        terms = (
            weight * log_odds**2,
            weight * log_odds,
            weight,
            residual * log_odds,
            residual,
            seen,
        )
        self._sums += [term.sum(axis=0) for term in terms]
        self._num_steps += 1
        if self._num_steps % _REFIT == 0:
            self._refit()

    def _refit(self) -> None:
        square, cross, own, slope_gradient, gradient, num = self._sums
        own = own + _RIDGE
        total = num.sum()
        step = slope_gradient.sum() - (cross * gradient / own).sum()
        step /= (square + _RIDGE).sum() - (cross**2 / own).sum()
        step *= total / (total + _DAMPING)
        step = step if self._slope + step >= 0 else 0.0
        self._slope += step
        self._intercepts = self._intercepts + (gradient - cross * step) / own * num / (
            num + _DAMPING
        )
        self._sums = np.zeros_like(self._sums)


class AdaptiveVerification(Cutter):
    """vLLM's rule. draft_s: seconds of drafting by requests; context: tokens of each request in
    the steps that are timed at the start."""

    def __init__(self, profile: StepProfile, draft_s: Callable[[int], float], context: int) -> None:
        self._verify_s = verify_seconds(profile, context)
        self._draft_s = draft_s
        self._estimator = AcceptanceEstimator()
        self._before: dict[str, FloatArray] = {}

    def cut(self, drafts: Drafts) -> tuple[IntArray, IntArray]:
        possible = np.arange(LONGEST) < drafts.limits[:, None]
        confidences = self._estimator.predict(drafts.log_odds)
        ids = [item.request_id for item in drafts.items]
        ones = np.ones(LONGEST)
        stale = np.cumprod([self._before.get(i, ones) for i in ids], axis=1)
        self._before = dict(zip(ids, confidences, strict=True))
        scores = np.sort(stale[possible])[::-1]
        tokens = drafts.num_sampled + np.append(0.0, scores.cumsum())
        seconds = self._verify_s[drafts.num_other : drafts.num_other + len(tokens)]
        seconds = seconds + self._draft_s(len(ids))
        budget = int(np.argmax(tokens[: len(seconds)] / seconds))
        survival = np.where(possible, np.cumprod(confidences, axis=1), -1.0)
        best = np.argsort(-survival, axis=None, kind="stable")[:budget]
        return np.bincount(best // LONGEST, minlength=len(ids)), drafts.limits

    def learn(self, drafts: Drafts, verified: IntArray) -> None:
        accepted = np.minimum(drafts.right, verified)
        self._estimator.learn(drafts.log_odds, accepted, verified)


def verify_seconds(profile: StepProfile, context: int) -> FloatArray:
    """Return the target's seconds by tokens of a step, from 0 on, as vLLM measures them."""

    def timed(num_tokens: int) -> float:
        requests = min(num_tokens, _MAX_REQUESTS)
        work = StepWork(0, 0.0, requests, requests * context, num_tokens - requests)
        return profile.seconds(work)

    sizes = np.arange(_MAX_TOKENS + 1)
    stairs = np.maximum.accumulate([timed(n) for n in (*_GRAPHS, *_ABOVE)])
    found = stairs[np.searchsorted((*_GRAPHS, *_ABOVE), sizes)]
    above = sizes > _GRAPHS[-1]
    found[above] = np.interp(sizes[above], _ABOVE, stairs[len(_GRAPHS) :])
    return np.asarray(found)


class Known(Cutter):
    """An oracle: knows which tokens are right, drafts no other, and is the best under one cap.

    draft_s: seconds of a draft token by requests."""

    def __init__(self, profile: StepProfile, draft_s: Callable[[int], float]) -> None:
        self._profile, self._draft_s = profile, draft_s

    def cut(self, drafts: Drafts) -> tuple[IntArray, IntArray]:
        caps = [np.minimum(np.minimum(drafts.right, drafts.limits), c) for c in range(LONGEST + 1)]
        best = max(caps, key=lambda lengths: self._rate(drafts, lengths))
        return best, best

    def _rate(self, drafts: Drafts, lengths: IntArray) -> float:
        tokens, other = int(lengths.sum()), drafts.num_other
        work = StepWork(0, 0.0, drafts.num_sampled, 0, other - drafts.num_sampled + tokens)
        drafting = sum(
            self._draft_s(int((lengths >= k).sum())) for k in range(1, lengths.max() + 1)
        )
        return (drafts.num_sampled + tokens) / (self._profile.seconds(work) + drafting)
