"""Tools of a chat request: its grammar and the parser of its tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api.bodies import ChatBody, Tool
from penstock.api.body import Structure
from penstock.api.errors import ApiError
from penstock.api.tool_calls import ToolCallParser, ToolFormat, format_of
from penstock.api.written_calls import (
    LONGEST_XML_KEY,
    JsonCall,
    KeyedCall,
    XmlCall,
    alternatives,
    is_plain_key,
    is_xml_key,
    types_of,
)
from penstock.engine.closed_schema import with_parts
from penstock.engine.grammar import lark_json, lark_text, lark_until

_Schema = Mapping[str, Any]
_Special = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tool calls that an answer may have.

    must: the answer is one call. thinks: the model may think before it. whole, most, formatted:
    arguments of `ToolCallParser`
    """

    form: ToolFormat
    tools: tuple[Tool, ...]
    must: bool
    thinks: bool
    whole: bool
    most: int | None
    formatted: bool

    @property
    def lead(self) -> str:
        """End of the prompt that makes the model continue with a call."""
        return "".join(self.form.before) if self.must and not self.thinks else ""

    def shaped(
        self, structures: Sequence[Structure], special: Mapping[str, int]
    ) -> list[Structure]:
        """Return the structures of the answer, given those requested.

        A `response_format` applies to text only: it is dropped if a call is required, and an
        alternative to calls otherwise. special: token ids by spelling. Raises: ApiError."""
        others = [s for s in structures if s.field != "response_format"]
        if self.must:
            if self.form.call is JsonCall and not self.thinks:
                return [*others, Structure("tool_choice", "json", self._calls("/anyOf"))]
            before = lark_text(self.form.before, special) if self.thinks else ""
            rules = "\n".join((f"start: {before} call", *self._call_rules(special)))
            return [*others, Structure("tool_choice", "lark", rules)]
        formats = [s for s in structures if s.field == "response_format"]
        return [*others, *(self._beside_calls(_object(s.value), special) for s in formats)]

    def _calls(self, place: str) -> dict[str, Any]:
        """Return the schema of a call's object. place: JSON pointer to its alternatives."""
        key = self.form.key
        return {
            "anyOf": [
                _call_schema(tool, key, f"{place}/{number}/properties/{key}")
                for number, tool in enumerate(self.tools)
            ]
        }

    def _beside_calls(self, schema: Mapping[str, Any], special: Mapping[str, int]) -> Structure:
        """Return the structure of a text by `schema`, or of calls in any format that is parsed.

        A model may also write the text between the marks of a call."""
        form = self.form
        if form.before:
            before, between, after = (
                lark_text(pieces, special) for pieces in (form.before, form.between, form.after)
            )
            more = "" if self.most == 1 else f"({between} call)*"
            either = ["text", f"{before} call {more} {after}"]
            head = lark_text(form.before_text, special)
            rules = [*self._call_rules(special), f"text: {head} {lark_json(schema)}"]
            around = [
                (lark_text((opening, "\n"), special), lark_text(("\n", closing), special))
                for opening, closing in form.closings.items()
                if closing and opening not in form.before
            ]
            if around:
                either += [f"{a} text {b}" for a, b in around]
                either.append("other" if self.most == 1 else 'other ("\\n" other)*')
                rules.append("other: " + " | ".join(f"{a} call {b}" for a, b in around))
            rules = [f"start: {' | '.join(either)}", *rules]
            return Structure("response_format", "lark", "\n".join(rules))
        schemas = [_moved(schema, "/anyOf/0"), self._calls("/anyOf/1/anyOf")]
        style = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
        return Structure("response_format", "json", {"anyOf": schemas, **style})

    def _call_rules(self, special: Mapping[str, int]) -> Iterator[str]:
        if self.form.call is JsonCall:
            yield f"call: {lark_json(self._calls('/anyOf'))}"
            return
        yield "call: " + " | ".join(f"call_{n}" for n in range(len(self.tools)))
        for n, tool in enumerate(self.tools):
            schema = {"type": "object", **_moved(_parameters(tool), "")}
            call, name = self.form.call, tool.function.name
            if issubclass(call, XmlCall):
                yield from _xml_rules(f"call_{n}", name, schema, call, special)
            elif issubclass(call, KeyedCall):
                yield from _keyed_rules(f"call_{n}", name, schema, call, special)
            else:
                head = lark_text((name, *self.form.behind_name), special)
                yield f"call_{n}: {head} {lark_json(schema)}"

    def parser(self) -> ToolCallParser:
        tools = {tool.function.name: _parameters(tool) for tool in self.tools}
        return ToolCallParser(
            self.form,
            tools,
            whole=self.whole,
            most=self.most,
            inside=self.must and not self.thinks,
            formatted=self.formatted,
        )


def _arguments(name: str, schema: _Schema, is_key: Callable[[str], bool]) -> list[Any]:
    """Return names and schemas of a tool's arguments, and whether required. Raises: ApiError."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_read = isinstance(properties, Mapping) and isinstance(required, list)
    if schema["type"] != "object" or not is_read:
        raise _refused_tool(f"the parameters of {name!r} must be a schema of an object")
    wrong = next((key for key in properties if not is_key(key)), None)
    if wrong is not None:
        raise _refused_tool(
            f"a parameter of {name!r} is called {wrong[:40]!r}: in this model's calls a name has "
            f"1 to {LONGEST_XML_KEY} characters, none of them a mark of the format"
        )
    return [(key, of_value, key in required) for key, of_value in properties.items()]


def _xml_rules(
    rule: str, name: str, schema: _Schema, call: type[XmlCall], special: _Special
) -> Iterator[str]:
    """Yield the Lark rules of a call in the format of `XmlCall`, arguments in the schema's order.

    Raises: ApiError for a schema whose calls `XmlCall` could not parse."""

    def lark(text: str) -> str:
        marks = "|".join(map(re.escape, call.marks)) or "(?!)"
        return lark_text([piece for piece in re.split(f"({marks})", text) if piece], special)

    parts, end = [], call.end_of_value
    for n, (key, of_value, is_required) in enumerate(_arguments(name, schema, is_xml_key)):
        part = f"{rule}_{n}"
        parts.append(part if is_required else f"{part}?")
        value, found = f"{part}_text", _values(of_value, schema)
        if found is None:
            yield lark_until(value, end, special)
        else:
            if any(end in text for text in found[0]):
                raise _refused_tool(f"a choice with {end} in it cannot be told from a value's end")
            either = " | ".join((*map(json.dumps, found[0]), *found[1]))
            value = f"({either}) {lark(call.margin + end)}"
        before = f"{call.before_key}{key}{call.behind_key}".replace("><", f">{call.gap}<")
        yield f"{part}: {lark(before + call.margin)} {value} {lark(call.gap)}"
    head = call.heads[0].format(name).removesuffix("<") + call.gap
    yield " ".join((f"{rule}:", lark(head), *parts, lark(call.end)))


def _keyed_rules(
    rule: str, name: str, schema: _Schema, call: type[KeyedCall], special: _Special
) -> Iterator[str]:
    """Yield the Lark rules of a call in the format of `KeyedCall`, required arguments first.

    A string by itself is between the format's marks, if it has any; all else is JSON."""
    arguments = sorted(_arguments(name, schema, is_plain_key), key=lambda one: not one[2])
    more = []
    for n, (key, of_value, is_required) in enumerate(arguments):
        more.append(f"({json.dumps(call.comma)} {rule}_{n}){'' if is_required else '?'}")
        own = of_value if isinstance(of_value, Mapping) else {}
        value = lark_json({**own, **_shared(schema)})
        if call.marks and _values(of_value, schema) is None:
            value = f"{lark_text(call.marks, special)} {rule}_{n}_text"
            yield lark_until(f"{rule}_{n}_text", call.marks[0], special)
        yield f"{rule}_{n}: {json.dumps(key + call.between)} {value}"
    num_firsts = 1 if arguments and arguments[0][2] else len(arguments)
    either = " | ".join(" ".join((f"{rule}_{n}", *more[n + 1 :])) for n in range(num_firsts))
    inside = either and f"({either}){'' if arguments[0][2] else '?'}"
    head = call.prefixes[0] + name + call.opening
    yield f"{rule}: {json.dumps(head)} {inside} {json.dumps(call.end)}"


def _shared(schema: _Schema) -> dict[str, Any]:
    """Return the definitions that parts of a schema may refer to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _values(of_value: Any, schema: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return the strings that an argument may be, and Lark expressions of what else, as JSON.

    None if it may be any string. schema: root of references"""
    strings: list[str] = []
    others: list[Mapping[str, Any]] = []
    for part in alternatives(of_value, schema):
        choices = part.get("enum", [part["const"]] if "const" in part else None)
        if isinstance(choices, list):
            strings += [choice for choice in choices if isinstance(choice, str)]
            rest = [choice for choice in choices if not isinstance(choice, str)]
            others += [{"enum": rest}] if rest else []
        elif types := types_of(part):
            if "string" in types:
                return None
            others.append({**part, "type": types})
    found = [lark_json({"anyOf": others, **_shared(schema)})] if others else []
    return (strings, found) if strings or found else None


def _refused_tool(message: str) -> ApiError:
    return ApiError(400, f"tool_choice: {message}", param="tools", code="invalid_grammar")


def _parameters(tool: Tool) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tool.for_template()["function"]["parameters"]
    return found


def _object(schema: Any) -> Mapping[str, Any]:
    """Return a schema as an object. Raises: ApiError."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        read = None
    if read is True:
        return {}
    if isinstance(read, Mapping):
        return read
    message = "response_format: the schema must be a JSON object, or true"
    raise ApiError(400, message, param="response_format", code="invalid_grammar")


def _call_schema(tool: Tool, key: str, place: str) -> dict[str, Any]:
    """Return the schema of a call's object. place: JSON pointer to the arguments' schema."""
    arguments = {"type": "object", **_moved(_parameters(tool), place)}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema with references moved to `place`."""
    made = with_parts(schema, lambda _, part: _moved(part, place))
    ref = made.get("$ref") if isinstance(made, dict) else None
    if isinstance(ref, str) and ref.startswith("#"):
        made["$ref"] = f"#{place}{ref[1:]}"
    return made


def tool_use(body: ChatBody, template: str | None, *, thinks: bool = False) -> ToolUse | None:
    """Return the tool calls that answers may have, or None.

    template: of chats with tools. thinks: the model may think before its answer

    Raises: ApiError for invalid tools, or if the template's format is not supported."""
    form = format_of(template)
    about_tools = [i for i, message in enumerate(body.messages) if message.is_about_tools]
    if form is None and (about_tools or body.offered_tools):
        param = f"messages.{about_tools[0]}" if about_tools else "tools"
        raise ApiError(
            400,
            f"{param}: the model's chat template has no tools in a format that this server reads "
            "(Hermes', Llama 3's, Mistral's, Qwen3-Coder's, gpt-oss', DeepSeek's, GLM's, "
            "Granite 3's, Gemma 4's or LFM2's)",
            param=param,
            code="unsupported_value",
        )
    names = [tool.function.name for tool in body.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"tools: two of them are called {twice!r}", param="tools")
    tools = _callable(body)
    if form is None or not tools:
        return None
    must = body.must_call
    most = 1 if must or form.is_single or not body.parallel_tool_calls else None
    formatted = any(s.field == "response_format" for s in body.structures)
    return ToolUse(form, tools, must, thinks, not body.stream, most, formatted and not must)


def _callable(body: ChatBody) -> tuple[Tool, ...]:
    if body.must_call and not body.tools:
        raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
    names = body.named_tools
    if names is None:
        return tuple(body.offered_tools)
    tools = {tool.function.name: tool for tool in body.tools}
    unknown = next((name for name in names if name not in tools), None)
    if unknown is not None:
        message = f"tool_choice: no tool is called {unknown!r}"
        raise ApiError(400, message, param="tool_choice")
    return tuple(tools[name] for name in dict.fromkeys(names))
