"""WAIT (Algorithm 1): a type of request is processed only while enough of it wait."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.parts.gate import Gate, schedule_running
from penstock.core.policies.base import AdmissionPolicy
from penstock.core.policies.declared import LimitOptions, ThresholdOptions
from penstock.core.policies.options import PositiveFloat, PositiveInt
from penstock.core.state import RequestState
from penstock.core.step import Step


class Wait(AdmissionPolicy):
    """Batches every type j that has at least n_j prompts at stage 0.

    n_j prompts and, at every later stage, all requests of the type (never more than n_j) join the
    batch. Nothing is preempted. A type is an expected output length, rounded up to the next of
    `output_lens`; stages are output tokens.

    Gated, thresholds hold back prompts only: at most one wave of each type an iteration, for at
    most half a second, and none while nothing else is ready to run."""

    name: ClassVar[str] = "wait"
    limits = LimitOptions(token_budget="max_num_batched_tokens")
    thresholds = ThresholdOptions("type", "output_lens", "thresholds", "gated")

    @dataclass(frozen=True, slots=True)
    class Options:
        output_lens: tuple[PositiveInt, ...] = (64, 256, 1024)  # l'_j of the types, rising
        thresholds: tuple[PositiveInt | PositiveFloat, ...] = (1, 1, 1)  # n_j of each type
        gated: bool = False  # decoding never waits; allows fractional thresholds
        max_num_batched_tokens: PositiveInt = 2048  # positions a step, gated

        def __post_init__(self) -> None:
            check_thresholds(self.output_lens, self.thresholds, self.gated)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.may_idle = not options.gated
        # The papers have no drafts.
        self.token_budget = options.max_num_batched_tokens if options.gated else 0
        self._gates = [Gate(n, _expected) for n in options.thresholds]

    def queue_of(self, state: RequestState) -> Hashable:
        return type_of(state, self.options.output_lens)

    def compose(self, step: Step) -> None:
        if self.options.gated:
            self._compose_gated(step)
        else:
            self._compose_literally(step)

    def _compose_gated(self, step: Step) -> None:
        budget = schedule_running(step, self.options.max_num_batched_tokens)
        if step.num_preempted:
            return
        for type_, gate in enumerate(self._gates):
            queue = step.waiting.queue(type_)
            gate.earn()
            if not gate.waits(step, queue):
                before = len(queue)
                budget -= gate.admit(step, queue, int(gate.credit), budget)
                gate.credit -= before - len(queue)
        if not step.num_tokens:
            for type_, gate in enumerate(self._gates):
                queue = step.waiting.queue(type_)
                budget -= gate.admit(step, queue, len(queue), budget)

    def _compose_literally(self, step: Step) -> None:
        blocked = False
        for type_, threshold in enumerate(self.options.thresholds):
            queue = step.waiting.queue(type_)
            if len(queue) < threshold:
                continue
            if not step.can_schedule_decodes(type_):
                blocked = True
                continue
            step.schedule_decodes(step.num_decodes(type_), type_)
            for state in list(itertools.islice(queue, int(threshold))):
                missing = step.num_missing_tokens(state)
                if not step.can_admit(state, missing):
                    blocked = True
                    break
                step.assign(state, type_)
                step.admit(state, missing)
        if not step.num_tokens and (step.running or step.waiting):
            step.stalled = (
                f"deadlock: {len(step.running)} running requests fill the memory, no type can go on"
                if blocked
                else f"{len(step.waiting)} prompts wait and {len(step.running)} requests run, "
                "of no type enough to go on"
            )


def check_thresholds(
    output_lens: tuple[int, ...], thresholds: tuple[float, ...], gated: bool
) -> None:
    """Raise ValueError unless lengths rise, counts agree, and thresholds fit `gated`."""
    if not output_lens or any(a >= b for a, b in itertools.pairwise(output_lens)):
        raise ValueError(f"the lengths must rise, not {output_lens}")
    if len(thresholds) != len(output_lens):
        raise ValueError(
            f"thresholds must be {len(output_lens)} numbers, one for each length, not {thresholds}"
        )
    if not gated and any(n != int(n) for n in thresholds):
        raise ValueError(f"thresholds must be whole numbers unless gated, not {thresholds}")


def type_of(state: RequestState, output_lens: tuple[int, ...]) -> int:
    """Return the index of the first length that covers the request's expected output."""
    expected = state.request.expected_output_tokens or state.request.max_tokens
    return min(bisect.bisect_left(output_lens, expected), len(output_lens) - 1)


def _expected(state: RequestState) -> int:
    """Return the tokens that the request is expected to hold in the end."""
    expected = state.request.expected_output_tokens or state.request.max_tokens
    return state.request.prompt_len + max(expected, state.num_output_tokens)


POLICY = Wait
