"""`auto` on the virtual clock: with draft servers it is as good as any pipeline for all loads."""

import pytest

from lab.bench.never_behind import servers


@pytest.mark.parametrize(("num", "round_trip", "verify"), [(4, 0.005, 0.1), (4, 0.3, 0.03)])
def test_auto_is_as_good_as_the_better_of_waiting_for_all_drafts_and_for_some(
    num: int, round_trip: float, verify: float
) -> None:
    """Control: two micro-batches are far behind, though drafters are busy all the time."""
    rates = {p: servers(num, round_trip, verify, "priced", p, 0) for p in ("auto", "off", "2")}
    assert rates["auto"] >= 0.98 * rates["off"]
    assert rates["2"] < 0.7 * rates["auto"]
