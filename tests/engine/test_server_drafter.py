"""Drafters on OpenAI-compatible servers: whatever they answer, the output is the target's own."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.engine.completions_server import (
    Answer,
    CompletionsServer,
    completion,
    completions_server,
    going_on,
)
from tests.engine.other_vocabulary import TARGET
from tests.engine.test_exactness import SAMPLINGS
from tests.products import covering

from penstock.config import EngineConfig, PolicyConfig, TenantConfig
from penstock.core.types import Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters import server as module
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.engine.verifier import Verifier
from penstock.serving.offline import Completion, complete
from penstock.zoo.registry import load_prompts, model_path

NUM = 3
NUM_TOKENS = 40
RATIO = SamplingParams(temperature=0.9, verification="ratio")
_ids = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FIRST_PAUSE_S", 0.05)
        patch.setattr(module, "_MOST_PAUSE_S", 0.2)
        patch.setattr(module, "_LONGEST_S", 1.0)
        yield


def silent(asked: dict[str, Any]) -> Any:
    return completion("")


@pytest.fixture(scope="module")
def served() -> Iterator[CompletionsServer]:
    with completions_server(silent) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_path(TARGET))


def load(url: str, pipeline: str = "auto", **settings: Any) -> Engine:
    return load_engine(
        EngineConfig(
            target=model_path(TARGET),
            drafters={"edge": f"{url}#small"},
            kv_tokens=4096,
            max_model_len=512,
            num_threads=1,
            dtype="float32",
            allocation=PolicyConfig(name="fixed", options={"k": 4}),
            selection=PolicyConfig(name="single"),
            pipeline=pipeline,
            **settings,
        ),
        calibrated=False,
    )


@pytest.fixture(scope="module")
def engine(served: CompletionsServer) -> Iterator[Engine]:
    loaded = load(served.url)
    wait_for(loaded)
    yield loaded
    loaded.executor.close()


def wait_for(engine: Engine, up: bool = True, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    edge = engine.scheduler.table.drafters["edge"]
    while edge.is_up is not up:
        assert time.monotonic() < end
        engine.loop.turn([])
        time.sleep(0.01)


def requests(
    tokenizer: Tokenizer, sampling: SamplingParams, drafter: str = "edge", **fields: Any
) -> list[Request]:
    made = []
    for i, prompt in enumerate(load_prompts("sql")[:NUM]):
        ids = tuple(tokenizer.encode(prompt.prompt))[: 60 - 7 * i]
        made.append(
            Request(
                f"server-{next(_ids)}",
                len(ids),
                NUM_TOKENS - i,
                prompt_token_ids=ids,
                sampling=dataclasses.replace(sampling, seed=7 + i),
                drafter=drafter,
                **fields,
            )
        )
    return made


def outputs(done: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


def run(engine: Engine, wanted: Sequence[Request]) -> tuple[list[list[int]], int]:
    done = complete(engine.loop, wanted, len(wanted))
    assert [c.error for c in done] == [None] * len(wanted)
    return outputs(done), sum(c.usage.num_accepted_tokens for c in done)


@pytest.fixture(scope="module")
def alone(engine: Engine, tokenizer: Tokenizer) -> Callable[[str], list[list[int]]]:
    known: dict[str, list[list[int]]] = {}

    def get(sampling: str) -> list[list[int]]:
        if sampling not in known:
            known[sampling] = run(engine, requests(tokenizer, SAMPLINGS[sampling], "none"))[0]
        return known[sampling]

    return get


def whole_texts(tokenizer: Tokenizer, tokens: list[list[int]]) -> list[str]:
    prompts = [r.prompt_token_ids or () for r in requests(tokenizer, RATIO)]
    return [
        tokenizer.decode([*prompt, *output], skip_special_tokens=False)
        for prompt, output in zip(prompts, tokens, strict=True)
    ]


def slowly(answer: Answer, seconds: float) -> Answer:
    def later(asked: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return answer(asked)

    return later


def every_other(answer: Answer) -> Answer:
    calls = itertools.count()
    return lambda asked: answer(asked) if next(calls) % 2 else (500, b"{}", {})


def lying(asked: dict[str, Any]) -> Any:
    return completion("zebra <|endoftext|> \u200d\U0001f600" * 4, "stop")


NEVER_RIGHT: dict[str, Answer] = {
    "lies": lying,
    "empty": silent,
    "no text": lambda asked: completion(7),
    "no JSON": lambda asked: (200, b"{" * 10_000, {}),
    "no choices": lambda asked: (200, json.dumps({"choices": []}).encode(), {}),
    "other types": lambda asked: (200, b'[{"choices": {"text": 1}}]', {}),
    "surrogates": lambda asked: (200, b'{"choices": [{"text": "\\ud800 a"}]}', {}),
    "huge": lambda asked: completion("word " * 100_000),
    "cut": lambda asked: (200, b'{"choices"', {"Content-Length": "100"}),
    "compressed": lambda asked: (200, b"\x1f\x8b\x08\0\0", {"Content-Encoding": "gzip"}),
    "status": lambda asked: (503, b"", {}),
    "no HTTP": lambda asked: (200, b"", {"Content-Length": "many"}),
}


@pytest.mark.parametrize("sampling", ["greedy", "coupled", "coupled-changed"])
@pytest.mark.parametrize("pace", ["at once", "slowly", "failing now and then"])
def test_right_drafts_change_nothing_but_the_speed(
    engine, served, tokenizer, alone, sampling, pace
) -> None:
    right = going_on(whole_texts(tokenizer, alone(sampling)))
    paces = {"slowly": slowly(right, 0.03), "failing now and then": every_other(right)}
    served.answer = right
    wait_for(engine)
    served.asked.clear()
    served.answer = paces.get(pace, right)
    made, accepted = run(engine, requests(tokenizer, SAMPLINGS[sampling]))
    assert made == alone(sampling)
    num_tokens = sum(len(tokens) for tokens in made)
    # Slow drafts need not pay.
    assert accepted > {"at once": 0.25}.get(pace, -1) * num_tokens
    asked = next(asked for asked in served.asked if asked["max_tokens"] == 5)
    assert asked == {
        "prompt": asked["prompt"],
        "max_tokens": 5,
        "temperature": 0,
        "stream": False,
        "cache_prompt": True,
        "model": "small",
    }
    assert set(served.paths) == {"/v1/completions"}


@pytest.mark.parametrize(
    ("what", "sampling"), covering(NEVER_RIGHT, ["greedy", "coupled"], strength=1)
)
def test_wrong_answers_change_nothing(engine, served, tokenizer, alone, what, sampling) -> None:
    served.answer = silent
    wait_for(engine)
    served.answer = NEVER_RIGHT[what]
    made, accepted = run(engine, requests(tokenizer, SAMPLINGS[sampling]))
    assert made == alone(sampling)
    assert accepted <= 6  # a lie may be true by chance


def test_ratio_verifies_point_masses(engine, served, tokenizer, monkeypatch) -> None:
    """A draft that is a function of the text has draft(x) = 1, as look-up's."""
    served.answer = silent
    wait_for(engine)
    served.answer = lambda asked: completion(" the" * asked["max_tokens"])
    drafts = []
    decide = Verifier.decide

    def watched(self: Verifier, scores: Any, items: Any, draft_probs: Any) -> Any:
        drafts.extend([*item.prob_rows] for item in items if item.token_ids)
        return decide(self, scores, items, draft_probs)

    monkeypatch.setattr(Verifier, "decide", watched)
    for _ in range(5):  # on a busy machine an answer may be late, and drafting pauses
        made, _ = run(engine, requests(tokenizer, RATIO))
        assert [len(tokens) for tokens in made] == [NUM_TOKENS - i for i in range(NUM)]
        if drafts:
            break
        wait_for(engine)
    assert drafts
    assert {row for rows in drafts for row in rows} == {-1}


def test_drafts_ahead_save_orders(engine, served, tokenizer, alone) -> None:
    served.answer = going_on(whole_texts(tokenizer, alone("greedy")))
    wait_for(engine)
    before = engine.scheduler.table.counters.ahead_used
    made, _ = run(engine, requests(tokenizer, SAMPLINGS["greedy"]))
    assert made == alone("greedy")
    assert engine.scheduler.table.counters.ahead_used > before


def test_a_frozen_server_costs_a_few_deadlines(engine, served, tokenizer, alone) -> None:
    served.answer = going_on(whole_texts(tokenizer, alone("greedy")))
    wait_for(engine)
    run(engine, requests(tokenizer, SAMPLINGS["greedy"]))
    served.answer = slowly(silent, 60)
    began = time.monotonic()
    made, _ = run(engine, requests(tokenizer, SAMPLINGS["greedy"]))
    assert made == alone("greedy")
    assert time.monotonic() - began < 20
    wait_for(engine, up=False)
    served.asked.clear()
    run(engine, requests(tokenizer, SAMPLINGS["greedy"]))
    assert all(asked["prompt"] == "a" for asked in served.asked), "no orders while it is down"


def test_a_server_that_comes_later_and_dies(tokenizer, alone, caplog) -> None:
    """It is no error at the start; it is tried again, and so is one that died."""
    caplog.set_level("INFO", "penstock")
    with completions_server(silent) as first:
        url = first.url
    port = int(url.split(":")[2].removesuffix("/v1"))
    engine = load(url, pipeline="off")
    wanted = alone("greedy")
    try:
        assert run(engine, requests(tokenizer, SAMPLINGS["greedy"]))[0] == wanted
        assert engine.describe()["drafters"] == ["edge"]
        with completions_server(going_on(whole_texts(tokenizer, wanted)), port):
            wait_for(engine)
            made, accepted = run(engine, requests(tokenizer, SAMPLINGS["greedy"]))
            assert made == wanted
            assert accepted > 0
        assert run(engine, requests(tokenizer, SAMPLINGS["greedy"]))[0] == wanted
        wait_for(engine, up=False)
        assert run(engine, requests(tokenizer, SAMPLINGS["greedy"]))[0] == wanted
        with completions_server(silent, port):
            wait_for(engine)
    finally:
        engine.executor.close()
    assert engine.executor.servers["edge"].num_failures >= 3
    said = [m for m in caplog.messages if "edge" in m]
    assert said[0].startswith("drafter edge does not draft for now: ConnectError")
    assert "drafter edge answers" in said


def test_redirects_are_not_followed() -> None:
    with completions_server(silent) as other:
        away = {"Location": f"{other.url}/completions"}
        with completions_server(lambda asked: (307, b"", away)) as redirecting:
            engine = load(redirecting.url)
            end = time.monotonic() + 10
            while len(redirecting.asked) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            assert engine.loop.turn([]).outputs == ()
            assert not engine.scheduler.table.drafters["edge"].is_up
            engine.executor.close()
        assert other.asked == []


def test_the_key_is_sent_and_not_said(monkeypatch, caplog) -> None:
    monkeypatch.setenv("PENSTOCK_DRAFTER_KEY_EDGE", "sk-secret")
    with completions_server(lambda asked: (401, b"sk-secret", {})) as refusing:
        engine = load(refusing.url)
        end = time.monotonic() + 10
        while not (refusing.asked and caplog.messages) and time.monotonic() < end:
            time.sleep(0.01)
        engine.executor.close()
    assert refusing.headers["Authorization"] == "Bearer sk-secret"
    assert "drafter edge does not draft for now: HTTP status 401" in caplog.messages
    assert "sk-secret" not in caplog.text + json.dumps(engine.describe())
    monkeypatch.setenv("PENSTOCK_DRAFTER_KEY_EDGE", "sk-sec\nret")
    with pytest.raises(ValueError, match="PENSTOCK_DRAFTER_KEY_EDGE") as raised:
        load(refusing.url)
    assert "sk-sec" not in str(raised.value)


@pytest.mark.parametrize("shares", [False, True])
def test_prompts_leave_the_machine_only_where_the_tenant_allows_it(
    tokenizer, monkeypatch, caplog, shares
) -> None:
    """The server counts as one of another machine here."""
    monkeypatch.setattr("penstock.config.completions.is_loopback", lambda host: False)
    tenants = {"default": TenantConfig(share_prompts=shares), "other": TenantConfig()}
    with completions_server(lambda asked: completion(" the")) as served:
        engine = load(served.url, tenants=tenants)
        wait_for(engine)
        for tenant, drafter in itertools.product(("other", "default"), ("edge", "auto")):
            served.asked.clear()
            run(engine, requests(tokenizer, SAMPLINGS["greedy"], drafter, tenant=tenant))
            assert bool(served.asked) is (shares and tenant == "default")
        engine.executor.close()
    warned = [m for m in caplog.messages if "--set tenants.default.share_prompts=true" in m]
    assert len(warned) == (not shares)


def test_long_texts_are_sent_from_a_steady_beginning(tokenizer) -> None:
    """The server can keep what it has computed; special tokens are text."""
    words = tokenizer.encode("one two three four five six seven eight nine ten " * 300)
    request = Request("long", len(words), 600, prompt_token_ids=tuple(words))
    text, known = module.TokenBuffer(request), module._Text(tokenizer)
    prompts = []
    for _ in range(600):
        prompt = known.prompt(text, text.length)
        prompts.append(prompt.text)
        text.append(words[:1])
    whole = tokenizer.decode(words, skip_special_tokens=False)
    assert whole.endswith(prompts[0])
    assert max(map(len, prompts)) <= 8000
    kept = [b.startswith(a) for a, b in itertools.pairwise(prompts)]
    assert kept.count(False) <= 2
