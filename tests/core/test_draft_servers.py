"""Draft servers: orders that are answered later, by events, or never."""

import pytest

from penstock.core.ahead import LinePiece
from penstock.core.kv import BlockPool
from penstock.core.policies.base import (
    AllocationPolicy,
    DraftCandidate,
    ReplayProposal,
    SelectionPolicy,
    View,
)
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import DrafterStatus, DraftStage, Grant, Outcome, RequestState
from penstock.core.types import (
    TARGET,
    Arrive,
    DraftAhead,
    DrafterDown,
    DrafterUp,
    DraftReady,
    DraftSource,
    Output,
    Request,
    StepPlan,
    StepResult,
    Tenant,
    Verdict,
)

VERIFY_S = 0.03


class Watching(AllocationPolicy):
    """The same for everybody; remembers what it saw."""

    name = "watching"

    def __init__(self) -> None:
        self.offered: list[list[str]] = []
        self.outcomes: list[list[tuple[str, int]]] = []

    def allocate(self, candidates: list[DraftCandidate], view: View) -> list[Grant]:  # type: ignore[override]
        self.offered.append([c.state.request.id for c in candidates])
        return [Grant(4, min_survival=0.25) for _ in candidates]

    def reserve(self, state: RequestState) -> int:
        return 4

    def on_step(self, outcomes: list[Outcome], now: float) -> None:  # type: ignore[override]
        self.outcomes.append([(o.state.request.id, o.verdict.num_proposed) for o in outcomes])


class Desk:
    """A scheduler with the target and the draft servers played by hand."""

    def __init__(
        self,
        pipeline: str,
        tenants: list[Tenant] | None = None,
        selection: SelectionPolicy | None = None,
    ) -> None:
        self.allocation = Watching()
        self.scheduler = Scheduler(
            BlockPool(256, 4),
            [],
            admission=make_policy("admission", "vllm_v1"),
            selection=selection or make_policy("selection", "single"),
            allocation=self.allocation,
            pipeline=make_pipeline(pipeline),
            max_model_len=256,
            tenants=tenants or [],
        )
        self.now = 0.0

    def arrive(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.apply(Arrive(request), self.now)

    def ask(self, lane: str = TARGET) -> StepPlan:
        return self.scheduler.schedule(self.now, lane)

    def send(self, lane: str) -> StepPlan:
        """Ask a remote lane; that its orders were sent is all the result there is."""
        plan = self.ask(lane)
        if not plan.is_empty:
            self.scheduler.update(plan, StepResult(plan.id, lane, self.now, self.now))
        return plan

    def verify(self, accepted: int = 2) -> tuple[StepPlan, list[Output]]:
        plan = self.ask()
        assert plan.items, "the target waits"
        self.now += VERIFY_S
        verdicts = tuple(
            Verdict(
                i.request_id,
                i.epoch,
                i.round,
                tuple(range(min(accepted, i.num_draft_tokens) + 1)),
                i.drafter,
                i.num_draft_tokens,
                min(accepted, i.num_draft_tokens),
            )
            for i in plan.items
        )
        result = StepResult(plan.id, TARGET, self.now - VERIFY_S, self.now, verdicts)
        return plan, self.scheduler.update(plan, result)

    def answer(
        self, order_plan: StepPlan, num: int = 4, after: float = 0.02, waited_s: float = 0.0
    ) -> None:
        self.now += after
        for o in order_plan.drafts:
            key = (o.request_id, o.epoch, o.round)
            ready = DraftReady(*key, o.drafter, num, waited_s=waited_s)
            self.scheduler.apply(ready, self.now)

    def up(self, *names: str, tenant: str | None = None) -> None:
        for name in names:
            self.scheduler.apply(DrafterUp(name, 8, tenant), self.now)


def request(name: str, drafter: str = "auto", tenant: str = "default") -> Request:
    return Request(name, 6, 40, drafter=drafter, tenant=tenant)


def prefilled(pipeline: str) -> Desk:
    """Two servers, a request of each, both past their first token."""
    desk = Desk(pipeline)
    desk.up("s1", "s2")
    desk.arrive(request("r1", "s1"), request("r2", "s2"))
    desk.verify()
    return desk


def test_a_round_over_two_servers() -> None:
    desk = prefilled("off")
    first, second = desk.send("s1"), desk.send("s2")
    (order,) = first.drafts
    assert (order.start, order.num_catch_up_tokens, order.max_draft_tokens) == (7, 0, 4)
    assert order.min_survival == 0.25
    assert order.deadline is not None
    assert order.deadline > desk.now
    assert desk.allocation.offered == [["r1", "r2"]], "lanes of one turn share what was allocated"
    assert desk.send("s1").is_empty, "one order at a time"

    desk.answer(first)
    assert desk.ask().is_empty, "the barrier waits for the second server"
    desk.answer(second, num=3)
    plan, outputs = desk.verify(accepted=2)
    assert [(i.source, i.num_draft_tokens) for i in plan.items] == [
        (DraftSource.HELD, 4),
        (DraftSource.HELD, 3),
    ]
    assert [len(o.token_ids) for o in outputs] == [3, 3]
    assert desk.allocation.outcomes[-1] == [("r1", 4), ("r2", 3)]


def test_asynchronously_what_is_ready_goes() -> None:
    desk = prefilled("async")
    first, second = desk.send("s1"), desk.send("s2")
    desk.answer(first)
    plan, _ = desk.verify()
    assert [i.request_id for i in plan.items] == ["r1"]
    again = desk.send("s1")
    assert [o.request_id for o in again.drafts] == ["r1"]
    assert desk.allocation.offered[-1] == ["r1", "r2"], "the other one counts, though not due"
    desk.answer(second)
    plan, _ = desk.verify()
    assert [i.request_id for i in plan.items] == ["r2"]


@pytest.mark.parametrize("pipeline", ["off", "async"])
def test_a_frozen_server_delays_the_others_by_one_deadline(pipeline: str) -> None:
    desk = prefilled(pipeline)
    first, second = desk.send("s1"), desk.send("s2")
    desk.answer(first)
    (order,) = second.drafts
    assert order.deadline is not None
    if pipeline == "off":
        waiting = desk.ask()
        assert waiting.is_empty
        assert waiting.wake_at == order.deadline
    desk.now = order.deadline
    plan, _ = desk.verify()
    assert {i.request_id: i.source for i in plan.items} == {
        "r1": DraftSource.HELD,
        "r2": DraftSource.NONE,
    }
    for _ in range(3):
        assert desk.send("s2").is_empty, "no orders for a server that does not answer"
        desk.answer(desk.send("s1"))
        plan, _ = desk.verify()
        assert len(plan.items) == 2, "nobody waits, and its requests go on alone"

    desk.answer(second)
    assert [o.request_id for o in desk.send("s2").drafts] == ["r2"], "a late answer shows it lives"
    assert desk.scheduler.table.requests["r2"].draft.stage is not DraftStage.HELD, (
        "but it is an old round's"
    )


def test_repeated_and_foreign_answers_change_nothing() -> None:
    desk = prefilled("async")
    plan = desk.send("s1")
    (order,) = plan.drafts
    for wrong in (
        DraftReady("r1", order.epoch, order.round, "s2", 4),
        DraftReady("r1", order.epoch + 1, order.round, "s1", 4),
        DraftReady("r1", order.epoch, order.round + 1, "s1", 4),
        DraftReady("r9", order.epoch, order.round, "s1", 4),
    ):
        desk.scheduler.apply(wrong, desk.now)
        assert desk.scheduler.table.requests["r1"].draft.stage is not DraftStage.HELD
    desk.answer(plan, num=99)
    held = desk.scheduler.table.requests["r1"].draft
    assert held.num_draft_tokens == order.max_draft_tokens, "not more than was ordered"
    desk.answer(plan, num=1)
    assert desk.scheduler.table.requests["r1"].draft == held


def test_a_server_that_leaves_takes_nothing_with_it() -> None:
    desk = prefilled("off")
    first = desk.send("s1")
    desk.send("s2")
    desk.answer(first)
    desk.scheduler.apply(DrafterDown("s2"), desk.now)
    assert "s2" not in desk.scheduler.lanes
    plan, _ = desk.verify()
    assert [i.request_id for i in plan.items] == ["r1", "r2"]
    desk.up("s2")
    assert [o.request_id for o in desk.send("s2").drafts] == ["r2"]


def test_requests_go_to_the_least_loaded_server_that_may_see_them() -> None:
    desk = Desk("async", [Tenant("open", shares_prompts=True), Tenant("closed")])
    desk.up("s1", "s2", tenant="owner")
    desk.arrive(*(request(f"o{i}", tenant="open") for i in range(4)))
    desk.arrive(request("c", tenant="closed"), request("w", tenant="owner"))
    desk.verify()
    orders = {lane: [o.request_id for o in desk.send(lane).drafts] for lane in ("s1", "s2")}
    assert sorted(orders["s1"] + orders["s2"]) == ["o0", "o1", "o2", "o3", "w"]
    assert abs(len(orders["s1"]) - len(orders["s2"])) <= 1
    before = {r: lane for lane, ids in orders.items() for r in ids}
    plan, _ = desk.verify()
    assert [i.request_id for i in plan.items] == ["c"], "it goes on alone, and waits for nobody"
    assert {r: desk.scheduler.table.requests[r].drafter for r in before} == before


def test_round_trips_are_told_from_drafting() -> None:
    links = Desk("off").scheduler.learn.links
    first_patience = links.patience("s", 4)
    for n in [1, 5, 3, 2, 8, 4] * 10:
        links.add_transfer("s", n, 0.03 + 0.012 * n)
    assert links.seconds("s", 0) == pytest.approx(0.03, rel=0.1)
    assert links.seconds("s", 11) - links.seconds("s", 1) == pytest.approx(0.12, rel=0.05)
    assert links.seconds("s", 10) < links.patience("s", 10) < first_patience
    assert links.seconds("unknown", 4) == links.seconds("s", 4), (
        "what others take is the best guess"
    )


def test_a_prompt_goes_where_its_tenant_allows_even_by_name() -> None:
    desk = Desk("async", [Tenant("open", shares_prompts=True), Tenant("closed")])
    desk.up("s", tenant="owner")
    desk.scheduler.apply(DrafterUp("own", 8, "owner", takes_assignments=False), desk.now)
    desk.arrive(
        request("o", "s", "open"),
        request("c", "s", "closed"),
        request("w", "own", "owner"),
        request("a", tenant="owner"),
    )
    desk.verify()
    assert [o.request_id for o in desk.send("s").drafts] == ["o", "a"]
    assert [o.request_id for o in desk.send("own").drafts] == ["w"], "its own, and nothing assigned"


class Leaving(SelectionPolicy):
    """One server for all, which may soon go to `s2`."""

    name = "leaving"
    chosen = "s1"

    def select(self, states, view) -> dict[str, str | None]:
        return {s.request.id: self.chosen for s in states}

    def replays(self, states, view) -> list[ReplayProposal]:
        return [ReplayProposal(s, "s2") for s in states if s.drafter != "s2"]


def test_a_text_is_sent_once_before_a_switch() -> None:
    """And not to a server that must not see it."""
    policy = Leaving()
    desk = Desk("off", [Tenant("closed")], policy)
    desk.up("s1")
    desk.up("s2", tenant="default")
    desk.arrive(request("r"), request("c", tenant="closed"))
    desk.verify()
    for texts in ([("r", 0)], []):
        drafts = desk.send("s1")
        assert [(o.request_id, o.max_draft_tokens) for o in desk.send("s2").drafts] == texts
        assert desk.send("s2").is_empty
        desk.answer(drafts)
        desk.verify()
    for policy.chosen, again in (("s2", []), ("s1", ["r"])):
        drafts = desk.send(policy.chosen)
        assert {o.max_draft_tokens for o in drafts.drafts} == {4}
        desk.answer(drafts)
        assert [o.request_id for o in desk.send("s2").drafts] == again
        desk.verify()
    desk.scheduler.apply(DrafterDown("s2"), desk.now)
    assert not desk.scheduler.table.sent_ahead


def ahead(desk: Desk, *token_ids: int, start: int = 7, line: int = 1, drafter: str = "s1") -> None:
    """A line behind the first output token of `r1`."""
    pieces = (LinePiece(line, start, token_ids, line),)
    desk.scheduler.apply(DraftAhead("r1", drafter, pieces), desk.now)


def test_a_draft_at_hand_is_verified_without_an_order() -> None:
    """The toy target says 0, 1, 2, … in every round."""
    desk = prefilled("async")
    ahead(desk, 0, 1, 2, 3, 9)
    assert desk.send("s1").is_empty, "there is nothing to wait for"
    plan, _ = desk.verify(accepted=1)
    (item,) = [i for i in plan.items if i.request_id == "r1"]
    assert (item.source, item.token_ids) == (DraftSource.KNOWN, (0, 1, 2, 3))
    assert item.num_draft_tokens == 4
    state = desk.scheduler.table.requests["r1"]
    assert state.output_token_ids == [0, 0, 1]
    assert state.at_hand("s1") == (2, 3, 9), "accepted 0, and the next is what the line says"
    assert [o.request_id for o in desk.send("s1").drafts] == ["r1"], "three are fewer than granted"
    counters = desk.scheduler.table.counters
    assert (counters.ahead, counters.ahead_used) == (5, 4)


def test_less_than_is_granted_is_verified_where_the_rest_is_far_away() -> None:
    for seconds, num_at_hand in ((0.0, 0), (5.0, 2)):
        desk = prefilled("async")
        for n in [1, 2, 4, 8] * 5:
            desk.scheduler.learn.links.add_transfer("s1", n, seconds)
        ahead(desk, 0, 1)
        assert len(desk.send("s1").drafts) == (not num_at_hand)
        draft = desk.scheduler.table.requests["r1"].draft
        assert len(draft.token_ids) == num_at_hand


def test_what_the_text_has_contradicted_is_not_used() -> None:
    desk = prefilled("async")
    ahead(desk, 0, 7, 7, 7, 7, 7)
    desk.send("s1")
    desk.verify(accepted=1)
    assert desk.scheduler.table.requests["r1"].at_hand("s1") == ()
    (order,) = desk.send("s1").drafts
    assert order.request_id == "r1"


def test_lines_go_with_their_server() -> None:
    desk = prefilled("async")
    ahead(desk, 0, 1, 2, 3, drafter="s2")
    assert desk.scheduler.table.requests["r1"].ahead is None, "not the one that drafts for it"
    ahead(desk, 0, 1, 2, 3)
    desk.scheduler.apply(DrafterDown("s1"), desk.now)
    assert desk.scheduler.table.requests["r1"].ahead is None
    ahead(desk, 0, 1, 2, 3)
    plan, _ = desk.verify()
    assert all(i.source is not DraftSource.KNOWN for i in plan.items)
    desk.up("s1")
    assert [o.request_id for o in desk.send("s1").drafts] == ["r1"]


def test_lines_of_unknown_requests_change_nothing() -> None:
    desk = prefilled("async")
    pieces = (LinePiece(1, 7, (1, 2), 1),)
    for event in (DraftAhead("r9", "s1", pieces), DraftAhead("r1", "s9", pieces)):
        assert desk.scheduler.apply(event, desk.now) == []
    assert desk.scheduler.table.counters.ahead == 0


def test_lines_show_that_a_silent_server_lives() -> None:
    desk = prefilled("async")
    desk.scheduler.table.drafters["s1"].status = DrafterStatus.SILENT
    assert desk.send("s1").is_empty
    ahead(desk, 5)
    desk.scheduler.table.counters.version += 1
    assert [o.request_id for o in desk.send("s1").drafts] == ["r1"]


def test_a_server_that_reads_a_text_is_not_waited_for_and_teaches_nothing() -> None:
    desk = prefilled("off")
    order = desk.send("s1").drafts[0]
    desk.answer(desk.send("s2"))
    known = desk.scheduler.learn.acceptance.mean("r1", "s1")
    reading = DraftReady(order.request_id, order.epoch, order.round, "s1", 0, is_reading=True)
    desk.scheduler.apply(reading, desk.now)
    plan, _ = desk.verify()
    assert {i.request_id: i.num_draft_tokens for i in plan.items} == {"r1": 0, "r2": 4}
    assert desk.scheduler.learn.acceptance.mean("r1", "s1") == known
    links = desk.scheduler.learn.links
    assert links.patience("s1", 4) > 1 > links.patience("s2", 4), "no draft of it was timed"
    assert [o.request_id for o in desk.send("s1").drafts] == ["r1"], "it gets the next order"


def test_a_link_has_an_estimate_before_its_first_draft() -> None:
    desk = prefilled("off")
    desk.scheduler.apply(DrafterUp("s1", 8, round_trip_s=0.3), desk.now)
    desk.answer(desk.send("s2"))
    links = desk.scheduler.learn.links
    other = links.seconds("s2", 4) - links.seconds("s2", 0)
    assert links.seconds("s1", 4) == pytest.approx(0.3 + other)
    assert links.patience("s1", 4) > 1, "it has to read the text first"
    desk.answer(desk.send("s1"), after=0.1)
    assert links.seconds("s1", 4) < 0.3, "a draft says more"


def test_drafts_of_one_length_do_not_hide_a_measured_round_trip() -> None:
    links = Desk("off").scheduler.learn.links
    links.add_round_trip("s", 0.3)
    for _ in range(2):
        links.add_transfer("s", 8, 0.38)
    assert links.seconds("s", 8) == pytest.approx(0.38)
    assert links.seconds("s", 1) == pytest.approx(0.31, abs=0.01)


def test_waiting_for_other_work_is_no_part_of_a_link() -> None:
    desk = prefilled("off")
    desk.answer(desk.send("s1"), after=0.02)
    desk.answer(desk.send("s2"), after=0.12, waited_s=0.1)
    links = desk.scheduler.learn.links
    assert links.seconds("s2", 4) == pytest.approx(links.seconds("s1", 4))
    assert links.patience("s2", 4) == pytest.approx(links.patience("s1", 4))
