import hashlib
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.types import SamplingParams, TokenLogprob
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import (
    WEIGHT_SUM,
    PrefixDigest,
    decode_logprobs,
    decode_sampling,
    decode_weights,
    encode_logprobs,
    encode_sampling,
    encode_weights,
    in_effect,
    truncate,
    weight_rows,
)


def distributions(rows: int, vocab: int, seed: int, scale: float) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(scale=scale, size=(rows, vocab))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=5))
def test_the_digest_of_a_prefix_does_not_depend_on_its_pieces(pieces: list[list[int]]) -> None:
    grown = PrefixDigest()
    for piece in pieces:
        grown.extend(piece)
    whole = [token for piece in pieces for token in piece]
    plain = b"".join(token.to_bytes(4, "little") for token in whole)
    assert grown.digest() == hashlib.sha256(plain).digest()[:8] == PrefixDigest(whole).digest()
    assert grown.length == len(whole)
    assert PrefixDigest([*whole, 1]).digest() != grown.digest()


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(0, 10**6),
    st.sampled_from([0.01, 1.0, 5.0, 40.0]),
)
def test_truncated_distributions(rows: int, vocab: int, k: int, seed: int, scale: float) -> None:
    probs = distributions(rows, vocab, seed, scale)
    token_ids, weights = truncate(probs, k)
    assert token_ids.shape == weights.shape == (rows, min(k, vocab))
    assert (weights.sum(axis=1) == WEIGHT_SUM).all()
    assert (weights >= 0).all()
    for row, ids, own in zip(probs, token_ids, weights, strict=True):
        assert len(set(ids.tolist())) == len(ids)
        assert row[ids].min() >= np.sort(row)[::-1][: len(ids)].min()
        kept = row[ids].astype(np.float64)
        assert np.abs(own / WEIGHT_SUM - kept / kept.sum()).max() < 1 / WEIGHT_SUM


def test_weights_divide_exactly() -> None:
    """What is sampled from is what the verification server computes with, in float32."""
    _, weights = truncate(distributions(20, 400, 1, 3.0), 64)
    single = weights.astype(np.float32) / np.float32(WEIGHT_SUM)
    assert (single.astype(np.float64) * WEIGHT_SUM == weights).all()
    assert (single.sum(axis=1, dtype=np.float64) == 1).all()


def test_over_the_wire() -> None:
    token_ids, weights = truncate(distributions(3, 4096, 3, 8.0), 32)
    draft = pb.DraftTokens(weights=encode_weights(weight_rows(token_ids, weights)))
    decoded = decode_weights(pb.DraftTokens.FromString(draft.SerializeToString()).weights)
    for row, (ids, own) in enumerate(decoded):
        assert sum(own) == WEIGHT_SUM
        assert min(own) > 0
        assert dict(zip(ids, own, strict=True)) == {
            int(t): int(w) for t, w in zip(token_ids[row], weights[row], strict=True) if w
        }


@pytest.mark.parametrize("verification", ["coupled", "ratio"])
def test_sampling_over_the_wire(verification: Literal["coupled", "ratio"]) -> None:
    params = SamplingParams(0.7, 0.9, 40, 2**64 - 1, verification, num_logprobs=3)
    sent = pb.Sampling.FromString(encode_sampling(params).SerializeToString())
    assert decode_sampling(sent, 3) == in_effect(params, trusted=True) == params
    assert in_effect(params, trusted=False).verification == "coupled"


def test_logprobs_over_the_wire() -> None:
    values = np.float32([-0.1, -1e-9, -33.3]).tolist()
    told = (
        TokenLogprob(values[0], ((3, values[0]), (4095, values[2]))),
        TokenLogprob(values[1], ()),
    )
    verdict = pb.VerifiedTokens(logprobs=encode_logprobs(told))
    assert (
        decode_logprobs(pb.VerifiedTokens.FromString(verdict.SerializeToString()).logprobs) == told
    )
    assert decode_logprobs(encode_logprobs(())) == ()


@pytest.mark.parametrize(("k", "most"), [(32, 200), (64, 400), (0, 8)])
def test_bytes_a_draft_token(k: int, most: int) -> None:
    """At a vocabulary of 151,936; k = 0 sends no distribution."""
    vocab, num_tokens = 151_936, 8
    token_ids, weights = truncate(distributions(num_tokens, vocab, 4, 2.5), max(k, 1))
    draft = pb.DraftTokens(
        request_id="17",
        epoch=3,
        round=200,
        prefix_len=700,
        prefix_digest=PrefixDigest([1]).digest(),
        token_ids=token_ids[:, -1].tolist(),
        weights=encode_weights(weight_rows(token_ids, weights)) if k else (),
    )
    assert len(pb.Up(draft=draft).SerializeToString()) / num_tokens <= most
