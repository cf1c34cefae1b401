"""The ragged-batch planner: nothing lost, nothing twice, and the costs counted by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.common.layouts import LAYOUTS, KVShape, compare
from penstock.fluid.packing import AttentionCost, Decomposition, best_decomposition, cut, decompose

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=12)
COSTS = st.builds(
    AttentionCost,
    per_call=st.just(0.0),
    per_kv_token=st.floats(0.1, 10),
    per_score=st.floats(0, 10),
    per_partial=st.floats(0, 100),
)
SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=5, dtype_bytes=4, block_size=4)


def check(plan: Decomposition, lengths: list[int]) -> None:
    """Every token once, no two in one place, no row longer than L, and the padding as counted."""
    places, tokens = [], []
    for k in range(plan.num_pieces):
        request, row = int(plan.request[k]), int(plan.row[k])
        count = int(plan.stop[k] - plan.start[k])
        assert count > 0
        assert 0 <= plan.offset[k] <= plan.row_length - count
        places += [(row, int(plan.offset[k]) + i) for i in range(count)]
        tokens += [(request, int(plan.start[k]) + i) for i in range(count)]
    assert sorted(tokens) == [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    assert len(set(places)) == len(places)
    assert {row for row, _ in places} == set(range(plan.num_rows))
    assert plan.padding == plan.num_rows * plan.row_length - sum(lengths)
    slots = sorted(zip(plan.row.tolist(), plan.slot.tolist(), strict=True))
    assert slots == [
        (row, slot)
        for row, group in itertools.groupby(slots, key=lambda x: x[0])
        for slot in range(len(list(group)))
    ]
    assert plan.num_slots == max(slot for _, slot in slots) + 1


@given(lengths=LENGTHS, num_rows=st.integers(1, 30))
def test_rows_of_pieces_hold_every_token_once(lengths: list[int], num_rows: int) -> None:
    plan = decompose(lengths, num_rows)
    check(plan, lengths)
    assert plan.num_rows <= num_rows
    # The shortest row that can hold everything: a shorter one is too small for any packing.
    assert (plan.row_length - 1) * num_rows < sum(lengths) <= plan.row_length * num_rows
    assert plan.padding < num_rows
    assert plan.num_pieces <= len(lengths) + num_rows


@given(lengths=LENGTHS, row_length=st.integers(1, 320))
def test_cut_rows_hold_one_piece_each(lengths: list[int], row_length: int) -> None:
    plan = cut(lengths, row_length)
    check(plan, lengths)
    assert plan.num_slots == 1
    assert plan.num_rows == sum(-(-n // row_length) for n in lengths)


@given(lengths=LENGTHS, window=st.integers(1, 8), cost=COSTS)
def test_the_best_is_no_dearer_than_what_it_is_chosen_from(lengths, window, cost) -> None:
    def seconds(plan: Decomposition) -> float:
        shape = KVShape(1, 1, 1, 1)
        costs = dict.fromkeys(LAYOUTS, cost)
        found = compare(lengths, [window] * len(lengths), shape, costs, plan)["decomposed"].seconds
        assert found is not None
        return found

    best = best_decomposition(lengths, window, cost)
    check(best, lengths)
    for other in (decompose(lengths, len(lengths)), cut(lengths, max(lengths))):
        assert seconds(other) >= seconds(best) * (1 - 1e-9)


def test_a_long_request_is_cut_and_stitched_onto_short_ones() -> None:
    plan = decompose([10, 4, 4], 3)
    assert (plan.num_rows, plan.row_length, plan.padding) == (3, 6, 0)
    pieces = zip(plan.request, plan.start, plan.stop, plan.row, plan.offset, strict=True)
    assert [tuple(map(int, p)) for p in pieces] == [
        (0, 0, 6, 0, 0),
        (2, 0, 4, 1, 0),
        (0, 8, 10, 1, 4),
        (1, 0, 4, 2, 0),
        (0, 6, 8, 2, 4),
    ]


def test_what_each_layout_costs_is_counted() -> None:
    lengths, queries = [10, 4, 4], [2, 3, 1]
    costs = {layout: AttentionCost(1000.0, 10.0, 0.1, 1.0) for layout in LAYOUTS}
    found = compare(lengths, queries, SHAPE, costs)
    packed, padded, decomposed = (found[layout] for layout in LAYOUTS)
    assert SHAPE.token_bytes == 2 * 2 * 3 * 5 * 4
    assert (packed.kv_tokens, packed.padding, packed.kv_read) == (12 + 4 + 4, 2, 18)
    assert (packed.query_rows, packed.scores, packed.partials) == (6, 20 + 12 + 4, 0)
    assert packed.seconds == pytest.approx(2 * (3 * 1000 + 180 + 3.6))
    assert (padded.kv_tokens, padded.padding, padded.kv_bytes) == (30, 12, 30 * 240)
    assert (padded.query_rows, padded.scores) == (9, 90)
    assert padded.seconds == pytest.approx(2 * (1000 + 300 + 9))
    # Three rows of six, two pieces in a row; request 0 lies in three pieces.
    assert (decomposed.kv_tokens, decomposed.padding) == (18, 0)
    assert (decomposed.query_rows, decomposed.scores) == (3 * 2 * 3, 3 * 2 * 3 * 6)
    assert decomposed.partials == 3 * 2 + 3 + 1
    assert decomposed.seconds == pytest.approx(2 * (1000 + 180 + 10.8 + 10))
    assert compare(lengths, queries, SHAPE)["packed"].seconds is None


def test_where_copies_of_queries_cost_nothing_the_paper_s_rows_are_best() -> None:
    lengths = [1000, 300, 200, 100]
    best = best_decomposition(lengths, 4, AttentionCost(0.0, 1.0, 0.0, 10.0))
    assert best.padding == 0
    assert best.num_rows == 2
    dear = best_decomposition(lengths, 4, AttentionCost(0.0, 1.0, 1.0, 0.01))
    assert dear.num_slots == 1
    assert dear.row_length < 100


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_lengths_below_one_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token for each"):
        decompose(lengths, 2)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rows is 0; must be at least 1"):
        decompose([3], 0)
    with pytest.raises(ValueError, match="row_length is 0; must be at least 1"):
        cut([3], 0)
    with pytest.raises(ValueError, match="a number of at least 1 for each of 2 requests"):
        compare([3, 4], [1], SHAPE)
    with pytest.raises(ValueError, match="a number of at least 1 for each of 2 requests"):
        compare([3, 4], [1, 0], SHAPE)
