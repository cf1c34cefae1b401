"""Spin, figure 11: goodput of drafter selection by LBSS, as printed and with additions (`SPIN`), by
prompt length and by ε-greedy.

Eight requests are always live, drafts have four tokens, and every drafter has a GPU of its own
beside the target. The paper's batch has a barrier; here a request that is drafted is verified as
soon as the target is free, for all policies alike.

Acceptance is measured. `gsm8k` and `sharegpt` replay records of look-up and EAGLE against a target
of 8 billion parameters (`--data`). `hard` and `easy` are the bundled family's measured acceptance
in the four domains where least and most is accepted, of five drafters that are as large beside the
target as in its grown copies. Step times are those of Spin's devices (`lab.common.families`).

A policy is compared with a rival run by run. The control sets the rival against itself, in the runs
of other seeds: what that passes would be luck. The oracle gives each request the drafter that is
best for it in hindsight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check, not_measured
from lab.common.experiment import Experiment, Trial
from lab.common.families import (
    FAMILY,
    SPIN,
    always_live,
    closed_loop,
    prompt_lengths,
    spin_profile,
)
from lab.common.oracles import assigned
from lab.common.report import Plot, draw, rows_of, write_table
from lab.common.statistics import SEEDS, FloatArray, Interval, ratio
from lab.rivals import policy_named
from penstock.config import PolicyConfig
from penstock.core.policies.registry import option_types
from penstock.sim.acceptance import (
    DomainAcceptance,
    GeometricAcceptance,
    RecordedAcceptance,
    read_records,
)
from penstock.sim.domains import AcceptanceFit, load_acceptance
from penstock.sim.run import run as simulate
from penstock.sim.workloads import Workload

NAME = "spin_fig11"

TARGETS = ("7B", "30B")
RECORDS = {name: f"accept_{name}.jsonl.gz" for name in ("gsm8k", "sharegpt")}
_RECORDED = {"ngram": 0.0, "eagle": 0.75}
"""Billions of parameters: none, and one layer of 32 with its output layer."""
HARD, EASY = "hard", "easy"
_LIVE, _DRAFT_TOKENS = 8, 4
POLICIES = {
    **SPIN,
    "greedy": policy_named("greedy"),
    "ε-greedy, printed": policy_named("epsilon_greedy", explore=0.8),
    "ε-greedy, meant": policy_named("epsilon_greedy", explore=0.2),
    "auto": PolicyConfig.from_name("auto", k_max=4),
}
HINDSIGHT = "in hindsight"
_SECONDS = 10.0
_LEAST_SECONDS = 0.8
"""Less, and a prompt's first token may not be there."""
_MOST_PER_S = 20.0
"""Requests; none of these machines serves so many."""

Goodput = dict[tuple[str, str, str], FloatArray]
"""Tokens per second by target, text and policy: [seeds]."""


def run(job: Trial) -> list[ClaimVerdict]:
    seconds = min(_SECONDS, max(_LEAST_SECONDS, job.effort.curve_arrivals / 1000))
    seeds = SEEDS[: job.effort.repetitions]
    texts = texts_of(job)
    cells = [(t, x, p) for t in TARGETS for x in texts for p in (*POLICIES, HINDSIGHT, *singles(x))]
    rates = job.by_cell(
        goodput,
        cells,
        seeds,
        job.data,
        seconds,
        what=lambda target, text, *_: f"{NAME}: LLaMA-{target}, {text}",
    )
    found: Goodput = {cell: np.array(own) for cell, own in rates.items()}
    header = ("target", "text", "policy", "seed", "tokens_per_s")
    write_table(job.out / f"{NAME}.csv", header, rows_of(found))
    hindsight = {text: worth("7B", text, job.data, range(300)) for text in texts}
    _draw(job, found, hindsight)
    return verdicts(found, {text: differ(text, own) for text, own in hindsight.items()})


def texts_of(job: Trial) -> list[str]:
    """With records where they are there."""
    there = [name for name, file in RECORDS.items() if job.data and (job.data / file).is_file()]
    if len(there) < len(RECORDS):
        job.tell(f"{NAME}: left out for want of records: {', '.join(RECORDS.keys() - there)}")
    return [*there, HARD, EASY]


def _billions(text: str) -> Mapping[str, float]:
    return _RECORDED if text in RECORDS else FAMILY


def singles(text: str) -> list[str]:
    return [f"Vanilla {name}" for name in _billions(text)]


@functools.cache
def acceptance(text: str, data: Path | None, seed: int) -> RecordedAcceptance | DomainAcceptance:
    if text in RECORDS:
        assert data is not None
        return RecordedAcceptance(read_records(data / RECORDS[text], list(_RECORDED)), seed)
    fit = load_acceptance()
    ours = [fit.drafters.index(name) for name in FAMILY]
    by_mean = sorted(fit.domains, key=lambda d: float(np.take(fit.domains[d].mean, ours).mean()))
    half = len(by_mean) // 2
    chosen = by_mean[:half] if text == HARD else by_mean[half:]
    domains = {d: fit.domains[d] for d in chosen}
    return DomainAcceptance(AcceptanceFit(drafters=fit.drafters, domains=domains), seed)


def worth(
    target: str, text: str, data: Path | None, requests: Sequence[int], seed: int = 0
) -> FloatArray:
    """Expected tokens per second of a round, [requests, drafters]."""
    model, profile = acceptance(text, data, seed), spin_profile(target, _billions(text))
    verify = profile.linear(_LIVE * (1 + _DRAFT_TOKENS))
    found = []
    for i in map(str, requests):
        for drafter in profile.drafters:
            own: RecordedAcceptance | GeometricAcceptance
            if isinstance(model, RecordedAcceptance):
                own = RecordedAcceptance({drafter.name: [model._row(drafter.name, i)]})
            else:
                own = GeometricAcceptance(model.rates(i))
            tokens = own.tokens_per_step(drafter.name, _DRAFT_TOKENS)
            found.append(tokens / (verify + drafter.seconds(_LIVE, _DRAFT_TOKENS)))
    return np.array(found).reshape(len(requests), -1)


def goodput(
    target: str, text: str, policy: str, data: Path | None, seconds: float, seed: int
) -> float:
    """Tokens per second of a run that is so long. Raises: PolicyError."""
    names = list(_billions(text))
    load = workload(math.ceil(_MOST_PER_S * seconds), seed)
    best = {}
    if policy == HINDSIGHT:
        order = worth(target, text, data, range(len(load.prompt_len)), seed).argmax(axis=1)
        best = {str(i): names[j] for i, j in enumerate(order.tolist())}
    single = PolicyConfig.from_name("single", drafter=policy.removeprefix("Vanilla "))
    with assigned(best) as name:
        chosen = POLICIES.get(policy, PolicyConfig.from_name(name) if best else single)
        setup = always_live(
            spin_profile(target, _billions(text)),
            acceptance(text, data, seed),
            names,
            _LIVE,
            seeded(chosen, seed),
            draft_tokens=_DRAFT_TOKENS,
            capacity=_LIVE,
            seed=seed,
        )
        report = simulate(setup, load, until=seconds)
    return float(report.figures()["throughput_tokens_per_s"])


def seeded(policy: PolicyConfig, seed: int) -> PolicyConfig:
    """A selection policy with this seed, if it draws."""
    draws = "seed" in option_types("selection", policy.name)
    return policy.with_defaults({"seed": seed} if draws else {})


def workload(num_requests: int, seed: int) -> Workload:
    """More requests than are ever served, so that there are always eight."""
    rng = np.random.default_rng(seed)
    prompts = prompt_lengths(rng, num_requests)
    outputs = np.exp(rng.normal(math.log(128), 0.5, num_requests)).astype(np.int64)
    return closed_loop(prompts, outputs.clip(16, 512))


def differ(text: str, found: FloatArray) -> str:
    """How heterogeneous requests are: what hindsight gains over one drafter for all."""
    gain = (1 / found).mean(axis=0).min() / (1 / found.max(axis=1)).mean()
    return f"{text} {gain:.2f}×"


def verdicts(found: Goodput, differences: Mapping[str, str]) -> list[ClaimVerdict]:
    """The claims of section VI-B2, and what a reader would ask next. differences: of requests, by
    text, in words."""
    cells = [*itertools.product(TARGETS, differences)]

    def of(policy: str) -> list[FloatArray]:
        return [found[*c, policy] for c in cells]

    best = [max((found[*c, v] for v in singles(c[1])), key=lambda r: r.mean()) for c in cells]
    claims = [
        _against(claim, of(policy), rivals, of(HINDSIGHT))
        for claim, policy, rivals in (
            *((f"{n} beats greedy for every text and target", n, of("greedy")) for n in SPIN),
            *((f"{n} beats ε-greedy (explores 0.8)", n, of("ε-greedy, printed")) for n in SPIN),
            *((f"{n} beats ε-greedy (explores 0.2)", n, of("ε-greedy, meant")) for n in SPIN),
            *((f"{n} beats each setting's best single drafter", n, best) for n in (*SPIN, "auto")),
        )
    ]
    told = ", ".join(differences.values())
    claims[6] = replace(claims[6], claim=f"{claims[6].claim} (an ideal choice gains: {told})")

    def gains(policy: str) -> dict[str, Interval]:
        """Over the better of the two rivals, by target, over all texts."""
        rivals = [
            np.maximum(a, b) for a, b in zip(of("greedy"), of("ε-greedy, printed"), strict=True)
        ]
        ratios = [a / b for a, b in zip(of(policy), rivals, strict=True)]
        by_target = {
            t: [r for c, r in zip(cells, ratios, strict=True) if c[0] == t] for t in TARGETS
        }
        return {
            t: ratio(np.prod(r, axis=0) ** (1 / len(r)), np.ones(len(r[0])))
            for t, r in by_target.items()
        }

    ideal, (small, large) = gains(HINDSIGHT), TARGETS
    text = max(
        differences, key=lambda x: ratio(found["7B", x, HINDSIGHT], found["7B", x, "greedy"]).mean
    )
    where = {p: found["7B", text, p] for p in _PAPER_GAINS}
    for name in SPIN:
        ours = gains(name)
        claims += [
            check(
                f"{name} gains more over both with a larger target (1.45× to 1.79×)",
                larger_gain,
                (ours[small], ours[large]),
                "the small target in both places",
                (ours[small], ours[small]),
                (HINDSIGHT, (ideal[small], ideal[large])),
            ),
            check(
                f"{name} makes 2.03× greedy and 1.49× ε-greedy, to a tenth (7B, {text})",
                as_far_ahead,
                (found["7B", text, name], where),
                "ε-greedy in its place",
                (where["ε-greedy, printed"], where),
                (HINDSIGHT, (found["7B", text, HINDSIGHT], where)),
            ),
        ]
    of_llama = "single drafters: larger ones best on hard text, 68M and 1.4B the worst (figure 10)"
    return [*claims, not_measured(of_llama, "the paper's five models")]


_PAPER_GAINS = {"greedy": 65.31 / 32.21, "ε-greedy, printed": 65.31 / 43.78}
_TENTH = 0.1


def as_far_ahead(found: tuple[FloatArray, Mapping[str, FloatArray]]) -> Measurement:
    """As the paper's figures have it on Alpaca."""
    ours, rivals = found
    gains = {name: ratio(ours, rival) for name, rival in rivals.items()}
    return Measurement(
        ", ".join(f"{gain.times} {rival}" for rival, gain in gains.items()),
        tuple(gain.high >= (1 - _TENTH) * _PAPER_GAINS[rival] for rival, gain in gains.items()),
    )


def _against(
    claim: str,
    ours: Sequence[FloatArray],
    rivals: Sequence[FloatArray],
    hindsight: Sequence[FloatArray],
) -> ClaimVerdict:
    """By cell, [seeds] each."""
    return check(
        claim,
        ahead,
        list(zip(ours, rivals, strict=True)),
        "the rival against itself, with other seeds",
        [(np.roll(rival, 1), rival) for rival in rivals],
        (HINDSIGHT, list(zip(hindsight, rivals, strict=True))),
    )


def ahead(cells: Sequence[tuple[FloatArray, FloatArray]]) -> Measurement:
    """Whether the first is ahead of the second in every cell, and in any."""
    ratios = [ratio(ours, rival) for ours, rival in cells]
    beaten = sum(r.low > 1 for r in ratios)
    return Measurement(
        f"{_span(ratios)}, surely in {beaten} of {len(ratios)} settings",
        (beaten == len(ratios), beaten > 0),
    )


def larger_gain(gains: tuple[Interval, Interval]) -> Measurement:
    """Over the better of greedy and ε-greedy, with a small and with a large target."""
    small, large = gains
    return Measurement(
        f"{small.times} for 7B, {large.times} for 30B",
        (large.low > small.mean,),
    )


def _span(ratios: Sequence[Interval]) -> str:
    return f"{min(r.mean for r in ratios):.2f}× to {max(r.mean for r in ratios):.2f}×"


def _draw(job: Trial, found: Goodput, hindsight: Mapping[str, FloatArray]) -> None:
    goodputs, shares = [], []
    for text, worths in hindsight.items():
        names = (*POLICIES, HINDSIGHT, *singles(text))
        rates = {p: np.array([found[t, text, p] for t in TARGETS]) for p in names}
        best = np.max([rates.pop(p).mean(axis=1) for p in singles(text)], axis=0)
        lines = {p: (list(TARGETS), y.mean(axis=1)) for p, y in rates.items()}
        lines["best single drafter"] = list(TARGETS), best
        axes = {"title": text, "xlabel": "target", "ylabel": "tokens/s", "ylim": (0, None)}
        styles = {"best single drafter": "k--"}
        # Of those whom the paper compares: seven bands would hide each other.
        bands = {p: (rates[p].min(axis=1), rates[p].max(axis=1)) for p in (*SPIN, *_PAPER_GAINS)}
        goodputs.append(Plot(lines, axes, "o-", styles, bands))
        counts = np.bincount(worths.argmax(axis=1), minlength=worths.shape[1]) / len(worths)
        drafters = [name.removeprefix("draft-") for name in _billions(text)]
        axes = {"title": f"{text}: how requests differ", "ylabel": "best for", "ylim": (0, 1)}
        shares.append(Plot({"share of the requests": (drafters, counts)}, axes, "o"))
    title = "Drafter selection (Spin, figure 11)"
    draw(job.out / f"{NAME}.png", title, [goodputs, shares])


EXPERIMENT = Experiment(NAME, "Figure 11: goodput by way of selecting drafters", run)
