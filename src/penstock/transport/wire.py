"""Wire form of drafts: prefixes as digests, distributions as integer weights.

`ratio` verification is exact only if a draft token was sampled from the reported distribution. A
distribution is therefore cut to its k likeliest tokens and rounded to integers of a fixed sum, and
the token is drawn from those integers. The verification server divides them by the sum, a power of
two, so nothing is rounded a second time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.core.ahead import LinePiece
from penstock.core.types import SamplingParams, StopStrings, TokenLogprob
from penstock.transport.v1 import drafting_pb2 as pb

WEIGHT_SUM = 1 << 16
"""Sum of the integer weights of one distribution: a power of two, part of the protocol."""

MAX_WEIGHTS = 64
"""Most tokens of one distribution, part of the protocol."""

DIGEST_BYTES = 8
"""Length of a prefix digest, part of the protocol."""

FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.int64]

Weights = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids and their integer weights: one truncated distribution."""


class PrefixDigest:
    """Digest of a growing list of token ids.

    First 8 bytes of the SHA-256 of the ids as little-endian uint32."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.length = 0
        self._hash = hashlib.sha256()
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._hash.update(np.asarray(token_ids, dtype="<u4").tobytes())
        self.length += len(token_ids)

    def digest(self) -> bytes:
        return self._hash.digest()[:DIGEST_BYTES]


def truncate(probs: FloatArray, k: int) -> tuple[IntArray, IntArray]:
    """Cut distributions to their k likeliest tokens, as integers that sum to `WEIGHT_SUM`.

    probs: [rows, V], each row of a positive sum. Returns token ids and weights, both [rows, min(k,
    V)]; rows are renormalised and rounded by largest remainders. A token of weight 0 is not part of
    the distribution."""
    k = min(k, probs.shape[1])
    token_ids = np.argpartition(probs, -k, axis=1)[:, -k:].astype(np.int64)
    kept = np.take_along_axis(probs, token_ids, axis=1).astype(np.float64)
    exact = kept * (WEIGHT_SUM / kept.sum(axis=1, keepdims=True))
    weights = np.floor(exact).astype(np.int64)
    missing = WEIGHT_SUM - weights.sum(axis=1, keepdims=True)
    order = np.argsort(weights - exact, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(k)[None], axis=1)
    return token_ids, weights + (rank < missing)


def weight_rows(token_ids: IntArray, weights: IntArray) -> list[Weights]:
    """Return one distribution per row of `truncate`, without the tokens of weight 0."""
    rows = []
    for ids, row in zip(token_ids, weights, strict=True):
        kept = row > 0
        rows.append((tuple(ids[kept].tolist()), tuple(row[kept].tolist())))
    return rows


def encode_weights(rows: Iterable[Weights]) -> list[pb.Distribution]:
    """Return the messages of distributions."""
    return [pb.Distribution(token_ids=ids, weights=weights) for ids, weights in rows]


def decode_weights(messages: Sequence[pb.Distribution]) -> tuple[Weights, ...]:
    """Decode distributions, unchecked (see `checks`)."""
    return tuple((tuple(m.token_ids), tuple(m.weights)) for m in messages)


def encode_pieces(pieces: Iterable[LinePiece]) -> list[pb.LinePiece]:
    """Return the messages of draft pieces."""
    return [
        pb.LinePiece(line=p.line, start=p.start, token_ids=p.token_ids, parent=p.parent)
        for p in pieces
    ]


def decode_pieces(messages: Iterable[pb.LinePiece]) -> tuple[LinePiece, ...]:
    """Decode draft pieces, unchecked (see `checks`)."""
    return tuple(
        LinePiece(m.line, m.start, tuple(m.token_ids), m.parent if m.HasField("parent") else None)
        for m in messages
    )


def encode_sampling(params: SamplingParams) -> pb.Sampling:
    """Return the message of sampling parameters."""
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        ratio=params.verification == "ratio",
    )


def decode_sampling(message: pb.Sampling, num_logprobs: int | None = None) -> SamplingParams:
    """Decode sampling parameters."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        verification="ratio" if message.ratio else "coupled",
        num_logprobs=num_logprobs,
    )


def encode_stop(stop: StopStrings) -> pb.StopStrings:
    """Return the message of stop strings."""
    return pb.StopStrings(
        strings=stop.strings,
        previous=stop.previous,
        shown_token_ids=sorted(stop.shown),
        num_made=stop.num_made,
    )


def decode_stop(message: pb.StopStrings) -> StopStrings:
    """Decode stop strings, unchecked (see `checks`)."""
    previous = message.previous if message.HasField("previous") else None
    shown = frozenset(message.shown_token_ids)
    return StopStrings(tuple(message.strings), previous, shown, message.num_made)


def in_effect(params: SamplingParams, *, trusted: bool) -> SamplingParams:
    """Return the parameters that verify a draft server's drafts: `ratio` only if it is trusted."""
    return params if trusted else replace(params, verification="coupled")


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> list[pb.Logprob]:
    """Return one message per token, in the single precision of the target."""
    messages = []
    for token in logprobs:
        ids, values = zip(*token.top, strict=True) if token.top else ((), ())
        messages.append(pb.Logprob(logprob=token.logprob, top_token_ids=ids, top_logprobs=values))
    return messages


def decode_logprobs(messages: Sequence[pb.Logprob]) -> tuple[TokenLogprob, ...]:
    """Decode log-probabilities."""
    return tuple(
        TokenLogprob(m.logprob, tuple(zip(m.top_token_ids, m.top_logprobs, strict=True)))
        for m in messages
    )
