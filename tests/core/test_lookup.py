"""Look-up in texts: against a plain search, between requests, and between tenants."""

import random
from collections.abc import Sequence

import pytest

from penstock.core.lookup import LONGEST_MATCH, SHORTEST_MATCH, TEXT_END, TextIndex, TextLookUp
from penstock.core.state import RequestState
from penstock.core.types import Match, Request


def search(kept: Sequence[int], first: int, text: Sequence[int]) -> tuple[int, int]:
    """The definition: of the places whose tokens before them end the text, within what is kept, the
    one with most of them; the latest of several. first: position of kept[0]"""
    best = (0, 0)
    for place in range(len(kept) - 1, SHORTEST_MATCH - 1, -1):
        length = 0
        while (
            length < min(place, len(text), LONGEST_MATCH)
            and kept[place - 1 - length] == text[-1 - length]
        ):
            length += 1
        if length >= max(SHORTEST_MATCH, best[1] + 1):
            best = (first + place, length)
    return best


@pytest.mark.parametrize("capacity", [16, 61, 1000])
@pytest.mark.parametrize("vocab_size", [5, 12])
def test_equals_a_plain_search(capacity: int, vocab_size: int) -> None:
    rng = random.Random(capacity + vocab_size)
    index, fed = TextIndex(capacity), []
    num_found = 0
    while len(fed) < 300:
        for _ in range(rng.randint(1, 9)):
            fed.append(TEXT_END if rng.random() < 0.02 else rng.randrange(vocab_size))
        index.append(fed[len(index) :])
        kept = fed[-capacity:]
        text = [rng.randrange(vocab_size) for _ in range(8)]
        if rng.random() < 0.7:
            begin = rng.randrange(len(kept))
            text += [t for t in kept[begin : begin + 6] if t != TEXT_END]
        found = index.find(text)
        assert found == search(kept, len(fed) - len(kept), text)
        num_found += found != (0, 0)
        after = fed[found[0] : found[0] + 5]
        if found != (0, 0):
            end = after.index(TEXT_END) if TEXT_END in after else len(after)
            assert index.after(found[0], 5) == after[:end]
    assert num_found > 20


def continued(text: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
    """The definition: what follows the text's own end elsewhere in it, overlap allowed."""
    place, length = search(text, 0, text)
    extended = list(text)
    for i in range(num_tokens if length else 0):
        extended.append(extended[place + i])
    return extended[len(text) :], length


@pytest.mark.parametrize("vocab_size", [4, 12])
def test_a_text_goes_on_as_a_plain_search_says(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    index, text, num_found = TextIndex(400), [], 0
    while len(text) < 300:
        fed = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.4:
            begin = rng.randrange(len(text) + 1)
            fed += text[begin : begin + 5]
        index.append(fed)
        text += fed
        assert len(index) == len(text)
        for num_tokens in (0, 1, 5, 50):
            found = index.continued(num_tokens)
            assert found == continued(text, num_tokens)
            num_found += bool(found[1])
    assert num_found > 20


def test_a_repeated_text_goes_on_periodically() -> None:
    index = TextIndex(100)
    index.append([1, 2, 3, 4, 5] * 2 + [1, 2])
    assert index.continued(8) == ([3, 4, 5, 1, 2, 3, 4, 5], 7)


def test_nothing_to_look_up() -> None:
    index = TextIndex(100)
    for fed in ([], [1], [2, 3], [4]):
        index.append(fed)
        assert index.continued(4) == ([], 0)
        assert index.find([1, 2]) == (0, 0)


@pytest.mark.parametrize("length", [65, 90, 200])
@pytest.mark.parametrize("capacity", [200, 260])
def test_a_first_text_taken_in_at_once_is_as_token_by_token(length: int, capacity: int) -> None:
    rng = random.Random(length)
    text = [rng.randrange(4) for _ in range(length)]
    at_once, one_by_one = TextIndex(capacity), TextIndex(capacity)
    at_once.append(text)
    for token in text:
        one_by_one.append([token])
    for token in (rng.randrange(4) for _ in range(150)):
        assert len(at_once) == len(one_by_one)
        assert at_once.tokens() == one_by_one.tokens()
        assert at_once.continued(9) == one_by_one.continued(9)
        end = list(at_once.tokens())[-9:-3]
        assert at_once.find(end) == one_by_one.find(end)
        at_once.append([token])
        one_by_one.append([token])


def state_of(name: str, prompt: Sequence[int], tenant: str = "default") -> RequestState:
    request = Request(name, len(prompt), 64, tenant=tenant, prompt_token_ids=tuple(prompt))
    return RequestState(request, 0)


def found(look_up: TextLookUp, state: RequestState, num_tokens: int = 4) -> list[int]:
    match = look_up.match(state, num_tokens)
    return [] if match is None else [*match.token_ids]


def put_out(look_up: TextLookUp, tenant: str, prompt: Sequence[int], out: Sequence[int]) -> None:
    """A request that comes and goes."""
    state = state_of(f"{tenant} {prompt} {out}", prompt, tenant)
    look_up.match(state, 4)
    state.append(out)
    look_up.release_request(state)


def test_what_a_request_put_out_is_found_for_the_next_of_its_tenant() -> None:
    look_up = TextLookUp("suffix")
    put_out(look_up, "a", [1, 2], [10, 11, 12, 13, 14, 15])
    assert found(look_up, state_of("next", [5, 6, 10, 11, 12], "a")) == [13, 14, 15], "to its end"
    assert found(look_up, state_of("other", [5, 6, 10, 11, 12], "b")) == []
    assert found(look_up, state_of("prompt", [9, 1, 2, 10], "a")) == [], "of the output alone"


def test_the_longer_match_counts_and_the_own_text_if_equal() -> None:
    look_up = TextLookUp("suffix")
    put_out(look_up, "a", [1], [20, 10, 11, 12, 13, 14])
    state = state_of("own", [10, 11, 12, 30, 31, 10, 11, 12], "a")
    assert look_up.match(state, 2) == Match((30, 31), 3, "own")
    state.append([30, 20, 10, 11, 12])
    assert look_up.match(state, 9) == Match((13, 14), 4, "tenant"), "without the end of the text"
    state.append([13])
    assert look_up.match(state, 9) == Match((14,), 5, "tenant")
    put_out(look_up, "a", [1], [30, 20, 10, 11, 12, 13])
    match = look_up.match(state, 1)
    assert match is None or match.token_ids, "at the end of an output nothing follows"


def test_without_memory_only_the_own_text_is_read() -> None:
    look_up = TextLookUp("ngram", remembers=False)
    put_out(look_up, "a", [1], [10, 11, 12, 13])
    assert found(look_up, state_of("next", [10, 11, 12], "a")) == []
    assert not look_up.memory(["a"])
    state = state_of("own", [10, 11, 12, 30, 10, 11, 12], "a")
    assert look_up.match(state, 2) == Match((30, 10), 3, "own")


def test_what_was_put_out_before_a_preemption_is_not_read_again() -> None:
    """The text is the same; only its KV was lost."""
    look_up = TextLookUp("suffix")
    state = state_of("r", [10, 11, 12], "a")
    state.append([20, 10, 11, 12])
    assert found(look_up, state, 1) == [20]
    state.epoch += 1
    state.append([20])
    assert found(look_up, state, 2) == [10, 11]


def test_the_oldest_output_and_the_tenant_of_long_ago_are_forgotten() -> None:
    look_up = TextLookUp("suffix", corpus_tokens=24, most_tenants=2)
    put_out(look_up, "a", [1], [10, 11, 12, 13])
    assert found(look_up, state_of("r1", [10, 11, 12], "a")) == [13]
    put_out(look_up, "a", [1], list(range(100, 122)))
    assert found(look_up, state_of("r2", [10, 11, 12], "a")) == []
    assert found(look_up, state_of("r3", [118, 119, 120], "a")) == [121]
    put_out(look_up, "b", [1], [50, 51, 52, 53])
    put_out(look_up, "c", [1], [60, 61, 62, 63])
    assert found(look_up, state_of("r4", [118, 119, 120], "a")) == []
    assert found(look_up, state_of("r5", [60, 61, 62], "c")) == [63]


def test_memory_is_restored() -> None:
    look_up = TextLookUp("suffix")
    put_out(look_up, "a", [1], [10, 11, 12, 13])
    put_out(look_up, "b", [1], [20, 21, 22, 23])
    again = TextLookUp("suffix")
    again.restore_memory(look_up.memory(["a"]))
    assert found(again, state_of("r1", [10, 11, 12], "a")) == [13]
    assert found(again, state_of("r2", [20, 21, 22], "b")) == []
