"""What Spin's figure 12 makes of known cells, and of whom its batches are made."""

import dataclasses
import sys

import pytest

from lab.common.experiment import LabError
from lab.papers import spin_fig12
from lab.papers.spin_fig12 import LayoutTimes, accuracy, exhaustion, latency, one_memory

ALL = [(name, batch) for name in (*spin_fig12.DATA_SETS, "Mix") for batch in (4, 8, 16, 32)]


def by_layout(packed: float, padded: float, decomposed: float) -> dict[str, float]:
    rows = {spin_fig12._SPIN_ROWS: decomposed}
    return {"packed": packed, "padded": padded, "decomposed": decomposed, **rows}


def turns(packed: float, padded: float, decomposed: float) -> dict[str, list[float]]:
    """Four of them, a little different from each other."""
    noise = (1.0, 1.01, 0.99, 1.005)
    found = by_layout(packed, padded, decomposed)
    return {layout: [seconds * x for x in noise] for layout, seconds in found.items()}


def cells(decomposed: float = 0.6, held: float = 40.0) -> dict[tuple[str, int], LayoutTimes]:
    """Padded steps take a second; at batch 32 they hold 100 tokens, else 50."""
    return {
        (name, batch): LayoutTimes(
            step=turns(0.5, 1.0, decomposed),
            attention=turns(0.5, 1.0, {"Alpaca": 0.4, "CP": 0.9}.get(name, 0.6)),
            held=by_layout(40, 100 if batch == 32 else 50, held),
            real=40,
        )
        for name, batch in ALL
    }


def test_a_reduction_like_the_papers_holds() -> None:
    found = latency(cells(0.65))
    assert found.outcome == "holds"
    assert "the whole step by 35.0% (35.0% to 35.0%), its attention by 60.0%" in found.measured
    assert found.control.outcome == "does not hold"
    assert latency(cells(0.99)).outcome == "holds in part"


def test_memory_must_tell_padding_from_decomposition() -> None:
    assert exhaustion(cells()).outcome == "holds"
    assert exhaustion(cells(held=120.0)).outcome == "does not hold"


def test_one_memory_must_tell_the_data_sets_apart() -> None:
    found = cells()
    assert one_memory(found).outcome == "holds in part"
    for name in ("CP", "Mix"):
        found[name, 32].held["padded"] = 45
    told = one_memory(found)
    assert told.outcome == "holds"
    assert told.control.outcome != "holds"


def test_accuracy_is_to_rounding() -> None:
    exact = cells()["Alpaca", 16]
    assert accuracy(exact).outcome == "holds"
    assert accuracy(dataclasses.replace(exact, errors=(0.1, 0.1))).outcome == "does not hold"


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    # Which another test may have loaded.
    monkeypatch.delitem(sys.modules, "lab.common.rehearsal", raising=False)
    with pytest.raises(LabError, match=r"needs torch"):
        spin_fig12.shape_of(None)
