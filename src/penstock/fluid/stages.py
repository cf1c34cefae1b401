"""Cost of one prompt at every stage, the building block of all thresholds.

A request takes steps 0 (its prefill), 1, 2, …; at decode step k ≥ 1 it holds prompt + k tokens. In
the paper a stage is one step. Whole thresholds are then coarse: one prompt at each of 500 stages
fills an A100. A *wave* of r makes a stage of r steps: the algorithm decides every r steps, n
prompts start together, and n / r per step is any fraction. An iteration is then r steps, at phases
0 to r − 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.fluid.traffic import TrafficType


@dataclass(frozen=True)
class StageRange:
    """Stages of steps `first` to `last` (inclusive), with equally many prompts at each.

    A stage is `wave` steps. The first begins at `first`, the last may be cut short."""

    prompt_len: int
    first: int
    last: int
    wave: int = 1

    @property
    def num_stages(self) -> int:
        return -(-(self.last - self.first + 1) // self.wave)

    def work(self, count: int = 1, phase: int = 0) -> StepWork:
        """Return the step at `phase` with `count` prompts at each stage, prefilled whole."""
        unit = self._units[phase]
        return StepWork(
            num_prefill_tokens=count * unit.num_prefill_tokens,
            prefill_context=count * unit.prefill_context,
            num_decodes=count * unit.num_decodes,
            num_kv_tokens=count * unit.num_kv_tokens,
        )

    def kv_tokens(self) -> int:
        """Return the KV tokens of one prompt at each of these stages, at the fullest phase."""
        return max(map(held_tokens, self._units))

    @cached_property
    def _units(self) -> tuple[StepWork, ...]:
        return tuple(self._unit(phase) for phase in range(self.wave))

    def _unit(self, phase: int) -> StepWork:
        step = self.first + phase
        prefill = self.prompt_len if step == 0 else 0
        start = step if step > 0 else self.wave
        decodes = max((self.last - start) // self.wave + 1, 0)
        # The contexts of decode steps start, start + wave, … are an arithmetic series.
        contexts = decodes * (2 * (self.prompt_len + start) + (decodes - 1) * self.wave) // 2
        return StepWork(
            num_prefill_tokens=prefill,
            prefill_context=prefill**2 / 2,
            num_decodes=decodes,
            num_kv_tokens=contexts,
        )


def held_tokens(work: StepWork) -> int:
    """Return the KV tokens that the requests of a step hold."""
    return work.num_prefill_tokens + work.num_kv_tokens


def stages_of(kind: TrafficType, wave: int = 1) -> StageRange:
    """Return all stages of a type, prefill included: l'_j + 1 of them in the paper."""
    return StageRange(kind.prompt_len, 0, kind.decode_len, wave)


def total_work(ranges: Sequence[StageRange], counts: Sequence[int], phase: int = 0) -> StepWork:
    """Return the step at `phase` with counts[i] prompts at every stage of ranges[i]."""
    works = [r.work(n, phase) for n, r in zip(counts, ranges, strict=True)]
    return StepWork(*(sum(parts) for parts in zip(*works, strict=True)))


def peak_kv_tokens(ranges: Sequence[StageRange], counts: Sequence[int]) -> int:
    """Return M^π, the KV tokens over all stages.

    Each range counts at its own fullest phase, as it may pause there while another runs."""
    return sum(n * r.kv_tokens() for n, r in zip(counts, ranges, strict=True))


def refuse_beyond(
    profile: StepProfile, ranges: Sequence[StageRange], counts: Sequence[float]
) -> None:
    """Raise ValueError where more requests are at the stages than states have room."""
    needed = sum(n * r.num_stages for n, r in zip(counts, ranges, strict=True))
    if needed > profile.most_requests:
        raise ValueError(
            f"no thresholds fit: they hold at least {needed:.0f} requests, there is room for "
            f"{profile.state_slots} recurrent states; lower the rates or shorten the outputs"
        )


def iteration_seconds(
    profile: StepProfile, ranges: Sequence[StageRange], counts: Sequence[int]
) -> float:
    """Return ΔT(n_1, …), the left side of eq. 7: all phases of an iteration."""
    return sum(profile.seconds(total_work(ranges, counts, q)) for q in range(ranges[0].wave))


def attention_seconds(profile: StepProfile, work: StepWork) -> float:
    """Return the part of a step's time that is proportional to the number of copies of its work."""
    fixed = profile.decode_fixed if work.num_decodes else 0.0
    return profile.seconds(work) - profile.linear(work.num_positions) - fixed
