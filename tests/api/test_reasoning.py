"""Reasoning, split from the text however it is cut."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.conftest import client_of
from tests.api.tool_servers import HERMES, tool_server

from penstock.api.reasoning import (
    GEMMA,
    GRANITE,
    HARMONY,
    MAGISTRAL,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    reasoning_of,
)

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
NEXT = "<|end|><|start|>assistant"
SPLIT: list[tuple[ReasoningFormat, bool, str, str, str]] = [
    (THINK, False, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
    (THINK, False, "\n <think>Hm.</think>Yes.\n", "Hm.", "Yes.\n"),
    (THINK, False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (THINK, False, "<think>Hm", "Hm", ""),
    (THINK, False, "<think>Hm.</think", "Hm.</think", ""),
    (THINK, False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    (THINK, False, "a</think>", "", "a</think>"),
    (THINK, False, "<th", "", "<th"),
    (THINK, True, "H <think>\n</think>\n<b> </think> <think>", "H <think>", "<b> </think> <think>"),
    (THINK, True, "Hm.\n", "Hm.\n", ""),
    (THINK, True, "</think>Yes.", "", "Yes."),
    (MAGISTRAL, False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    (GRANITE, False, "<think>Hm.</think><response>Yes.</response>", "Hm.", "Yes."),
    (GRANITE, False, "<think>Hm.</think>\n<response>Yes.</resp", "Hm.", "Yes.</resp"),
    (GEMMA, False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    (GEMMA, False, "<|channel>other", "", "<|channel>other"),
    (HARMONY, False, f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.<|return|>", "Hm.", "Yes."),
    (HARMONY, False, f"{FINAL}Yes.", "", "Yes."),
    (HARMONY, False, f"{ANALYSIS}Hm.{NEXT}{PREAMBLE}Wait.{NEXT}{ANALYSIS}So.{NEXT}{FINAL}Yes.",
     "Hm.So.", "Wait.Yes."),
    (HARMONY, False, f"{ANALYSIS}Hm.{NEXT}{CALL}", "Hm.", CALL),
    (HARMONY, False, f"{ANALYSIS}Hm.{NEXT} to=functions.f", "Hm.", " to=functions.f"),
    (HARMONY, False, f"{FINAL}<|channel|>analysis <|end", "", "<|channel|>analysis <|end"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "inside", "text", "reasoning", "shown"), SPLIT)
@given(data=st.data())
def test_however_it_is_cut(form, inside, text, reasoning, shown, data) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parser = ReasoningParser(form, inside=inside)
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    told = [parser.add(part, is_last=n == len(parts)) for n, part in enumerate(parts, 1)]
    assert "".join(first for first, _ in told) == reasoning
    assert "".join(second for _, second in told) == shown


def test_nothing_is_held_back_that_cannot_be_a_mark() -> None:
    parser = ReasoningParser(THINK, inside=False)
    assert parser.add("<th") == ("", "")
    assert parser.add("e") == ("", "<the")
    parser = ReasoningParser(THINK, inside=True)
    assert parser.add("Hm </th") == ("Hm ", "")
    assert parser.add("e\n") == ("</the", "")


@pytest.mark.parametrize(
    ("continued", "reasoning", "text"),
    [("<think>Hm.", "\nSo.", "Yes."), ("<think>Hm.</think>Well", "", "\nSo.</think>\nYes.")],
)
def test_what_goes_on_keeps_its_line_break(continued: str, reasoning: str, text: str) -> None:
    parser = THINK.parser("", continued)
    assert parser.add("\nSo.</think>\nYes.", is_last=True) == (reasoning, text)


def test_the_template_says_how_a_model_thinks() -> None:
    assert reasoning_of("{{ content.split('</think>')[-1] }}") is THINK
    assert reasoning_of("between <think></think> and <response></response>") is GRANITE
    assert reasoning_of("[THINK]{{ thinking }}[/THINK]") is MAGISTRAL
    assert reasoning_of("<|start|>assistant<|channel|>analysis<|message|>") is HARMONY
    assert reasoning_of("<|im_start|>{{ content }}") is reasoning_of(None) is None


def test_the_prompt_may_open_it() -> None:
    assert THINK.is_open("Hi<assistant><think>\n", None)
    assert not THINK.is_open("Hi<assistant><think>\n\n</think>\n\n", None)
    assert not THINK.is_open("<think> is a tag<assistant>", None)
    assert THINK.is_open("", "<think>Hm")
    assert not THINK.is_open("", "<think>Hm.</think>So")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Its model says what its last message says."""
    template = HERMES + "{# </think> #}"
    with (
        tool_server(tmp_path_factory.mktemp("thinker"), template) as server,
        client_of(server) as client,
    ):
        yield client


def chat(ai: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return ai.chat.completions.create(**{"model": "toy", "messages": messages, **fields})


THOUGHT = "<think>\nWhat is it? Rain, then.\n</think>\n\nRain."


def test_a_whole_answer(thinker: openai.OpenAI) -> None:
    made = chat(thinker, THOUGHT, logprobs=True)
    (choice,) = made.choices
    assert choice.message.content == "Rain."
    assert choice.message.reasoning_content == "What is it? Rain, then."
    details = made.usage.completion_tokens_details
    assert 5 < details.reasoning_tokens < made.usage.completion_tokens - 1
    plain = chat(thinker, "Rain.")
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    assert "reasoning_content" not in plain.choices[0].message.model_extra
    assert len(choice.logprobs.content) == made.usage.completion_tokens - 1


def test_a_streamed_answer(thinker: openai.OpenAI) -> None:
    told: list[tuple[str, str]] = []
    for chunk in chat(thinker, THOUGHT, stream=True):
        (choice,) = chunk.choices
        told += [
            ("reasoning_content", (choice.delta.model_extra or {}).get("reasoning_content", ""))
        ]
        told += [("content", choice.delta.content or "")]
    told = [(kind, text) for kind, text in told if text]
    kinds = [kind for kind, _ in told]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count("reasoning_content") > 2
    assert "".join(t for k, t in told if k == "content") == "Rain."
    assert "".join(t for k, t in told if k != "content") == "What is it? Rain, then."


def test_a_call_behind_it_and_none_in_it(thinker: openai.OpenAI) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    (choice,) = chat(thinker, f"<think>\n{call}?\n</think>\n\n{call}", tools=tools).choices
    assert choice.message.reasoning_content == f"{call}?"
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


def test_a_stop_string_in_it(thinker: openai.OpenAI) -> None:
    (choice,) = chat(thinker, THOUGHT, stop=[" Rain"]).choices
    assert choice.message.reasoning_content == "What is it?"
    assert choice.message.content == ""
    assert choice.finish_reason == "stop"
