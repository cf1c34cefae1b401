"""`auto` on the virtual clock: with draft servers it is as good as any pipeline for all loads."""

from dataclasses import replace

import pytest
from tests.products import first_fast

from lab.bench.never_behind_scenes import servers
from lab.common.families import SPIN_DRAFTERS
from lab.common.steady_batch import SteadyBatch, play
from lab.papers.spin_fig13 import _ACCEPTANCE, _ROWS, _WORKLOADS, drafter
from penstock.core.policies.bundles import AUTO, BUNDLES
from penstock.sim.profiles import load_profile


@pytest.mark.parametrize("link", first_fast([(0.005, 0.1), (0.3, 0.03)]))
def test_auto_is_as_good_as_the_better_of_waiting_for_all_drafts_and_for_some(
    link: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: two micro-batches are far behind, though drafters are busy all the time."""
    rates = {}
    for pipeline in ("auto", "off", "2"):
        monkeypatch.setitem(BUNDLES, AUTO, replace(BUNDLES[AUTO], pipeline=pipeline))
        rates[pipeline] = servers(4, *link, AUTO, 0)["value"]
    assert rates["auto"] >= 0.98 * rates["off"]
    assert rates["2"] < 0.7 * rates["auto"]


def test_a_server_given_up_too_early_is_measured_all_the_same() -> None:
    """Its one draft in time was long: a line through the origin promises short ones too early.

    Each round waited for it in vain, with 5.7 tokens/s."""
    assert servers(4, 0.03, 0.1, AUTO, 3)["value"] > 9


@pytest.mark.parametrize("world", first_fast([("rows", "2"), ("a100-llama2-7b", "off")]))
def test_spins_heuristic_comes_to_the_best_number_on_figure_13s_worlds(world) -> None:
    """Through the scheduler, by the requests that each drafter has; control: four are behind."""
    target, as_good_as = world
    times = _ROWS if target == _ROWS.name else load_profile(target)
    drafters = tuple(drafter(name, times) for name in SPIN_DRAFTERS)
    batch = SteadyBatch(replace(times, drafters=drafters), _WORKLOADS["hard"], 4, _ACCEPTANCE)
    found = {p: play(batch, p, beside=True, rounds=30) for p in ("5%", as_good_as, "4")}
    assert found["5%"] == pytest.approx(found[as_good_as], rel=0.02)
    assert found["4"] < 0.96 * found["5%"]
