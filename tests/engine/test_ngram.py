"""N-gram look-up against a plain search of the whole text."""

import random

import pytest
from penstock.engine.drafters.lookup import NgramIndex


def search(text: list[int], num_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The definition: longest suffix first, its most recent earlier occurrence, overlap allowed."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                extended = list(text)
                for i in range(num_tokens):
                    extended.append(extended[start + length + i])
                return extended[len(text) :]
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(4, 2), (3, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("vocab_size", [2, 4, 12])
def test_equals_a_plain_search(max_ngram: int, min_ngram: int, vocab_size: int) -> None:
    rng = random.Random(vocab_size * 10 + max_ngram)
    index = NgramIndex(max_ngram, min_ngram)
    text: list[int] = []
    while len(text) < 150:
        fed = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
        index.append(fed)
        text += fed
        assert len(index) == len(text)
        for num_tokens in (0, 1, 5):
            assert index.propose(num_tokens) == search(text, num_tokens, max_ngram, min_ngram)


def test_nothing_to_propose() -> None:
    index = NgramIndex()
    assert index.propose(4) == []
    index.append([1])
    assert index.propose(4) == []
    index.append([2, 3, 4])
    assert index.propose(4) == []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 2), (0, 0), (3, -1)])
def test_refuses_impossible_lengths(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(ValueError, match="1 <= min_ngram <= max_ngram"):
        NgramIndex(max_ngram, min_ngram)
