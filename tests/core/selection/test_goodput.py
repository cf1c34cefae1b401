import dataclasses

import pytest
from tests.core.selection.rounds import Machine

from penstock.core.policies.base import View
from penstock.core.policies.selection.parts.goodput import ObservedGoodput, RoundTimes
from penstock.core.state import Drafter, DrafterKind, DrafterStatus, Outcome, RequestState
from penstock.core.types import TARGET, Request, Status, Verdict

MACHINE = Machine({"small": 1e-3, "large": 3e-3}, verify=10e-3, per_row=0.1e-3)


def make_state(name: str = "r", drafter: str | None = None, made: int = 10) -> RequestState:
    state = RequestState(Request(name, 100, 200), 0)
    state.status = Status.RUNNING
    state.kv_of(TARGET).num_computed_tokens = 100
    state.append([0] * made)
    state.drafter = drafter
    state.round = 3
    return state


def times(num_requests: int, beside: bool = False) -> RoundTimes:
    machine = dataclasses.replace(MACHINE, beside=beside)
    names = frozenset(machine.make_drafters()) if beside else frozenset()
    return RoundTimes(View({}, machine.estimators(), beside=names), num_requests)


def drafter(name: str, beside: bool = False) -> Drafter:
    return dataclasses.replace(MACHINE, beside=beside).make_drafters()[name]


def test_charges_add_up_to_the_step_when_all_do_the_same() -> None:
    """Eight requests with five rows each, one drafter for all of them."""
    step = 10e-3 + 40 * 0.1e-3 + 4 * 3e-3
    assert times(8).seconds(drafter("large"), 8, 4) == pytest.approx(step)


def test_inside_a_step_all_wait_for_a_lone_drafter() -> None:
    """Whoever shares a drafter shares its time; a lane of its own delays nobody else."""
    verify = 10e-3 + 40 * 0.1e-3
    assert times(8).seconds(drafter("small"), 2, 4) == pytest.approx(verify + 4 * 4e-3)
    beside = times(8, beside=True).seconds(drafter("small", beside=True), 2, 4)
    assert beside == pytest.approx(verify + 4e-3)


def test_a_draft_servers_time_is_that_of_its_link() -> None:
    estimators = MACHINE.estimators()
    for tokens in (1, 4, 8):
        estimators.links.add_transfer("edge", tokens, 0.05 + 0.01 * tokens)
    remote = Drafter("edge", kind=DrafterKind.SERVER)
    found = RoundTimes(View({}, estimators), 1).draft(remote, 1, 4)
    assert found == pytest.approx(estimators.links.seconds("edge", 4))
    assert found > 0.05


def test_reading_grows_with_the_context_and_is_free_for_the_own_drafter() -> None:
    one = times(1)
    state = make_state(drafter="small")
    assert one.reading(state, drafter("small")) == 0
    assert one.reading(state, drafter("large")) == pytest.approx(110 * 0.02e-3)
    state.append([0] * 90)
    assert one.reading(state, drafter("large")) == pytest.approx(200 * 0.02e-3)
    state.kv_of("large").num_computed_tokens = 150
    assert one.reading(state, drafter("large")) == pytest.approx(50 * 0.02e-3)
    assert times(8).reading(state, drafter("large")) == pytest.approx(8 * 50 * 0.02e-3)
    assert times(8, beside=True).reading(state, drafter("large")) == pytest.approx(50 * 0.02e-3)
    assert one.reading(state, Drafter("lookup")) == 0


def outcome(state: RequestState, accepted: int, proposed: int = 4) -> Outcome:
    tokens = (0,) * (accepted + 1)
    state.append(tokens)
    return Outcome(
        state, Verdict(state.request.id, 0, 0, tokens, state.drafter, proposed, accepted)
    )


def make_work(**changes: bool) -> View:
    drafters = MACHINE.make_drafters()
    for name, value in changes.items():
        setattr(drafters["small"], name, value)
    return View(drafters, MACHINE.estimators())


def test_observed_goodput_is_tokens_per_second_of_the_round_that_was_caused() -> None:
    observed = ObservedGoodput()
    state = make_state("r", "small")
    observed.on_step([outcome(state, 2)], make_work())
    assert observed.estimate("r", "small") == pytest.approx(3 / (10.5e-3 + 4e-3))
    other = make_state("s", "small")
    observed.on_step([outcome(other, 0)], make_work())
    mean = (3 + 1) / 2 / (10.5e-3 + 4e-3)
    assert observed.estimate("t", "small") == pytest.approx(mean, rel=1e-3)
    assert observed.estimate("r", "large") == 0
    observed.release_request("r")
    assert observed.estimate("r", "small") == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("change", [DrafterStatus.DOWN, DrafterStatus.SILENT])
def test_a_round_without_its_drafter_says_nothing_of_it(change: DrafterStatus) -> None:
    observed = ObservedGoodput()
    observed.on_step([outcome(make_state("r", "small"), 0, 0)], make_work(status=change))
    assert not observed.by_model


def test_neither_the_prompts_round_nor_one_without_a_drafter_counts() -> None:
    observed = ObservedGoodput()
    first = make_state("r", "small", made=0)
    observed.on_step([outcome(first, 0, 0), outcome(make_state("s"), 0, 0)], make_work())
    assert not observed.by_model


def test_a_finished_request_counts_for_its_drafter_and_leaves_nothing_behind() -> None:
    observed = ObservedGoodput()
    state = make_state("r", "small")
    state.status = Status.FINISHED
    observed.on_step([outcome(state, 1)], make_work())
    assert observed.by_model["small"].count == 1
    assert observed.estimate("r", "large") == 0
