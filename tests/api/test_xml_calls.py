"""Forced calls with arguments one by one: what the grammar lets through is read as that call."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.api.tool_servers import GEMMA, GLM, LFM2, QWEN_CODER, SHORT_GLM

from penstock.api.bodies import ChatBody
from penstock.api.errors import ApiError
from penstock.api.tool_use import ToolUse, tool_use
from penstock.api.written_calls import LONGEST_XML_KEY, alternatives

OR_NULL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
COLOUR = {"$ref": "#/$defs/Colour"}
DEFS = {"Colour": {"type": "string", "enum": ["red", "blue"]}}


def use_of(properties: dict[str, Any], template: str = QWEN_CODER, **others: Any) -> ToolUse:
    parameters = {"type": "object", "properties": properties, "required": [*properties], **others}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
    )
    use = tool_use(body, template)
    assert use is not None
    return use


def call_of(**values: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<function=f>\n{''.join(parts)}</function>"


def is_allowed(use: ToolUse, text: str) -> bool:
    (structure,) = use.shaped([], {})
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(structure.value))
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.validate_tokens(tokens) == len(tokens))


def arguments_of(use: ToolUse, text: str) -> Any:
    """None where it is no call."""
    call = use.form.call({tool.function.name: tool.function.parameters or {} for tool in use.tools})
    if call.add(text) < len(text) or not call.is_over or call.arguments is None:
        return None
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("schema", "written", "read"),
    [
        ({"type": "string"}, "Rome, <b>now</b>\n\nor later", "Rome, <b>now</b>\n\nor later"),
        ({"type": "string"}, "", ""),
        ({}, "Rome", "Rome"),
        (OR_NULL, "Rome", "Rome"),
        (OR_NULL, "null", None),
        ({"type": ["string", "null"]}, "Rome", "Rome"),
        (COLOUR, "red", "red"),
        ({"anyOf": [COLOUR, {"type": "null"}]}, "red", "red"),
        ({"anyOf": [COLOUR, {"type": "null"}]}, "null", None),
        ({"allOf": [COLOUR]}, "blue", "blue"),
        ({"const": "on"}, "on", "on"),
        ({"type": "integer"}, "7", 7),
        ({"type": "array", "items": COLOUR}, '["red"]', ["red"]),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, '{"a": "b"}', {"a": "b"}),
    ],
)
def test_what_is_forced_is_read(schema: dict[str, Any], written: str, read: Any) -> None:
    use = use_of({"a": schema}, **{"$defs": DEFS})
    text = call_of(a=written)
    assert is_allowed(use, text)
    assert arguments_of(use, text) == {"a": read}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        (COLOUR, "green"),
        (COLOUR, '"red"'),
        ({"anyOf": [COLOUR, {"type": "null"}]}, "7"),
        ({"type": "integer"}, "Rome"),
        ({"type": "string"}, "before</parameter>behind"),
    ],
)
def test_what_would_not_be_read_is_not_let_through(schema: dict[str, Any], written: str) -> None:
    """The last one is no call: its value would end too early."""
    assert not is_allowed(use_of({"a": schema}, **{"$defs": DEFS}), call_of(a=written))


@pytest.mark.parametrize("name", ["", "a<b", "a>b", "a\nb", "a" * (LONGEST_XML_KEY + 1)])
def test_a_parameter_that_could_not_be_read_is_refused(name: str) -> None:
    use = use_of({name: {"type": "string"}})
    with pytest.raises(ApiError, match=r"tool_choice: a parameter of 'f' is called") as refused:
        use.shaped([], {})
    assert (refused.value.status, refused.value.param) == (400, "tools")
    # Rightly: as its template would have the call written, it is none.
    assert arguments_of(use, call_of(**{name: "x"})) != {name: "x"}


@pytest.mark.parametrize("name", ["Größe in m²", "a" * LONGEST_XML_KEY, 'a"b', "a=b"])
def test_other_names_are_not(name: str) -> None:
    use = use_of({name: {"type": "string"}})
    assert is_allowed(use, call_of(**{name: "x"}))
    assert arguments_of(use, call_of(**{name: "x"})) == {name: "x"}


def test_a_choice_that_could_not_be_read_is_refused() -> None:
    with pytest.raises(ApiError, match="a choice with </parameter> in it"):
        use_of({"a": {"enum": ["b</parameter>c"]}}).shaped([], {})


def test_a_schema_that_refers_to_itself_is_looked_at_once() -> None:
    loop: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/loop"} for _ in range(50)]}
    assert len(list(alternatives(loop, {"$defs": {"loop": loop}}))) == 51


PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": COLOUR},
    "required": ["city"],
    "additionalProperties": False,
}
ALL = {"note": {"type": "string"}, "at": PLACE, "days": {"type": "integer"}, "mood": COLOUR}
READ = {"note": "a 'b' (c)\n", "at": {"city": "red"}, "days": -3, "mood": "blue"}
KEYED = 'f(note="a \'b\' (c)\\n", at={"city": "red"}, days=-3, mood="blue")'
MARKED = 'call:f{note:<|"|>a \'b\' (c)\n<|"|>,at:{"city": "red"},days:-3,mood:"blue"}'
ARG = "<arg_key>{}</arg_key>{}<arg_value>{}</arg_value>{}"


def glm(gap: str) -> str:
    written = {"note": READ["note"], "at": '{"city": "red"}', "days": "-3", "mood": "blue"}
    parts = [ARG.format(key, gap, value, gap) for key, value in written.items()]
    return f"f{gap}{''.join(parts)}</tool_call>"


FORMS = [(LFM2, KEYED), (GEMMA, MARKED), (GLM, glm("\n")), (SHORT_GLM, glm(""))]


@pytest.mark.parametrize(("template", "text"), FORMS)
def test_forced_calls_of_other_forms_are_read(template: str, text: str) -> None:
    use = use_of(ALL, template, **{"$defs": DEFS})
    assert is_allowed(use, text)
    assert arguments_of(use, text) == READ
    for wrong in ("green", "days", "city"):
        right = {"green": "red", "days": "-3", "city": "mood"}[wrong]
        assert not is_allowed(use, text.replace(right, wrong))


@pytest.mark.parametrize(
    ("template", "required", "texts"),
    [
        (LFM2, [], ["f()", "f(a=1)", "f(b=2)", "f(a=1, b=2)"]),
        (LFM2, ["b"], ["f(b=2)", "f(b=2, a=1)"]),
        (GEMMA, [], ["call:f{}", "call:f{b:2}", "call:f{a:1,b:2}"]),
        (GEMMA, ["a", "b"], ["call:f{a:1,b:2}"]),
    ],
)
def test_optional_arguments_may_be_left_out(template, required, texts) -> None:
    whole = {"type": "integer", "minimum": 1, "maximum": 2}
    use = use_of({"a": whole, "b": whole}, template, required=required)
    for text in texts:
        assert is_allowed(use, text)
        assert arguments_of(use, text) is not None
    head, end = texts[0][: 2 if template == LFM2 else 7], texts[0][-1]
    assert is_allowed(use, head + end) is (not required)
    assert not is_allowed(use, texts[-1][:-1] + ",")


def test_a_bare_name_that_could_not_be_read_is_refused() -> None:
    with pytest.raises(ApiError, match="a parameter of 'f' is called 'a=b'"):
        use_of({"a=b": {"type": "string"}}, LFM2).shaped([], {})
