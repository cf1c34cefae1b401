"""Limits of tenants: what is taken, what is not, and when to come again."""

from typing import Any

import pytest

from penstock.config import TenantConfig
from penstock.core.types import Request
from penstock.serving.limits import NotAllowed, Quotas, RateLimited


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("penstock.serving.limits.time", made)
    return made


def limits(**settings: Any) -> dict[str, TenantConfig]:
    return {"t": TenantConfig(**settings)}


def request(name: str = "r", prompt_len: int = 10, max_tokens: int = 20) -> Request:
    return Request(name, prompt_len, max_tokens, tenant="t")


def wait_of(taken: Quotas, *requests: Request) -> float:
    with pytest.raises(RateLimited) as refused:
        taken.charge(requests or (request(),))
    return refused.value.retry_after_s


def test_requests_a_minute(clock: Clock) -> None:
    taken = Quotas(limits(requests_per_minute=30))
    taken.charge([request(f"r{i}") for i in range(30)])
    assert wait_of(taken) == pytest.approx(2)
    clock.now += 1.9
    assert wait_of(taken) == pytest.approx(0.1)
    clock.now += 0.11
    taken.charge([request()])
    taken.charge([Request("other", 1, 1, tenant="u")])
    with pytest.raises(NotAllowed, match="needs 31 requests, and this tenant has 30 a minute"):
        taken.charge([request(f"r{i}") for i in range(31)])


def test_tokens_a_minute_are_given_back_where_they_were_not_put_out(clock: Clock) -> None:
    taken = Quotas(limits(tokens_per_minute=60))
    taken.charge([request("a"), request("b")])
    assert wait_of(taken) == pytest.approx(30)
    taken.put_out("a", 5)
    taken.end("a")
    taken.end("a")
    assert wait_of(taken) == pytest.approx(15)
    clock.now += 15.01
    taken.charge([request("c")])
    with pytest.raises(NotAllowed, match="needs 61 tokens, and this tenant has 60 a minute"):
        taken.charge([request("d", 11, 50)])


def test_what_is_refused_takes_nothing(clock: Clock) -> None:
    """Of neither limit."""
    taken = Quotas(limits(requests_per_minute=2, tokens_per_minute=60))
    taken.charge([request("a", 20, 20)])
    for _ in range(5):
        assert wait_of(taken) == pytest.approx(10)
    taken.charge([request("b", 10, 10)])


@pytest.mark.parametrize(
    ("settings", "asked", "said"),
    [
        ({"max_prompt_tokens": 9}, {}, "prompt: 10 tokens are more than the 9"),
        ({"max_output_tokens": 19}, {}, "max_tokens: 20 are more than the 19"),
    ],
)
def test_lengths(settings: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(NotAllowed, match=said):
        Quotas(limits(**settings)).charge([request(**asked)])
    Quotas(limits(max_prompt_tokens=10, max_output_tokens=20)).charge([request()])


def test_a_default_length_is_one_that_can_be_had() -> None:
    assert Quotas().most_output("t", 10) is None
    assert Quotas(limits(max_output_tokens=5)).most_output("t", 10) == 5
    assert Quotas(limits(max_output_tokens=50, tokens_per_minute=40)).most_output("t", 10) == 30
    assert Quotas(limits(tokens_per_minute=5)).most_output("t", 10) == 1


def test_other_limits_do_not_forget_what_was_used(clock: Clock) -> None:
    taken = Quotas(limits(requests_per_minute=1, tokens_per_minute=60))
    taken.charge([request()])
    taken.change(limits(requests_per_minute=1, tokens_per_minute=600))
    assert wait_of(taken) == pytest.approx(60), "the same limit is still used up"
    taken.change(limits(requests_per_minute=2, tokens_per_minute=600))
    taken.charge([request("s")])
    taken.change({})
    taken.charge([request("u")])
    taken.end("r")
