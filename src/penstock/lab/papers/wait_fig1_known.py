"""WAIT paper, figure 1 (a-b): throughput and latency of WAIT on the synthetic workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.lab.claims import ClaimVerdict, Measurement, check
from penstock.lab.experiment import Effort, Experiment, Trial
from penstock.lab.loads import (
    UNCAPPED,
    Candidate,
    Point,
    Sustained,
    best_of,
    bound_of,
    capacity_of,
    draw_points,
    gain_verdict,
    measure,
    options_of,
    setup_of,
    write_points,
)
from penstock.lab.report import write_table
from penstock.lab.thresholds import (
    nested_choices,
    nested_neighbours,
    planned_thresholds,
    planned_wait,
    unit_traffic,
    wait_choice,
    wait_neighbours,
)
from penstock.sim.run import Setup

NAME = "wait_fig1_known"

_PROTOTYPE = {"low": 2.07, "high": 1.38, "nested": 2.04}
"""Capacity of the best literal WAIT over that of vLLM's first rule, in an independent prototype."""
_CLOSE = 0.05
_PAPER_RATES = {"low": 2_000, "high": 12_000}
"""Σ λ_j as section 6 prints it, without a unit."""
_UNPLANNED = "wait, thresholds of its capacity"
_NESTED_SEGMENTS = 4
"""As many as there are lengths."""

Found = dict[str, dict[str, Sustained]]


def run(job: Trial) -> list[ClaimVerdict]:
    effort = job.effort
    found: Found = {}
    bounds = {name: bound_of(name, effort.arrivals) for name in _PROTOTYPE}
    points = []
    for name in _PROTOTYPE:
        found[name] = capacities(job, name, bounds[name])
    for name in _PAPER_RATES:
        job.tell(f"{NAME}: curves of {name}")
        drawn = job.each(measure, _curves(name, found[name], bounds[name], effort))
        points += [(name, p) for p in drawn]
    write_table(
        job.out / f"{NAME}_capacity.csv",
        ("workload", "policy", "options", "capacity_requests_per_s", "fluid_bound_requests_per_s"),
        (
            (name, policy, options_of(s.setup), s.requests_per_s, bounds[name])
            for name, policies in found.items()
            for policy, s in policies.items()
        ),
    )
    write_points(points, job.out / f"{NAME}.csv")
    title = "WAIT, thresholds in hindsight (WAIT paper, figure 1 a-b; paper-linear)"
    draw_points(points, job.out / f"{NAME}.png", title)
    return [
        *(ratio_verdict(name, found[name], effort) for name in found),
        *(_gain_verdict(name, found[name]) for name in _PAPER_RATES),
        _unit_verdict(bounds),
        _latency_verdict(points),
    ]


def capacities(job: Trial, name: str, bound: float) -> dict[str, Sustained]:
    """Best literal WAIT and its rivals, by policy."""
    effort, traffic = job.effort, unit_traffic(name)
    guesses = rivals(bound)
    measured = job.each(
        capacity_of,
        ((guess, name, effort) for guess in guesses.values()),
        lambda guess, *_: f"{NAME}: capacity of {guess.setup.admission.name} on {name}",
    )
    found = dict(zip(guesses, measured, strict=True))

    def tell(what: str) -> None:
        job.tell(f"{NAME}: {what}")

    planned = planned_wait(traffic, bound)
    best = best_of(planned, lambda s: wait_neighbours(traffic, s), name, effort, tell, job.workers)
    found["wait"] = best or Sustained(wait_choice(traffic, (1,) * len(traffic)).setup, 0.0)
    if name == "nested":
        choices = nested_choices(traffic, _NESTED_SEGMENTS)
        nested = best_of(
            choices, lambda s: nested_neighbours(traffic, s), name, effort, tell, job.workers
        )
        if nested is not None:
            found["nested_wait"] = nested
    return found


def rivals(bound: float) -> dict[str, Candidate]:
    """The paper's rivals with the limits they come with (256 requests at once), and one without."""
    return {
        "vllm_v0": Candidate(setup_of("vllm_v0"), 0.5 * bound),
        "sarathi": Candidate(setup_of("sarathi"), 0.7 * bound),
        "sarathi, no limits": Candidate(setup_of("sarathi", **UNCAPPED), bound),
    }


def ratio_verdict(name: str, found: dict[str, Sustained], effort: Effort) -> ClaimVerdict:
    """The capacity of the best literal WAIT over vLLM's, beside the prototype's."""
    rival = found["vllm_v0"]

    def as_far_ahead(policies: dict[str, Sustained]) -> Measurement:
        ratios = {p: s.over(rival) for p, s in policies.items()}
        parts = ", ".join(
            f"{p} ({options_of(s.setup)}) {s.requests_per_s:.4g}/s, ratio {ratios[p]:.2f} "
            f"({ratios[p] / _PROTOTYPE[name] - 1:+.0%})"
            for p, s in policies.items()
        )
        # One of the literal algorithms is enough.
        reached = max(ratios.values()) >= (1 - _CLOSE) * _PROTOTYPE[name]
        return Measurement(
            f"{parts}; vllm_v0 {rival.requests_per_s:.4g}/s; {effort.arrivals} arrivals a run",
            (reached,),
        )

    return check(
        f"{name}: best literal WAIT over vllm_v0 is at least {_PROTOTYPE[name]:.2f}, as in a "
        f"prototype, less {_CLOSE:.0%}",
        as_far_ahead,
        {p: s for p, s in found.items() if p in ("wait", "nested_wait")},
        "sarathi in its place",
        {"sarathi": found["sarathi"]},
    )


def _gain_verdict(name: str, found: dict[str, Sustained]) -> ClaimVerdict:
    rivals = {p: s for p, s in found.items() if p not in ("wait", "nested_wait")}
    claim = f"{name}: WAIT's peak throughput is 20-30% above vLLM and Sarathi"
    return gain_verdict(claim, found["wait"], rivals)


def _unit_verdict(bounds: dict[str, float]) -> ClaimVerdict:
    """No unit of time makes the low rates low and the high ones sustainable but a long one, so the
    printed figures are read as requests of a run, and only their proportions are used."""
    return check(
        "the printed rates, 1,000 + 1,000 and 6,000 + 4,000 + 2,000, are requests a second",
        lambda rates: _bearable(rates, bounds),
        _PAPER_RATES,
        "requests a millisecond",
        {name: 1000 * rate for name, rate in _PAPER_RATES.items()},
    )


def _bearable(rates: Mapping[str, float], bounds: Mapping[str, float]) -> Measurement:
    over = {name: rate / bounds[name] for name, rate in rates.items()}
    return Measurement(
        f"{over['low']:.2f} and {over['high']:,.0f} times the fluid capacity bound: no machine of "
        f"this profile serves the high ones in less than {over['high']:,.0f} s; taken as requests "
        "a run, of which only the proportions matter",
        tuple(x <= 1 for x in over.values()),
    )


def _latency_verdict(points: list[tuple[str, Point]]) -> ClaimVerdict:
    """Latency at the lightest load of the curves against the rival's; the control is WAIT with the
    thresholds of its capacity, which wait there for many requests."""
    lightest = {name: min(p.rate for w, p in points if w == name) for name in _PAPER_RATES}

    def slightly_higher(policy: str) -> Measurement:
        parts, within = [], []
        for name, rate in lightest.items():
            at = {p.policy: p.latency_s for w, p in points if w == name and p.rate == rate}
            mine, rival = at[policy], at["vllm_v0"]
            within.append(bool(mine and rival and mine <= 2 * rival))
            what = f"{mine:.3g} s against {rival:.3g} s" if mine and rival else "nothing finished"
            parts.append(f"{name} at {rate:.3g}/s: {what}")
        return Measurement("; ".join(parts), tuple(within))

    return check(
        "WAIT's latency is only slightly higher at low loads (at most twice vllm_v0's)",
        slightly_higher,
        "wait",
        "the thresholds of its capacity",
        _UNPLANNED,
    )


def _curves(
    name: str, found: dict[str, Sustained], bound: float, effort: Effort
) -> Iterator[tuple[str, Setup, str, float, int]]:
    """Points to measure. WAIT with the fluid planner's thresholds for each load, where they fit,
    else with those of its capacity; rivals as they are."""
    traffic = unit_traffic(name)
    drawn = ("wait", "vllm_v0", "sarathi")
    highest = max(found[policy].requests_per_s for policy in drawn) or bound
    for share in effort.shares:
        rate = share * highest
        planned = planned_thresholds(traffic, rate)
        wait = wait_choice(traffic, planned).setup if planned else found["wait"].setup
        setups = {"wait": wait, **{p: found[p].setup for p in ("vllm_v0", "sarathi")}}
        if share == min(effort.shares):
            setups[_UNPLANNED] = found["wait"].setup
        for policy, setup in setups.items():
            yield policy, setup, name, rate, effort.curve_arrivals


EXPERIMENT = Experiment(NAME, "WAIT on known output lengths: throughput and latency", run)
