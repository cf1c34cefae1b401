"""Penstock's own admission: prompts bought at the fluid price, memory kept for expected growth.

Nothing is tuned for a workload: prices come from the step-time profile, growth from outputs
seen."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from penstock.core.policies.admission.parts.growth import num_that_fit
from penstock.core.policies.admission.parts.targets import Targets, time_left_of_own
from penstock.core.policies.base import AdmissionPolicy, Gauges
from penstock.core.policies.declared import Gauge, LimitOptions
from penstock.core.policies.options import PositiveFloat, PositiveInt
from penstock.core.queues import OrderName
from penstock.core.state import RequestState
from penstock.core.step import Step
from penstock.core.types import Status
from penstock.fluid.step_profile import StepProfile, StepWork

# Chosen by hand; `lab.bench.admission` measures what they come to.
_PEAK = 1.5  # standard deviations by which the fullest of the steps ahead exceeds a certain one
_LEAST_RISK = 0.01  # least chance that memory runs out, or does not, that is aimed at
_HORIZON = 10.0  # steps within which waiting prompts should be prefilled
_TOLERANCE = 0.08  # share by which a step may be less efficient than the best one, to be shorter
_SHORTER = 0.03  # share of a step that its prompt tokens may lose against the best number of them
_URGENT_SHARE = 0.25  # share of the TTFT target after which a waiting request is urgent
_SIZES = tuple(round(2 ** (i / 2)) for i in range(33))  # of steps, beside the profile's
_MAX_WAITING_CONSIDERED = 256  # most waiting requests considered in a step: bounds the host's time
_SPARE_LOAD = 0.7  # load up to which decoding may pause for a prompt that is on time anyway
_LEAST_PROMPT_SHARE = 0.25  # share of the best step that prompts get whatever the TPOT target


class FluidGuided(AdmissionPolicy):
    """Decodes always, adds prompt tokens while they are cheap, admits what memory should hold.

    In the fluid model the best mixture of steps lies on the lower convex envelope of the step-time
    staircase above the decoding requests. Its slope at the prompts' arrival rate is their price: a
    step takes the prompt tokens that cost less. Under overload the price is that of the most
    efficient step."""

    name: ClassVar[str] = "fluid_guided"
    limits = LimitOptions(
        token_budget="max_num_batched_tokens", ttft_p99="ttft_p99", tpot_p99="tpot_p99"
    )
    metrics = (
        Gauge(
            "kv_reserved_tokens",
            "Free KV tokens kept from waiting requests, for running ones to grow.",
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Options:
        max_num_batched_tokens: PositiveInt = 8192  # most positions in a step
        order: OrderName = "size_aware"  # of waiting requests
        ttft_p99: PositiveFloat | None = None  # target in seconds; None: no target
        tpot_p99: PositiveFloat | None = None  # likewise

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.order = options.order
        self.token_budget = options.max_num_batched_tokens
        self._corners: tuple[StepProfile, list[tuple[int, float]]] | None = None
        self._blocked: tuple[str, int] | None = None
        self._targets = Targets(options.ttft_p99, options.tpot_p99)
        self._best: tuple[StepProfile | None, float, tuple[int, float]] = (None, 0.0, (1, 0.0))
        self._is_steady = False
        self._step: Step | None = None

    @property
    def gauges(self) -> Gauges:
        if self._step is None:
            return {}
        pool, running = self._step.pool, len(self._step.running)
        waits = self._blocked is not None and self._blocked[1] == running
        is_kept = self._step.waiting and waits and self._step.num_places > 0
        return {"kv_reserved_tokens": pool.num_free_blocks * pool.block_size if is_kept else 0}

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        _, places = step.shortage(state)
        if places or num_that_fit(step, [state], self._confidence(step)):
            return 0, places
        return step.pool.blocks_for(state.num_known_tokens + int(step.learn.lengths.mean)), 0

    def compose(self, step: Step) -> None:
        self._step = step
        budget = max(self.options.max_num_batched_tokens, step.num_decodes())
        self._is_steady = False
        in_order, pauses = self._in_order(step)
        num_decodes = 0 if pauses else step.schedule_decodes(budget)
        prompts = [] if step.num_preempted else self._prompts(step, in_order)
        if prompts:
            self._schedule_prompts(step, num_decodes, prompts)
        else:
            # With a TTFT target the order of waiting requests changes with time.
            changes = step.waiting and self.options.ttft_p99 is not None
            self._is_steady = not (step.num_preempted or changes)
        if pauses and not step.scheduled:
            step.schedule_decodes(budget)

    def is_steady(self, step: Step) -> bool:
        return self._is_steady

    def _schedule_prompts(self, step: Step, num_decodes: int, prompts: list[RequestState]) -> None:
        backlog = sum(_missing(step, state) for state in prompts)
        # Drafts are rows of the step too: as many as are accepted, and as many again.
        made = 2 * num_decodes * (step.learn.lengths.per_step - 1)
        drafts = min(step.num_reserved, round(made), self._best_step(step)[0] // 2)
        left = self._prompt_tokens(step, num_decodes + drafts, prompts, backlog)
        for state in prompts:
            tokens = min(_missing(step, state), left)
            if tokens <= 0:
                return
            if state.status is Status.RUNNING:
                if step.make_room(state, tokens):
                    step.schedule(state, tokens)
            elif step.num_preempted or not step.can_admit(state, tokens):
                return
            else:
                step.admit(state, tokens)
            left -= tokens

    # --- whose prompts --------------------------------------------------------------------------

    def _in_order(self, step: Step) -> tuple[list[RequestState] | None, bool]:
        """Return the prompts in order under a TTFT target, and whether decoding pauses for them.

        Decoding pauses where that brings more prompts on time than requests are expected to miss
        the TPOT target. At low load, seconds gained in TTFT count as their share of its target."""
        targets, ttft = self._targets, self.options.ttft_p99
        if ttft is None:
            return None, False
        prompts = [
            *step.prefills(),
            *itertools.islice(step.waiting.queue(), _MAX_WAITING_CONSIDERED),
        ]
        num_decodes = step.num_decodes()
        beside = targets.order(prompts, step.now, self._seconds_of_prompt(step, num_decodes))
        if not prompts or not num_decodes or self.options.tpot_p99 is None:
            return beside.prompts, False
        has_time = self._load(step) < _SPARE_LOAD
        if not beside.num_late and not has_time:
            return beside.prompts, False
        alone = targets.order(prompts, step.now, self._seconds_of_prompt(step, 0))
        gained: float = beside.num_late - alone.num_late
        if not gained and has_time:
            gained = (beside.seconds - alone.seconds) / ttft
        decoding = self._decode_only_seconds(step, num_decodes)
        if gained > 0 and gained > targets.num_lost(step, alone.seconds, decoding):
            return alone.prompts, True
        return beside.prompts, False

    def _prompts(self, step: Step, in_order: list[RequestState] | None) -> list[RequestState]:
        """Return running prompts, and waiting ones that memory should hold, in order of service."""
        if in_order is None:
            prompts = step.prefills()
            return (
                prompts + self._admissible(step, step.waiting.queue()) if step.waiting else prompts
            )
        others = [s for s in in_order if s.status is not Status.RUNNING]
        admissible = set(map(id, self._admissible(step, others)))
        return [s for s in in_order if s.status is Status.RUNNING or id(s) in admissible]

    def _admissible(self, step: Step, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Return the first waiting requests that memory should hold and that are due."""
        waiting = iter(waiting)
        first = next(waiting, None)
        if first is None or self._blocked == (first.request.id, len(step.running)):
            return []
        enough = _HORIZON * self._best_step(step)[0]
        soon, tokens = [first], step.num_missing_tokens(first)
        for state in waiting:
            if tokens >= enough:
                break
            soon.append(state)
            tokens += step.num_missing_tokens(state)
        num_fit = num_that_fit(step, soon, self._confidence(step))
        admissible = soon[: num_fit if step.running else max(1, num_fit)]
        # Until a request ends there is no more room for the first of them.
        self._blocked = None if admissible else (first.request.id, len(step.running))
        return admissible

    def _confidence(self, step: Step) -> float:
        """Return the standard deviations by which less memory may come free than expected.

        A newsvendor's: memory that runs out costs the seconds of a preempted text, memory that
        stays free the tokens of one more request. A token is worth its share of a step."""
        lengths, profile = step.learn.lengths, step.learn.times.profile
        num, context = step.num_decodes() + 1, self._context_len(step)
        token = self._decode_only_seconds(step, num) / num
        own = (profile.linear(2 * num) - profile.linear(num)) / num + profile.per_decode
        own += profile.per_kv_token * context
        gained = lengths.mean / lengths.per_step * max(token - own, 0.0)
        lost = context * self._work(step)[0]
        risk = gained / (lost + gained) if gained else 0.0
        return _PEAK - NormalDist().inv_cdf(min(max(risk, _LEAST_RISK), 1 - _LEAST_RISK))

    def _seconds_of_prompt(self, step: Step, num_decodes: int) -> Callable[[RequestState], float]:
        """Return a function for the seconds of the rest of a prompt beside decoding requests."""
        profile = step.learn.times.profile
        size, _ = self._best_step(step)
        decoding = self._decode_seconds(step, num_decodes) if num_decodes else 0.0
        share = 0.0
        if self.options.tpot_p99 is not None:
            a_token = decoding / step.learn.lengths.per_step
            share = min(0.95, a_token / self.options.tpot_p99)

        def seconds(state: RequestState) -> float:
            tokens = _missing(step, state)
            context = tokens * (state.num_known_tokens - 0.5 * tokens)
            alone = profile.seconds(StepWork(tokens, context))
            return max(alone + decoding * max(1.0, tokens / size), alone / (1 - share))

        return seconds

    def _load(self, step: Step) -> float:
        """Return the work that arrives in a second, in seconds of the most efficient steps."""
        traffic, lengths = step.learn.traffic, step.learn.lengths
        prompt, decode = self._work(step)
        per_token = prompt + decode * lengths.mean / traffic.mean_prompt_len
        return traffic.prompt_tokens_per_s(step.now) * per_token

    # --- how many prompt tokens -----------------------------------------------------------------

    def _prompt_tokens(
        self, step: Step, num_decodes: int, prompts: list[RequestState], backlog: int
    ) -> int:
        first = prompts[0]
        # A shorter step would serve decoding requests only.
        urgent = not num_decodes or self._is_urgent(step, first, backlog)
        size = self._best_step(step)[0]
        # As many as arrive meanwhile: with fewer the backlog would grow for ever.
        seconds = step.learn.times.profile.linear(max(size, num_decodes))
        seconds += self._decode_seconds(step, num_decodes)
        arriving = step.learn.traffic.least_prompt_tokens_per_s(step.now) * seconds
        most = max(size - num_decodes, math.ceil(arriving))
        if urgent:
            # Only the first prompt: others would delay it.
            most = max(most, self._soonest(step, num_decodes, _missing(step, first)))
        most = min(most, backlog, self.options.max_num_batched_tokens - num_decodes)
        most = self._most_in_time(step, num_decodes, prompts, most)
        if most <= 0:
            return 0
        hull = self._envelope(step.learn.times.profile, num_decodes, most)
        is_unknown = not hull[-1][1]  # nothing was measured yet
        if urgent or is_unknown or len(hull) == 1:
            return most
        price, needed = self._price(step, num_decodes, hull, backlog / _HORIZON)
        surplus = [price * tokens - seconds for tokens, seconds in hull]
        best = max(surplus)
        return next(
            tokens
            for (tokens, seconds), worth in zip(hull, surplus, strict=True)
            if worth >= best or (tokens >= needed and worth >= best - _SHORTER * seconds)
        )

    def _soonest(self, step: Step, num_decodes: int, missing: int) -> int:
        """Return the tokens a step that finish a prompt soonest."""
        profile = step.learn.times.profile
        decoding = self._decode_seconds(step, num_decodes) if num_decodes else 0.0

        def seconds(tokens: int) -> float:
            whole, rest = divmod(missing, tokens)
            total = whole * (profile.linear(num_decodes + tokens) + decoding)
            return total + (profile.linear(num_decodes + rest) + decoding if rest else 0.0)

        sizes = (count - num_decodes for count, _ in self._corners_of(profile))
        return min([missing, *(n for n in sizes if 0 < n < missing)], key=seconds)

    def _is_urgent(self, step: Step, first: RequestState, backlog: int) -> bool:
        target = self.options.ttft_p99
        if target is None:
            return False
        ahead = backlog * self._best_step(step)[1]
        return step.now - first.request.arrival_time + ahead > _URGENT_SHARE * target

    def _most_in_time(
        self, step: Step, num_decodes: int, prompts: list[RequestState], most: int
    ) -> int:
        """Return at most `most` prompt tokens, so that running requests' tokens are in time."""
        if not num_decodes or most <= 0:
            return most
        profile, decoding = step.learn.times.profile, self._decode_seconds(step, num_decodes)

        def seconds(tokens: int) -> float:
            linear = profile.linear(num_decodes + tokens) + decoding
            linear += profile.per_prefill_token * tokens
            return linear + profile.per_prefill_context * _context(step, prompts, tokens)

        def in_time(left: float) -> int:
            if left == math.inf:
                return most
            return bisect.bisect_right(range(1, most + 1), left, key=seconds)

        alone = self._decode_only_seconds(step, num_decodes)
        own = time_left_of_own(step, alone)
        least = min(most, round(_LEAST_PROMPT_SHARE * self._best_step(step)[0]))
        return min(in_time(self._targets.time_left(step, alone)), max(least, in_time(own)))

    def _envelope(
        self, profile: StepProfile, num_decodes: int, most: int
    ) -> list[tuple[int, float]]:
        """Return the lower convex envelope of step time over 0 to `most` prompt tokens."""
        # Without decoding requests a step without prompts would be empty.
        points = [(0, profile.linear(num_decodes))] if num_decodes else []
        corners = self._corners_of(profile)
        first = bisect.bisect_right(corners, (num_decodes, math.inf))
        for count, seconds in itertools.islice(corners, first, None):
            if count >= num_decodes + most:
                break
            points.append((count - num_decodes, seconds))
        points.append((most, profile.linear(num_decodes + most)))
        return _lower_hull(points)

    def _price(
        self, step: Step, num_decodes: int, hull: list[tuple[int, float]], overdue: float
    ) -> tuple[float, int]:
        """Return the seconds that a prompt token is worth, and the tokens that keep up.

        They keep up with arrivals and with `overdue` tokens a step. A token is worth its cost in
        the mixture of steps that does, at most its cost in the best step; and never less than its
        share in ending a request."""
        arriving = step.learn.traffic.prompt_tokens_per_s(step.now)
        decoding = self._decode_seconds(step, num_decodes)
        slope, needed = 0.0, 0
        for (tokens, before), (needed, seconds) in itertools.pairwise(hull):
            slope = (seconds - before) / (needed - tokens)
            if needed >= max(arriving * (seconds + decoding), overdue):
                break
        prompt_value, decode_value = self._values(step)
        num_made = num_decodes * step.learn.lengths.per_step
        ends_per_s = max(
            (prompt_value * tokens + decode_value * num_made) / (seconds + decoding)
            for tokens, seconds in hull
        )
        price = max(min(slope, self._best_step(step)[1]), prompt_value / ends_per_s)
        # It is often exactly that of the last tokens worth buying.
        return price * (1 + 1e-6), needed

    def _values(self, step: Step) -> tuple[float, float]:
        """Return the shares of a request's end that a prompt token and a decoded token bring."""
        lengths = step.learn.lengths
        prompt, decode = self._work(step)
        work = step.learn.traffic.mean_prompt_len * prompt + lengths.mean * decode
        return prompt / work, 1 / lengths.mean_residual

    def _work(self, step: Step) -> tuple[float, float]:
        """Return seconds of a prompt token and of a decoded token in the best step."""
        profile, lengths = step.learn.times.profile, step.learn.lengths
        prompt_len = step.learn.traffic.mean_prompt_len
        position = self._best_step(step)[1]
        prompt = position + profile.per_prefill_token
        prompt += profile.per_prefill_context * prompt_len / 2
        decode = position + profile.per_decode
        decode += profile.per_kv_token * self._context_len(step)
        return prompt, decode / lengths.per_step

    def _context_len(self, step: Step) -> float:
        """Return the known tokens of a request in the middle of its output."""
        return step.learn.traffic.mean_prompt_len + step.learn.lengths.mean / 2

    def _decode_seconds(self, step: Step, num_decodes: int) -> float:
        """Return a step's seconds for decoding beside its positions, drafts included."""
        model = step.learn.times
        attention = model.profile.per_kv_token * step.num_decoding_tokens
        fixed = model.profile.decode_fixed + model.drafting if num_decodes else 0.0
        return max(0.0, fixed + model.profile.per_decode * num_decodes + attention + model.shift)

    def _decode_only_seconds(self, step: Step, num_decodes: int) -> float:
        profile = step.learn.times.profile
        return profile.linear(num_decodes) + self._decode_seconds(step, num_decodes)

    def _best_step(self, step: Step) -> tuple[int, float]:
        """Return positions of the smallest nearly best step, and its seconds per position."""
        model = step.learn.times
        constant = model.profile.decode_fixed + max(model.shift, 0.0)
        if self._best[0] is not model.profile or abs(constant - self._best[1]) > 1e-4:
            most = self.options.max_num_batched_tokens
            corners = self._corners_of(model.profile)
            prices = [(count, (s + constant) / count) for count, s in corners if count <= most]
            least = min(price for _, price in prices)
            good = next(p for p in prices if p[1] <= (1 + _TOLERANCE) * least)
            self._best = (model.profile, constant, good)
        return self._best[2]

    def _corners_of(self, profile: StepProfile) -> list[tuple[int, float]]:
        """Return the sizes of a step just before it would take longer, and their seconds."""
        if self._corners is None or self._corners[0] is not profile:
            most = self.options.max_num_batched_tokens
            counts = sorted({n for n in (*profile.token_counts, *_SIZES) if 0 < n < most} | {most})
            seconds = [profile.linear(n) for n in counts]
            corners = [
                (counts[i], seconds[i])
                for i in range(len(counts) - 1)
                if seconds[i + 1] > 1.002 * seconds[i]
            ]
            self._corners = (profile, [*corners, (most, seconds[-1])])
        return self._corners[1]


def _missing(step: Step, state: RequestState) -> int:
    if state.status is Status.RUNNING:
        return state.num_due_tokens
    return step.num_missing_tokens(state)


def _context(step: Step, prompts: Iterable[RequestState], tokens: int) -> float:
    """Return the `prefill_context` (StepWork) of the first `tokens` tokens of prompts."""
    pairs = 0.0
    for state in prompts:
        missing = _missing(step, state)
        chunk = min(missing, tokens)
        pairs += chunk * (state.num_known_tokens - missing + 0.5 * chunk)
        tokens -= chunk
        if not tokens:
            break
    return pairs


def _lower_hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the lower convex envelope of points with rising first coordinates."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2], hull[-1]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


POLICY = FluidGuided
