"""Spin, figure 11: goodput of drafter selection by LBSS, by prompt length and by ε-greedy.

Eight requests are always live, drafts have four tokens, and every drafter has a GPU of its own
beside the target. The paper's batch has a barrier; here a request that is drafted is verified as
soon as the target is free, for all policies alike.

Times are a roofline of public figures: a V100 reads 900 GB/s and computes 125 TFLOP/s in half
precision (NVIDIA's data sheet), of which 70% and 40% are taken to be reached, and half a
millisecond is spent on launching a step; parameters are those in the models' names, 6.7 to 32.5
billion of the targets, which have one, two and four of these GPUs. Acceptances are not public. Each
request draws them from a logit-normal distribution: on `hard` text they grow with the drafter, as
the paper finds on Alpaca, on `easy` text hardly, as on CP, `between` stands for CIP, and `mix` is
all three. Prompt lengths say nothing of difficulty.

A policy is compared with a rival run by run. The control sets the rival against itself, in the runs
of other seeds: what that passes would be luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.repro import Entry, Finding, Run, Verdict, check
from penstock.repro.output import pyplot, save_figure, write_table
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.domains import AcceptanceFit, DomainFit
from penstock.sim.drafters import Capacity
from penstock.sim.run import Setup
from penstock.sim.run import run as simulate
from penstock.sim.workloads import Workload

NAME = "spin_fig11"

_DRAFTERS = {"68M": 0.068, "265M": 0.265, "616M": 0.616, "1.1B": 1.1, "1.4B": 1.4}
_TARGETS = {"7B": (6.7, 1), "13B": (13.0, 2), "30B": (32.5, 4)}
"""Billions of parameters, and GPUs."""
_BYTES_PER_S = 0.7 * 900e9
_FLOP_PER_S = 0.4 * 125e12
_LAUNCH_S = 0.5e-3

_LOGITS = {
    "hard": (-1.1, -0.3, 0.4, 1.0, 1.15),
    "between": (-0.1, 0.5, 0.9, 1.2, 1.3),
    "easy": (0.9, 1.5, 1.6, 1.7, 1.75),
}
"""Mean log-odds of a draft token's acceptance, by drafter."""
_TOGETHER, _ALONE = 0.6, 0.6
"""Standard deviations over requests: of all drafters together, and of each by itself."""
_DATASETS = {**{name: (name,) for name in _LOGITS}, "mix": tuple(_LOGITS)}

_LIVE = 8
_DRAFT_TOKENS = 4
_POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LBSS": ("lbss", {}),
    "greedy": ("greedy", {}),
    "ε-greedy, printed": ("epsilon_greedy", {"explore": 0.8}),
    "ε-greedy, meant": ("epsilon_greedy", {"explore": 0.2}),
    "UCB": ("ucb", {}),
    "replay": ("replay", {}),
    "adaptive": ("adaptive", {"k_max": 4}),
    **{f"Vanilla {name}": ("single", {"drafter": name}) for name in _DRAFTERS},
}
_VANILLA = tuple(name for name in _POLICIES if name.startswith("Vanilla"))
_SEEDS = 5
_SECONDS = 10.0
_LEAST_SECONDS = 0.8
"""Less, and a prompt's first token may not be there."""
_MOST_PER_S = 20.0
"""Requests; none of these machines serves so many."""

FloatArray = npt.NDArray[np.float64]
Goodput = dict[tuple[str, str, str], FloatArray]
"""Tokens per second by target, data set and policy: [seeds]."""


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of a ratio over seeds, with its interval of 95%."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, numerator: FloatArray, denominator: FloatArray) -> Ratio:
        logs = np.log(numerator / denominator)
        error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
        half = float(stats.t.ppf(0.975, len(logs) - 1)) * error
        mean = float(logs.mean())
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    def __str__(self) -> str:
        return f"{self.mean:.2f}× ({self.low:.2f} to {self.high:.2f})"


def run(job: Run) -> list[Verdict]:
    seconds = min(_SECONDS, max(_LEAST_SECONDS, job.effort.curve_arrivals / 1000))
    found: Goodput = {}
    for target in _TARGETS:
        for dataset in _DATASETS:
            job.tell(f"{NAME}: LLaMA-{target}, {dataset}")
            for policy in _POLICIES:
                rates = [goodput(target, dataset, policy, seconds, s) for s in range(_SEEDS)]
                found[target, dataset, policy] = np.array(rates)
    write_table(
        job.out / f"{NAME}.csv",
        ("target", "dataset", "policy", "seed", "tokens_per_s"),
        (
            (*key, seed, float(rate))
            for key, rates in found.items()
            for seed, rate in enumerate(rates)
        ),
    )
    _draw(job, found)
    return verdicts(found)


def goodput(target: str, dataset: str, policy: str, seconds: float, seed: int) -> float:
    """Tokens per second of a run that is so long. Raises: PolicyError."""
    selection, options = _POLICIES[policy]
    report = simulate(
        Setup(
            profile(target),
            admission_options={"max_num_seqs": _LIVE},
            allocation="fixed",
            allocation_options={"k": _DRAFT_TOKENS},
            selection=selection,
            selection_options=options | ({} if selection in _UNSEEDED else {"seed": seed}),
            block_size=16,
            acceptance=DomainAcceptance(acceptances(_DATASETS[dataset]), seed),
            drafters=tuple(_DRAFTERS),
            capacities=dict.fromkeys(_DRAFTERS, Capacity(_LIVE)),
            pipeline="async",
            seed=seed,
        ),
        workload(math.ceil(_MOST_PER_S * seconds), seed),
        until=seconds,
    )
    return float(report.figures()["throughput_tokens_per_s"])


_UNSEEDED = ("single", "greedy", "ucb", "replay")


def profile(target: str) -> StepProfile:
    """Roofline times of a target and of all drafters."""
    parameters, gpus = _TARGETS[target]
    rows = (1, 4096)
    return StepProfile(
        f"llama-{target}-v100",
        kv_tokens=60_000,
        token_counts=rows,
        token_seconds=tuple(_seconds(parameters / gpus, n) for n in rows),
        origin="roofline of NVIDIA's V100 data sheet",
        drafters=tuple(
            DrafterProfile(
                name,
                batch_counts=(1, _LIVE),
                batch_seconds=tuple(_seconds(size, n) for n in (1, _LIVE)),
                per_catch_up_token=_seconds(size, 2) - _seconds(size, 1),
            )
            for name, size in _DRAFTERS.items()
        ),
    )


def _seconds(billions: float, num_tokens: int) -> float:
    """Of a step over so many tokens, weights and computation one after the other."""
    return _LAUNCH_S + 2e9 * billions * (1 / _BYTES_PER_S + num_tokens / _FLOP_PER_S)


def acceptances(domains: Sequence[str]) -> AcceptanceFit:
    """Of a data set's domains, all equally often."""
    covariance = _TOGETHER**2 + _ALONE**2 * np.eye(len(_DRAFTERS))
    rows = tuple(tuple(float(x) for x in row) for row in covariance)
    fits = {d: DomainFit(mean=_LOGITS[d], covariance=rows) for d in domains}
    return AcceptanceFit(drafters=tuple(_DRAFTERS), domains=fits)


def workload(num_requests: int, seed: int) -> Workload:
    """Everybody is there from the beginning, and eight at a time are let in; more than are ever
    served, so that there are always eight."""
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.normal(math.log(60), 0.8, num_requests)).astype(np.int64)
    outputs = np.exp(rng.normal(math.log(128), 0.5, num_requests)).astype(np.int64)
    return Workload(
        "closed loop", prompts.clip(8, 1024), outputs.clip(16, 512), np.zeros(num_requests)
    )


def verdicts(found: Goodput) -> list[Verdict]:
    """The claims of section VI-B2, and what a reader would ask next."""
    cells = [(t, d) for t in _TARGETS for d in _DATASETS]
    lbss = [found[*c, "LBSS"] for c in cells]
    claims = [
        _against(claim, lbss, [found[*c, rival] for c in cells])
        for claim, rival in (
            ("LBSS beats greedy for every data set and target", "greedy"),
            ("LBSS beats ε-greedy (explores 0.8)", "ε-greedy, printed"),
            ("LBSS beats ε-greedy (explores 0.2)", "ε-greedy, meant"),
        )
    ]
    gains = {
        target: Ratio.of(
            found[target, "easy", "LBSS"],
            np.maximum(found[target, "easy", "greedy"], found[target, "easy", "ε-greedy, printed"]),
        )
        for target in ("7B", "30B")
    }
    claims.append(
        check(
            "selection gains more with a larger target (1.45× to 1.79× over both, easy text)",
            larger_gain,
            (gains["7B"], gains["30B"]),
            "7B in both places",
            (gains["7B"], gains["7B"]),
        )
    )
    best = [max((found[*c, v] for v in _VANILLA), key=lambda r: r.mean()) for c in cells]
    for policy in ("LBSS", "UCB", "replay", "adaptive"):
        claim = f"choice pays: {policy} against the best single drafter of each cell"
        claims.append(_against(claim, [found[*c, policy] for c in cells], best))
    return claims


def _against(claim: str, ours: Sequence[FloatArray], rivals: Sequence[FloatArray]) -> Verdict:
    """By cell, [seeds] each."""
    return check(
        claim,
        ahead,
        list(zip(ours, rivals, strict=True)),
        "the rival against itself, with other seeds",
        [(np.roll(rival, 1), rival) for rival in rivals],
    )


def ahead(cells: Sequence[tuple[FloatArray, FloatArray]]) -> Finding:
    """Whether the first is ahead of the second in every cell, and in any."""
    ratios = [Ratio.of(ours, rival) for ours, rival in cells]
    beaten = sum(r.low > 1 for r in ratios)
    return Finding(
        f"{_span(ratios)}, beyond the interval in {beaten} of {len(ratios)} cells",
        (beaten == len(ratios), beaten > 0),
    )


def larger_gain(gains: tuple[Ratio, Ratio]) -> Finding:
    """Over the better of greedy and ε-greedy, with a small and with a large target."""
    small, large = gains
    return Finding(
        f"LBSS over the better of the two: {small} for 7B, {large} for 30B",
        (large.low > small.mean,),
    )


def _span(ratios: Sequence[Ratio]) -> str:
    return f"{min(r.mean for r in ratios):.2f}× to {max(r.mean for r in ratios):.2f}×"


def _draw(job: Run, found: Goodput) -> None:
    figure, axes = pyplot().subplots(1, len(_DATASETS), figsize=(14, 4), layout="constrained")
    shown = [p for p in _POLICIES if p not in _VANILLA]
    places = np.arange(len(_TARGETS))
    for axis, dataset in zip(axes, _DATASETS, strict=True):
        for i, policy in enumerate(shown):
            rates = [found[t, dataset, policy] for t in _TARGETS]
            axis.bar(
                places + i / (len(shown) + 1),
                [r.mean() for r in rates],
                1 / (len(shown) + 1),
                yerr=[r.std(ddof=1) for r in rates],
                label=policy,
            )
        for place, target in zip(places, _TARGETS, strict=True):
            best = max(float(found[target, dataset, v].mean()) for v in _VANILLA)
            axis.hlines(best, place - 0.1, place + 0.9, colors="black", linewidth=0.8)
        axis.set_xticks(places + 0.4, [f"LLaMA-{t}" for t in _TARGETS])
        axis.set(title=dataset, ylabel="tokens/s")
    axes[0].legend(fontsize="x-small")
    figure.suptitle("Drafter selection (Spin, figure 11); line: the best single drafter")
    save_figure(figure, job.out / f"{NAME}.png")


ENTRY = Entry(NAME, "Figure 11: goodput by way of selecting drafters", run)
