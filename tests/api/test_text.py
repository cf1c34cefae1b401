from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_tokenizer import CHAT, metaspace, save

from penstock.api.bodies import ChatBody, CompletionBody
from penstock.api.choices import TextStream
from penstock.api.http import Caller
from penstock.api.prepare import RequestBuilder
from penstock.core.types import Output, TokenLogprob
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.serving.limits import Quotas
from penstock.serving.messages import Ready

LOGPROB = TokenLogprob(-1.0, ())

SOMEONE = Caller("someone", "someone")


def test_only_what_could_be_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    stream.add(tokenizer.encode("the E"), ())
    assert stream.pop_text()[0] == "the "
    stream.add(tokenizer.encode("N"), ())
    assert stream.pop_text()[0] == ""
    stream.add(tokenizer.encode("X"), ())
    assert stream.pop_text()[0] == "ENX"


def test_a_text_may_go_on_from_another(tmp_path: Path) -> None:
    """Where words bring their space, it is dropped before a text's first word only."""
    spelled = load_tokenizer(save(tmp_path, metaspace()))
    prompt, added = spelled.encode("The quick"), spelled.encode("brown fox")
    for previous, expected in ((None, "brown fox"), (spelled.last_of_text(prompt), " brown fox")):
        stream = TextStream(spelled, (), previous)
        stream.add(added, [LOGPROB] * len(added))
        stream.finish()
        text, tokens = stream.pop_text()
        assert text == b"".join(t.raw for t in tokens).decode() == expected


async def test_completions_go_on_from_their_prompt_and_assistants_begin(tmp_path: Path) -> None:
    spelled = load_tokenizer(save(tmp_path, metaspace(), chat_template=CHAT))
    engine = Ready(tmp_path, 1000, 4096, frozenset(), (), {})
    prepare = RequestBuilder(
        ("toy",), spelled, engine, None, lambda: (), lambda client: 8, Quotas()
    )
    body: dict[str, Any] = {"prompt": "The quick"}
    (completion,) = await prepare.completion(CompletionBody.model_validate(body), SOMEONE, "job")
    body = {"messages": [{"role": "user", "content": "The quick"}]}
    (answer,) = await prepare.chat(ChatBody.model_validate(body), SOMEONE, "job")
    for choice, expected in ((completion, " brown fox"), (answer, "brown fox")):
        (delta,) = choice.on_output(Output("job", tuple(spelled.encode("brown fox"))))
        assert delta.text == expected


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ())
    stream.add(tokenizer.encode("€")[:1], ())
    stream.finish()
    assert stream.pop_text()[0] == "\ufffd"


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_tokens_are_reported_with_the_text_they_complete(tokenizer, stops) -> None:
    token_ids = tokenizer.encode("one two €!")
    stream = TextStream(tokenizer, stops)
    text, tokens = "", []
    for token_id in token_ids:
        stream.add([token_id], [LOGPROB])
        piece, reported = stream.pop_text()
        text += piece
        tokens += reported
        assert all(t.end <= len(text) for t in reported)
    assert [t.token_id for t in tokens] == token_ids
    assert b"".join(t.raw for t in tokens).decode() == text == "one two €!"
