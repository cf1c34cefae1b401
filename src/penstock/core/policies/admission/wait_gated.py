"""WAIT that serves: thresholds gate only the prefill, decoding never waits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.policies.admission.papers.wait import check_thresholds, type_of
from penstock.core.policies.options import NonNegativeFloat, PositiveFloat, PositiveInt
from penstock.core.queues import OrderName
from penstock.core.state import RequestState
from penstock.core.step import Step


class WaitGated(AdmissionPolicy):
    """Prompts of a type are admitted in waves of its threshold, at most one wave an iteration.

    A threshold may be a fraction: then a wave of one comes every so many iterations. A wave does
    not wait for more when its oldest prompt has waited for `max_wait`, nor when nothing else is
    ready to run. A request is admitted only where memory holds all that the running ones and it are
    expected to grow to, so that right expectations never cause a preemption.
    """

    name: ClassVar[str] = "wait_gated"

    @dataclass(frozen=True, slots=True)
    class Options:
        """output_lens: the types' output lengths l'_j, rising.
        thresholds: n_j for each of them, prompts an iteration.
        max_wait: seconds after which a prompt is admitted without its wave.
        max_num_batched_tokens: positions a step.
        order: in which order waiting requests are tried."""

        output_lens: tuple[PositiveInt, ...] = (64, 256, 1024)
        thresholds: tuple[PositiveFloat, ...] = (1.0, 1.0, 1.0)
        max_wait: NonNegativeFloat = 0.5
        max_num_batched_tokens: PositiveInt = 2048
        order: OrderName = "arrival"

        def __post_init__(self) -> None:
            check_thresholds(self.output_lens, self.thresholds)

    def __init__(self, options: Options) -> None:
        self.options = options
        self.order = options.order
        self._credit = [0.0] * len(options.thresholds)

    def queue_of(self, state: RequestState) -> Hashable:
        return type_of(state, self.options.output_lens)

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.max_num_batched_tokens - num_tokens

    def compose(self, step: Step) -> None:
        budget = max(self.options.max_num_batched_tokens, step.num_decodes())
        budget -= step.schedule_decodes(budget)
        budget -= step.schedule_prefills(budget)
        if step.num_preempted:
            return
        for type_, threshold in enumerate(self.options.thresholds):
            # Credit for one wave at most: unused waves are not made up for later at once.
            self._credit[type_] = min(self._credit[type_] + threshold, max(threshold, 1.0))
            budget -= self._admit_wave(step, type_, threshold, budget)
        if not step.num_tokens:
            # Nothing else is ready to run: waiting for a full wave would only waste the time.
            for type_ in range(len(self.options.thresholds)):
                budget -= self._admit(step, type_, len(step.waiting), budget)

    def _admit_wave(self, step: Step, type_: int, threshold: float, budget: int) -> int:
        queue = step.waiting.queue(type_)
        if queue.oldest is None:
            return 0
        due = queue.oldest.request.arrival_time + self.options.max_wait
        if len(queue) < threshold and step.now < due:
            step.wake_at = due if step.wake_at is None else min(due, step.wake_at)
            return 0
        before = len(queue)
        tokens = self._admit(step, type_, int(self._credit[type_]), budget)
        self._credit[type_] -= before - len(queue)
        return tokens

    def _admit(self, step: Step, type_: int, num: int, budget: int) -> int:
        """Admit up to `num` prompts of a type; returns their tokens in this step."""
        before = step.num_tokens
        queue = step.waiting.queue(type_)
        while num > 0 and budget > 0:
            state = queue.first
            if state is None:
                break
            if step.running and step.num_free_when_grown(_expected) < _grown(step, state):
                break
            tokens = min(step.num_missing_tokens(state), budget)
            if not step.can_admit(state, tokens):
                break
            step.admit(state, tokens)
            num -= 1
            budget -= tokens
        return step.num_tokens - before


def _expected(state: RequestState) -> int:
    """Tokens that the request is expected to hold in the end."""
    expected = state.request.expected_output_tokens or state.request.max_tokens
    return state.request.prompt_len + max(expected, state.num_output_tokens)


def _grown(step: Step, state: RequestState) -> int:
    return step.pool.blocks_for(_expected(state))


POLICY = WaitGated
