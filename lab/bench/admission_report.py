"""Tables of what `lab.bench.admission` has measured, and their result files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lab.common.cells import Cells
from lab.common.results import Results, ResultTable, save, show
from lab.common.statistics import plus_minus

RIVALS = ("sarathi", "vllm_v1", "vllm_v1 8192/1024", "vllm_v0")
ORDERED = (
    "fluid_guided",
    "sarathi 376/320",
    "sarathi",
    "vllm_v1",
    "vllm_v0",
)
NAMES = {
    "conversation": "Azure conversation",
    "sharegpt": "ShareGPT lengths",
    "long": "long prompts",
}
USUAL = ("", "low", "high", "nested", "ten_bins", "conversation", "sharegpt", "long")
ON_THE_CLOCK = "the virtual clock, step times of `a100-llama2-7b`"


def report(cells: Cells, folder: Path | None) -> None:
    """Print the tables of every part, and write them into result files. Raises: OSError."""
    for part, make in PARTS.items():
        tables = [t for t in make(cells) if any(any(row[1:]) for row in t.rows)]
        if not tables:
            continue
        results = Results({}, tables=tables)
        show(results)
        if folder is not None:
            keys = [k for k in cells.done if k.split("/")[0] in (part, *ALSO.get(part, ()))]
            command = f"python -m lab.bench.admission {part}"
            when = max(cells.dates[k] for k in keys).isoformat()
            path = folder / f"{part}.json"
            save(path, results, command=command, date=when, machine=ON_THE_CLOCK)


def grid(
    title: str,
    corner: str,
    rows: dict[str, str],
    columns: Sequence[str],
    cell: Callable[[str], str],
) -> ResultTable:
    """rows: label to the first part of its keys; columns: the second part."""
    cells = [
        [label, *(cell(f"{key}/{column}") for column in columns)] for label, key in rows.items()
    ]
    return ResultTable(title, (corner, *(f"`{c}`" for c in columns)), cells)


def named(part: str, names: Sequence[str], suffix: str = "") -> dict[str, str]:
    return {NAMES.get(n, n): f"{part}/{n}{suffix}" for n in names}


def parts_of(cells: Cells, part: str, position: int) -> list[str]:
    """What keys of a part have there, workloads in their usual order."""
    keys = (k.split("/") for k in cells.done)
    found = dict.fromkeys(k[position] for k in keys if k[0] == part)
    return sorted(found, key=lambda name: USUAL.index(name) if name in USUAL else 0)


def mean(cells: Cells, figure: str, digits: int = 3) -> Callable[[str], str]:
    """With so many significant digits, or as many as the whole number has."""

    def cell(key: str) -> str:
        found = cells.mean(key, figure)
        if found is None:
            return ""
        few = f"{found.mean:.{digits}g}"
        return f"{found.mean:,.0f}" if "e" in few or abs(found.mean) >= 10**digits else few

    return cell


# --- the parts ------------------------------------------------------------------------------------


def capacity(cells: Cells) -> Iterator[ResultTable]:
    names = parts_of(cells, "capacity", 1)
    columns = ("fluid_guided", "sarathi*", "sarathi", "vllm_v1", "vllm_v0")
    shown = grid(
        "Capacity, requests/s",
        "",
        named("capacity", names),
        columns,
        lambda key: plus_minus(m) if (m := cells.mean(key, "capacity")) else "",
    )
    bounds = [mean(cells, "requests_per_s", 4)(f"bound/{n}") for n in names]
    rows = [[*row, bound] for row, bound in zip(shown.rows, bounds, strict=True)]
    yield ResultTable(shown.title, (*shown.header, "bound"), rows)

    def ratio(key: str) -> str:
        ours = key.rpartition("/")[0] + "/fluid_guided"
        found = cells.ratio(ours, key, "capacity")
        return "" if found is None else f"{found.mean:.4f}"

    yield grid(
        "Capacity of `fluid_guided` over theirs", "", named("capacity", names), columns[1:], ratio
    )
    policies = ("fluid_guided", "sarathi*", *RIVALS)
    seconds, first = mean(cells, "latency"), mean(cells, "ttft_p99", 2)
    for share in ("0.5", "0.8", "0.95"):
        yield grid(
            f"Mean latency in s (p99 of TTFT) at {share} of the capacity of `sarathi*`",
            "",
            named("latency", names, f"/{share}"),
            policies,
            lambda key: f"{seconds(key)} ({first(key)})" if seconds(key) else "",
        )


def order(cells: Cells) -> Iterator[ResultTable]:
    policies = [f"{p}, {o}" for p in ORDERED for o in ("arrival", "size_aware")]
    names = parts_of(cells, "order", 1)
    figures = {
        "Mean latency in s": "latency",
        "p99.9 of TTFT in s": "ttft_p999",
        "Mean slowdown of the longest tenth": "slowdown_longest",
    }
    for title, figure in figures.items():
        cell = mean(cells, figure)
        rows = [[f"`{p}`", *(cell(f"order/{n}/0.95/{p}") for n in names)] for p in policies]
        yield ResultTable(f"{title}, at 0.95", ("", *(NAMES.get(n, n) for n in names)), rows)
    compared = {
        "mean latency": "latency",
        "mean TTFT": "ttft",
        "p99.9 of TTFT": "ttft_p999",
        "largest TTFT": "ttft_max",
        "slowdown of the longest tenth": "slowdown_longest",
    }
    rows = []
    for name in names:
        for share in ("0.8", "0.95"):
            key = f"order/{name}/{share}/fluid_guided, "
            ratios = [
                cells.ratio(f"{key}size_aware", f"{key}arrival", f) for f in compared.values()
            ]
            shown = ["" if r is None else plus_minus(r) for r in ratios]
            rows.append([f"{NAMES.get(name, name)}, {share}", *shown])
    yield ResultTable(
        "`fluid_guided`: `size_aware` over `arrival`", ("at the load", *compared), rows
    )


PARTS = {f.__name__: f for f in (capacity, order)}
ALSO = {"capacity": ("latency", "tuned")}
