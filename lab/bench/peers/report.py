"""The figures as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.bench.peers.engines import BY_POLICY
from lab.bench.peers.passes import PeerCell, kept, median, shown

Run = dict[str, Any]


def runs_of(cells: Sequence[PeerCell], tried: Sequence[PeerCell], wanted: int) -> list[Run]:
    """One entry for each cell, with what was tried of its engine, model, mode and batch size."""
    references = {
        (c.setup.model.name, c.batch): c.token_ids
        for c in sorted(cells, key=lambda cell: cell.mode == "target")
        if c.is_ours
    }
    return [
        _run(cell, references.get((cell.setup.model.name, cell.batch), []), tried, wanted)
        for cell in cells
    ]


def equal_share(token_ids: list[list[int]], reference: list[list[int]]) -> float | None:
    """Share of the places of `reference` that hold the same token."""
    places = [
        a == b
        for x, y in zip(token_ids, reference, strict=False)
        for a, b in zip(x, y, strict=True)
    ]
    return sum(places) / len(places) if places else None


def _run(cell: PeerCell, reference: list[list[int]], tried: Sequence[PeerCell], wanted: int) -> Run:
    counted, flag = kept(cell.passes, wanted)
    rated = bool(counted) and cell.error is None
    return {
        **_names(cell),
        "tokens_per_s": median(counted) if rated else None,
        "best_tokens_per_s": max(p.tokens_per_s for p in counted) if rated else None,
        "passes": [
            {"tokens_per_s": p.tokens_per_s, "cpu_over_wall": p.share, "others": p.other}
            for p in cell.passes
        ],
        "thrown_out": len(cell.passes) - len(counted),
        "cpu_over_wall": sum(p.share for p in counted) / len(counted) if counted else None,
        "flag": flag if rated else "",
        "equal_tokens": equal_share(cell.token_ids, reference),
        "error": cell.error,
        "facts": cell.facts,
        "tried": [
            {
                "settings": dict(other.setup.settings),
                "drafter": other.setup.drafter,
                "draft_tokens": other.setup.draft_tokens,
                "best_tokens_per_s": other.best,
                "error": other.error,
            }
            for other in tried
            if _place(other) == _place(cell)
        ],
    }


def _names(cell: PeerCell) -> Run:
    setup = cell.setup
    length: int | str = "policy" if setup.draft_tokens == BY_POLICY else setup.draft_tokens
    return {
        "model": setup.model.name,
        "batch": cell.batch,
        "engine": setup.engine.name,
        "mode": cell.mode,
        "drafter": setup.drafter,
        "draft_tokens": length,
        "settings": dict(setup.settings),
    }


def _place(cell: PeerCell) -> tuple[str, str, str, int]:
    # Settings are tried on one model of a shape and hold for the others.
    model = cell.setup.model
    where = model.shape if cell.mode == "target" else model.name
    return cell.setup.engine.name, where, cell.mode, cell.batch


def print_report(runs: Sequence[Run], verdict: dict[str, Any]) -> None:
    console = Console(width=150)
    for model in dict.fromkeys(run["model"] for run in runs):
        console.print(_table(model, [run for run in runs if run["model"] == model]))
    for line in verdict["lines"]:
        console.print(line, highlight=False)
    console.print("met" if verdict["met"] else "not met", style="bold")


def _table(model: str, runs: Sequence[Run]) -> Table:
    table = Table(title=f"{model}: tokens per second, prefill included")
    for column in ("batch", "engine", "drafter", "k"):
        table.add_column(column)
    for column in ("median", "best", "CPU / wall", "thrown out", "equal tokens"):
        table.add_column(column, justify="right")
    table.add_column("settings; remarks")
    for run in sorted(runs, key=lambda r: (r["batch"], r["mode"] != "target")):
        equal = run["equal_tokens"]
        said = ", ".join(f"{k} {v}" for k, v in run["settings"].items())
        remark = run["error"] or run["flag"]
        rated = run["tokens_per_s"] is not None
        table.add_row(
            str(run["batch"]),
            run["engine"],
            run["drafter"] or "(target only)",
            str(run["draft_tokens"] or ""),
            shown(run["tokens_per_s"]) if rated else "",
            shown(run["best_tokens_per_s"]) if rated else "",
            f"{run['cpu_over_wall']:.2f}" if rated else "",
            str(run["thrown_out"] or ""),
            "" if equal is None else f"{equal:.3f}",
            said + (f"; {remark}" if remark else ""),
        )
    return table
