import threading
from typing import Any, Literal

import pytest
from tests.serving.fakes import TOKENIZER
from tokenizers.processors import TemplateProcessing

from penstock.api.bodies import ChatBody, CompletionBody
from penstock.api.errors import ApiError
from penstock.api.http import Caller
from penstock.api.prepare import RequestBuilder, derived_seed
from penstock.config import TenantConfig
from penstock.core.types import Request
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.serving.limits import Quotas
from penstock.serving.messages import Ready

SOMEONE = Caller("someone", "someone")
READY = Ready(TOKENIZER, 100, 4096, frozenset({2}), ("small", "ngram"), {})


def preparer(
    tokenizer: Tokenizer,
    verification: Literal["coupled", "ratio"] | None = None,
    tenants: dict[str, TenantConfig] | None = None,
) -> RequestBuilder:
    quotas = Quotas(tenants)
    return RequestBuilder(
        ("toy",), tokenizer, READY, verification, lambda: READY.drafters, lambda client: 64, quotas
    )


async def completion(preparer: RequestBuilder, **fields: Any) -> list[Request]:
    body = CompletionBody.model_validate({"prompt": [5, 6, 7], **fields})
    return [c.request for c in await preparer.completion(body, SOMEONE, "job")]


async def test_defaults_are_openais(tokenizer: Tokenizer) -> None:
    (request,) = await completion(preparer(tokenizer))
    assert request.prompt_token_ids == (5, 6, 7)
    assert request.max_tokens == 16
    assert request.tenant == "someone"
    assert request.drafter == "auto"
    assert request.stop_token_ids == {2}
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.num_logprobs is None


async def test_special_tokens_are_added_where_the_client_says_so() -> None:
    """As in vLLM: by default to a text, and not to a chat, whose template writes them."""
    tokenizer = load_tokenizer(TOKENIZER)
    begin = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer._fast.backend_tokenizer.post_processor = begin
    built = preparer(tokenizer)

    async def prompt(given: Any, **fields: Any) -> tuple[int, ...]:
        request, *_ = await completion(built, prompt=given, **fields)
        return request.prompt_token_ids or ()

    async def chat(**fields: Any) -> tuple[int, ...]:
        messages = [{"role": "user", "content": "Hi"}]
        body = ChatBody.model_validate({"messages": messages, **fields})
        (choice,) = await built.chat(body, SOMEONE, "job")
        return choice.request.prompt_token_ids or ()

    (x,) = tokenizer.encode("x", add_special_tokens=False)
    assert await prompt("x") == await prompt("x", add_special_tokens=True) == (1, x)
    assert await prompt("x", add_special_tokens=False) == (x,)
    assert await prompt(["x", "y"], add_special_tokens=False) == (x,)
    assert await prompt([7, 8], add_special_tokens=True) == (7, 8)
    own = await chat()
    assert await chat(add_special_tokens=False) == own
    assert await chat(add_special_tokens=True) == (1, *own)


async def test_without_a_seed_one_is_drawn(tokenizer: Tokenizer) -> None:
    requests = [*await completion(preparer(tokenizer), n=2), *await completion(preparer(tokenizer))]
    assert len({r.sampling.seed for r in requests}) == 3
    assert {r.sampling.verification for r in requests} == {"ratio"}


async def test_a_seed_couples_and_is_derived_for_further_choices(tokenizer: Tokenizer) -> None:
    requests = await completion(preparer(tokenizer), n=3, seed=-1, prompt=["one", "two"])
    seeds = [r.sampling.seed for r in requests]
    assert seeds[0] == 2**64 - 1
    assert seeds[:3] == seeds[3:] == [derived_seed(2**64 - 1, n) for n in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert {r.sampling.verification for r in requests} == {"coupled"}


@pytest.mark.parametrize("seed", [None, 7])
async def test_the_servers_verification_prevails(tokenizer: Tokenizer, seed: int | None) -> None:
    for mode in ("coupled", "ratio"):
        (request,) = await completion(preparer(tokenizer, mode), seed=seed)
        assert request.sampling.verification == mode


async def test_stop_tokens(tokenizer: Tokenizer) -> None:
    (request,) = await completion(preparer(tokenizer), stop_token_ids=[9])
    assert request.stop_token_ids == {2, 9}
    (request,) = await completion(preparer(tokenizer), stop_token_ids=[9], ignore_eos=True)
    assert request.stop_token_ids == {9}


@pytest.mark.parametrize("fields", [{"temperature": 1e-9}, {"top_p": 0}])
async def test_what_leaves_one_token_is_greedy(tokenizer: Tokenizer, fields: Any) -> None:
    (request,) = await completion(preparer(tokenizer), **fields)
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 1)


async def test_speculation_is_the_requests_own(tokenizer: Tokenizer) -> None:
    speculation = {"drafter": "small", "max_draft_tokens": 2}
    (request,) = await completion(preparer(tokenizer), speculation=speculation)
    assert (request.drafter, request.max_draft_tokens) == ("small", 2)


async def test_length_by_default_is_what_fits(tokenizer: Tokenizer) -> None:
    (request,) = await completion(preparer(tokenizer), prompt=[5] * 90)
    assert request.max_tokens == 10
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    (choice,) = await preparer(tokenizer).chat(body, SOMEONE, "job")
    assert choice.request.max_tokens == 100 - choice.request.prompt_len


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Of each text that is tokenised, the thread."""
    seen: list[threading.Thread] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(threading.current_thread())
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    return seen


@pytest.mark.parametrize(
    ("prompt", "stays"),
    [(["Hi"], True), (["Hi there. "] * 10, True), (["Hi there. " * 9] * 64, False)],
)
async def test_many_texts_are_as_much_work_as_a_long_one(tokenizer, threads, prompt, stays) -> None:
    await completion(preparer(tokenizer), prompt=prompt)
    assert len(threads) == len(prompt)
    assert [t is threading.main_thread() for t in threads] == [stays] * len(prompt)


async def test_too_many_choices_are_refused_before_anything_is_tokenised(
    tokenizer: Tokenizer, threads: list[threading.Thread]
) -> None:
    assert len(await completion(preparer(tokenizer), prompt=["a"] * 32, n=2)) == 64
    threads.clear()
    for prompt, n in ((["a"] * 33, 2), (["a"] * 20_000, 128), ("a", 65)):
        with pytest.raises(ApiError, match="together at most 64 are allowed") as refused:
            await completion(preparer(tokenizer), prompt=prompt, n=n)
        assert refused.value.status == 400
    assert threads == []


async def test_messages_as_the_template_gets_them(tokenizer, monkeypatch) -> None:
    seen: list[Any] = []

    def noted(self: Tokenizer, messages: Any, *more: Any) -> str:
        seen.extend(messages)
        return "a"

    monkeypatch.setattr(Tokenizer, "chat_text", noted)
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ada"},
    ]
    await preparer(tokenizer).chat(ChatBody.model_validate({"messages": given}), SOMEONE, "job")
    assert seen == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ada"},
    ]


async def test_top_k_of_minus_one_is_off(tokenizer: Tokenizer) -> None:
    (request,) = await completion(preparer(tokenizer), top_k=-1)
    assert request.sampling.top_k == 0


async def test_what_does_not_fit_the_context_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="context length is 100 tokens") as refused:
        await completion(preparer(tokenizer), prompt=[5] * 100)
    assert refused.value.code == "context_length_exceeded"
