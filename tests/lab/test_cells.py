"""A comparison that is stopped and continued."""

import json
from functools import partial
from pathlib import Path

import pytest

from lab.common.cells import Cells, Figures
from penstock.sim.parallel import workers


def doubled(number: int) -> Figures:
    if number == 3:
        raise ValueError("three")
    return {"double": 2 * number}


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_what_is_there_is_not_measured_again(num: int, tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    batch = {f"cell/{n}": partial(doubled, n) for n in range(5)}
    with workers(num) as pool:
        with pytest.raises(ValueError, match="three"):
            Cells(path).measure_all(batch, pool)
        kept = path.read_text(encoding="utf-8")
        assert [json.loads(line)["key"] for line in kept.splitlines()] == list(batch)[:3]
        continued = Cells(path)
        found = continued.measure_all(batch | {"cell/3": partial(doubled, 6)}, pool)
    assert [figures["double"] for figures in found] == [0, 2, 4, 12, 8]
    assert path.read_text(encoding="utf-8").startswith(kept)
    assert Cells(path).values("cell", "double") == [0, 2, 4, 12, 8]
    assert Cells(path).measure("cell/4", partial(doubled, 3))["double"] == 8
