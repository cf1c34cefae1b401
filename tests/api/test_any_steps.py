"""What is written does not depend on how many tokens a step brings."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.test_tool_calls import TAGGED, TOOLS

from penstock.api.anthropic.bodies import MessagesBody
from penstock.api.anthropic.format import MessagesFormat
from penstock.api.choices import Delta, ResponseChoice, TextStream
from penstock.api.reasoning import THINK
from penstock.api.response_bodies import ResponsesBody
from penstock.api.response_format import ResponsesFormat
from penstock.api.responses import ChatFormat, CompletionFormat, Form
from penstock.api.tool_calls import HERMES, ToolCallParser
from penstock.core.types import Output, Request, StopStrings, TokenLogprob
from penstock.engine.ends import OutputEnd
from penstock.engine.tokenizer import Tokenizer

EOS, HIDDEN = 2, 4
HORSE = "🐎"
MESSAGE = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


class StepChoice(ResponseChoice):
    """The control: reads all tokens of a step at once."""

    def _read(self, output: Output) -> Iterator[Delta | None]:
        self._text.add(output.token_ids, output.logprobs)
        if output.finish_reason is not None:
            self._text.finish(output.num_stop_chars)
            self.finish_reason = output.finish_reason
        yield self._delta(len(output.token_ids))
        self.usage.on_output(output)


def outputs_of(
    request: Request, tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]
) -> list[Output]:
    """Steps of these sizes, and of one token from then on, up to the output's end."""
    end, made, at = OutputEnd(request, lambda: tokenizer), list[Output](), 0
    for size in [*sizes, *[1] * len(token_ids)]:
        tokens = token_ids[at : at + size]
        at += size
        found = end.follow(tokens)
        tokens = tokens if found is None else tokens[: found.num_tokens]
        output = Output(request.id, tuple(tokens), drafter="d", num_proposed=len(tokens))
        output = output._replace(logprobs=tuple(TokenLogprob(-t / 7, ((t, 0.5),)) for t in tokens))
        if found is not None:
            ended = {"finish_reason": found.reason, "num_stop_chars": found.num_stop_chars}
            return [*made, output._replace(**ended)]
        made.append(output)
    raise AssertionError("max_tokens ends it")


def written(
    tokenizer: Tokenizer, request: Request, sizes: list[int], token_ids: list[int], kind: Any
) -> Any:
    """Tokens, their number, and whole responses without what differs between any two.

    kind: class of the choice, whether the model thinks, limit of calls (0: no tools)."""
    choice_type, thinks, most = kind
    choice = choice_type(
        0,
        request,
        TextStream(tokenizer, request.stop.strings if request.stop else ()),
        opens_prompt=True,
        reasoning=THINK.parser("", None) if thinks else None,
        calls=None if most == 0 else ToolCallParser(HERMES, TOOLS, whole=False, most=most),
    )
    deltas: list[Delta] = []
    for output in outputs_of(request, tokenizer, token_ids, sizes):
        if choice.finish_reason is None:
            deltas += choice.on_output(output)
    forms: list[Form] = [
        CompletionFormat("i", "m", tokenizer, logprobs=True),
        ChatFormat("i", "m", tokenizer, logprobs=True),
        ResponsesFormat("i", "m", ResponsesBody.model_validate({"input": "Hi"})),
        MessagesFormat("i", "m", MessagesBody.model_validate(MESSAGE)),
    ]
    bodies = []
    for form in forms:
        told = json.dumps(form.response([choice], deltas))
        told = re.sub(r'"created(_at)?": \d+|"\w+_[0-9a-f]{24,}"', '"":""', told)
        bodies.append(re.sub(r'"speculation": {.*?}', '"":""', told))
    return [t for d in deltas for t in d.tokens], choice.usage.num_tokens, bodies


PIECES = [
    "a", HORSE, "€", "END", "\n", "<think>", "</think>", TAGGED, "<tool_call>", "b " + HORSE,
]  # fmt: skip
STOPS = [HORSE, "END", "a" + HORSE, "€€", "ENDE", "\ufffd", "\ufffda", "<tool"]


@st.composite
def texts(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Token ids, with characters cut short and special tokens among them."""
    token_ids: list[int] = []
    for piece in draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8)):
        made = tokenizer.encode(piece, add_special_tokens=False)
        cut = draw(st.sampled_from([0, 0, 0, 1])) if len(made) > 1 else 0
        token_ids += made[: len(made) - cut]
        token_ids += draw(st.sampled_from([[], [], [], [HIDDEN], [EOS]]))
    return token_ids


def request_of(stops: list[str], max_tokens: int) -> Request:
    stop = StopStrings(tuple(stops)) if stops else None
    ids = frozenset({EOS})
    return Request("r", 1, max_tokens, prompt_token_ids=(5,), stop=stop, stop_token_ids=ids)


@given(data=st.data())
def test_however_tokens_are_split_into_steps(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(texts(tokenizer))
    max_tokens = data.draw(st.integers(1, len(token_ids)))
    request = request_of(data.draw(st.lists(st.sampled_from(STOPS), max_size=2)), max_tokens)
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=20))
    kind = ResponseChoice, data.draw(st.booleans()), data.draw(st.sampled_from([0, None, 1]))
    alone = written(tokenizer, request, [], token_ids, kind)
    assert written(tokenizer, request, sizes, token_ids, kind) == alone
    assert written(tokenizer, request, [len(token_ids)], token_ids, kind) == alone


@pytest.mark.parametrize("sizes", [[], [3], [9]])
def test_tokens_of_one_character_are_shown_or_cut_together(tokenizer, sizes: list[int]) -> None:
    horse = tokenizer.encode(HORSE, add_special_tokens=False)
    token_ids = [*tokenizer.encode("a", add_special_tokens=False), *horse]
    kind = ResponseChoice, False, 0
    for stops, num in (([HORSE], 1), ([], len(token_ids))):
        request = request_of(stops, len(token_ids))
        tokens, num_tokens, _ = written(tokenizer, request, sizes, token_ids, kind)
        assert [t.token_id for t in tokens] == token_ids[:num]
        assert [t.start for t in tokens] == [0, 1, 1, 1, 1][:num]
        assert num_tokens == len(token_ids)
    # A stop token behind an incomplete character, whose text is the last shown token's.
    request = request_of([], 9)
    tokens, *_ = written(tokenizer, request, sizes, [*token_ids[:-1], EOS], kind)
    assert [t.text for t in tokens] == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("choice_type", [ResponseChoice, StepChoice])
def test_texts_and_calls_in_one_step(tokenizer: Tokenizer, choice_type: Any) -> None:
    """They keep their order; what follows the last call that may be made is not counted."""
    is_right = choice_type is ResponseChoice
    called = tokenizer.encode(f"a {TAGGED.partition('</')[0].rstrip()}", add_special_tokens=False)
    token_ids = [*called, *tokenizer.encode("</tool_call> b", add_special_tokens=False)]
    request, kind = request_of([], len(token_ids)), (choice_type, False, None)
    *_, (*_, message) = written(tokenizer, request, [99], token_ids, kind)
    order = re.findall('"type": "(text|tool_use)"', message)
    assert (order == ["text", "tool_use", "text"]) is is_right
    tokens, num_tokens, _ = written(tokenizer, request, [99], token_ids, (choice_type, False, 1))
    assert ((len(tokens), num_tokens) == (len(called),) * 2) is is_right
