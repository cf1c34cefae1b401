"""What a step takes in each of `lab.bench.vllm_arrivals`' arms, over a line through stock's steps.

    python -m lab.bench.step_costs FILE.jsonl [--json] [--result FILE]

FILE is what `lab.bench.vllm_arrivals --out` wrote. The line is over all that a step computes
(positions, decoding requests, their contexts, pairs of tokens in prompts), with least squares of
relative errors through the steps of stock as shipped, of each stretch by itself: the machine's
speed differs between stretches. Medians over the steps of all stretches that every arm served.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from lab.bench.vllm_arrivals import ARMS
from lab.common.results import Results, ResultTable, parser, tell
from lab.common.statistics import FloatArray
from penstock.fluid.step_profile import StepWork

SIZES = ((1, 1 << 16), (4, 8), (8, 16), (128, 256), (512, 700))


def steps_of(found: Any) -> tuple[FloatArray, FloatArray]:
    """[steps, 5] terms, and seconds, of a stretch."""
    rows = [(StepWork(*step[:-1]), step[-1]) for step in found["steps"]]
    terms = [
        (1.0, w.num_positions, w.num_decodes, w.num_kv_tokens, w.prefill_context) for w, _ in rows
    ]
    return np.array(terms), np.array([seconds for _, seconds in rows])


def costs(path: Path) -> dict[str, list[float]]:
    """By arm: medians over stock's line, by `SIZES`. Raises: OSError."""
    by_load: dict[str, dict[str, Any]] = defaultdict(dict)
    names = {json.dumps(list(arm)): name for name, arm in ARMS.items()}
    for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
        run = json.loads(line)
        about, arm = run["about"], json.dumps(run["about"]["arm"])
        if about["rate"] is not None and arm in names:
            by_load[f"{about['stretch']}, {about['rate']}"][names[arm]] = run["found"]
    over: dict[str, list[tuple[FloatArray, FloatArray]]] = {name: [] for name in ARMS}
    for runs in by_load.values():
        if len(runs) < len(ARMS):
            continue
        terms, seconds = steps_of(runs["default"])
        line, _ = nnls(terms / seconds[:, None], np.ones(len(seconds)))
        for name, found in runs.items():
            terms, seconds = steps_of(found)
            over[name].append((terms[:, 1], seconds / (terms @ line)))
    told = {}
    for name, found in over.items():
        sizes, ratios = (np.concatenate(column) for column in zip(*found, strict=True))
        told[name] = [float(np.median(ratios[(a <= sizes) & (sizes < b)])) for a, b in SIZES]
    return told


def main() -> int:
    options = parser(__doc__)
    options.add_argument("file", type=Path)
    args = options.parse_args()
    found = costs(args.file)
    header = ("arm", "all steps", *(f"{a} to {b - 1} positions" for a, b in SIZES[1:]))
    rows = [[name, *(f"{x:.3f}" for x in row)] for name, row in found.items()]
    return tell(args, Results(found, tables=[ResultTable("Over stock's line", header, rows)]))


if __name__ == "__main__":
    sys.exit(main())
