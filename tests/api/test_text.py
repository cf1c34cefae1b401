from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_tokenizer import CHAT, metaspace, save

from penstock.api.bodies import ChatBody, CompletionBody
from penstock.api.choices import TextStream
from penstock.api.prepare import Caller, RequestBuilder
from penstock.core.types import Output, TokenLogprob
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.serving.messages import Ready
from penstock.serving.quotas import Quotas

LOGPROB = TokenLogprob(-1.0, ())

SOMEONE = Caller("someone", "someone")


def cut(text: str, stops: list[str]) -> str:
    """What a client may see of a text: generation ends where a stop string is complete."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


@given(
    text=st.text("ab€", min_size=1, max_size=40),
    stops=st.lists(st.text("ab€", min_size=1, max_size=5), max_size=3),
    size=st.integers(1, 5),
)
def test_stop_strings_are_found_across_any_chunks(
    tokenizer: Tokenizer, text: str, stops: list[str], size: int
) -> None:
    token_ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stops)
    shown = ""
    for at in range(0, len(token_ids), size):
        stream.add(token_ids[at : at + size], ())
        piece, _ = stream.take()
        shown += piece
        assert cut(text, stops).startswith(shown)
        if stream.stopped:
            break
    else:
        stream.finish()
        shown += stream.take()[0]
    assert shown == cut(text, stops)
    assert stream.stopped == (shown != text)


def test_only_what_could_be_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    stream.add(tokenizer.encode("the E"), ())
    assert stream.take()[0] == "the "
    stream.add(tokenizer.encode("N"), ())
    assert stream.take()[0] == ""
    stream.add(tokenizer.encode("X"), ())
    assert stream.take()[0] == "ENX"


def test_characters_come_out_whole(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("€")
    assert len(token_ids) > 1
    stream = TextStream(tokenizer, ())
    stream.add(token_ids[:1], ())
    assert stream.take()[0] == ""
    stream.add(token_ids[1:], ())
    assert stream.take()[0] == "€"


def test_a_text_may_go_on_from_another(tmp_path: Path) -> None:
    """Where words bring their space, it is dropped before a text's first word only."""
    spelled = load_tokenizer(save(tmp_path, metaspace()))
    prompt, added = spelled.encode("The quick"), spelled.encode("brown fox")
    for previous, expected in ((None, "brown fox"), (spelled.last_of_text(prompt), " brown fox")):
        stream = TextStream(spelled, (), previous)
        stream.add(added, [LOGPROB] * len(added))
        stream.finish()
        text, tokens = stream.take()
        assert text == b"".join(t.raw for t in tokens).decode() == expected


async def test_completions_go_on_from_their_prompt_and_assistants_begin(tmp_path: Path) -> None:
    spelled = load_tokenizer(save(tmp_path, metaspace(), chat_template=CHAT))
    engine = Ready(tmp_path, 1000, 4096, frozenset(), (), {})
    prepare = RequestBuilder("toy", spelled, engine, None, lambda: (), lambda client: 8, Quotas())
    body: dict[str, Any] = {"prompt": "The quick"}
    (completion,) = await prepare.completion(CompletionBody.model_validate(body), SOMEONE, "job")
    body = {"messages": [{"role": "user", "content": "The quick"}]}
    (answer,) = await prepare.chat(ChatBody.model_validate(body), SOMEONE, "job")
    for choice, expected in ((completion, " brown fox"), (answer, "brown fox")):
        delta = choice.take(Output("job", tuple(spelled.encode("brown fox"))))
        assert delta is not None
        assert delta.text == expected


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ())
    stream.add(tokenizer.encode("€")[:1], ())
    stream.finish()
    assert stream.take()[0] == "\ufffd"


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_tokens_are_reported_with_the_text_they_complete(
    tokenizer: Tokenizer, stops: list[str]
) -> None:
    token_ids = tokenizer.encode("one two €!")
    stream = TextStream(tokenizer, stops)
    text, tokens = "", []
    for token_id in token_ids:
        stream.add([token_id], [LOGPROB])
        piece, reported = stream.take()
        text += piece
        tokens += reported
        assert all(t.end <= len(text) for t in reported)
    assert [t.token_id for t in tokens] == token_ids
    assert b"".join(t.raw for t in tokens).decode() == text == "one two €!"


def test_tokens_behind_a_stop_string_are_not_reported(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one two. three")
    stream = TextStream(tokenizer, ["."])
    used = stream.add(token_ids, [LOGPROB] * len(token_ids))
    text, tokens = stream.take()
    assert text == "one two"
    assert b"".join(t.raw for t in tokens).decode() == text
    assert used == len(tokens) + 1 < len(token_ids)
