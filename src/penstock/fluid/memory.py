"""Bound on the KV memory of random arrivals in the fluid."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

HORIZON_S = 3600.0
"""Seconds for which a bound holds, an hour."""
DELTA = 1e-3
"""Default probability with which it is exceeded, one in a thousand."""

FloatArray = npt.NDArray[np.float64]


def poisson_kv_bound(
    kv: FloatArray, means: FloatArray, step_s: float, delta: float = DELTA
) -> float:
    """Return KV tokens that are exceeded within the horizon with probability `delta` at most.

    Requests arrive by Poisson processes and take one stage per step, so the number at each stage is
    Poisson. Chernoff's bound over all S steps is the least of (Σ mean (exp(θ kv) − 1) + ln(S / δ))
    / θ.

    kv, means: [stages], tokens a request at the stage holds, and mean requests there. step_s:
    seconds of a step."""
    # Imported here, as it takes a third of a second.
    from scipy.optimize import minimize_scalar

    odds = math.log(max(1.0, HORIZON_S / step_s) / delta)
    scale = float(kv.max())

    def bound(log_theta: float) -> float:
        theta = math.exp(log_theta) / scale
        return float((means @ np.expm1(theta * kv) + odds) / theta)

    return float(minimize_scalar(bound, bounds=(-12.0, 5.0), method="bounded").fun)
