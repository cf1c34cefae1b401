"""Thresholds for unknown output lengths (Nested WAIT: section 5, B.2, appendix D)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.fluid.queues import queue_limit
from penstock.fluid.stages import StageRange, iteration_seconds, peak_kv_tokens, refuse_beyond
from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import Traffic
from penstock.fluid.wait import roomy_wait_thresholds

MAX_SEGMENTS = 8
"""Most segments that are tried; a moderate number is enough (appendix B.2)."""
_MARGIN_SCALES = (0.0, 0.3, 1.0)
"""Shares of `_margins` that are tried: none, a part, all."""


@dataclass(frozen=True)
class Segments:
    """Traffic of Nested WAIT: all requests alike until they enter the next segment.

    prompt_lens: mean prompt tokens of the requests that enter each segment, (L,). The paper has one
                 length. The memory bound holds for the values given: give the longest to be sure.
    ends:        last step of each segment, (L,), rising; segment 1 includes the prefill, step 0.
    survival:    probability that a request of segment i enters segment i + 1, (L − 1,).
    rate:        Poisson arrivals of all requests, 1/s.
    wave:        steps of a stage (see `stages`). All ends but the last are ends of stages."""

    prompt_lens: tuple[int, ...]
    ends: tuple[int, ...]
    survival: tuple[float, ...]
    rate: float
    wave: int = 1

    def __post_init__(self) -> None:
        count = len(self.ends)
        if not count or len(self.survival) != count - 1 or len(self.prompt_lens) != count:
            raise ValueError("each segment has an end and a prompt, every two have a survival")
        if self.ends[0] < 0 or any(b <= a for a, b in itertools.pairwise(self.ends)):
            raise ValueError(f"segments end at rising stages, not {list(self.ends)}")
        if self.wave < 1 or any((end + 1) % self.wave for end in self.ends[:-1]):
            raise ValueError(f"segments end where a stage of {self.wave} steps does")
        if any(not 0 < p <= 1 for p in self.survival):
            raise ValueError("a share of requests that go on lies in (0, 1]")

    def ranges(self) -> list[StageRange]:
        """Return the stages of each segment."""
        firsts = [0, *(end + 1 for end in self.ends[:-1])]
        return [
            StageRange(prompt, first, last, self.wave)
            for prompt, first, last in zip(self.prompt_lens, firsts, self.ends, strict=True)
        ]

    def queue_kv_tokens(self, segment: int) -> int:
        """Return the KV tokens of a prompt that waits before a segment (0-based): l + l'_{i−1}.

        Prompts before segment 0 hold none."""
        return self.prompt_lens[segment] + self.ends[segment - 1] if segment else 0


def segments_of(traffic: Traffic, num_segments: int, wave: int = 1) -> Segments:
    """Cut the request types, ordered by decode steps, into segments of equally many types.

    (WAIT, appendix B.2.) Types that end at the same step boundary count as one. A segment's prompt
    length is the mean over all types that reach it, weighted by arrival rate."""
    last_step = max(t.decode_len for t in traffic)
    steps = {t: _stage_end(t.decode_len, wave, last_step) for t in traffic}
    lengths = sorted(set(steps.values()))
    if not 1 <= num_segments <= len(lengths):
        raise ValueError(f"{len(lengths)} lengths make 1 to {len(lengths)} segments")
    ends = [lengths[round(i * len(lengths) / num_segments) - 1] for i in range(1, num_segments + 1)]
    entering = [[t for t in traffic if steps[t] > end] for end in [-1, *ends[:-1]]]
    rates = [sum(t.rate for t in kinds) for kinds in entering]
    return Segments(
        prompt_lens=tuple(
            math.ceil(sum(t.rate * t.prompt_len for t in kinds) / rate - 1e-9)
            for kinds, rate in zip(entering, rates, strict=True)
        ),
        ends=tuple(ends),
        survival=tuple(b / a for a, b in itertools.pairwise(rates)),
        rate=rates[0],
        wave=wave,
    )


@dataclass(frozen=True)
class NestedThresholds:
    """A policy π = [n_1, …, n_L] and the terms of its memory bound (theorem 5.1, eq. 12).

    thresholds:  prompts at each stage of each segment.
    iteration_s: ΔT with every segment in the batch.
    batch_kv_tokens: M^π, summed over the stages.
    queue_kv_tokens: Σ_{i≥2} n_i (l + l'_{i−1}).
    tail_kv_tokens:  Σ_{i≥2} ln((L − 1) S / δ) / θ_i × (l + l'_{i−1}).
    delta, iterations: δ, largest probability that memory is exceeded within S iterations."""

    segments: Segments
    thresholds: tuple[int, ...]
    iteration_s: float
    batch_kv_tokens: float
    queue_kv_tokens: float
    tail_kv_tokens: float
    delta: float
    iterations: int

    @property
    def kv_bound_tokens(self) -> float:
        return self.batch_kv_tokens + self.queue_kv_tokens + self.tail_kv_tokens


def nested_policy(
    profile: StepProfile,
    segments: Segments,
    thresholds: Sequence[int],
    delta: float,
    iterations: int,
) -> NestedThresholds:
    """Return the bounds of given thresholds.

    Raises ValueError where they break eq. 11 (eq. 10 with the worst arrivals and survival), so that
    a queue would grow without bound."""
    if len(thresholds) != len(segments.ends) or min(thresholds) < 1:
        raise ValueError(f"{len(segments.ends)} segments need as many thresholds of 1 or more")
    ranges = segments.ranges()
    seconds = iteration_seconds(profile, ranges, thresholds)
    arrivals = segments.rate * seconds
    if arrivals >= thresholds[0]:
        raise ValueError(
            f"the first threshold is too low: an iteration takes {seconds:.4g} s, {arrivals:.4g} "
            f"requests arrive meanwhile, and only {thresholds[0]} are taken"
        )
    odds = log_odds(len(thresholds), iterations, delta)
    queued = [segments.queue_kv_tokens(i) for i in range(1, len(thresholds))]
    limits = [
        queue_limit(before, here, p, odds)
        for (before, here), p in zip(itertools.pairwise(thresholds), segments.survival, strict=True)
    ]
    in_queues = sum(n * kv for n, kv in zip(thresholds[1:], queued, strict=True))
    return NestedThresholds(
        segments=segments,
        thresholds=tuple(thresholds),
        iteration_s=seconds,
        batch_kv_tokens=peak_kv_tokens(ranges, thresholds),
        queue_kv_tokens=in_queues,
        tail_kv_tokens=sum(c * kv for c, kv in zip(limits, queued, strict=True)) - in_queues,
        delta=delta,
        iterations=iterations,
    )


def fluid_segments(
    profile: StepProfile, traffic: Traffic, kv_tokens: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return ends, in output tokens, and the fluid's thresholds: the share that enters a segment.

    Raises ValueError where they do not fit."""
    found = roomy_wait_thresholds(profile, traffic, kv_tokens)
    num_lengths = len({t.decode_len for t in traffic})
    ends = segments_of(traffic, min(MAX_SEGMENTS, num_lengths)).ends
    starts = (-1, *ends[:-1])
    numbers = list(zip(traffic, found.thresholds, strict=True))
    thresholds = tuple(sum(n for t, n in numbers if t.decode_len > start) for start in starts)
    return tuple(end + 1 for end in ends), thresholds


def nested_thresholds(
    profile: StepProfile, segments: Segments, kv_tokens: int, delta: float, iterations: int
) -> NestedThresholds:
    """Return thresholds that keep up with the least memory found.

    The first one is the smallest possible. The others are the best of a few choices between the
    smallest and those with a short tail. Raises ValueError where all bounds exceed `kv_tokens`."""
    margins = _margins(segments, log_odds(len(segments.ends), iterations, delta))
    found, refusal = [], None
    for scale in _MARGIN_SCALES:
        try:
            thresholds = _that_keep_up(profile, segments, [scale * m for m in margins], kv_tokens)
        except ValueError as error:
            refusal = refusal or error
            continue
        found.append(nested_policy(profile, segments, thresholds, delta, iterations))
    if not found:
        raise refusal or ValueError("no thresholds fit")
    best = min(found, key=lambda policy: policy.kv_bound_tokens)
    if best.kv_bound_tokens > kv_tokens:
        raise _too_large(best.kv_bound_tokens, kv_tokens)
    return best


def _that_keep_up(
    profile: StepProfile, segments: Segments, margins: Sequence[float], kv_tokens: int
) -> list[int]:
    """Repeat n_1 ← ⌊arrivals(ΔT)⌋ + 1 from 1, which ends at the smallest solution.

    The other thresholds and the iteration rise with n_1."""
    ranges = segments.ranges()
    first = 1
    while True:
        thresholds = _following(first, segments.survival, margins)
        if (least := peak_kv_tokens(ranges, thresholds)) > kv_tokens:
            raise _too_large(least, kv_tokens)
        refuse_beyond(profile, ranges, thresholds)
        seconds = iteration_seconds(profile, ranges, thresholds)
        needed = math.floor(segments.rate * seconds) + 1
        if needed <= first:
            return thresholds
        first = needed


def _stage_end(step: int, wave: int, last_step: int) -> int:
    """Return the last step of the stage that contains `step`."""
    return min(step // wave * wave + wave - 1, last_step)


def log_odds(num_segments: int, iterations: int, delta: float) -> float:
    """Return ln((L − 1) S / δ): the union over the L − 1 queues that hold KV and S iterations.

    The paper also writes m ζ S, (m − 1)(S + 1) and (L − 1)(T + 1)."""
    if not 0 < delta < 1 or iterations < 1:
        raise ValueError(f"δ lies in (0, 1) and S is 1 or more, not {delta} and {iterations}")
    return math.log(max(num_segments - 1, 1) * iterations / delta)


def _margins(segments: Segments, odds: float) -> list[float]:
    """Return the least-memory (n_k − n_{k−1} p_k) / √n_{k−1} for segments 2 to L.

    One more prompt at a threshold holds `behind` tokens in its stages and queue and in those after
    it. The tail costs odds / θ × queued with θ ≈ 2 D / (n p (1 − p)) (F.5). The minimum of behind ×
    D + queued × odds × n p (1 − p) / (2 D) lies at the root below. Near capacity less is better,
    since a longer iteration then raises n_1 too."""
    ranges = segments.ranges()
    margins: list[float] = []
    behind = 0.0
    for i in range(len(ranges) - 1, 0, -1):
        p, queued = segments.survival[i - 1], segments.queue_kv_tokens(i)
        after = segments.survival[i] if i < len(segments.survival) else 0.0
        behind = ranges[i].kv_tokens() + queued + after * behind
        margins.append(math.sqrt(queued * odds * p * (1 - p) / (2 * behind)))
    return margins[::-1]


def _following(first: int, survival: Sequence[float], margins: Sequence[float]) -> list[int]:
    """Return all thresholds from the first.

    Each is at least the smallest whole number above n_{k−1} p_k, and at most n_{k−1}, where the
    queue has no tail."""
    thresholds = [first]
    for p, margin in zip(survival, margins, strict=True):
        mean = thresholds[-1] * p
        wished = math.ceil(mean + margin * math.sqrt(thresholds[-1]))
        ceiling = thresholds[-1] if p < 1 else thresholds[-1] + 1
        thresholds.append(max(min(wished, ceiling), math.floor(mean) + 1))
    return thresholds


def _too_large(needed: float, kv_tokens: int) -> ValueError:
    return ValueError(
        f"no thresholds fit: they need at least {needed:.0f} KV tokens, memory has {kv_tokens}; "
        "lower the rates or allow another number of segments"
    )
