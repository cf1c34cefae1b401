"""What steps take over stock's line, from a file of recorded steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.bench.step_costs import SIZES, costs
from lab.bench.vllm_arrivals import ARMS

SLOWER = {"default": 1.0, "plug-in": 1.1, "engine": 1.05}


def stretch(arm: str, number: int, rate: float | None = 40.0) -> dict[str, Any]:
    """The second one on a machine half as fast."""
    rng = np.random.default_rng(number)
    steps = []
    for _ in range(400):
        decodes, prompt = int(rng.integers(1, 16)), int(rng.choice([0, 160, 560]))
        kv = decodes * int(rng.integers(50, 200))
        work = [prompt, prompt**2 / 2, decodes, kv, 0]
        seconds = 0.002 + 6e-5 * (prompt + decodes) + 1e-7 * kv
        steps.append([*work, seconds * number * SLOWER[arm]])
    about = {"arm": list(ARMS[arm]), "stretch": number, "rate": rate}
    return {"about": about, "found": {"steps": steps}}


def test_an_arm_is_compared_with_stock_in_the_same_stretch(tmp_path: Path) -> None:
    runs = [stretch(arm, number) for arm in ARMS for number in (1, 2)]
    # Of no load, and one that stock alone has served.
    runs += [stretch("default", 3, None), stretch("default", 4)]
    file = tmp_path / "runs.jsonl"
    file.write_text("\n\n".join(map(json.dumps, runs)))
    for name, row in costs(file).items():
        assert row == pytest.approx([SLOWER[name]] * len(SIZES), rel=0.01)
