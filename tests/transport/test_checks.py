import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transport.checks import (
    PROTOCOL_VERSION,
    ExpectedDraft,
    Limits,
    Refusal,
    TokenBucket,
    answers,
    check_draft,
    check_hello,
    check_open,
    parse,
)
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import WEIGHT_SUM, PrefixDigest, decode_stop

LIMITS = Limits(vocab_size=100, max_request_tokens=50, max_draft_tokens=8, max_open_requests=3)
TEXT = PrefixDigest([1, 2, 3])
WEIGHTED = ExpectedDraft(epoch=1, round=2, max_draft_tokens=2, weighted=True)
HALF = WEIGHT_SUM // 2


def draft(**changes: Any) -> pb.DraftTokens:
    fields: dict[str, Any] = {
        "request_id": "r",
        "epoch": 1,
        "round": 2,
        "prefix_len": 3,
        "prefix_digest": TEXT.digest(),
        "token_ids": [4, 5],
        "weights": [row([4, 7], [HALF, HALF]), row([5], [WEIGHT_SUM])],
    }
    return pb.DraftTokens(**{**fields, **changes})


def row(token_ids: list[int], weights: list[int]) -> pb.Distribution:
    return pb.Distribution(token_ids=token_ids, weights=weights)


def test_a_good_weighted_draft() -> None:
    check_draft(draft(), LIMITS, WEIGHTED, TEXT)
    check_draft(draft(token_ids=[], weights=[]), LIMITS, WEIGHTED, TEXT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": []}, "0 distributions for 2 draft tokens"),
        ({"token_ids": [4]}, "2 distributions for 1 draft tokens"),
        ({"weights": [row([], []), row([5], [WEIGHT_SUM])]}, "of 0 tokens and 0 weights"),
        ({"weights": [row([4, 7], [WEIGHT_SUM]), row([5], [WEIGHT_SUM])]}, "2 tokens and 1"),
        ({"weights": [row(list(range(4, 69)), [1] * 65), row([5], [WEIGHT_SUM])]}, "of 65 tokens"),
        ({"weights": [row([4, 100], [HALF, HALF]), row([5], [WEIGHT_SUM])]}, "token 100"),
        ({"weights": [row([4, 4], [HALF, HALF]), row([5], [WEIGHT_SUM])]}, "occurs twice"),
        ({"weights": [row([4, 7], [WEIGHT_SUM, 0]), row([5], [WEIGHT_SUM])]}, "weight of 0"),
        ({"weights": [row([4, 7], [HALF, 1]), row([5], [WEIGHT_SUM])]}, "sum to 32769"),
        (
            {"weights": [row([4, 7], [2**32 - 1, WEIGHT_SUM + 1]), row([5], [WEIGHT_SUM])]},
            "sum to 4295032832",
        ),
        ({"weights": [row([8, 7], [HALF, HALF]), row([5], [WEIGHT_SUM])]}, "token 4 is not in"),
        ({"token_ids": [4, 5, 6]}, "3 draft tokens; 2 were asked for"),
    ],
)
def test_false_weights(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refusal, match=reason) as refusal:
        check_draft(draft(**changes), LIMITS, WEIGHTED, TEXT)
    assert refusal.value.request_id == "r"
    assert "\n" not in refusal.value.reason


def test_only_the_outstanding_order_is_answered() -> None:
    assert answers(draft(), WEIGHTED)
    assert not answers(draft(epoch=0), WEIGHTED)
    assert not answers(draft(round=3), WEIGHTED)
    assert not answers(draft(), None)


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        kind = rng.randrange(3)
        at = rng.randrange(len(changed)) if changed else 0
        if kind == 0 and changed:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at:at] = rng.randbytes(rng.randrange(1, 5))
        else:
            del changed[at : at + rng.randrange(1, 5)]
    return bytes(changed)


@settings(max_examples=15 * settings.default.max_examples, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_message_is_refused_or_valid(rng: random.Random) -> None:
    """No other exception, and nothing gets through that the engine could choke on."""
    messages = [
        pb.Up(
            hello=pb.Hello(
                protocol_version=PROTOCOL_VERSION, tokenizer_digest="d", max_draft_tokens=4
            )
        ),
        pb.Up(
            open=pb.Open(
                request_id="r",
                prompt_token_ids=[1, 2, 3],
                max_tokens=5,
                stop_token_ids=[9],
                expected_output_tokens=4,
                tpot=0.1,
                deadline=5.0,
                stop=pb.StopStrings(strings=["a"], previous=3, shown_token_ids=[4], num_made=1),
                sampling=pb.Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=1),
            )
        ),
        pb.Up(draft=draft()),
        pb.Up(close=pb.Close(request_id="r")),
    ]
    data = mutated(rng.choice(messages).SerializeToString(), rng)
    if rng.randrange(10) == 0:
        data = rng.randbytes(rng.randrange(300))
    reason = "taken"
    try:
        up = parse(data, LIMITS)
        if up.HasField("hello"):
            check_hello(up.hello, "d")
        elif up.HasField("open"):
            check_open(up.open, LIMITS, ())
            assert max(up.open.prompt_token_ids) < 100
            stop = up.open.stop
            assert max([stop.previous, *stop.shown_token_ids]) < 100
            assert all(decode_stop(stop).strings) or not up.open.HasField("stop")
            assert stop.num_made < len(up.open.prompt_token_ids)
            assert len(up.open.prompt_token_ids) + up.open.max_tokens <= 50
            assert up.open.expected_output_tokens <= up.open.max_tokens
            assert not up.open.HasField("tpot") or up.open.tpot > 0
            assert 0 <= up.open.sampling.temperature <= 100
        elif up.HasField("draft"):
            check_draft(up.draft, LIMITS, WEIGHTED, TEXT)
            assert len(up.draft.token_ids) <= 2
            assert all(sum(r.weights) == WEIGHT_SUM for r in up.draft.weights)
    except Refusal as refusal:
        reason = refusal.reason
    assert reason
    assert "\n" not in reason


@pytest.mark.parametrize("expected", [0, 6, 2**32 - 1])
def test_no_expectation_beyond_what_is_asked_for(expected: int) -> None:
    message = pb.Open(
        request_id="r",
        prompt_token_ids=[1],
        max_tokens=5,
        sampling=pb.Sampling(top_p=1.0),
        expected_output_tokens=expected,
    )
    with pytest.raises(Refusal, match=f"expected_output_tokens {expected}; it must be from 1 to"):
        check_open(message, LIMITS, ())


@pytest.mark.parametrize("name", ["tpot", "deadline"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_latency_that_is_none(name: str, seconds: float) -> None:
    message = pb.Open(
        request_id="r",
        prompt_token_ids=[1],
        max_tokens=5,
        sampling=pb.Sampling(top_p=1.0),
        **{name: seconds},
    )
    with pytest.raises(Refusal, match=f"{name} .*; it must be a number of seconds over 0"):
        check_open(message, LIMITS, ())


def test_sizes() -> None:
    with pytest.raises(Refusal, match="a message of 100000 bytes; at most"):
        parse(b"\x00" * 100_000, LIMITS)
    largest = pb.Up(draft=draft(weights=[row([99] * 64, [WEIGHT_SUM] * 64)] * 8))
    assert largest.ByteSize() < LIMITS.max_message_bytes
    long = Limits(vocab_size=2**31, max_request_tokens=100_000)
    prompt = pb.Up(open=pb.Open(prompt_token_ids=[2**31 - 1] * 99_999))
    assert prompt.ByteSize() < long.max_message_bytes


def test_a_quota_refills() -> None:
    quota = TokenBucket(10.0, 0.0)
    assert [quota.spend(1, 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert [quota.spend(1, 0.25) for _ in range(3)] == [True, True, False]
    assert quota.spend(20, 100.0)
    assert not quota.spend(0.5, 100.0)
