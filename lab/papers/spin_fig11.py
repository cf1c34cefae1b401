"""Spin, figure 11: goodput of drafter selection by LBSS, by prompt length and by ε-greedy; and what
section VI-B1 says of one drafter for everybody (figure 10).

Eight requests are always live, drafts have four tokens, and every drafter has a GPU of its own
beside the target. The paper's batch has a barrier; here a request that is drafted is verified as
soon as the target is free, for all policies alike.

Step times and acceptances are those of Spin's family (`lab.common.families`); `mix` is all texts.
Prompt lengths say nothing of difficulty.

A policy is compared with a rival run by run. The control sets the rival against itself, in the runs
of other seeds: what that passes would be luck.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.families import (
    SPIN_DRAFTERS,
    SPIN_TARGETS,
    SPIN_TEXTS,
    always_live,
    closed_loop,
    prompt_lengths,
    spin_acceptances,
    spin_profile,
)
from lab.common.report import Plot, draw, rows_of, write_table
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from penstock.config import PolicyConfig
from penstock.sim.acceptance import DomainAcceptance
from penstock.sim.run import run as simulate
from penstock.sim.workloads import Workload

NAME = "spin_fig11"

DATASETS = {**{name: (name,) for name in SPIN_TEXTS}, "mix": tuple(SPIN_TEXTS)}
_LIVE = 8
_DRAFT_TOKENS = 4
POLICIES = {
    "LBSS": PolicyConfig.from_name("lbss"),
    "greedy": PolicyConfig.from_name("greedy"),
    "ε-greedy, printed": PolicyConfig.from_name("epsilon_greedy", explore=0.8),
    "ε-greedy, meant": PolicyConfig.from_name("epsilon_greedy", explore=0.2),
    "auto": PolicyConfig.from_name("auto", k_max=4),
    **{f"Vanilla {name}": PolicyConfig.from_name("single", drafter=name) for name in SPIN_DRAFTERS},
}
_SECONDS = 10.0
_LEAST_SECONDS = 0.8
"""Less, and a prompt's first token may not be there."""
_MOST_PER_S = 20.0
"""Requests; none of these machines serves so many."""

Goodput = dict[tuple[str, str, str], FloatArray]
"""Tokens per second by target, data set and policy: [seeds]."""


def run(job: Trial) -> list[ClaimVerdict]:
    seconds = min(_SECONDS, max(_LEAST_SECONDS, job.effort.curve_arrivals / 1000))
    seeds = SEEDS[: job.effort.repetitions]
    cells = [*itertools.product(SPIN_TARGETS, DATASETS, POLICIES)]
    rates = job.by_cell(
        goodput,
        cells,
        seeds,
        seconds,
        what=lambda target, dataset, *_: f"{NAME}: LLaMA-{target}, {dataset}",
    )
    found: Goodput = {cell: np.array(own) for cell, own in rates.items()}
    header = ("target", "dataset", "policy", "seed", "tokens_per_s")
    write_table(job.out / f"{NAME}.csv", header, rows_of(found))
    _draw(job, found)
    return verdicts(found)


def _singles() -> list[str]:
    return [name for name in POLICIES if name.startswith("Vanilla")]


def goodput(target: str, dataset: str, policy: str, seconds: float, seed: int) -> float:
    """Tokens per second of a run that is so long. Raises: PolicyError."""
    chosen = POLICIES[policy]
    seeded = {} if chosen.name in _UNSEEDED else {"seed": seed}
    setup = always_live(
        spin_profile(target),
        DomainAcceptance(spin_acceptances(DATASETS[dataset]), seed),
        tuple(SPIN_DRAFTERS),
        _LIVE,
        PolicyConfig.from_name(chosen.name, **chosen.options, **seeded),
        draft_tokens=_DRAFT_TOKENS,
        capacity=_LIVE,
        seed=seed,
    )
    report = simulate(setup, workload(math.ceil(_MOST_PER_S * seconds), seed), until=seconds)
    return float(report.figures()["throughput_tokens_per_s"])


_UNSEEDED = ("single", "greedy")


def workload(num_requests: int, seed: int) -> Workload:
    """More requests than are ever served, so that there are always eight."""
    rng = np.random.default_rng(seed)
    prompts = prompt_lengths(rng, num_requests)
    outputs = np.exp(rng.normal(math.log(128), 0.5, num_requests)).astype(np.int64)
    return closed_loop(prompts, outputs.clip(16, 512))


def verdicts(found: Goodput) -> list[ClaimVerdict]:
    """The claims of sections VI-B1 and VI-B2, and what a reader would ask next."""
    return [*_of_policies(found), *_of_single_drafters(found)]


def _of_policies(found: Goodput) -> list[ClaimVerdict]:
    cells = [(t, d) for t in SPIN_TARGETS for d in DATASETS]
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
        target: ratio(
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
    best = [max((found[*c, v] for v in _singles()), key=lambda r: r.mean()) for c in cells]
    for policy in ("LBSS", "auto"):
        claim = f"choice pays: {policy} against the best single drafter of each cell"
        claims.append(_against(claim, [found[*c, policy] for c in cells], best))
    hard = {p: found["7B", "hard", p] for p in ("LBSS", *_PAPER_GAINS)}
    claims.append(
        check(
            "LBSS makes 2.03× greedy and 1.49× ε-greedy (hard text, 7B), to a tenth",
            as_far_ahead,
            hard,
            "ε-greedy in its place",
            {**hard, "LBSS": hard["ε-greedy, printed"]},
        )
    )
    return claims


def _of_single_drafters(found: Goodput) -> list[ClaimVerdict]:
    singles = {d: {p: found["7B", d, p] for p in _singles()} for d in DATASETS}
    names = _singles()
    renamed = {
        d: dict(zip(names, [*list(own.values())[1:], own[names[0]]], strict=True))
        for d, own in singles.items()
    }
    return [
        check(
            "the best single drafter is larger on hard text than on easy (figure 10)",
            larger_where_hard,
            (singles["hard"], singles["easy"]),
            "easy text in both places",
            (singles["easy"], singles["easy"]),
        ),
        check(
            "the smallest and the largest drafter are nowhere the best, and always the worst "
            "(figure 10)",
            extremes_lose,
            singles,
            "each drafter under the name of the one before",
            renamed,
        ),
    ]


_PAPER_GAINS = {"greedy": 65.31 / 32.21, "ε-greedy, printed": 65.31 / 43.78}
_TENTH = 0.1


def as_far_ahead(found: Mapping[str, FloatArray]) -> Measurement:
    """As the paper's figures have it, on what stands for Alpaca."""
    gains = {rival: ratio(found["LBSS"], found[rival]) for rival in _PAPER_GAINS}
    return Measurement(
        ", ".join(f"{gain.times} {rival}" for rival, gain in gains.items()),
        tuple(gain.high >= (1 - _TENTH) * _PAPER_GAINS[rival] for rival, gain in gains.items()),
    )


def _ranked(rates: Mapping[str, FloatArray]) -> list[str]:
    """The best first."""
    return sorted(rates, key=lambda name: -float(rates[name].mean()))


def larger_where_hard(
    given: tuple[Mapping[str, FloatArray], Mapping[str, FloatArray]],
) -> Measurement:
    """With certainty better there, and not here."""
    names = list(given[0])
    hard, easy = (_ranked(rates)[0] for rates in given)
    there, here = (ratio(rates[hard], rates[easy]) for rates in given)
    return Measurement(
        f"{hard} on hard text, {easy} on easy: the first makes {there.times} and {here.times}",
        (names.index(hard) > names.index(easy) and there.low > 1, here.high < 1),
    )


def extremes_lose(found: Mapping[str, Mapping[str, FloatArray]]) -> Measurement:
    """By the means of each data set."""
    names = list(next(iter(found.values())))
    ends = {names[0], names[-1]}
    ranks = {dataset: _ranked(rates) for dataset, rates in found.items()}
    return Measurement(
        "; ".join(f"{dataset}: {' > '.join(order)}" for dataset, order in ranks.items()),
        (
            all(order[0] not in ends for order in ranks.values()),
            all(set(order[-2:]) == ends for order in ranks.values()),
        ),
    )


def _against(claim: str, ours: Sequence[FloatArray], rivals: Sequence[FloatArray]) -> ClaimVerdict:
    """By cell, [seeds] each."""
    return check(
        claim,
        ahead,
        list(zip(ours, rivals, strict=True)),
        "the rival against itself, with other seeds",
        [(np.roll(rival, 1), rival) for rival in rivals],
    )


def ahead(cells: Sequence[tuple[FloatArray, FloatArray]]) -> Measurement:
    """Whether the first is ahead of the second in every cell, and in any."""
    ratios = [ratio(ours, rival) for ours, rival in cells]
    beaten = sum(r.low > 1 for r in ratios)
    return Measurement(
        f"{_span(ratios)}, beyond the interval in {beaten} of {len(ratios)} cells",
        (beaten == len(ratios), beaten > 0),
    )


def larger_gain(gains: tuple[Interval, Interval]) -> Measurement:
    """Over the better of greedy and ε-greedy, with a small and with a large target."""
    small, large = gains
    return Measurement(
        f"LBSS over the better of the two: {small.times} for 7B, {large.times} for 30B",
        (large.low > small.mean,),
    )


def _span(ratios: Sequence[Interval]) -> str:
    return f"{min(r.mean for r in ratios):.2f}× to {max(r.mean for r in ratios):.2f}×"


def _draw(job: Trial, found: Goodput) -> None:
    plots = []
    for dataset in DATASETS:
        rates = {p: np.array([found[t, dataset, p] for t in SPIN_TARGETS]) for p in POLICIES}
        best = np.max([rates.pop(p).mean(axis=1) for p in _singles()], axis=0)
        lines = {p: (list(SPIN_TARGETS), y.mean(axis=1)) for p, y in rates.items()}
        lines["best single drafter"] = list(SPIN_TARGETS), best
        axes = {"title": dataset, "xlabel": "target", "ylabel": "tokens/s", "ylim": (0, None)}
        styles = {"best single drafter": "k--"}
        # Of those whom the paper compares: seven bands would hide each other.
        bands = {p: (rates[p].min(axis=1), rates[p].max(axis=1)) for p in ("LBSS", *_PAPER_GAINS)}
        plots.append(Plot(lines, axes, "o-", styles, bands))
    draw(job.out / f"{NAME}.png", "Drafter selection (Spin, figure 11)", [plots])


EXPERIMENT = Experiment(NAME, "Figure 11: goodput by way of selecting drafters", run)
