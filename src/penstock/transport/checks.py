"""Checks of every message of a draft server before it is used. No I/O.

Each refusal is one line. With a request id it concerns that request and the stream goes on; without
one the stream ends."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from penstock.core.ahead import MAX_AHEAD_TOKENS, MAX_LINES
from penstock.core.policies.options import LONGEST_DRAFT
from penstock.core.types import (
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MIN_TEMPERATURE,
)
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import DIGEST_BYTES, MAX_WEIGHTS, WEIGHT_SUM, PrefixDigest

PROTOCOL_VERSION = 5
"""Version of `drafting.proto` and its rules, exchanged in `Hello` and `Welcome`."""

ASSIGNED_PREFIX = "@"
"""First character of the request ids that the verification server assigns (central ingress)."""

_MAX_ID_CHARS = 64
_MAX_NAME_CHARS = 256
_MAX_STOP_TOKENS = 64
_MAX_TEMPERATURE = 100.0
_MAX_TOKEN_BYTES = 5
_MAX_FIXED_BYTES = 8192
"""Protocol limits of ids, names, stop tokens and temperatures; bytes of a varint token id, and of a
message without its tokens."""


class Refusal(Exception):
    """Refused message: one line with the mistake and the allowed values.

    request_id: empty where the stream must end. code: the cause, the message or the server's state.
    """

    def __init__(
        self,
        reason: str,
        request_id: str = "",
        code: pb.Refused.Code = pb.Refused.INVALID,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.request_id = request_id
        self.code = code


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one stream.

    max_messages_per_s, max_bytes_per_s: over any second; bursts of twice as much."""

    vocab_size: int
    max_request_tokens: int
    max_draft_tokens: int = 16
    max_open_requests: int = 64
    max_messages_per_s: float = 1000.0
    max_bytes_per_s: float = 4 * 2.0**20

    @property
    def max_message_bytes(self) -> int:
        """Size that holds any prompt, and any draft with its distributions."""
        weights = self.max_draft_tokens * MAX_WEIGHTS * 2 * _MAX_TOKEN_BYTES
        return _MAX_FIXED_BYTES + max(self.max_request_tokens * _MAX_TOKEN_BYTES, weights)

    def welcome(
        self, drafter: str, target: str, eos_token_ids: Iterable[int], *, trusted: bool
    ) -> pb.Welcome:
        """Return these limits as the first message down.

        drafter: name of the draft server; target: served name of the target; eos_token_ids: the
        target's."""
        return pb.Welcome(
            protocol_version=PROTOCOL_VERSION,
            drafter=drafter,
            vocab_size=self.vocab_size,
            max_draft_tokens=self.max_draft_tokens,
            max_open_requests=self.max_open_requests,
            max_request_tokens=self.max_request_tokens,
            max_message_bytes=self.max_message_bytes,
            weight_sum=WEIGHT_SUM,
            max_weights=MAX_WEIGHTS,
            trusted=trusted,
            target=target,
            eos_token_ids=sorted(eos_token_ids),
            max_ahead_tokens=MAX_AHEAD_TOKENS,
        )


class TokenBucket:
    """Token bucket: fills with `per_s` units per second and holds `seconds` worth."""

    def __init__(self, per_s: float, now: float, seconds: float = 2.0) -> None:
        self._per_s = per_s
        self._most = self._level = seconds * per_s
        self._at = now

    def spend(self, amount: float, now: float) -> bool:
        """Take units out; return False where there are too few."""
        if self.seconds_until(amount, now) > 0:
            return False
        self._level -= amount
        return True

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until so many are there; infinite for more than it holds."""
        self._level = min(self._most, self._level + (now - self._at) * self._per_s)
        self._at = now
        if amount > self._most:
            return math.inf
        return max(0.0, amount - self._level) / self._per_s

    def give_back(self, amount: float) -> None:
        """Return units that were taken out."""
        self._level = min(self._most, self._level + amount)


class ExpectedDraft(NamedTuple):
    """Draft that a request waits for, of at most `max_draft_tokens` tokens.

    weighted: with the distributions its tokens were sampled from."""

    epoch: int
    round: int
    max_draft_tokens: int
    weighted: bool


def parse(data: bytes, limits: Limits) -> pb.Up:
    """Parse a message. Raises Refusal, which ends the stream."""
    if len(data) > limits.max_message_bytes:
        raise Refusal(f"a message of {len(data)} bytes; at most {limits.max_message_bytes}")
    try:
        message = pb.Up.FromString(data)
    except DecodeError as error:
        raise Refusal("a message that is not penstock.v1.Up") from error
    if message.WhichOneof("message") is None:
        raise Refusal("a message of an unknown kind; known are hello, open, draft, ahead, close")
    return message


def check_hello(hello: pb.Hello, tokenizer_digest: str) -> None:
    """Check the first message. Raises Refusal, which ends the stream."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Refusal(
            f"protocol version {hello.protocol_version}; this server speaks {PROTOCOL_VERSION}"
        )
    if hello.tokenizer_digest != tokenizer_digest:
        raise Refusal(
            "the draft model has another tokenizer than the target; token ids would mean "
            "something else"
        )
    if not 1 <= hello.max_draft_tokens <= LONGEST_DRAFT:
        told = f"max_draft_tokens {hello.max_draft_tokens}; it must be from 1 to {LONGEST_DRAFT}"
        raise Refusal(told)
    if len(hello.model_name) > _MAX_NAME_CHARS:
        raise Refusal(f"model_name is longer than {_MAX_NAME_CHARS} characters")


def check_open(message: pb.Open, limits: Limits, own: Collection[str]) -> None:
    """Check a new request; `own`: ids of the stream's requests. Raises Refusal of it."""
    request_id = message.request_id
    if not request_id or len(request_id) > _MAX_ID_CHARS:
        raise Refusal(f"a request id must have from 1 to {_MAX_ID_CHARS} characters")
    problem = _problem_of_id(request_id, limits, own) or _problem_of_text(message, limits)
    problem = problem or _problem_of_sampling(message)
    if problem is not None:
        raise Refusal(problem, request_id)


def _problem_of_id(request_id: str, limits: Limits, own: Collection[str]) -> str | None:
    if request_id.startswith(ASSIGNED_PREFIX):
        return f"request ids that start with {ASSIGNED_PREFIX!r} are this server's own"
    if request_id in own:
        return "a request with this id is open already"
    if len(own) >= limits.max_open_requests:
        return f"{len(own)} requests are open; at most {limits.max_open_requests}"
    return None


def _problem_of_text(message: pb.Open, limits: Limits) -> str | None:
    num_prompt, num_stops = len(message.prompt_token_ids), len(message.stop_token_ids)
    if num_prompt < 1 or message.max_tokens < 1:
        return "a request needs at least 1 prompt token and at least 1 token to make"
    if num_prompt + message.max_tokens > limits.max_request_tokens:
        return (
            f"{num_prompt} prompt tokens and {message.max_tokens} to make; together at most "
            f"{limits.max_request_tokens}"
        )
    if message.HasField("expected_output_tokens"):
        expected = message.expected_output_tokens
        if not 1 <= expected <= message.max_tokens:
            return f"expected_output_tokens {expected}; it must be from 1 to max_tokens"
    for name in ("tpot", "deadline"):
        if message.HasField(name) and not 0 < getattr(message, name) < math.inf:
            return f"{name} {getattr(message, name)}; it must be a number of seconds over 0"
    if num_stops > _MAX_STOP_TOKENS:
        return f"{num_stops} stop tokens; at most {_MAX_STOP_TOKENS}"
    for name, ids in (
        ("prompt", message.prompt_token_ids),
        ("stop", message.stop_token_ids),
        ("previous", [message.stop.previous]),
        ("shown", message.stop.shown_token_ids),
    ):
        if ids and max(ids) >= limits.vocab_size:
            return f"{name} token {max(ids)}; token ids go from 0 to {limits.vocab_size - 1}"
    return _problem_of_stops(message.stop, num_prompt) if message.HasField("stop") else None


def _problem_of_stops(stop: pb.StopStrings, num_prompt: int) -> str | None:
    num, num_chars = len(stop.strings), sum(map(len, stop.strings))
    if not 1 <= num <= MAX_STOP_STRINGS or num_chars > MAX_STOP_CHARS or not all(stop.strings):
        return (
            f"{num} stop strings of {num_chars} characters; from 1 to {MAX_STOP_STRINGS}, none of "
            f"them empty, and {MAX_STOP_CHARS} characters in all are allowed"
        )
    if len(stop.shown_token_ids) > _MAX_STOP_TOKENS:
        return f"{len(stop.shown_token_ids)} shown tokens; at most {_MAX_STOP_TOKENS}"
    if stop.num_made >= num_prompt:
        return f"{stop.num_made} tokens of the prompt's {num_prompt} are output; one must be before"
    return None


def _problem_of_sampling(message: pb.Open) -> str | None:
    if not message.HasField("sampling"):
        return "sampling is missing"
    temperature, top_p = message.sampling.temperature, message.sampling.top_p
    if temperature != 0.0 and not MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE:
        return (
            f"temperature {temperature:g}; it must be 0 (greedy) or from {MIN_TEMPERATURE:g} to "
            f"{_MAX_TEMPERATURE:g}"
        )
    if not 0.0 < top_p <= 1.0 or not math.isfinite(top_p):
        return f"top_p {top_p:g}; it must be above 0 and at most 1"
    if message.num_logprobs > MAX_LOGPROBS:
        return f"num_logprobs {message.num_logprobs}; at most {MAX_LOGPROBS}"
    return None


def answers(draft: pb.DraftTokens, order: ExpectedDraft | None) -> bool:
    """Return whether a draft is the expected one; a late or repeated one is ignored."""
    return order is not None and (draft.epoch, draft.round) == (order.epoch, order.round)


def check_draft(
    draft: pb.DraftTokens, limits: Limits, order: ExpectedDraft, prefix: PrefixDigest
) -> None:
    """Check a draft that answers `order` against the verified text. Raises Refusal of it."""
    num_tokens = len(draft.token_ids)
    if draft.prefix_len != prefix.length:
        problem: str | None = (
            f"a draft behind {draft.prefix_len} tokens; {prefix.length} are verified"
        )
    elif len(draft.prefix_digest) != DIGEST_BYTES or draft.prefix_digest != prefix.digest():
        problem = "a draft behind another text than the verified one"
    elif num_tokens > order.max_draft_tokens:
        problem = f"{num_tokens} draft tokens; {order.max_draft_tokens} were asked for"
    elif num_tokens and max(draft.token_ids) >= limits.vocab_size:
        problem = (
            f"draft token {max(draft.token_ids)}; token ids go from 0 to {limits.vocab_size - 1}"
        )
    elif order.weighted:
        problem = _problem_of_weights(draft.token_ids, draft.weights, limits)
    else:
        problem = "weights, though drafts are compared with the sample" if draft.weights else None
    if problem is not None:
        raise Refusal(problem, draft.request_id)


def check_lines(lines: pb.Lines, limits: Limits, *, weighted: bool) -> None:
    """Check drafts ahead of a request. Raises Refusal of them.

    weighted: drafts need their distributions, so none may be sent ahead."""
    tokens = [t for piece in lines.pieces for t in piece.token_ids]
    problem = None
    if weighted:
        problem = "tokens ahead, though drafts are verified by their distributions"
    elif len(lines.pieces) > MAX_LINES or len(tokens) > MAX_AHEAD_TOKENS:
        problem = (
            f"{len(tokens)} tokens ahead in {len(lines.pieces)} pieces; at most "
            f"{MAX_AHEAD_TOKENS} in {MAX_LINES}"
        )
    elif tokens and max(tokens) >= limits.vocab_size:
        problem = f"token {max(tokens)} ahead; token ids go from 0 to {limits.vocab_size - 1}"
    elif any(p.start > limits.max_request_tokens for p in lines.pieces):
        problem = f"tokens ahead beyond {limits.max_request_tokens}, the longest request"
    if problem is not None:
        raise Refusal(problem, lines.request_id)


def _problem_of_weights(
    token_ids: Sequence[int], weights: Sequence[pb.Distribution], limits: Limits
) -> str | None:
    if len(weights) != len(token_ids):
        return f"{len(weights)} distributions for {len(token_ids)} draft tokens"
    for token, row in zip(token_ids, weights, strict=True):
        problem = _problem_of_distribution(token, row.token_ids, row.weights, limits)
        if problem is not None:
            return problem
    return None


def _problem_of_distribution(
    token: int, ids: Sequence[int], weights: Sequence[int], limits: Limits
) -> str | None:
    if not 1 <= len(ids) <= MAX_WEIGHTS or len(weights) != len(ids):
        return (
            f"a distribution of {len(ids)} tokens and {len(weights)} weights; it needs as many of "
            f"both, from 1 to {MAX_WEIGHTS}"
        )
    if max(ids) >= limits.vocab_size:
        return f"token {max(ids)} in a distribution; ids go from 0 to {limits.vocab_size - 1}"
    if len(set(ids)) < len(ids):
        return "a token occurs twice in a distribution"
    if min(weights) < 1:
        return "a weight of 0 in a distribution; leave such tokens out"
    if sum(weights) != WEIGHT_SUM:
        return f"the weights of a distribution sum to {sum(weights)}, not to {WEIGHT_SUM}"
    if token not in ids:
        return f"draft token {token} is not in the distribution that it was sampled from"
    return None
