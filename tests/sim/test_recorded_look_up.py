"""Look-up of recorded texts on the virtual clock, alone and beside drafters."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from penstock.core.state import RequestState
from penstock.core.types import LOOK_UP, Request
from penstock.sim.acceptance import AcceptanceByDrafter, GeometricAcceptance
from penstock.sim.drafters import DrafterCounts, parse_drafter_seconds
from penstock.sim.lookup import RecordedLookUp, RecordedText, parse_proposers, read_texts, row_of
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.traces import WorkloadError
from penstock.sim.workloads import Workload


def text_of(found_share: float, num: int = 200) -> RecordedText:
    """A text in which look-up finds eight right tokens at so many positions, spread evenly."""
    every = round(1 / found_share)
    found = [(1, 16, 8, 8) if i % every == 0 else (0, 0, 0, 0) for i in range(num)]
    return RecordedText("made up", 50, found, {})


def played(
    look_up: RecordedLookUp | None, drafters: tuple[str, ...] = ()
) -> tuple[Report, Counter]:
    """Ten requests, one after the other."""
    profile = load_profile("qwen2.5-coder-1.5b-zen4")
    given = parse_drafter_seconds(["small=0.004:0.0005"])
    setup = Setup(
        replace(profile, drafters=given),
        acceptance=GeometricAcceptance({"small": 0.7}),
        drafters=drafters,
        look_up=look_up,
    )
    load = Workload("ten", np.full(10, 50), np.full(10, 200), np.arange(10) * 60.0)
    counts = DrafterCounts()
    return run(setup, load, instruments=[counts]), counts.rounds


def test_it_finds_what_was_found_right_and_wrong() -> None:
    text = RecordedText("made up", 3, [(0, 0, 0, 0), (2, 7, 5, 2)], {})
    state = RequestState(Request("r", 3, 9), 0)
    look_up = RecordedLookUp([text])
    assert look_up.match(state, 8) is None
    state.append((3,))
    match = look_up.match(state, 8)
    assert (match.token_ids, match.length, match.source) == ((4, 5, -1, -1, -1), 7, "tenant")
    shorter = look_up.match(state, 1)
    assert shorter.token_ids == (4,)


def test_what_is_found_saves_steps() -> None:
    steps = {}
    for share in (None, 0.1, 1.0):
        look_up = None if share is None else RecordedLookUp([text_of(share)])
        report, _ = played(look_up)
        assert report.completed.all()
        steps[share] = report.result.num_steps
    assert steps[None] > 1.3 * steps[0.1] > 1.3 * 1.5 * steps[1.0]


def test_a_drafter_makes_what_is_seldom_found() -> None:
    """Where look-up finds in a tenth of the rounds the drafter drafts in the others; where it finds
    in all there is nothing left."""
    _, seldom = played(RecordedLookUp([text_of(0.1)]), ("small",))
    assert seldom["small"] > 2 * seldom[LOOK_UP] > 0
    _, always = played(RecordedLookUp([text_of(1.0)]), ("small",))
    assert always["small"] < 0.3 * always[LOOK_UP]


def test_the_bundled_texts_and_their_drafters() -> None:
    texts = read_texts()
    assert {t.kind for t in texts} == {"code", "edit", "chat", "json", "summary"}
    assert sum(t.is_held_out for t in texts) == len(texts) / 2
    look_up, models = parse_proposers((), 0, "texts")
    assert look_up is not None
    assert list(models) == list(texts[0].right)
    assert row_of(0, "7", 60) == row_of(0, "7", 60) < 60


@pytest.mark.parametrize(
    ("asked", "has_look_up", "drafters"),
    [
        (["small=0.7"], False, ["small"]),
        (["suffix"], True, []),
        (["suffix+small=0.7"], True, ["small"]),
        (["suffix", "small=0.7", "suffix+large=0.9,0.8"], True, ["small", "large"]),
    ],
)
def test_spellings(asked: list[str], has_look_up: bool, drafters: list[str]) -> None:
    look_up, models = parse_proposers(asked, 0, None)
    assert (look_up is not None, list(models)) == (has_look_up, drafters)
    assert isinstance(AcceptanceByDrafter(models), AcceptanceByDrafter)


@pytest.mark.parametrize(
    ("asked", "acceptance", "said"),
    [
        (["suffix+"], None, "a drafter is NAME=RATE"),
        (["nobody"], "texts", "no texts were recorded with 'nobody'; there are qwen2.5-coder-0.5b"),
        (["small"], None, "a drafter is NAME=RATE"),
        (["ngram+small=0.7"], None, "look-up before a drafter is suffix"),
    ],
)
def test_bad_spellings_are_named(asked: list[str], acceptance: str | None, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        parse_proposers(asked, 0, acceptance)


def test_on_the_command_line(cli) -> None:
    command = ["simulate", "--profile", "qwen2.5-coder-1.5b-zen4", "--workload", "low"]
    command += ["--rate", "0.1", "--requests", "20", "--json"]
    code, out, _ = cli(
        *command, "--drafter", "suffix+small=0.7", "--drafter-seconds", "small=0.004"
    )
    found = json.loads(out)
    assert code == 0
    assert set(found["drafters"]) == {LOOK_UP, "small"}
    code, _, err = cli(*command, "--acceptance", "texts", "--drafter", "nobody")
    assert (code, err.count("\n")) == (2, 1)
    assert "nobody" in err
