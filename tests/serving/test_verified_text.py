import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types import TokenLogprob
from penstock.serving.tracked import Piece, VerifiedText
from penstock.transport.wire import PrefixDigest

PROMPT = [1, 2, 3]


def pieces_of(sizes: list[int]) -> list[Piece]:
    """A text cut into pieces; the last one ends it."""
    pieces, start = [], len(PROMPT)
    for size in sizes:
        tokens = tuple(range(100 + start, 100 + start + size))
        told = tuple(TokenLogprob(-float(t), ((t, -float(t)),)) for t in tokens)
        pieces.append(Piece(start, tokens, num_accepted=size - 1, logprobs=told))
        start += size
    pieces[-1] = pieces[-1]._replace(finish_reason="length")
    return pieces


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 2**32)
)
def test_any_order_and_any_repetition_gives_the_text(sizes, copies, seed) -> None:
    pieces = pieces_of(sizes)
    sent = pieces * copies
    random.Random(seed).shuffle(sent)
    text = VerifiedText(PROMPT)
    news = [fresh for piece in sent for fresh in text.add_piece(piece)]
    assert text.token_ids == PROMPT + [t for p in pieces for t in p.token_ids]
    assert news[: len(pieces)] == pieces
    assert all(
        extra == pieces[-1]._replace(start=len(text), token_ids=(), num_accepted=0, logprobs=())
        for extra in news[len(pieces) :]
    )
    assert text.digest.digest() == PrefixDigest(text.token_ids).digest()


def test_logprobs_stay_with_their_tokens() -> None:
    text = VerifiedText(PROMPT)
    told = tuple(TokenLogprob(-float(n), ()) for n in range(3))
    text.add_piece(Piece(3, (10, 11), logprobs=told[:2]))
    assert text.add_piece(Piece(3, (10, 11, 12), logprobs=told)) == [
        Piece(5, (12,), logprobs=told[2:])
    ]


def test_what_waits_can_be_forgotten() -> None:
    text = VerifiedText(PROMPT)
    text.add_piece(Piece(4, (9,)))
    text.forget_ahead()
    assert text.add_piece(Piece(3, (8,))) == [Piece(3, (8,))]
