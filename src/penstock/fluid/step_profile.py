"""Step times of the target and of drafters, by the content of the step."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class StepWork(NamedTuple):
    """Content of one target step.

    num_prefill_tokens: positions of prompts, and of recomputed text.
    prefill_context:    Σ chunk × (context before the chunk + chunk / 2), in token pairs.
    num_decodes:        requests that sample their next token, or verify a draft.
    num_kv_tokens:      Σ context of those requests, in tokens.
    num_draft_tokens:   draft positions beside the decoding ones."""

    num_prefill_tokens: int = 0
    prefill_context: float = 0.0
    num_decodes: int = 0
    num_kv_tokens: int = 0
    num_draft_tokens: int = 0

    @property
    def num_positions(self) -> int:
        """All rows of the step."""
        return self.num_prefill_tokens + self.num_decodes + self.num_draft_tokens


class ServedStep(NamedTuple):
    """A whole step of served requests, drafting inside it left out.

    drafts: its requests might have drafts."""

    work: StepWork
    seconds: float
    drafts: bool = False


# Of pydantic, which reads files of profiles.
_STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True)
class DrafterProfile:
    """Step times of one drafter, in seconds.

    batch_counts, batch_seconds: one drafting step (one token for each request of the batch), both
        non-decreasing; interpolated, and continued with the upper slope beyond the last point.
    per_catch_up_token: for each verified token that it has to read first.
    slowdown: its step beside a working target over its step alone; `target_slowdown`: the target's
        step beside this drafter over its step alone. 1 where each has its own device.
    of_target: a head of the target: in its step, with its KV. It reads only looked-up tokens that
        its draft begins with."""

    __pydantic_config__: ClassVar = _STRICT

    name: str
    batch_counts: tuple[int, ...]
    batch_seconds: tuple[float, ...]
    per_catch_up_token: float = 0.0
    slowdown: float = 1.0
    target_slowdown: float = 1.0
    of_target: bool = False

    def __post_init__(self) -> None:
        _check_table(f"drafter {self.name!r}", self.batch_counts, self.batch_seconds)
        if any(b < a for a, b in itertools.pairwise(self.batch_seconds)):
            raise ValueError(f"drafter {self.name!r}: a larger step cannot be faster")
        if self.per_catch_up_token < 0 or min(self.slowdown, self.target_slowdown) <= 0:
            raise ValueError(f"drafter {self.name!r}: times and slowdowns cannot be negative")

    def slower(self, factor: float) -> DrafterProfile:
        """Return the profile with a factor on all times."""
        return replace(
            self,
            batch_seconds=tuple(factor * s for s in self.batch_seconds),
            per_catch_up_token=factor * self.per_catch_up_token,
        )

    def seconds(self, batch: int, num_steps: int, num_catch_up_tokens: int = 0) -> float:
        """Return the seconds of catching up and `num_steps` drafting steps for `batch` requests."""
        step = _interpolate(self.batch_counts, self.batch_seconds, batch)
        return num_steps * step + self.per_catch_up_token * num_catch_up_tokens


@dataclass(frozen=True)
class StepProfile:
    """Step times of one target, in seconds.

    token_counts, token_seconds: time without attention by positions, interpolated, and continued
        with the slope of the upper half. A larger step may be faster where a better kernel begins.
    granularity: positions are rounded up to a multiple of it first.
    decode_fixed: added once if any request decodes.
    per_prefill_token: negative where prompts are read faster, as without logits.
    pace, host_fixed, host_per_decode, host_per_drafting: of served steps (`served`): factor on all
        models' times, and the host's seconds in a step, for each request that decodes in it, and
        as much more if it may have drafts.
    spread: relative standard deviation of all times from one minute to another.
    kv_tokens: KV memory of the measured machine.
    drafters: models measured with it.
    state_slots: requests at once whose recurrent states have room; None: the model has none."""

    __pydantic_config__: ClassVar = _STRICT

    name: str
    kv_tokens: int
    token_counts: tuple[int, ...]
    token_seconds: tuple[float, ...]
    granularity: int = 1
    decode_fixed: float = 0.0
    per_decode: float = 0.0
    per_kv_token: float = 0.0
    per_prefill_token: float = 0.0
    per_prefill_context: float = 0.0
    pace: float = 1.0
    host_fixed: float = 0.0
    host_per_decode: float = 0.0
    host_per_drafting: float = 0.0
    spread: float = 0.0
    origin: str = ""
    drafters: tuple[DrafterProfile, ...] = ()
    state_slots: int | None = None

    def __post_init__(self) -> None:
        _check_table(f"profile {self.name!r}", self.token_counts, self.token_seconds)
        coefficients = (
            self.decode_fixed,
            self.per_decode,
            self.per_kv_token,
            self.least_added + self.per_prefill_token,
            self.per_prefill_context,
            self.host_fixed,
            self.host_per_decode,
            self.host_per_drafting,
            self.spread,
        )
        if self.pace <= 0:
            raise ValueError(f"profile {self.name!r}: a pace is over 0, not {self.pace:g}")
        if min(coefficients) < 0 or self.kv_tokens < 1 or self.granularity < 1:
            what = "no coefficient may be negative, and no prompt's token save all that it costs"
            raise ValueError(f"profile {self.name!r}: {what}")
        if self.state_slots is not None and self.state_slots < 1:
            raise ValueError(f"profile {self.name!r}: a state needs a slot, not {self.state_slots}")

    def served(self, factor: float = 1.0, *, drafts: bool = False) -> StepProfile:
        """Return the profile of whole served steps, the host's part included.

        factor: on all times, as on a slower or faster machine. drafts: requests may have some."""
        pace = factor * self.pace
        host = factor * self.host_fixed
        each = factor * (self.host_per_decode + drafts * self.host_per_drafting)
        return replace(
            self,
            token_seconds=tuple(pace * s + host for s in self.token_seconds),
            decode_fixed=pace * self.decode_fixed,
            per_decode=pace * self.per_decode + each,
            per_kv_token=pace * self.per_kv_token,
            per_prefill_token=pace * self.per_prefill_token,
            per_prefill_context=pace * self.per_prefill_context,
            pace=1.0,
            host_fixed=0.0,
            host_per_decode=0.0,
            host_per_drafting=0.0,
            drafters=tuple(d.slower(pace) for d in self.drafters),
        )

    @property
    def most_requests(self) -> float:
        """Requests at once that there is room for beside KV memory."""
        return math.inf if self.state_slots is None else self.state_slots

    def linear(self, num_tokens: int) -> float:
        """Return the seconds of everything but attention over `num_tokens` positions."""
        known = self._cache.get(num_tokens)
        if known is None:
            rounded = -(-num_tokens // self.granularity) * self.granularity
            known = _interpolate(self.token_counts, self.token_seconds, rounded)
            self._cache[num_tokens] = known
        return known

    def linear_at(self, sizes: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
        """Return the same for several sizes."""
        counts, seconds, slope = self._table
        rounded = np.ceil(sizes / self.granularity) * self.granularity
        within = np.interp(rounded, counts, seconds)
        return np.asarray(within + slope * np.maximum(rounded - counts[-1], 0.0))

    @cached_property
    def _table(self) -> tuple[FloatArray, FloatArray, float]:
        """Return positions, their seconds, and the slope beyond."""
        slope = _tail_slope(self.token_counts, self.token_seconds)
        return np.array(self.token_counts, dtype=np.float64), np.array(self.token_seconds), slope

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a whole step; 0 for an empty one."""
        prefill, context, decodes, kv_tokens, drafts = work
        tokens = prefill + decodes + drafts
        if not tokens:
            return 0.0
        total = self.linear(tokens)
        if decodes:
            total += self.decode_fixed + self.per_decode * decodes
            total += self.per_kv_token * kv_tokens
        if prefill:
            total += self.per_prefill_token * prefill
            total += self.per_prefill_context * context
        return total

    def decoding(self, num_decodes: int) -> tuple[float, float]:
        """Return the seconds of a step of `num_decodes` ≥ 1, and those per context token."""
        attention = self.decode_fixed + self.per_decode * num_decodes
        return self.linear(num_decodes) + attention, self.per_kv_token

    @cached_property
    def per_position(self) -> float:
        """Seconds per position in the most efficient step of the table, without attention."""
        pairs = zip(self.token_counts, self.token_seconds, strict=True)
        return min((seconds / count for count, seconds in pairs if count), default=0.0)

    @cached_property
    def least_added(self) -> float:
        """Least seconds that a position of a step adds to it, in the mean or beyond the table."""
        return min(self.per_position, _tail_slope(self.token_counts, self.token_seconds))

    def request_seconds(self, prompt_len: float, output_len: float) -> float:
        """Return the seconds that a request adds to steps of the highest efficiency."""
        prompt = prompt_len * (self.per_position + self.per_prefill_token)
        prompt += self.per_prefill_context * prompt_len * prompt_len / 2
        context = prompt_len + output_len / 2
        token = self.per_position + self.per_decode + self.per_kv_token * context
        return prompt + output_len * token

    @cached_property
    def _cache(self) -> dict[int, float]:
        return {}


def _check_table(what: str, counts: Sequence[int], seconds: Sequence[float]) -> None:
    if not counts or len(counts) != len(seconds):
        raise ValueError(f"{what}: a table needs as many times as token counts")
    if any(b <= a for a, b in itertools.pairwise(counts)) or counts[0] < 0:
        raise ValueError(f"{what}: token counts must rise from 0 or more")
    if min(seconds) < 0:
        raise ValueError(f"{what}: no step can take less than no time")
    if _tail_slope(counts, seconds) < 0:
        raise ValueError(f"{what}: beyond the table a larger step cannot be faster")


def _interpolate(counts: Sequence[int], seconds: Sequence[float], size: int) -> float:
    i = bisect.bisect_left(counts, size)
    if i == 0 or len(counts) == 1:
        return seconds[0]
    if i < len(counts):
        share = (size - counts[i - 1]) / (counts[i] - counts[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])
    return seconds[-1] + _tail_slope(counts, seconds) * (size - counts[-1])


def _tail_slope(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds per position of the table's upper half; 0 for a single point."""
    if len(counts) == 1:
        return 0.0
    middle = len(counts) // 2 if len(counts) > 2 else 0
    return (seconds[-1] - seconds[middle]) / (counts[-1] - counts[middle])


PAPER_LINEAR = StepProfile(
    name="paper-linear",
    kv_tokens=111_580,
    token_counts=(0,),
    token_seconds=(9.35e-3,),
    per_kv_token=4.10e-7,
    per_prefill_token=4.10e-7,
    origin="eq. 1 of the WAIT paper with d0 and d1 fitted to Llama-2-7B decode batches on an A100",
)

UNKNOWN = StepProfile("unknown", 1, (0,), (0.0,), origin="before anything was measured")
