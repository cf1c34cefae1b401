"""The learning policy on recorded acceptance, from several beginnings of the record."""

import os
from pathlib import Path

import pytest
from tests.products import first_fast

from lab.bench.selection_sim import seconds_of
from penstock.sim.acceptance import read_records

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))
REQUESTS = 24


@pytest.mark.slow
@pytest.mark.parametrize("fifth", first_fast(range(5)))
def test_no_beginning_locks_auto_out_of_the_better_drafter(fifth: int) -> None:
    """On gsm8k a token takes 4.6 ms with EAGLE and 9.4 without a draft."""
    path = DATA / "accept_gsm8k.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in the data folder (set PENSTOCK_DATA)")
    rows = read_records(path, ("ngram", "eagle"))
    first = fifth * len(rows["eagle"]) // 5
    part = {drafter: own[first : first + REQUESTS] for drafter, own in rows.items()}
    alone = seconds_of("single", {"drafter": "eagle"}, part).sum()
    assert alone / seconds_of("auto", {}, part).sum() > 0.95
