"""Calls in texts, however they are cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.tool_calls import (
    DEEPSEEK,
    DEEPSEEK_V31,
    GEMMA,
    GLM,
    GPT_OSS,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    SHORT_GLM,
    CallPiece,
    ToolCallParser,
    ToolFormat,
    format_of,
)

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "at": {"$ref": "#/$defs/place"},
            "loop": {"$ref": "#/$defs/loop"},
            "odd": {"type": 7, "anyOf": 7},
            "near": {"anyOf": [{"type": "array"}, {"type": "number"}]},
        },
        "$defs": {"place": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
    },
    "add": {},
}
PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
LLAMA_CALL = f'{{"name": "weather", "parameters": {PARIS}}}'
ARGS_CALL = f"[TOOL_CALLS]weather[ARGS]{PARIS}"


def xml(name: str, **arguments: str) -> str:
    """As Qwen3-Coder's template writes a call."""
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


XML_CALL = xml("weather", city="Paris")
TO, JSON = "<|channel|>commentary to=functions.", "<|constrain|>json<|message|>"
HARMONY_CALL = f"{TO}weather {JSON}{PARIS}<|call|>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>"
)
SHORT = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


def glm(name: str, break_: str = "\n", **arguments: str) -> str:
    """As GLM's templates write a call: until 4.6 with line breaks."""
    parts = [
        f"<arg_key>{key}</arg_key>{break_}<arg_value>{value}</arg_value>{break_}"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{break_}{''.join(parts)}</tool_call>"


GLM_CALL = glm("weather", city="Paris")
STRING = '<|"|>'


def gemma(arguments: str, name: str = "weather") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


GEMMA_CALL = gemma(f"city:{STRING}Paris{STRING}")


def lfm2(*calls: str) -> str:
    return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"


PYTHON = 'weather(city="Paris")'
GRANITE_CALL = f"<|tool_call|>[{CALL}]"

Calls = list[tuple[str, str]]


def merged(pieces: list[CallPiece]) -> Calls:
    """Names and arguments, as a client puts them together."""
    calls: Calls = []
    ids: list[str] = []
    for index, call_id, name, arguments in pieces:
        if index == len(calls):
            assert name is not None
            calls.append((name, ""))
            ids.append(call_id)
        else:
            assert name is None
        assert call_id == ids[index]
        calls[index] = (calls[index][0], calls[index][1] + arguments)
    assert len(set(ids)) == len(ids)
    return calls


def parsed(
    form: ToolFormat,
    chunks: list[str],
    *,
    whole: bool = True,
    most: int | None = None,
    formatted: bool = False,
) -> tuple[str, Calls, int]:
    """Shown text, calls, and how many of them are complete."""
    parser = ToolCallParser(form, TOOLS, whole=whole, most=most, formatted=formatted)
    content, pieces = "", []
    for number, chunk in enumerate(chunks, 1):
        found = parser.finish(chunk) if number == len(chunks) else parser.add(chunk)
        content += found.content
        pieces += found.pieces
    return content, merged(pieces), parser.num_calls


GOOD: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, TAGGED, "", [("weather", PARIS)]),
    (HERMES, f"Let me look.\n\n{TAGGED}\n", "Let me look.", [("weather", PARIS)]),
    (HERMES, f"{TAGGED}\n{TAGGED}", "", [("weather", PARIS)] * 2),
    (HERMES, f"a\n{TAGGED}\nb\n", "a\nb", [("weather", PARIS)]),
    # The end of the text closes a call, too, and so does another text.
    (HERMES, f"<tool_call>{CALL}", "", [("weather", PARIS)]),
    (HERMES, f"<tool_call>{CALL} so", " so", [("weather", PARIS)]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": [1, {"b": "}\\"{"}]}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": [1, {"b": "}\\"{"}]}')],
    ),
    # Arguments as a string, as OpenAI's clients get them.
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (HERMES, f"So:\n```json\n{CALL}\n```", "So:", [("weather", PARIS)]),
    (HERMES, f"<tools>\n{CALL}\n</tools>\n{TAGGED}", "", [("weather", PARIS)] * 2),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}]", "", [("weather", PARIS)]),
    (MISTRAL, f"Well. [TOOL_CALLS][{CALL}, {CALL}] So.", "Well. So.", [("weather", PARIS)] * 2),
    (MISTRAL, f"[TOOL_CALLS] {CALL}", "", [("weather", PARIS)]),
    (MISTRAL, "[TOOL_CALLS] [a list] and [another]", "[TOOL_CALLS] [a list] and [another]", []),
    (MISTRAL_ARGS, ARGS_CALL, "", [("weather", PARIS)]),
    (MISTRAL_ARGS, f"Well. {ARGS_CALL}{ARGS_CALL}", "Well.", [("weather", PARIS)] * 2),
    (MISTRAL_ARGS, "[TOOL_CALLS]add[CALL_ID]c0ffee123[ARGS]{}", "", [("add", "{}")]),
    (MISTRAL_ARGS, f"[TOOL_CALLS] so, {ARGS_CALL}", "[TOOL_CALLS] so,", [("weather", PARIS)]),
    (QWEN_CODER, XML_CALL, "", [("weather", PARIS)]),
    (QWEN_CODER, f"I look.\n{XML_CALL}\n{XML_CALL}", "I look.", [("weather", PARIS)] * 2),
    (QWEN_CODER, f"<tool_call>{XML_CALL}", "<tool_call>", [("weather", PARIS)]),
    (QWEN_CODER, "<tool_call>\n<function=add>\n</function>", "", [("add", "{}")]),
    (
        QWEN_CODER,
        xml("weather", city=' "a" <b>\n</c>\n\u00e9', days="3", exact="True", near="[1, 2]"),
        "",
        [
            (
                "weather",
                '{"city": " \\"a\\" <b>\\n</c>\\n\u00e9", "days": 3, "exact": true, '
                '"near": [1, 2]}',
            )
        ],
    ),
    (
        QWEN_CODER,
        xml("weather", city="7", days="true", exact="None", near="close", more="1"),
        "",
        [("weather", '{"city": "7", "days": "true", "exact": null, "near": "close", "more": "1"}')],
    ),
    (
        QWEN_CODER,
        xml("weather", at='{"x": 1}', loop="{}", odd="1"),
        "",
        [("weather", '{"at": {"x": 1}, "loop": "{}", "odd": "1"}')],
    ),
    (LLAMA, LLAMA_CALL, "", [("weather", PARIS)]),
    (LLAMA, f"\n<|python_tag|>{LLAMA_CALL}", "", [("weather", PARIS)]),
    (LLAMA, f"Well: <|python_tag|>{LLAMA_CALL}", "Well:", [("weather", PARIS)]),
    (LLAMA, f"{LLAMA_CALL}; {LLAMA_CALL}", "", [("weather", PARIS)] * 2),
    (
        LLAMA,
        '{"type": "function", "name": "add", "parameters": {"é": "\\u00e9"}}',
        "",
        [("add", '{"é": "\\u00e9"}')],
    ),
    (GPT_OSS, HARMONY_CALL, "", [("weather", PARIS)]),
    (GPT_OSS, f"{TO}weather{JSON} {PARIS}", "", [("weather", PARIS)]),
    (GPT_OSS, f"{TO}add<|message|>{{}}", "", [("add", "{}")]),
    (
        GPT_OSS,
        f"Wait. to=functions.weather<|channel|>commentary json<|message|>{PARIS}<|call|>",
        "Wait.",
        [("weather", PARIS)],
    ),
    (
        GPT_OSS,
        "<|channel|>analysis to=functions.add code<|message|>{}<|call|> so",
        " so",
        [("add", "{}")],
    ),
    (GLM, f"So.\n{GLM_CALL}\n{GLM_CALL}\n", "So.", [("weather", PARIS)] * 2),
    (SHORT_GLM, glm("weather", "", city="Paris") * 2, "", [("weather", PARIS)] * 2),
    (GLM, "<tool_call>add</tool_call><tool_call>add\n</tool_call>", "", [("add", "{}")] * 2),
    (
        GLM,
        glm("weather", city=' "a" <b>\n', days="3", exact="true", near="[1, 2]", at='{"x": 1}'),
        "",
        [
            (
                "weather",
                '{"city": " \\"a\\" <b>\\n", "days": 3, "exact": true, "near": [1, 2], '
                '"at": {"x": 1}}',
            )
        ],
    ),
    (GLM, f"<tool_call>weather so {GLM_CALL}", "<tool_call>weather so", [("weather", PARIS)]),
    (GRANITE, f"Well.{GRANITE_CALL}", "Well.", [("weather", PARIS)]),
    (GRANITE, f"<tool_call>[{CALL}, {CALL}]", "", [("weather", PARIS)] * 2),
    (LFM2, f"I look.{lfm2(PYTHON)} So.", "I look. So.", [("weather", PARIS)]),
    (
        LFM2,
        lfm2(PYTHON, "add()", PYTHON),
        "",
        [("weather", PARIS), ("add", "{}"), ("weather", PARIS)],
    ),
    (
        LFM2,
        f"<|tool_call_start|>{PYTHON}<|tool_call_end|>weather()",
        "weather()",
        [("weather", PARIS)],
    ),
    (
        LFM2,
        lfm2("weather(city='it\\'s \"so\",\\n(x=1', days=-3, exact=None, near=[1.5, True, 'a)'])"),
        "",
        [
            (
                "weather",
                '{"city": "it\'s \\"so\\",\\n(x=1", "days": -3, "exact": null, '
                '"near": [1.5, true, "a)"]}',
            )
        ],
    ),
    (
        LFM2,
        lfm2("weather(at={'x': {'é': False}}, odd={\"true\": true}, city='a\nb\\d\\x41\\u00e9',)"),
        "",
        [
            (
                "weather",
                '{"at": {"x": {"é": false}}, "odd": {"true": true}, "city": "a\\nb\\\\dA\\u00e9"}',
            )
        ],
    ),
    (GEMMA, f"So.{GEMMA_CALL}{GEMMA_CALL}", "So.", [("weather", PARIS)] * 2),
    (GEMMA, gemma("", "add"), "", [("add", "{}")]),
    (
        GEMMA,
        gemma(
            f'city:{STRING}a "b", {{c}}: \\d\n{STRING},days:3,exact:None,near:[1,{STRING}]{STRING}]'
        ),
        "",
        [
            (
                "weather",
                '{"city": "a \\"b\\", {c}: \\\\d\\n", "days": 3, "exact": null, "near": [1,"]"]}',
            )
        ],
    ),
    (
        GEMMA,
        gemma(f'at:{{x:{{{STRING}y z{STRING}:true}},n-o:null}},odd:{{"a": "}}"}}'),
        "",
        [("weather", '{"at": {"x":{"y z":true},"n-o":null}, "odd": {"a": "}"}}')],
    ),
    (DEEPSEEK, f"{BEGIN}{ONE}{END}", "", [("weather", PARIS)]),
    (DEEPSEEK, f"I look.\n{BEGIN}{ONE}\n{ONE}{END}\n", "I look.", [("weather", PARIS)] * 2),
    (DEEPSEEK, ONE.partition("```<")[0], "", [("weather", PARIS)]),
    (DEEPSEEK_V31, f"I look.{BEGIN}{SHORT}{SHORT}{END}", "I look.", [("weather", PARIS)] * 2),
]

BROKEN: list[tuple[ToolFormat, str]] = [
    (HERMES, "no call at all \n"),
    (HERMES, CALL),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_ca"),
    (HERMES, '```json\n{"city": "Paris"}\n```'),
    (HERMES, "```js"),
    (HERMES, "<tool_call>\nwhat now </tool_call>"),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Pa'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": ["Paris"]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "Paris"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "launch", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "name": "weather"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "mood": 1}</tool_call>'),
    (HERMES, "<tool_call>{}</tool_call>"),
    (MISTRAL_ARGS, f"weather[ARGS]{PARIS}"),
    (MISTRAL_ARGS, f"[TOOL_CALLS]launch[ARGS]{PARIS}"),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather {PARIS}"),
    (MISTRAL_ARGS, "[TOOL_CALLS]weather[CALL_ID]"),
    (MISTRAL_ARGS, '[TOOL_CALLS]weather[ARGS]{"city": "Pa'),
    (MISTRAL_ARGS, "[TOOL_CALLS]weather[ARGS]{city}"),
    (MISTRAL_ARGS, "[TOOL_CALLS] [a list]"),
    (QWEN_CODER, "<tool_call>\n<function=launch>\n</function>\n</tool_call>"),
    (QWEN_CODER, f"<tool_call>{CALL}</tool_call>"),
    (QWEN_CODER, XML_CALL.removeprefix("<tool_call>")),
    (QWEN_CODER, XML_CALL.partition("</function>")[0]),
    (QWEN_CODER, "<tool_call><function=add>so</function></tool_call>"),
    (QWEN_CODER, "<tool_call><function=add><parameter=></parameter></function></tool_call>"),
    (QWEN_CODER, XML_CALL.replace("</function>", "<parameter=city>x</parameter></function>")),
    (GPT_OSS, f"{TO}launch {JSON}{PARIS}"),
    (GPT_OSS, f"{TO}weather {JSON}[1]"),
    (GPT_OSS, f"{TO}weather<|channel|>{PARIS}"),
    (GPT_OSS, "send it to=functions. and <|channel|>comm"),
    (DEEPSEEK, f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{PARIS}"),
    (DEEPSEEK, f"weather\n```json\n{PARIS}\n```"),
    (DEEPSEEK_V31, f"<｜tool▁call▁begin｜>launch<｜tool▁sep｜>{PARIS}"),
    (GLM, "<tool_call>launch\n</tool_call>"),
    (GLM, "<tool_call>weath</tool_call>"),
    (GLM, GLM_CALL.partition("</tool_call>")[0]),
    (GLM, GLM_CALL.partition("</arg_value>")[0]),
    (GLM, GLM_CALL.replace("</arg_key>", "</arg_key>so")),
    (GLM, GLM_CALL.replace("</arg_key>", f"</arg_key>{' ' * 600}")),
    (GLM, GLM_CALL.replace("city", "")),
    (
        GLM,
        glm("weather", city="a").replace(
            "</tool_call>", GLM_CALL.removeprefix("<tool_call>weather")
        ),
    ),
    (GLM, f"<tool_call>{CALL}</tool_call>"),
    (GRANITE, '<|tool_call|>[{"name": "launch", "arguments": {}}]'),
    (GRANITE, GRANITE_CALL[:-9]),
    (GRANITE, "<|tool_call|>[a list]"),
    (LFM2, PYTHON),
    (LFM2, lfm2('launch(city="Paris")')),
    (LFM2, lfm2('weather("Paris")')),
    (LFM2, lfm2("weather(city=Paris)")),
    (LFM2, lfm2("weather(city=1, city=2)")),
    (LFM2, lfm2('weather(city="Paris"}')),
    (LFM2, lfm2("weather(city=[1, 2)")),
    (LFM2, lfm2("weather(city=weather())")),
    (LFM2, lfm2("weather(days=nan)")),
    (LFM2, lfm2("weather(days=)")),
    (LFM2, lfm2(PYTHON)[:35]),
    (LFM2, "<|tool_call_start|>[it is weather"),
    (GEMMA, "<|tool_call>call:launch{}<tool_call|>"),
    (GEMMA, gemma("city:Paris")),
    (GEMMA, gemma("city")),
    (GEMMA, gemma(f"city:{STRING}Paris")),
    (GEMMA, GEMMA_CALL[:-14]),
    (GEMMA, f"<|tool_call>call:weather{PARIS}<tool_call|>"),
    (GEMMA, "<|tool_call>call:weather[1]<tool_call|>"),
    (LLAMA, '{"city": "Paris", "name": "weather"}'),
    (LLAMA, f"It is {LLAMA_CALL}"),
    (LLAMA, '<|python_tag|>weather.call(city="Paris")'),
    (LLAMA, "  hm"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
@pytest.mark.parametrize("whole", [True, False])
def test_calls(form, text, content, calls, whole) -> None:
    for chunks in ([text], list(text), [text[:9], text[9:]]):
        assert parsed(form, chunks, whole=whole) == (content, calls, len(calls))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_what_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    assert parsed(form, [text]) == (text, [], 0)
    assert parsed(form, list(text)) == (text, [], 0)


def test_a_call_behind_a_broken_one() -> None:
    content, calls, _ = parsed(HERMES, list(f"<tool_call>oh, {TAGGED}"))
    assert content == "<tool_call>oh,"
    assert calls == [("weather", PARIS)]
    content, calls, _ = parsed(HERMES, [f"<tool_call>{TAGGED}"])
    assert content == "<tool_call>"
    assert calls == [("weather", PARIS)]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, TAGGED, "", [("weather", PARIS)]),
        (HERMES, f"```json\n{CALL}\n```\n```json\n{CALL}\n```", "", [("weather", PARIS)] * 2),
        (HERMES, '```json\n{"name": "Bob", "a": "```"}\n```', '{"name": "Bob", "a": "```"}', []),
        (HERMES, "```json\n[1, 2]\n```", "[1, 2]", []),
        (HERMES, '```json\n{"a": "b', '{"a": "b', []),
        (HERMES, json.dumps({"a": TAGGED}), json.dumps({"a": TAGGED}), []),
        (HERMES, f'"<tool_call>{CALL}"', f'"<tool_call>{CALL}"', []),
        (LLAMA, '{"a": ";"}', '{"a": ";"}', []),
        (LLAMA, LLAMA_CALL, "", [("weather", PARIS)]),
        (MISTRAL, '{"a": 1}', '{"a": 1}', []),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_calls_beside_a_text_that_has_a_format(form, text, content, calls, whole) -> None:
    for chunks in ([text], list(text), [text[:9], text[9:]]):
        found = parsed(form, chunks, whole=whole, formatted=True)
        assert found == (content, calls, len(calls))


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES, TOOLS, whole=False)
    assert parser.add('<tool_call>\n{"name": "weather", "argum') == ("", [])
    (first,) = parser.add('ents": {"city"').pieces
    assert (first.name, first.arguments) == ("weather", '{"city"')
    (second,) = parser.add(': "Par').pieces
    assert (second.position, second.id, second.name, second.arguments) == (
        0,
        first.id,
        None,
        ': "Par',
    )
    assert parser.num_calls == 0
    (third,) = parser.add('is"}}').pieces
    assert third.arguments == 'is"}'
    assert parser.num_calls == 1


def test_qwen_coders_arguments_come_one_by_one() -> None:
    parser = ToolCallParser(QWEN_CODER, TOOLS, whole=False)
    (first,) = parser.add("<tool_call>\n<function=weather>\n<parameter=city>\nPa").pieces
    assert (first.name, first.arguments) == ("weather", "{")
    (second,) = parser.add("ris\n</parameter>\n<parameter=days>\n3\n").pieces
    assert (second.id, second.name, second.arguments) == (first.id, None, '"city": "Paris"')
    (third,) = parser.add("</parameter>\n</function>").pieces
    assert third.arguments == ', "days": 3}'
    assert parser.num_calls == 1


def test_a_streamed_call_that_breaks_is_not_counted() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call> so'
    content, calls, num = parsed(HERMES, list(text), whole=False)
    assert num == 0
    assert calls[0][0] == "weather"
    assert content.endswith("so")


def test_no_more_calls_than_are_wanted() -> None:
    text = f"a {TAGGED} b {TAGGED} c"
    for chunks in ([text], list(text)):
        assert parsed(HERMES, chunks, most=1) == ("a", [("weather", PARIS)], 1)


PARTS = st.sampled_from(
    [TAGGED, CALL, LLAMA_CALL, "<tool_call>", "</tool_call>", "<|python_tag|>", "```json", "```",
     "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", ARGS_CALL, XML_CALL, "<function=add>", "</function>",
     "<parameter=a>", "</parameter>", "weather", TO, JSON, HARMONY_CALL, " to=functions.", BEGIN,
     GLM_CALL, "<arg_key>", "</arg_key>", "</arg_value>", "call:", STRING, GEMMA_CALL, PYTHON,
     "<|tool_call>", "<tool_call|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>",
     "[", "]", "(", ")", "'", "=", GRANITE_CALL, "<｜tool▁call▁begin｜>", ONE, SHORT,
     "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|call|>",
     "{", "}", '"', ";", '"name"', ":", " ", "\n", "x", "\\", ",", '{"name": "add"', "<"]
)  # fmt: skip


FORMS = st.sampled_from(
    [
        HERMES,
        LLAMA,
        MISTRAL,
        MISTRAL_ARGS,
        QWEN_CODER,
        GPT_OSS,
        DEEPSEEK,
        DEEPSEEK_V31,
        GLM,
        GRANITE,
        LFM2,
        GEMMA,
    ]
)


@given(st.lists(PARTS, max_size=12), st.data(), FORMS, st.booleans(), st.booleans())
def test_the_cut_does_not_matter(parts, data, form, whole, formatted) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    given = {"whole": whole, "formatted": formatted}
    assert parsed(form, chunks, **given) == parsed(form, [text], **given)


def test_the_format_is_the_templates() -> None:
    hermes = "{% if tools %}<tool_call>{% endif %}"
    assert format_of(hermes) is HERMES
    assert format_of(f"{hermes}<function=") is QWEN_CODER
    assert format_of(f"{hermes}<arg_key>k</arg_key>\n<arg_value>") is GLM
    assert format_of(f"{hermes}<arg_key>k</arg_key><arg_value>") is SHORT_GLM
    assert format_of("{{ available_tools }} respond only with <|tool_call|>") is GRANITE
    assert format_of("{{ tools }} <|tool_call>call:") is GEMMA
    assert format_of("{{ tools }} List of tools: <|tool_list_start|>[") is LFM2
    assert format_of('{{ tools }} \'ipython\' {"name": function name, "parameters": x}') is LLAMA
    assert format_of("[AVAILABLE_TOOLS] {{ tools }}") is None
    assert format_of("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS] [") is MISTRAL
    assert format_of("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]name[ARGS]") is MISTRAL_ARGS
    assert format_of("{{ messages }}") is None
    assert format_of("{{ tools }} <|channel|>commentary to=functions.") is GPT_OSS
    assert format_of("{{ tools }} <｜tool▁call▁begin｜>function\n```json") is DEEPSEEK
    assert format_of("{{ tools }} <｜tool▁call▁begin｜>name<｜tool▁sep｜>") is DEEPSEEK_V31


def test_mistrals_templates_want_ids_of_nine_letters_or_digits() -> None:
    parser = ToolCallParser(MISTRAL, TOOLS, whole=True)
    (piece,) = parser.finish(f"[TOOL_CALLS] [{CALL}]").pieces
    assert len(piece.id) == 9
    assert piece.id.isalnum()


def test_no_template_no_format() -> None:
    assert format_of(None) is None
