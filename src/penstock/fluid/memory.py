"""How much KV memory random arrivals take in the fluid."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

HORIZON_S = 3600.0
"""Seconds for which a bound holds."""
DELTA = 1e-3
"""Probability with which it does not, by default."""

FloatArray = npt.NDArray[np.float64]


def poisson_kv_bound(
    kv: FloatArray, means: FloatArray, step_s: float, delta: float = DELTA
) -> float:
    """KV tokens that are exceeded within the horizon with probability `delta` at most, where
    requests arrive by Poisson processes and take one stage a step.

    The number at each stage is then Poisson, and Chernoff's bound, over all S steps, is the least
    of (Σ mean (exp(θ kv) − 1) + ln(S / δ)) / θ.

    kv, means: [stages] tokens that a request at the stage holds, and how many are at it in the
    mean. step_s: seconds of a step.
    """
    # A third of a second of imports, which no server should wait for at its start.
    from scipy.optimize import minimize_scalar

    odds = math.log(max(1.0, HORIZON_S / step_s) / delta)
    scale = float(kv.max())

    def bound(log_theta: float) -> float:
        theta = math.exp(log_theta) / scale
        return float((means @ np.expm1(theta * kv) + odds) / theta)

    return float(minimize_scalar(bound, bounds=(-12.0, 5.0), method="bounded").fun)
