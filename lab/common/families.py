"""Families of drafters, what of their drafts is accepted, and requests that are always live: the
scenes in which drafters are chosen.

Spin's five: times are a roofline of public figures. A V100 reads 900 GB/s and computes 125 TFLOP/s
in half precision (NVIDIA's data sheet), of which 70% and 40% are taken to be reached, and half a
millisecond is spent on launching a step; parameters are those in the models' names, 6.7 to 32.5
billion of the targets, which have one, two and four of these GPUs. Acceptances are not public. Each
request draws them from a logit-normal distribution: on `hard` text they grow with the drafter, as
the paper finds on Alpaca, on `easy` text hardly, as on CP, `between` stands for CIP.

Four specialists: equally fast, and each accepted more often in a domain of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import PolicyConfig
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import AcceptanceModel, RecordedAcceptance
from penstock.sim.domains import AcceptanceFit, DomainFit
from penstock.sim.drafters import DrafterCapacity
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup
from penstock.sim.workloads import Workload

IntArray = npt.NDArray[np.int64]

# --- requests that are always live ----------------------------------------------------------------


def prompt_lengths(rng: np.random.Generator, num: int) -> IntArray:
    """Log-normal, 60 tokens in the median."""
    return np.exp(rng.normal(math.log(60), 0.8, num)).astype(np.int64).clip(8, 1024)


def closed_loop(prompts: IntArray, outputs: IntArray | int, tenants: Any = None) -> Workload:
    """Everybody is there from the beginning, and so many at a time are let in."""
    num = len(prompts)
    lengths = np.broadcast_to(np.asarray(outputs, dtype=np.int64), num)
    return Workload("closed loop", prompts, lengths.copy(), np.zeros(num), tenants)


def always_live(
    profile: StepProfile,
    acceptance: AcceptanceModel,
    drafters: Sequence[str],
    live: int,
    selection: PolicyConfig,
    *,
    draft_tokens: int | None = None,
    capacity: int | None = None,
    beside: bool = True,
    seed: int = 0,
) -> Setup:
    """A server with so many requests live. draft_tokens: of every draft; None: by `priced`.
    capacity: requests of a drafter. beside: whether drafters work beside the target."""
    fixed = PolicyConfig.from_name("fixed", k=draft_tokens)
    return Setup(
        profile,
        admission=PolicyConfig.from_name("vllm_v1", max_num_seqs=live),
        allocation=PolicyConfig.from_name("priced") if draft_tokens is None else fixed,
        selection=selection,
        block_size=16,
        acceptance=acceptance,
        drafters=tuple(drafters),
        capacities={} if capacity is None else dict.fromkeys(drafters, DrafterCapacity(capacity)),
        pipeline="async" if beside and drafters else "off",
        seed=seed,
    )


class OwnRow(RecordedAcceptance):
    """Recorded acceptance, of which request i replays row i."""

    def _row(self, drafter: str, request_id: str) -> Sequence[int]:
        return self.records[drafter][int(request_id)]


# --- Spin's five ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Billions of parameters, and layers as far as they are public."""

    billions: float
    layers: int


SPIN_DRAFTERS = {
    "68M": ModelSize(0.068, 2),
    "265M": ModelSize(0.265, 8),
    "616M": ModelSize(0.616, 16),
    "1.1B": ModelSize(1.1, 22),
    "1.4B": ModelSize(1.4, 24),
}
SPIN_TARGETS = {"7B": (6.7, 1), "13B": (13.0, 2), "30B": (32.5, 4)}
"""Billions of parameters, and GPUs."""
SPIN_TEXTS = {
    "hard": (-1.1, -0.3, 0.4, 1.0, 1.15),
    "between": (-0.1, 0.5, 0.9, 1.2, 1.3),
    "easy": (0.9, 1.5, 1.6, 1.7, 1.75),
}
"""Mean log-odds of a draft token's acceptance, by drafter."""
AS_PRINTED, WITH_ADDITIONS = "Spin as printed", "Spin with additions"
SPIN = {
    AS_PRINTED: PolicyConfig.from_bundle("selection", "spin"),
    WITH_ADDITIONS: PolicyConfig.from_name("lbss"),
}
"""Selection of the bundle `spin`, and with all `corrections` of `lbss`: named so everywhere."""
_BYTES_PER_S = 0.7 * 900e9
_FLOP_PER_S = 0.4 * 125e12
_LAUNCH_S = 0.5e-3
_TOGETHER, _ALONE = 0.6, 0.6
"""Standard deviations over requests: of all drafters together, and of each by itself."""
_MOST_ROWS = 8


def spin_profile(target: str, drafters: Mapping[str, float] | None = None) -> StepProfile:
    """Roofline times of a target and of all drafters: Spin's, or others' billions by name."""
    parameters, gpus = SPIN_TARGETS[target]
    sizes = drafters or {name: size.billions for name, size in SPIN_DRAFTERS.items()}
    rows = (1, 4096)
    return StepProfile(
        f"llama-{target}-v100",
        kv_tokens=60_000,
        token_counts=rows,
        token_seconds=tuple(_roofline(parameters / gpus, n) for n in rows),
        origin="roofline of NVIDIA's V100 data sheet",
        drafters=tuple(
            DrafterProfile(
                name,
                batch_counts=(1, _MOST_ROWS),
                batch_seconds=tuple(_roofline(billions, n) for n in (1, _MOST_ROWS)),
                per_catch_up_token=_roofline(billions, 2) - _roofline(billions, 1),
            )
            for name, billions in sizes.items()
        ),
    )


def _roofline(billions: float, num_tokens: int) -> float:
    """Of a step over so many tokens, weights and computation one after the other."""
    return _LAUNCH_S + 2e9 * billions * (1 / _BYTES_PER_S + num_tokens / _FLOP_PER_S)


def spin_acceptances(texts: Sequence[str]) -> AcceptanceFit:
    """Of texts that are all equally frequent."""
    covariance = _TOGETHER**2 + _ALONE**2 * np.eye(len(SPIN_DRAFTERS))
    rows = tuple(tuple(float(x) for x in row) for row in covariance)
    fits = {d: DomainFit(mean=SPIN_TEXTS[d], covariance=rows) for d in texts}
    return AcceptanceFit(drafters=tuple(SPIN_DRAFTERS), domains=fits)


# --- the bundled family ---------------------------------------------------------------------------

FAMILY = {
    "draft-tiny": 0.068,
    **dict.fromkeys(("draft-code", "draft-data", "draft-lang"), 0.265),
    "draft-base": 0.616,
}
"""Billions of parameters that its drafters stand for in the grown copies."""

# --- four specialists -----------------------------------------------------------------------------

SPECIALISTS = ("north", "east", "south", "west")
"""And the domains that they are made for."""
_MEAN = 0.6
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def specialists_profile(ratio: float) -> StepProfile:
    """The target is `a100-llama2-7b`; a drafter's step takes `ratio` times what the target's takes
    for as many rows, and so does what it reads."""
    target = load_profile("a100-llama2-7b")
    seconds = tuple(ratio * target.linear(n) for n in _BATCHES)
    reading = ratio * (target.linear(1024) - target.linear(512)) / 512
    drafters = tuple(DrafterProfile(name, _BATCHES, seconds, reading) for name in SPECIALISTS)
    return replace(target, drafters=drafters)


def specialists_acceptances(contrast: float) -> AcceptanceFit:
    """Every drafter's acceptance is `contrast` higher in its own domain than in the others, and 0.6
    in the mean over all of them."""
    num = len(SPECIALISTS)
    own, elsewhere = (
        math.log(p / (1 - p)) for p in (_MEAN + contrast * (num - 1) / num, _MEAN - contrast / num)
    )
    return AcceptanceFit(
        drafters=SPECIALISTS,
        domains={
            d: DomainFit(
                mean=tuple(own if n == d else elsewhere for n in SPECIALISTS),
                covariance=((0.0,) * num,) * num,
            )
            for d in SPECIALISTS
        },
    )
