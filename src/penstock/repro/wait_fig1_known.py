"""WAIT paper, figure 1 (a-b): throughput and latency of WAIT on the synthetic workloads."""

from __future__ import annotations

from penstock.repro import Effort, Entry, Run, Verdict, judge
from penstock.repro.output import write_table
from penstock.repro.wait_loads import (
    UNCAPPED,
    Choice,
    Point,
    Sustained,
    best_of,
    bound_of,
    capacity_of,
    draw_points,
    measure,
    options_of,
    setup_of,
    write_points,
)
from penstock.repro.wait_policies import (
    nested_choices,
    nested_neighbours,
    planned_thresholds,
    planned_wait,
    unit_traffic,
    wait_choice,
    wait_neighbours,
)

NAME = "wait_fig1_known"

_PROTOTYPE = {"low": 2.07, "high": 1.38, "nested": 2.04}
"""Capacity of the best literal WAIT over that of vLLM's first rule, in an independent prototype."""
_CLOSE = 0.05
_PAPER_RATES = {"low": 2_000, "high": 12_000}
"""Σ λ_j as section 6 prints it, without a unit."""
_CLAIMED_GAIN = 1.2
_NESTED_SEGMENTS = 4
"""As many as there are lengths."""

Found = dict[str, dict[str, Sustained]]


def run(job: Run) -> list[Verdict]:
    effort = job.effort
    found: Found = {}
    bounds = {name: bound_of(name, effort.arrivals) for name in _PROTOTYPE}
    points = []
    for name in _PROTOTYPE:
        found[name] = capacities(job, name, bounds[name])
    for name in _PAPER_RATES:
        job.tell(f"{NAME}: curves of {name}")
        points += [(name, p) for p in _curves(name, found[name], bounds[name], effort)]
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


def capacities(job: Run, name: str, bound: float) -> dict[str, Sustained]:
    """Best literal WAIT and its rivals, by policy."""
    effort, traffic = job.effort, unit_traffic(name)
    found: dict[str, Sustained] = {}
    for rival, guess in rivals(bound).items():
        job.tell(f"{NAME}: capacity of {rival} on {name}")
        found[rival] = capacity_of(guess, name, effort)

    def tell(what: str) -> None:
        job.tell(f"{NAME}: {what}")

    planned = planned_wait(traffic, bound)
    best = best_of(planned, lambda s: wait_neighbours(traffic, s), name, effort, tell)
    found["wait"] = best or Sustained(wait_choice(traffic, (1,) * len(traffic)).setup, 0.0)
    if name == "nested":
        choices = nested_choices(traffic, _NESTED_SEGMENTS)
        nested = best_of(choices, lambda s: nested_neighbours(traffic, s), name, effort, tell)
        if nested is not None:
            found["nested_wait"] = nested
    return found


def rivals(bound: float) -> dict[str, Choice]:
    """The paper's rivals with the limits they come with (256 requests at once), and one without."""
    return {
        "vllm_v0": Choice(setup_of("vllm_v0"), 0.5 * bound),
        "sarathi": Choice(setup_of("sarathi"), 0.7 * bound),
        "sarathi, no limits": Choice(setup_of("sarathi", **UNCAPPED), bound),
    }


def ratio_verdict(name: str, found: dict[str, Sustained], effort: Effort) -> Verdict:
    """The capacity of the best literal WAIT over vLLM's, beside the prototype's."""
    literal = {p: s for p, s in found.items() if p in ("wait", "nested_wait")}
    rival = found["vllm_v0"]
    ratios = {p: s.over(rival) for p, s in literal.items()}
    close = [abs(r / _PROTOTYPE[name] - 1) <= _CLOSE for r in ratios.values()]
    parts = ", ".join(
        f"{p} ({options_of(s.setup)}) {s.requests_per_s:.4g}/s, ratio {ratios[p]:.2f} "
        f"({ratios[p] / _PROTOTYPE[name] - 1:+.0%})"
        for p, s in literal.items()
    )
    return Verdict(
        f"{name}: best literal WAIT over vllm_v0 is {_PROTOTYPE[name]:.2f}, within {_CLOSE:.0%}",
        f"{parts}; vllm_v0 {rival.requests_per_s:.4g}/s; {effort.arrivals} arrivals a run",
        "holds" if any(close) else "does not hold",
    )


def _gain_verdict(name: str, found: dict[str, Sustained]) -> Verdict:
    gains = {
        policy: found["wait"].over(s)
        for policy, s in found.items()
        if policy not in ("wait", "nested_wait")
    }
    parts = ", ".join(f"{gain - 1:+.0%} over {policy}" for policy, gain in gains.items())
    return Verdict(
        f"{name}: WAIT's peak throughput is 20-30% above vLLM and Sarathi",
        parts,
        judge(*(gain >= _CLAIMED_GAIN for gain in gains.values())),
    )


def _unit_verdict(bounds: dict[str, float]) -> Verdict:
    """No unit of time makes the low rates low and the high ones sustainable but a long one, so the
    printed figures are read as requests of a run, and only their proportions are used."""
    over = {name: rate / bounds[name] for name, rate in _PAPER_RATES.items()}
    return Verdict(
        "the printed rates, 1,000 + 1,000 and 6,000 + 4,000 + 2,000, are requests a second",
        f"{over['low']:.2f} and {over['high']:.0f} times the fluid capacity bound: no machine of "
        f"this profile serves the high ones in less than {over['high']:.0f} s; taken as requests "
        "a run, of which only the proportions matter",
        judge(*(x <= 1 for x in over.values())),
    )


def _latency_verdict(points: list[tuple[str, Point]]) -> Verdict:
    """Latency at the lightest load of the curves against the rivals'."""
    worse, parts = [], []
    for name in _PAPER_RATES:
        mine = [p for w, p in points if w == name]
        least = min(p.rate for p in mine)
        first = {p.policy: p.latency_s for p in mine if p.rate == least}
        if first["wait"] and first["vllm_v0"]:
            worse.append(first["wait"] <= 2 * first["vllm_v0"])
            parts.append(
                f"{name} at {least:.3g}/s: {first['wait']:.3g} s against {first['vllm_v0']:.3g} s"
            )
        else:
            worse.append(False)
            parts.append(f"{name} at {least:.3g}/s: nothing finished")
    return Verdict(
        "WAIT's latency is only slightly higher at low loads (at most twice vllm_v0's)",
        "; ".join(parts),
        judge(*worse),
    )


def _curves(name: str, found: dict[str, Sustained], bound: float, effort: Effort) -> list[Point]:
    """WAIT with the fluid planner's thresholds for each load, where they fit, else with those of
    its capacity; rivals as they are."""
    traffic = unit_traffic(name)
    drawn = ("wait", "vllm_v0", "sarathi")
    highest = max(found[policy].requests_per_s for policy in drawn) or bound
    points = []
    for share in effort.shares:
        rate = share * highest
        planned = planned_thresholds(traffic, rate)
        wait = wait_choice(traffic, planned).setup if planned else found["wait"].setup
        setups = {"wait": wait, **{p: found[p].setup for p in ("vllm_v0", "sarathi")}}
        points += [
            measure(policy, setup, name, rate, effort.curve_arrivals)
            for policy, setup in setups.items()
        ]
    return points


ENTRY = Entry(NAME, "WAIT on known output lengths: throughput and latency", run)
