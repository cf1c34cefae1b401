"""WAIT paper, figure 1 (c-d): throughput and latency of Nested WAIT on ten bins of lengths."""

from __future__ import annotations

from dataclasses import replace

from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.fluid.traffic import Traffic, scaled
from penstock.fluid.wait import fractional_wait_thresholds
from penstock.lab.claims import ClaimVerdict, Measurement, check
from penstock.lab.experiment import Experiment, Trial
from penstock.lab.loads import (
    Candidate,
    Sustained,
    best_of,
    bound_of,
    capacity_of,
    draw_points,
    gain_verdict,
    measure,
    setup_of,
    write_points,
)
from penstock.lab.report import write_table
from penstock.lab.thresholds import (
    nested_choice,
    nested_choices,
    nested_kv,
    nested_neighbours,
    segment_ends,
    unit_traffic,
)

NAME = "wait_fig1_nested"

_WORKLOAD = "ten_bins"
_SEGMENTS = 10
_FEWER = (5, 2, 1)
_GATED_LOAD = 0.95
"""Share of the bound for which the gated version's thresholds are planned."""


def run(job: Trial) -> list[ClaimVerdict]:
    effort = job.effort
    traffic = unit_traffic(_WORKLOAD)
    bound = bound_of(_WORKLOAD, effort.arrivals)
    found = _capacities(job, traffic, bound)
    job.tell(f"{NAME}: curves")
    highest = max(s.requests_per_s for s in found.values()) or bound
    drawn = (
        (policy, s.setup, _WORKLOAD, share * highest, effort.curve_arrivals)
        for share in effort.shares
        for policy, s in found.items()
    )
    points = [(_WORKLOAD, point) for point in job.each(measure, drawn)]
    write_table(
        job.out / f"{NAME}_capacity.csv",
        ("policy", "capacity_requests_per_s", "fluid_bound_requests_per_s"),
        ((policy, s.requests_per_s, bound) for policy, s in found.items()),
    )
    write_points(points, job.out / f"{NAME}.csv")
    title = "Nested WAIT (WAIT paper, figure 1 c-d; paper-linear)"
    draw_points(points, job.out / f"{NAME}.png", title)
    return verdicts(found, traffic)


def literal(num_segments: int) -> str:
    return f"nested_wait, L = {num_segments}"


def gated(num_segments: int) -> str:
    return f"nested_wait_gated, L = {num_segments}"


def _capacities(job: Trial, traffic: Traffic, bound: float) -> dict[str, Sustained]:
    """Rivals; the literal algorithm with the paper's ten segments, thresholds of one, and with
    fewer, in hindsight; the gated version with ten."""
    effort = job.effort
    fixed = {
        "vllm_v0": Candidate(setup_of("vllm_v0"), 0.5 * bound),
        "sarathi": Candidate(setup_of("sarathi"), 0.7 * bound),
        literal(_SEGMENTS): _literal_ten(traffic),
        gated(_SEGMENTS): _gated_ten(traffic, bound),
    }
    measured = job.each(
        capacity_of,
        ((choice, _WORKLOAD, effort) for choice in fixed.values()),
        lambda choice, *_: f"{NAME}: capacity of {choice.setup.admission.name}",
    )
    found = dict(zip(fixed, measured, strict=True))
    for count in _FEWER:
        best = best_of(
            nested_choices(traffic, count),
            lambda s: nested_neighbours(traffic, s),
            _WORKLOAD,
            replace(effort, tries=min(effort.tries, 4)),
            lambda what: job.tell(f"{NAME}: {what}"),
            job.workers,
        )
        if best is not None:
            found[literal(count)] = best
    return found


def _literal_ten(traffic: Traffic) -> Candidate:
    ends = segment_ends(traffic, _SEGMENTS)
    return nested_choice(traffic, ends, (1,) * _SEGMENTS)


def _gated_ten(traffic: Traffic, bound: float) -> Candidate:
    """The version that serves, with the fluid's fractional thresholds: a segment's is the share of
    the requests that enters it."""
    ends = segment_ends(traffic, _SEGMENTS)
    planned = scaled(traffic, _GATED_LOAD * bound)
    per_stage = fractional_wait_thresholds(PAPER_LINEAR, planned, PAPER_LINEAR.kv_tokens).thresholds
    numbers = list(zip(planned, per_stage, strict=True))
    thresholds = tuple(
        sum(n for t, n in numbers if t.output_len > start) for start in (0, *ends[:-1])
    )
    setup = setup_of("nested_wait_gated", segment_ends=ends, thresholds=thresholds)
    return Candidate(setup, _GATED_LOAD * bound)


def verdicts(found: dict[str, Sustained], traffic: Traffic) -> list[ClaimVerdict]:
    """What capacities say about the paper's claims for Nested WAIT."""
    ten = found[literal(_SEGMENTS)]
    ends = segment_ends(traffic, _SEGMENTS)
    literals = {p: s for p, s in found.items() if p.startswith("nested_wait,")}
    best = max(literals, key=lambda policy: literals[policy].requests_per_s)

    def fits(thresholds: tuple[int, ...]) -> Measurement:
        needed = nested_kv(traffic, ends, thresholds)
        return Measurement(
            f"{thresholds[0]} at each stage hold {needed:,.0f} KV tokens on average, memory has "
            f"{PAPER_LINEAR.kv_tokens:,}; capacity of one {ten.requests_per_s:.3g} requests/s",
            (needed <= PAPER_LINEAR.kv_tokens,),
        )

    return [
        check(
            "a moderate number of segments such as L = 10 is sufficient in practice",
            fits,
            (1,) * _SEGMENTS,
            "two requests a stage",
            (2,) * _SEGMENTS,
        ),
        _gain(f"{literal(_SEGMENTS)}, as in the paper", ten, found),
        _gain(f"the best literal one ({_text(best, found)})", found[best], found),
        _gain(f"{gated(_SEGMENTS)}, the version that serves", found[gated(_SEGMENTS)], found),
    ]


def _text(policy: str, found: dict[str, Sustained]) -> str:
    thresholds = found[policy].setup.admission.options["thresholds"]
    return f"{policy}, thresholds {'/'.join(map(str, thresholds))}"


def _gain(what: str, mine: Sustained, found: dict[str, Sustained]) -> ClaimVerdict:
    claim = f"{what}: peak throughput 20-30% above vLLM and Sarathi"
    return gain_verdict(claim, mine, {p: found[p] for p in ("vllm_v0", "sarathi")})


EXPERIMENT = Experiment(NAME, "Nested WAIT on ten bins of lengths: throughput and latency", run)
