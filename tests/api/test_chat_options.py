"""Fields that agents' clients send with a chat: template variables, effort, allowed tools."""

import inspect
import json
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.api.conftest import client_of
from tests.api.test_prepare import SOMEONE, preparer
from tests.api.tool_servers import HERMES, QWEN_CODER, TEMPLATE, tool_server, write_tokenizer
from transformers import PreTrainedTokenizerBase

from penstock.api.bodies import RESERVED_NAMES, ChatBody
from penstock.api.errors import ApiError
from penstock.api.reasoning import HARMONY, THINK, ReasoningFormat
from penstock.api.response_bodies import ResponsesBody
from penstock.api.tool_use import tool_use
from penstock.engine.grammar import GrammarCompiler, behind, grammar_of
from penstock.engine.tokenizer import load_tokenizer

USER = [{"role": "user", "content": "Hi"}]
SAID = {"role": "assistant", "content": "Well, it"}
KNOWING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }};{% endfor %}"
    "{{ reasoning_effort }}/{{ enable_thinking }}/{{ mood }}/{{ documents or 0 }}"
    "{% if add_generation_prompt %}>{% endif %}"
)


async def prompt(tmp_path: Any, template: str, **fields: Any) -> str:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template))
    body = ChatBody.model_validate({"messages": USER, **fields})
    (choice,) = await preparer(tokenizer).chat(body, SOMEONE, "job")
    return tokenizer.decode(choice.request.prompt_token_ids or (), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "user: Hi;///0>"),
        ({"add_generation_prompt": False}, "user: Hi;///0"),
        ({"chat_template_kwargs": {"mood": [1, "a"], "unread": 2}}, "user: Hi;//[1, 'a']/0>"),
        ({"reasoning_effort": "low"}, "user: Hi;low///0>"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "user: Hi;high///0>",
        ),
        ({"documents": [{"text": "b"}]}, "user: Hi;///[{'text': 'b'}]>"),
        ({"messages": [*USER, SAID | {"reasoning": "Hm."}]},
         "user: Hi;assistant: Well, itHm.;///0>"),
        ({"messages": [*USER, {"role": "assistant", "content": None, "refusal": "No."}]},
         "user: Hi;assistant: No.;///0>"),
        ({"messages": [*USER, {"role": "assistant", "content": [
            {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]}]},
         "user: Hi;assistant: aNo.;///0>"),
    ],
)  # fmt: skip
async def test_what_the_template_gets(tmp_path, fields, text) -> None:
    assert await prompt(tmp_path, KNOWING, **fields) == text


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("high", True)])
async def test_effort_of_a_template_that_thinks_or_does_not(tmp_path, effort, thinks) -> None:
    template = "{{ enable_thinking }}"
    assert await prompt(tmp_path, template, reasoning_effort=effort) == str(thinks)


async def test_a_message_that_goes_on(tmp_path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    asked = {"messages": [*USER, SAID], "continue_final_message": True}
    assert await prompt(tmp_path, template, **asked) == "<user>Hi</><assistant>Well, it"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": []}, "chat_template_kwargs: Input should be an object"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs: 'a b' is not a variable that a"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs: 'bos_token' is not a"),
    ({"chat_template_kwargs": {"a": "b" * 20_000}}, "chat_template_kwargs: at most 16384 charac"),
    (
        {"messages": [*USER, SAID], "continue_final_message": True, "add_generation_prompt": True},
        "the body is wrong: give continue_final_message or add_generation_prompt, not both",
    ),
    ({"continue_final_message": True}, "the body is wrong: continue_final_message needs a last"),
    ({"documents": [{"text": "a"}]}, "documents: the model's chat template takes none"),
    ({"documents": ["a"]}, "documents.0: Input should be"),
    ({"reasoning_effort": "huge"}, "reasoning_effort: Input should be 'none', 'minimal', 'low',"),
    ({"messages": [{**USER[0], "reasoning_content": "a"}]}, "messages.0: reasoning_content is"),
    ({"messages": [{**USER[0], "refusal": "a"}]}, "messages.0: refusal is only allowed in"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages.0: content is required"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice: must be"),
    *(
        ({"messages": [{"role": "user", "content": [part]}]}, "messages.0.content: must be a")
        for part in ({"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "file"})
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_is_wrong_is_said_in_one_line(http: httpx.Client, fields, message) -> None:
    made = http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert made.status_code == 400
    assert made.json()["error"]["message"].startswith(message)


def test_no_client_sets_what_transformers_takes_itself() -> None:
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert set(taken) - {"kwargs"} <= RESERVED_NAMES
    for name in RESERVED_NAMES:
        with pytest.raises(ValueError, match="is not a variable"):
            ChatBody.model_validate({"messages": USER, "chat_template_kwargs": {name: 1}})


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": USER, "reasoning_effort": "high"}),
     ("responses", {"input": "Hi", "reasoning": {"effort": "high"}})],
)  # fmt: skip
def test_what_has_no_effect_is_said(http: httpx.Client, path: str, asked: Any) -> None:
    others = {"user": "a", "priority": 3, "service_tier": "auto", "prompt_cache_key": "k"}
    others |= {"safety_identifier": "s", "verbosity": "low"}
    made = http.post(f"/v1/{path}", json={**asked, **others, "max_tokens": None})
    assert made.status_code == 200
    told = made.headers["X-Penstock-Ignored-Fields"].split(", ")
    assert {*others} - {"user"} | {"reasoning_effort"} <= set(told)


def test_variables_that_are_not_read_are_said(http: httpx.Client) -> None:
    asked = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}, "store": True}
    made = http.post(
        "/v1/chat/completions", json={**asked, "metadata": {"a": "b"}, "max_tokens": 2}
    )
    told = made.headers["X-Penstock-Ignored-Fields"].split(", ")
    assert set(told) == {"store", "metadata", "chat_template_kwargs.enable_thinking"}


# --- tools ---------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": n}} for n in ("a", "b", "c")]


def subset(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(mode: str) -> None:
    fields = {"messages": USER, "tools": TOOLS, "tool_choice": subset(mode, "c", "a", "a")}
    body = ChatBody.model_validate(fields)
    use = tool_use(body, HERMES)
    assert [tool.function.name for tool in use.tools] == ["c", "a"]
    assert [tool.function.name for tool in body.offered_tools] == ["a", "c"]
    assert use.must is (mode == "required")
    responses = ResponsesBody.model_validate({
        "input": "Hi",
        "tools": [{"type": "function", "name": n} for n in "abc"],
        "tool_choice": {
            "type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "b"}],
        },
    })  # fmt: skip
    assert [tool.function.name for tool in responses.as_chat().offered_tools] == ["b"]
    assert responses.as_chat().must_call is (mode == "required")


def test_allowed_tools_that_are_not_there() -> None:
    body = ChatBody.model_validate(
        {"messages": USER, "tools": TOOLS, "tool_choice": subset("auto", "d")}
    )
    with pytest.raises(ApiError, match="tool_choice: no tool is called 'd'"):
        tool_use(body, HERMES)


# --- structure behind reasoning ------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MADE = ReasoningFormat(
    ("<|user|>", "analysis"), ("<|assistant|>", "x"), before=("<|user|>", "final", "<|system|>")
)
"""Like harmony, with special tokens that the bundled vocabulary has."""


@pytest.mark.parametrize(
    ("form", "inside", "text", "fits"),
    [
        (THINK, False, '{"a": 1}', True),
        (THINK, False, '<think>Hm {"b".\n</think>\n\n{"a": 1}', True),
        (THINK, False, "<think></think>Well", False),
        (THINK, True, 'Hm. </think>{"a": 1}', True),
        (THINK, True, "Hm. </think>Well", False),
        (MADE, False, '<|user|>analysisHm.<|assistant|>x<|user|>final<|system|>{"a": 1}', True),
        (MADE, False, '<|user|>final<|system|>{"a": 1}', True),
        (MADE, False, '<|user|>analysisHm.<|assistant|>x{"a": 1}', False),
        (MADE, False, '<|user|>analysisHm.<|user|>final<|system|>{"a": 1}', False),
        (MADE, False, '{"a": 1}', False),
    ],
)
@pytest.mark.parametrize("kind", ["json", "regex", "lark"])
def test_the_structure_is_of_the_text_behind(tokenizer, kind, form, inside, text, fits) -> None:
    special = {spelt: i for i, spelt in tokenizer.special_tokens.items()}
    rules = form.rules(special, "".join(form.opening) if inside else "", None, heads=True)
    assert rules is not None
    value = {"json": SCHEMA, "regex": r'\{"a": \d\}', "lark": 'start: "{\\"a\\": " /[0-9]/ "}"'}
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, [special["<|eos|>"]])
    matcher = compiler.compile(behind(rules, grammar_of(kind, value[kind]))).result()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.validate_tokens(tokens) == len(tokens)) is fits


@pytest.mark.parametrize("template", [HERMES, QWEN_CODER])
def test_a_forced_call_behind_it(template: str) -> None:
    """The prompt does not begin the call, so that the model may think before it."""
    asked = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
    use = tool_use(ChatBody.model_validate(asked), template, thinks=True)
    assert use.lead == ""
    (structure,) = use.shaped([], {})
    rules = THINK.rules({}, "", None, heads=False)
    assert rules is not None
    grammar = behind(rules, grammar_of(structure.kind, structure.value))
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    call = (
        "<function=b>\n</function>" if template is QWEN_CODER else '{"name": "b", "arguments": {}}'
    )
    for text in (f"<think>a</think>\n\n<tool_call>\n{call}", f"<tool_call>\n{call}"):
        tokens = tokenizer.tokenize_str(text)
        assert matcher.validate_tokens(tokens) == len(tokens)
        parser = use.parser()
        found = parser.finish(text.rpartition("</think>")[2])
        assert [piece.name for piece in found.pieces] == ["b"]
    assert matcher.validate_tokens(tokenizer.tokenize_str("Well")) == 0


async def test_only_where_the_prompt_has_not_closed_it(tmp_path) -> None:
    async def grammar(end: str) -> str:
        tokenizer = load_tokenizer(write_tokenizer(tmp_path, "{{ messages }}" + end))
        fields = {"messages": USER, "response_format": {"type": "json_object"}}
        made = ChatBody.model_validate(fields)
        (choice,) = await preparer(tokenizer).chat(made, SOMEONE, "job")
        return choice.request.sampling.grammar or ""

    plain = grammar_of("json", {"type": "object"})
    assert await grammar("") == plain
    assert await grammar("<think>\n\n</think>\n\n") == plain
    opened = await grammar("{# </think> #}<think>\n")
    assert opened == behind(THINK.rules({}, "<think>", None, heads=True) or "", plain)
    assert THINK.rules({}, "", "<think>Hm.", heads=True) == THINK.rules(
        {}, "<think>", None, heads=True
    )
    assert THINK.rules({}, "", "Well", heads=True) is None


def test_marks_of_harmony_are_told_from_text() -> None:
    """As special tokens they would not be in the text, from which reasoning is split."""
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= HARMONY.marks


# --- responses -----------------------------------------------------------------------------------


def test_reasoning_items(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("thinker")
    asked = {"model": "toy", "input": "<think>\nHm, hm.\n</think>\n\nYes."}
    with tool_server(folder, TEMPLATE + "{# </think> #}") as server, client_of(server) as ai:
        made = ai.responses.create(**asked)  # type: ignore[call-overload]
        reasoning, message = made.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm, hm.")
        assert reasoning.summary == []
        assert (message.type, made.output_text) == ("message", "Yes.")
        assert made.usage.output_tokens_details.reasoning_tokens > 2
        kinds = streamed(ai, **asked)
        turns = [{"role": "user", "content": "a"}, *made.output, {"role": "user", "content": "b"}]
        again = ai.responses.create(model="toy", input=turns)
        assert again.output_text == "b"
    item, part, done = "output_item.added", "content_part.added", "content_part.done"
    assert kinds == [
        "created", "in_progress", item, part, "reasoning_text.delta", item, part,
        "output_text.delta", "reasoning_text.done", done, "output_item.done", "output_text.done",
        done, "output_item.done", "completed",
    ]  # fmt: skip


def streamed(ai: openai.OpenAI, **asked: Any) -> list[str]:
    """Kinds of the events, each once in a row."""
    kinds: list[str] = []
    with ai.responses.stream(**asked) as stream:
        for event in stream:
            kind = event.type.removeprefix("response.")
            kinds += [kind] if [kind] != kinds[-1:] else []
        assert stream.get_final_response().output[0].content[0].text == "Hm, hm."
    return kinds


def test_reasoning_belongs_to_the_turn_behind_it() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [],
               "content": [{"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    said = {"role": "assistant", "content": "So."}
    items = [{"role": "user", "content": "a"}, thought, call, result, thought, said, thought]
    body = ResponsesBody.model_validate(json.loads(json.dumps({"input": items})))
    turns = [(m.role, m.text, m.reasoning_content) for m in body.as_chat().messages]
    assert turns == [
        ("user", "a", ""), ("assistant", "", "Hm."), ("tool", "x", ""),
        ("assistant", "So.", "Hm."), ("assistant", "", "Hm."),
    ]  # fmt: skip
