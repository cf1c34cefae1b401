"""Known texts on the virtual clock: the engine's look-up, and what is right of what it finds."""

import pytest

from lab.common.played_texts import KnownText, PlayedTexts
from penstock.core.state import RequestState
from penstock.core.types import Request, VerifyItem

REPEATED = KnownText((1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 9, 6), {"small": [3, 2, 1, 0, 1, 0]})
AGAIN = KnownText((30, 31), (2, 3, 4, 9, 6, 8), {"small": [0] * 6})


def state_of(texts: list[KnownText], number: int, num_output: int) -> RequestState:
    """As the simulator has it: of the tokens only their number is known."""
    text = texts[number]
    state = RequestState(Request(str(number), len(text.prompt_ids), len(text.output)), 0)
    state.append(list(range(len(text.prompt_ids), len(text.prompt_ids) + num_output)))
    return state


@pytest.fixture
def played() -> PlayedTexts:
    return PlayedTexts.new([REPEATED, AGAIN])


def test_what_is_found_is_right_up_to_the_first_other_token(played: PlayedTexts) -> None:
    state = state_of([REPEATED, AGAIN], 0, 3)
    match = played.match(state, 4)
    # Behind 1 2 3 the prompt goes on with 4 5 6 7, the answer with 4 9 6.
    assert match is not None
    assert (match.token_ids, match.source) == ((10, -1, -1, -1), "own")
    assert played.match(state_of([REPEATED, AGAIN], 1, 3), 4) is None


def test_an_answer_is_found_once_it_has_ended(played: PlayedTexts) -> None:
    texts = [REPEATED, AGAIN]
    ended = state_of(texts, 0, 6)
    played.match(ended, 1)
    assert played.match(state_of(texts, 1, 3), 2) is None
    other = PlayedTexts.new(texts)
    other.match(ended, 1)
    other.release_request(ended)
    match = other.match(state_of(texts, 1, 3), 4)
    assert match is not None
    assert (match.token_ids, match.source) == ((5, 6), "tenant")


def test_drafts_are_accepted_as_far_as_they_are_right(played: PlayedTexts) -> None:
    item = VerifyItem("0", 0, 0, 7, 1, True, num_draft_tokens=2, drafter="small")
    assert [played.num_accepted(item, p) for p in range(7)] == [2, 2, 1, 0, 1, 0, 0]
