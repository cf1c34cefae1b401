"""Where an output ends, and that nothing behind it is counted."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_exactness import SAMPLINGS, load, make_loop, make_requests, run
from tests.engine.test_tokenizer import metaspace, save
from tests.products import slow

from penstock.api.choices import TextStream
from penstock.core.types import (
    DraftSource,
    FinishReason,
    Request,
    SamplingParams,
    StopStrings,
    Verdict,
    VerifyItem,
)
from penstock.engine.build import Engine
from penstock.engine.ends import End, LazyTokenizer, OutputEnd
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import Computed, verdicts_of
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.engine.verifier import Decided, Drafted

TOKENIZER = Path(__file__).parents[2] / "src/penstock/zoo/weights/target-large"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZER)


def output_end(
    tokenizer: Tokenizer, *strings: str, max_tokens: int = 99, min_tokens: int = 0, **fields: Any
) -> OutputEnd:
    stop = StopStrings(strings, fields.pop("previous", None), num_made=fields.pop("num_made", 0))
    request = Request(
        "r",
        3,
        max_tokens,
        prompt_token_ids=fields.pop("prompt", (5, 6, 7)),
        sampling=SamplingParams(min_tokens=min_tokens),
        stop=stop if strings else None,
        **fields,
    )
    return OutputEnd(request, lambda: tokenizer)


def cut(text: str, stops: list[str]) -> str:
    """What a client may see of a text: generation ends where a stop string is complete."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


def shown_in_chunks(
    tokenizer: Tokenizer, token_ids: list[int], stops: list[str], size: int
) -> tuple[str, int, FinishReason | None]:
    """What the client sees, how many tokens there are, and why they end."""
    end, stream = output_end(tokenizer, *stops), TextStream(tokenizer, stops)
    shown, num_tokens = "", 0
    for at in range(0, len(token_ids), size):
        chunk = token_ids[at : at + size]
        found = end.follow(chunk)
        kept = chunk if found is None else chunk[: found.num_tokens]
        num_tokens += len(kept)
        stream.add(kept, ())
        if found is not None:
            stream.finish(found.num_stop_chars)
            return shown + stream.pop_text()[0], num_tokens, found.reason
        shown += stream.pop_text()[0]
    stream.finish()
    return shown + stream.pop_text()[0], num_tokens, None


@given(
    text=st.text("ab€", min_size=1, max_size=40),
    stops=st.lists(st.text("ab€", min_size=1, max_size=5), max_size=3),
    size=st.integers(1, 5),
)
def test_stop_strings_are_found_across_any_chunks(tokenizer, text, stops, size) -> None:
    token_ids = tokenizer.encode(text)
    shown, num_tokens, reason = shown_in_chunks(tokenizer, token_ids, stops, size)
    assert shown == cut(text, stops)
    assert reason == (FinishReason.STOP if shown != text else None)
    assert num_tokens == shown_in_chunks(tokenizer, token_ids, stops, 1)[1], "whatever the chunks"
    if reason is not None:
        before = tokenizer.decode(token_ids[: num_tokens - 1])
        assert cut(before, stops) == before, "it is the token that completes the string"


def test_a_broken_character_may_be_a_stop_string(tokenizer: Tokenizer) -> None:
    """What is left of it at the end of the output is a replacement character, which is shown."""
    ids = tokenizer.encode("a€", add_special_tokens=False)[:-1]
    end = output_end(tokenizer, "\ufffd", max_tokens=len(ids))
    assert end.follow(ids) == End(len(ids), FinishReason.STOP, 1)
    stop = output_end(tokenizer, "\ufffd", stop_token_ids=frozenset({9}))
    assert stop.follow([*ids, 9, 8]) == End(len(ids) + 1, FinishReason.STOP, 1)


@pytest.mark.parametrize(
    ("fields", "tokens", "expected"),
    [
        ({"stop_token_ids": frozenset({9})}, [4, 9, 9, 4], End(2, FinishReason.STOP)),
        ({"stop_token_ids": frozenset({9}), "max_tokens": 1}, [4, 9], End(1, FinishReason.LENGTH)),
        ({"stop_token_ids": frozenset({9}), "max_tokens": 2}, [4, 9], End(2, FinishReason.STOP)),
        ({"max_tokens": 2}, [4, 5, 6], End(2, FinishReason.LENGTH)),
        ({"max_tokens": 4}, [4, 5, 6], None),
    ],
)
def test_what_comes_first_ends_it(tokenizer, fields, tokens, expected) -> None:
    assert output_end(tokenizer, **fields).follow(tokens) == expected
    assert output_end(tokenizer, "no such text", **fields).follow(tokens) == expected


@pytest.mark.parametrize(("min_tokens", "end"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6)])
def test_a_stop_string_may_begin_before_min_tokens(tokenizer, min_tokens, end) -> None:
    """It is where it ends that counts."""
    ids = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "ababab"]
    found = output_end(tokenizer, "ab", min_tokens=min_tokens, previous=ids[-1]).follow(ids)
    assert found.num_tokens == end


def test_a_stop_string_does_not_begin_in_the_prompt(tmp_path: Path) -> None:
    """Words bring their space: the text goes on from the prompt's last token."""
    spelled = load_tokenizer(save(tmp_path, metaspace()))
    prompt, made = spelled.encode("The quick"), spelled.encode("brown fox")
    for stop, num_tokens in (("quick brown", None), (" brown", 1)):
        fields: dict[str, Any] = {"previous": spelled.last_of_text(prompt)}
        found = output_end(spelled, stop, **fields).follow(made)
        assert (None if found is None else found.num_tokens) == num_tokens


def test_what_was_made_before_may_hold_its_beginning(tokenizer: Tokenizer) -> None:
    """A request that is opened again, over a draft server's next stream."""
    ids = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "xyab"]
    again = output_end(tokenizer, "yab", prompt=(*ids[:2], ids[2]), num_made=2)
    assert again.follow(ids[3:]) == End(1, FinishReason.STOP, 3)
    assert output_end(tokenizer, "yab", prompt=tuple(ids[:3]), num_made=1).follow(ids[3:]) is None


def test_a_tokenizer_that_cannot_be_loaded_ends_the_request(tokenizer: Tokenizer) -> None:
    def fail() -> Tokenizer:
        raise OSError("no such file")

    request = Request("r", 1, 9, prompt_token_ids=(5,), stop=StopStrings(("a",)))
    text = TokenBuffer(request, end=OutputEnd(request, LazyTokenizer(fail)))
    assert text.problem == "stop: the tokenizer cannot be loaded: no such file"


def verdict_of(
    tokenizer: Tokenizer, answer: Decided, draft: list[int], num_looked_up: int = 0, **fields: Any
) -> Verdict:
    request = Request("r", 3, 99, prompt_token_ids=(5, 6, 7), **fields)
    text = TokenBuffer(request, end=OutputEnd(request, lambda: tokenizer))
    item = VerifyItem("r", 0, 0, 2, 1, True, DraftSource.INLINE, "d", len(draft))
    item = item._replace(num_looked_up=num_looked_up)
    computed = Computed([Drafted(text, 3, draft, [])], [answer], 5, 0.0, 0.0)
    (verdict,) = verdicts_of([item], computed)
    assert text.tokens(3, text.length) == list(verdict.token_ids)
    return verdict


@pytest.mark.parametrize(
    ("evidence", "num_accepted", "decided", "of_model"),
    [([0.5, 0, 0, 0], 0, 0, 0), ([0.5, 0.6, 0.2, 0], 2, 1, 0.2), ([0.5, 0.6, 0.2, 0.5], 4, 2, 0.7)],
)
def test_a_verdict_has_the_evidence_of_the_model_behind_look_up(
    tokenizer: Tokenizer, evidence: list[float], num_accepted: int, decided: int, of_model: float
) -> None:
    answer = Decided([], num_accepted, min(4, num_accepted + 1), evidence, evidence)
    verdict = verdict_of(tokenizer, answer, [40, 41, 42, 43], num_looked_up=2)
    assert (verdict.num_looked_up, verdict.num_accepted) == (2, num_accepted)
    assert verdict.num_decided == decided
    assert verdict.evidence == pytest.approx(of_model)


@pytest.mark.parametrize(
    ("place", "proposed", "accepted", "evidence", "evidence_all"),
    [(0, 1, 1, 0.5, 0.7), (1, 2, 2, 1.1, 1.6), (2, 3, 2, 1.3, 1.7)],
)
def test_a_verdict_ends_with_the_output(
    tokenizer: Tokenizer,
    place: int,
    proposed: int,
    accepted: int,
    evidence: float,
    evidence_all: float,
) -> None:
    """A draft of four, of which two are accepted."""
    answer = Decided([40, 41, 42], 2, 3, [0.5, 0.6, 0.2, 0.0], [0.7, 0.9, 0.1, 0.8])
    fields: dict[str, Any] = {"stop_token_ids": frozenset({40 + place})}
    verdict = verdict_of(tokenizer, answer, [40, 41, 43, 44], **fields)
    assert verdict.token_ids == (40, 41, 42)[: place + 1]
    assert verdict.finish_reason is FinishReason.STOP
    assert (verdict.num_proposed, verdict.num_accepted) == (proposed, accepted)
    assert verdict.num_decided == proposed
    assert verdict.evidence == pytest.approx(evidence)
    assert verdict.evidence_all == pytest.approx(evidence_all)
    assert verdict.num_drafted == 4, "the target has computed them all"


@pytest.fixture(scope="module", params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, family: dict[str, Path]) -> Engine:
    return load(family, request.param)


def ended(request: Request, output: tuple[int, ...], kind: str, spelt: Tokenizer) -> Request:
    """The request, to end at the tenth token or before."""
    name = f"{request.id}-{kind}"
    if kind == "max_tokens":
        return dataclasses.replace(request, id=name, max_tokens=10)
    if kind == "stop token":
        return dataclasses.replace(request, id=name, stop_token_ids=frozenset({output[9]}))
    previous = spelt.last_of_text(request.prompt_token_ids or ())
    text = spelt.detokenizer(previous=previous)
    pieces = [text.add(token) for token in output]
    # In what is shown, whole characters.
    stop = "".join(pieces[6:10])[-3:]
    return dataclasses.replace(request, id=name, stop=StopStrings((stop,), previous))


def until_its_end(output: tuple[int, ...], request: Request, spelt: Tokenizer) -> tuple[int, ...]:
    end = OutputEnd(request, lambda: spelt)
    for count, token in enumerate(output, 1):
        if end.follow([token]) is not None:
            return output[:count]
    return output


@pytest.mark.parametrize("kind", ["stop string", "stop token", "max_tokens"])
@pytest.mark.parametrize("own_lane", [False, True])
@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_speculation_ends_where_the_target_alone_does(
    engine: Engine, kind: str, own_lane: bool, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelt = load_tokenizer(engine.tokenizer_path)
    requests = make_requests(SAMPLINGS[sampling], 8, "none")
    whole, _ = run(make_loop(engine), requests)
    requests = [ended(r, o, kind, spelt) for r, o in zip(requests, whole, strict=True)]
    expected = [until_its_end(o, r, spelt) for o, r in zip(whole, requests, strict=True)]
    assert all(len(e) < len(w) for e, w in zip(expected, whole, strict=True))
    loop = make_loop(engine, k=6, own_lane=own_lane, pipeline="auto" if own_lane else "off")
    verdicts: list[Verdict] = []
    charged: list[int] = []
    learn, accounts = loop.scheduler.learn.acceptance, loop.scheduler.table.accounts
    monkeypatch.setattr(accounts, "are_kept", True)
    monkeypatch.setattr(learn, "on_verdict", verdicts.append)
    monkeypatch.setattr(
        accounts, "charge_decode", lambda state, known, num_drafts: charged.append(num_drafts)
    )
    drafted = [dataclasses.replace(r, id=f"{r.id}-drafted", drafter="same") for r in requests]
    outputs, accepted = run(loop, drafted)
    assert outputs == expected
    num_tokens = sum(map(len, expected))
    assert 0 < accepted <= num_tokens
    # The drafter is always right: every position that is no output's first token was drafted or
    # is the target's own behind a whole draft.
    assert sum(v.num_decided for v in verdicts) == sum(v.evidence for v in verdicts) == accepted
    assert all(v.num_proposed <= len(v.token_ids) for v in verdicts)
    assert sum(charged) == sum(v.num_proposed for v in verdicts if v.num_proposed)
    assert sum(charged) == accepted
