"""Look-up of the longest suffix: against a plain search, between requests, and between tenants."""

import random
from collections.abc import Sequence

import pytest
from penstock.engine.drafters.lookup import LONGEST_MATCH
from penstock.engine.drafters.suffix import SHORTEST_MATCH, TEXT_END, SuffixDrafter, SuffixIndex

from penstock.core.types import DraftOrder, Request, SamplingParams
from penstock.engine.sequences import TokenBuffer


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
    index, fed = SuffixIndex(capacity), []
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


def buffer(name: str, prompt: Sequence[int], tenant: str = "default") -> TokenBuffer:
    request = Request(
        name,
        len(prompt),
        64,
        tenant=tenant,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
    )
    return TokenBuffer(request)


def draft(drafter: SuffixDrafter, text: TokenBuffer, num_tokens: int = 4) -> list[int]:
    order = DraftOrder(text.request.id, 0, 0, drafter.name, text.length, 0, num_tokens)
    return drafter.draft([order], [text]).drafts[0].token_ids


def put_out(drafter: SuffixDrafter, tenant: str, prompt: Sequence[int], out: Sequence[int]) -> None:
    """A request that comes and goes."""
    text = buffer(f"{tenant} {prompt} {out}", prompt, tenant)
    text.append(out)
    draft(drafter, text)
    drafter.release_request(text.request.id)


def test_what_a_request_put_out_is_drafted_for_the_next_of_its_tenant() -> None:
    drafter = SuffixDrafter("suffix")
    put_out(drafter, "a", [1, 2], [10, 11, 12, 13, 14, 15])
    assert draft(drafter, buffer("next", [5, 6, 10, 11, 12], "a")) == [13, 14, 15], "to its end"
    assert draft(drafter, buffer("other", [5, 6, 10, 11, 12], "b")) == []
    assert draft(drafter, buffer("prompt", [9, 1, 2, 10], "a")) == [], "of the output alone"


def test_the_oldest_output_and_the_tenant_of_long_ago_are_forgotten() -> None:
    drafter = SuffixDrafter("suffix", corpus_tokens=24, most_tenants=2)
    put_out(drafter, "a", [1], [10, 11, 12, 13])
    assert draft(drafter, buffer("r1", [10, 11, 12], "a")) == [13]
    put_out(drafter, "a", [1], list(range(100, 122)))
    assert draft(drafter, buffer("r2", [10, 11, 12], "a")) == []
    assert draft(drafter, buffer("r3", [118, 119, 120], "a")) == [121]
    put_out(drafter, "b", [1], [50, 51, 52, 53])
    put_out(drafter, "c", [1], [60, 61, 62, 63])
    assert draft(drafter, buffer("r4", [118, 119, 120], "a")) == []
    assert draft(drafter, buffer("r5", [60, 61, 62], "c")) == [63]
