"""The fluid equilibrium (WAIT, eqs. 3–5), for any step-time profile."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from penstock.fluid.stages import attention_seconds, held_tokens, stages_of
from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import Traffic


@dataclass(frozen=True)
class Equilibrium:
    """Steady state of the fluid.

    iteration_s: seconds of an iteration, d0 + d1 M* for the paper's profile.
    per_stage:   n_j* / (l'_j + 1), with n_j* of eq. 4: prompts of each type at each stage.
    kv_tokens:   M* of eq. 5."""

    iteration_s: float
    per_stage: tuple[float, ...]
    kv_tokens: float


def equilibrium(profile: StepProfile, traffic: Traffic) -> Equilibrium:
    """Return the equilibrium with the shortest iteration.

    Raises ValueError where the load exceeds what the profile can serve with any memory."""
    rated = [(t.rate, stages_of(t).work()) for t in traffic]
    seconds = least_iteration_seconds(
        profile,
        token_rate=sum(rate * work.num_positions for rate, work in rated),
        attention=sum(rate * attention_seconds(profile, work) for rate, work in rated),
        decodes=any(work.num_decodes for _, work in rated),
    )
    return Equilibrium(
        iteration_s=seconds,
        per_stage=tuple(t.rate * seconds for t in traffic),
        kv_tokens=seconds * sum(rate * held_tokens(work) for rate, work in rated),
    )


def least_iteration_seconds(
    profile: StepProfile, token_rate: float, attention: float, decodes: bool
) -> float:
    """Return the least τ with τ = linear(token_rate · τ) + fixed + attention · τ.

    token_rate: positions that arrive per second; attention: seconds of attention per second. The
    linear part is constant on every granule, so each granule has one candidate. The first whose
    positions fit into its granule is the least solution; a staircase may have several. Raises
    ValueError where there is none."""
    if attention >= 1:
        raise ValueError(f"unstable: attention alone takes {attention:.3g} s for each second")
    fixed = profile.decode_fixed if decodes else 0.0
    step = profile.granularity
    end = step * max(1, math.ceil(profile.token_counts[-1] / step))

    def seconds_of(granules: int) -> float:
        return (profile.linear(granules * step) + fixed) / (1 - attention)

    def keeps_up(granules: int) -> bool:
        return token_rate * seconds_of(granules) <= granules * step

    first = 1
    # Between two sizes of the table seconds rise in equal steps, so the spare room rises or falls.
    for last in [*(count // step for count in profile.token_counts), end // step]:
        if last >= first:
            found = first
            if not keeps_up(first):
                found += bisect.bisect_left(range(first, last), True, key=keeps_up)
            if keeps_up(found):
                return seconds_of(found)
            first = last + 1
    # Beyond the table the profile is one straight line.
    far = 1000 * step
    at_end = profile.linear(end)
    slope = (profile.linear(end + far) - at_end) / far
    spare = 1 - attention - slope * token_rate
    if spare <= 0:
        raise ValueError(
            f"unstable: a second's arrivals take at least {1 - spare:.3g} s of step time; "
            "lower the rates"
        )
    return (at_end - slope * end + fixed) / spare
