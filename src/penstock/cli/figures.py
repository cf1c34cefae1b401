"""Tables of the figures of simulated runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.cli.terminal import print_table

_COLUMNS = {"mean": "mean", "p50": "p50", "p99": "p99", "p999": "p99.9", "max": "max"}


def print_figures(figures: dict[str, Any], title: str) -> None:
    """Print a table of times, and the other figures as lines."""
    times = {
        "latency_s": "latency, s",
        "ttft_s": "time to first token, s",
        "tpot_s": "time per output token, s",
        "slowdown": "slowdown",
    }
    rows = (
        (name, *(_number(figures[key][column]) for column in _COLUMNS))
        for key, name in times.items()
    )
    print_table(title, ("", *_COLUMNS.values()), rows)
    if len(figures["by_prompt_len"]) > 1:
        _print_by_prompt_len(figures["by_prompt_len"])
    print("\n".join(_lines(figures)))


def print_explanation(rows: list[dict[str, Any]], title: str) -> None:
    """Print the rows of `sim.explain`."""
    from penstock.sim.explain import COLUMNS

    cells = ([v if isinstance(v, str) else _number(v) for v in row.values()] for row in rows)
    print_table(title, [name.replace("_", " ") for name in COLUMNS], cells)


_TIMES = {"latency_s": "latency", "ttft_s": "time to first token", "tpot_s": "per output token"}
_COUNTS = {
    "throughput_requests_per_s": "requests/s",
    "throughput_tokens_per_s": "tokens/s",
    "slo_goodput": "requests/s within their targets",
    "requests_refused": "refused",
    "requests_unfinished": "unfinished",
    "preemptions": "preemptions",
    "kv_peak_tokens": "KV peak, tokens",
    "kv_tokens": "KV memory, tokens",
}


def print_side_by_side(runs: dict[str, dict[str, Any]], title: str) -> None:
    """Print a table with a column per run, by its name."""
    rows = [(name, *map(_number, values)) for _, name, values in _compared([*runs.values()])]
    print_table(title, ("", *runs), rows)


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return mean, its 95% interval and one run's, for each figure that all runs have."""
    from penstock.sim.capacity import Estimate

    known = ((key, values) for key, _, values in _compared(runs) if None not in values)
    means = {
        key: Estimate.from_values([float(v) for v in values if v is not None])
        for key, values in known
    }
    return {
        key: {
            "mean": mean.mean,
            "interval_95": [mean.low, mean.high],
            "one_run_95": mean.one_of(len(runs)),
        }
        for key, mean in means.items()
    }


def print_over_seeds(runs: list[dict[str, Any]], title: str) -> None:
    """Print a table of means over several runs."""
    names = {key: name for key, name, _ in _compared(runs)}
    rows = [
        (names[key], *map(_number, (found["mean"], *found["interval_95"], *found["one_run_95"])))
        for key, found in over_seeds(runs).items()
    ]
    columns = ("", "mean", "95% from", "to", "one run from", "to")
    print_table(title, columns, rows)


def _compared(runs: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[float | None]]]:
    for key, name in _TIMES.items():
        for column in ("mean", "p99"):
            values = [run[key][column] for run in runs]
            yield f"{key}.{column}", f"{name}, {_COLUMNS[column]}, s", values
    for key, name in _COUNTS.items():
        if all(key in run for run in runs):
            yield key, name, [run[key] for run in runs]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _print_by_prompt_len(groups: list[dict[str, Any]]) -> None:
    columns = ("prompt tokens", "requests", "latency, s", "time to first token, s", "slowdown")
    rows = []
    for group in groups:
        shortest, longest = group["prompt_len"]
        values = (group["latency_s"], group["ttft_s"], group["slowdown"])
        lengths = f"{shortest:,} to {longest:,}"
        rows.append((lengths, f"{group['requests']:,}", *(f"{v:.4g}" for v in values)))
    print_table("means by prompt length", columns, rows)


def _met(figures: dict[str, Any]) -> str:
    asked, met = (figures["latency_targets"][key] for key in ("requests", "met"))
    return f"{met:,} of {asked:,} met ({met / asked:.1%})"


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figures['requests_completed']:,} requests completed, "
        f"{figures['requests_refused']:,} refused, {figures['requests_unfinished']:,} unfinished"
    )
    yield (
        f"{figures['throughput_requests_per_s']:.4g} requests/s, "
        f"{figures['throughput_tokens_per_s']:.4g} tokens/s; {figures['steps']:,} steps, "
        f"{figures['preemptions']:,} preemptions, KV peak {figures['kv_peak_tokens']:,} tokens"
    )
    if figures["stalled"]:
        yield f"stalled: {figures['stalled']}"
    if "slo_goodput" in figures:
        met = ", ".join(f"{n} {'met' if ok else 'missed'}" for n, ok in figures["slo_met"].items())
        yield f"{figures['slo_goodput']:.4g} requests/s within their targets; p99: {met}"
    if "latency_targets" in figures:
        yield f"targets of requests: {_met(figures)}"
    if "draft_tokens_proposed" in figures:
        yield (
            f"{figures['draft_tokens_proposed']:,} draft tokens, "
            f"{figures['draft_tokens_accepted']:,} accepted"
        )
    if figures.get("drafters"):
        shares = (f"{n} {own['rounds']:,}" for n, own in figures["drafters"].items())
        yield (
            f"rounds by drafter: {', '.join(shares)}; "
            f"{figures['switches_per_request']:.3g} switches a request"
        )
    for name, own in figures.get("tenants", {}).items():
        mean = own["latency_s"]["mean"]
        yield (
            f"tenant {name}: {own['throughput_tokens_per_s']:.4g} tokens/s, mean latency "
            f"{'none' if mean is None else f'{mean:.4g} s'}"
            f"{f', targets: {_met(own)}' if 'latency_targets' in own else ''}"
        )
    if figures.get("jain") is not None:
        yield f"Jain's index {figures['jain']:.4f}"
    yield f"{figures['wall_s']:.2f} s of wall time"
