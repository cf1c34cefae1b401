"""`auto` on the virtual clock: with draft servers it is as good as any pipeline for all loads."""

from dataclasses import replace

import pytest

from lab.bench.never_behind import servers
from penstock.core.policies.bundles import AUTO, BUNDLES


@pytest.mark.parametrize(("num", "round_trip", "verify"), [(4, 0.005, 0.1), (4, 0.3, 0.03)])
def test_auto_is_as_good_as_the_better_of_waiting_for_all_drafts_and_for_some(
    num: int, round_trip: float, verify: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: two micro-batches are far behind, though drafters are busy all the time."""
    rates = {}
    for pipeline in ("auto", "off", "2"):
        monkeypatch.setitem(BUNDLES, AUTO, replace(BUNDLES[AUTO], pipeline=pipeline))
        rates[pipeline] = servers(num, round_trip, verify, AUTO, 0)["value"]
    assert rates["auto"] >= 0.98 * rates["off"]
    assert rates["2"] < 0.7 * rates["auto"]


def test_a_server_given_up_too_early_is_measured_all_the_same() -> None:
    """Its one draft in time was long: a line through the origin promises short ones too early.

    Each round waited for it in vain, with 5.7 tokens/s."""
    assert servers(4, 0.03, 0.1, AUTO, 3)["value"] > 9
