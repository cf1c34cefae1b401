"""The figures of a simulated run, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.cli.terminal import print_table

_COLUMNS = {"mean": "mean", "p50": "p50", "p99": "p99", "p999": "p99.9", "max": "max"}


def print_figures(figures: dict[str, Any], title: str) -> None:
    """A table of times, and the rest in lines."""
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


_TIMES = {"latency_s": "latency", "ttft_s": "time to first token", "tpot_s": "per output token"}
_COUNTS = {
    "throughput_requests_per_s": "requests/s",
    "throughput_tokens_per_s": "tokens/s",
    "slo_goodput": "requests/s within their targets",
    "requests_refused": "refused",
    "requests_unfinished": "unfinished",
    "preemptions": "preemptions",
    "kv_peak_tokens": "KV peak, tokens",
}


def print_side_by_side(runs: dict[str, dict[str, Any]], title: str) -> None:
    """A table with a column for each run, by its name."""
    rows = [
        (f"{name}, {_COLUMNS[column]}, s", *(_number(run[key][column]) for run in runs.values()))
        for key, name in _TIMES.items()
        for column in ("mean", "p99")
    ]
    rows += [
        (name, *(_number(run[key]) for run in runs.values()))
        for key, name in _COUNTS.items()
        if all(key in run for run in runs.values())
    ]
    print_table(title, ("", *runs), rows)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _print_by_prompt_len(groups: list[dict[str, Any]]) -> None:
    """Whether long prompts pay for short ones."""
    columns = ("prompt tokens", "requests", "latency, s", "time to first token, s", "slowdown")
    rows = []
    for group in groups:
        shortest, longest = group["prompt_len"]
        values = (group["latency_s"], group["ttft_s"], group["slowdown"])
        lengths = f"{shortest:,} to {longest:,}"
        rows.append((lengths, f"{group['requests']:,}", *(f"{v:.4g}" for v in values)))
    print_table("means by prompt length", columns, rows)


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
        )
    if figures.get("jain") is not None:
        yield f"Jain's index {figures['jain']:.4f}"
    yield f"{figures['wall_s']:.2f} s of wall time"
