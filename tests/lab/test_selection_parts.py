"""The comparison of the default selection with itself without its parts."""

from pathlib import Path
from unittest.mock import patch

import pytest

from lab.bench import several_drafters
from lab.bench.selection_parts import VARIANTS, Cell, cells, compare, variant
from lab.common.cells import Cells, Figures
from penstock.core.policies.selection import auto
from penstock.core.types import Request
from penstock.sim.parallel import HERE


def test_a_part_is_missing_only_within_its_variant() -> None:
    request = Request("0", 2, 8, prompt_token_ids=(5, 6))
    with variant("without words"):
        assert not len(auto._words_of(request))
    assert set(auto._words_of(request).tolist()) > {5, 6}


@pytest.mark.parametrize("name", [*VARIANTS])
def test_every_variant_serves_and_the_first_requests_differ(name: str) -> None:
    with patch.object(several_drafters, "_ROUNDS", {8: 0.25}):
        cell = Cell("specialists 0.05 0.4", 8, Path())
        assert cell.measure(name, 0)["early"] > 0


def test_the_first_requests_begin_with_all_drafters_in_turn() -> None:
    begun: list[str | None] = []
    with variant("turns for replays"):
        in_turn = auto.Auto.select

        def noted(self: auto.Auto, states: list, view: object) -> dict:  # type: ignore[type-arg]
            new = [s.request.id for s in states if s.request.id not in self._known]
            chosen = in_turn(self, states, view)  # type: ignore[arg-type]
            begun.extend(chosen[i] for i in new if i in self._known)
            return chosen

        with (
            patch.object(auto.Auto, "select", noted),
            patch.object(several_drafters, "_ROUNDS", {8: 0.5}),
        ):
            several_drafters.with_choice(
                "specialists 0.05 0.4", Path(), 8, False, "vllm_v1, priced, auto", 0
            )
    assert begun[:8] == ["north", "east", "south", "west"] * 2


def test_what_a_part_gains_is_told_by_cell_and_in_the_mean(tmp_path: Path) -> None:
    rates = {"auto": 1.0, "without replays": 0.5}

    class Given(Cell):
        def measure(self, system: str, seed: int) -> Figures:
            return {"value": rates.get(system, 1.0), "early": 1.0}

    results = compare(
        [Given("spin 7B", 8, tmp_path)], range(2), Cells(tmp_path / "out", silent=True), HERE
    )
    assert results.runs["value"]["spin 7B, batch 8"]["without replays"] == 0.5
    assert results.verdicts[0].measured.startswith("0.500, at first 1.000")


def test_draft_servers_have_no_replays_to_do_without(tmp_path: Path) -> None:
    for cell in cells(tmp_path):
        assert ("without replays" in cell.systems) == (cell.scene != "servers")
