"""Fairness between tenants: 27 of them in the simulator, and a quiet one beside a greedy one live.

    python -m benchmarks.tenants [simulated] [live] [--seeds N] [--out FILE.jsonl] [--report]

`simulated`: tenants with Zipf loads at 0.9 and 1.5 times the capacity. `live`: four clients beside
80 and 400 on `penstock serve`, weights 1:1 and 10:1. Figures go to a file, a line each, and are not
measured again; the report has means over the seeds with 95% intervals (medians for `live`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.figures import interval, line
from benchmarks.tenants_live import CASES, Seconds, measure, serving
from benchmarks.tenants_simulated import CAPACITY, LOADS, figures


class Record:
    """Figures by key, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.done: dict[str, dict[str, Any]] = {(f := json.loads(x))["key"]: f for x in lines}

    def note(self, key: str, found: dict[str, Any]) -> None:
        self.done[key] = {"key": key, **found}
        with self._path.open("a") as file:
            file.write(json.dumps(self.done[key]) + "\n")
        print(json.dumps(self.done[key]), flush=True)


def simulated(record: Record, seeds: int, num_requests: int) -> None:
    for seed in range(seeds):
        for admission in CAPACITY:
            for load in LOADS:
                key = f"simulated/{admission}/{load}/{seed}"
                if key not in record.done:
                    record.note(key, figures(admission, load, seed, num_requests))


def live(record: Record, seeds: int, seconds: Seconds) -> None:
    for seed in range(seeds):
        for weight in sorted({w for _, w in CASES}):
            keys = {
                g: f"live/{g}/{weight:g}:1/{seed}"
                for g, w in CASES
                if w == weight and f"live/{g}/{weight:g}:1/{seed}" not in record.done
            }
            if not keys:
                continue
            with serving(weight) as port:
                for greedy, key in keys.items():
                    record.note(key, measure(port, greedy, weight, seconds, seed))


def report(record: Record) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, found in record.done.items():
        groups.setdefault(key.rpartition("/")[0], []).append(found)
    for name, runs in sorted(groups.items()):
        for figure in runs[0]:
            if figure == "key":
                continue
            values = [run[figure] for run in runs]
            mean, half = interval(values)
            print(
                f"{name} {figure}: {mean:.4g} ± {half:.2g}, median {statistics.median(values):.4g}"
            )
        if name.startswith("simulated"):
            worst, _ = interval([run["worst_ttft_over_bar"] for run in runs])
            kept, _ = interval([run["throughput_over_without"] for run in runs])
            print(line(worst <= 1, f"{name}: the worst TTFT is {worst:.2f} of its bar"))
            print(line(kept >= 0.98, f"{name}: {kept:.3f} of the throughput"))
        else:
            due = statistics.median(run["of_what_is_due"] for run in runs)
            ttft = statistics.median(run["ttft_over_bar"] for run in runs)
            print(line(due >= 0.9, f"{name}: {due:.2f} of what is due"))
            print(line(ttft <= 1, f"{name}: TTFT is {ttft:.2f} of its bar"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["simulated", "live", []])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000, help="of a simulated run")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a live measurement")
    parser.add_argument("--out", type=Path, default=Path("tenants.jsonl"))
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    record = Record(given.out)
    if not given.report:
        parts = given.parts or ["simulated", "live"]
        if "simulated" in parts:
            simulated(record, given.seeds, given.requests)
        if "live" in parts:
            live(record, given.seeds, Seconds(0.8 * given.seconds, given.seconds))
    report(record)


if __name__ == "__main__":
    main()
