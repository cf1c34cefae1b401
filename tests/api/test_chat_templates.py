"""Prompts of chats, byte by byte as transformers renders them, of ten families."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api.test_prepare import READY, SOMEONE, preparer
from tests.serving.fakes import TOKENIZER
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.api.bodies import ChatBody
from penstock.engine.models.fast_tokenizer import FastTokenizer
from penstock.engine.tokenizer import Tokenizer, load_tokenizer

FOLDER = Path(__file__).parent / "templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Größe > 0 & <b>it's</b>"},
        "days": {"type": ["integer", "null"], "default": 3},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "Tells it.", "parameters": PLACE}}
    for n in ("weather", "tides")
]
SYSTEM = {"role": "system", "content": "Be brief. \n"}
ASK = {"role": "user", "content": " Wie wird's in Köln — \U0001f327?\n"}
ARGUMENTS = {"unit": "C", "city": "K\u00f6ln <\u2019>", "days": None}
FUNCTION = {"name": "weather", "arguments": ARGUMENTS}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "content": '{"sky": "grey"}', "tool_call_id": "abcdef123"}
SAID = {"role": "assistant", "content": "Rain.\n"}
THOUGHT = {"reasoning_content": "It is \nautumn."}
TURNS = [SYSTEM, ASK, SAID, ASK]

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([ASK], {}),
    "several turns": (TURNS, {}),
    "no generation prompt": ([SYSTEM, ASK, SAID], {"add_generation_prompt": False}),
    "continued": ([SYSTEM, ASK, SAID], {"continue_final_message": True}),
    "thinking": (TURNS, {"chat_template_kwargs": {"enable_thinking": True}}),
    "no thinking": (TURNS, {"chat_template_kwargs": {"enable_thinking": False}}),
    "variables": ([ASK], {"chat_template_kwargs": {"date_string": "1 May 2031", "x": [1]}}),
    "reasoning": ([ASK, SAID | THOUGHT, ASK], {}),
    "tools": ([SYSTEM, ASK], {"tools": TOOLS}),
    "called": ([SYSTEM, ASK, CALL, RESULT], {"tools": TOOLS}),
    "called, thinking": ([ASK, CALL | THOUGHT, RESULT], {"tools": TOOLS}),
    "called earlier": ([SYSTEM, ASK, CALL, RESULT, SAID, ASK], {"tools": TOOLS}),
}


@pytest.fixture(scope="module", params=["folder", "GGUF"])
def bundled(request: pytest.FixtureRequest) -> Any:
    """A tokenizer whose chat template may be set."""
    fast = load_tokenizer(TOKENIZER)._fast
    return fast if request.param == "folder" else FastTokenizer(fast.backend_tokenizer, "", SPECIAL)


async def ours(bundled: Any, template: str, body: Mapping[str, Any]) -> str:
    bundled.chat_template = template
    vars(bundled).pop("_writer", None)
    tokenizer = Tokenizer(bundled)
    made = ChatBody.model_validate_json(json.dumps(body))
    builder = preparer(tokenizer)
    builder.engine = replace(READY, max_request_tokens=8192)
    (choice,) = await builder.chat(made, SOMEONE, "job")
    return tokenizer.decode(choice.request.prompt_token_ids or (), skip_special_tokens=False)


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's clients send it: arguments are a string."""
    sent: dict[str, Any] = json.loads(json.dumps(message))
    for call in sent.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def in_both_fields(message: dict[str, Any]) -> dict[str, Any]:
    """The reasoning before a call also as gpt-oss's template has it, which renders it."""
    if "tool_calls" not in message or "reasoning_content" not in message:
        return message
    return message | {"thinking": message["reasoning_content"]}


@pytest.mark.parametrize("family", FAMILIES)
async def test_as_transformers(bundled: Any, family: str) -> None:
    template = (FOLDER / f"{family}.jinja").read_text()
    for case, (messages, fields) in CASES.items():
        if "tools" in fields and "tools" not in template:
            continue
        options = {"add_generation_prompt": not fields.get("continue_final_message"), **fields}
        options |= options.pop("chat_template_kwargs", {})
        (expected,), _ = render_jinja_template(
            [[in_both_fields(m) for m in messages]],
            chat_template=template,
            **bundled.special_tokens_map | options,
        )
        sent = {"messages": [as_sent(m) for m in messages], **fields}
        assert await ours(bundled, template, sent) == expected, case
