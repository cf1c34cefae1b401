"""Tools of a chat request: its grammar and the parser of its tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api.bodies import ChatBody, Tool
from penstock.api.body import Structure
from penstock.api.errors import ApiError
from penstock.api.tool_calls import ToolCallParser, ToolFormat, format_of
from penstock.api.written_calls import (
    LONGEST_XML_KEY,
    JsonCall,
    XmlCall,
    alternatives,
    is_xml_key,
    is_xml_value,
    types_of,
)
from penstock.engine.closed_schema import with_parts
from penstock.engine.grammar import lark_json, lark_text


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
            if self.form.call is XmlCall:
                yield from _xml_rules(f"call_{n}", tool.function.name, schema)
            else:
                head = lark_text((tool.function.name, *self.form.behind_name), special)
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


def _xml_rules(rule: str, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the Lark rules of a call in the format of `XmlCall`, arguments in the schema's order.

    Raises: ApiError for a schema whose calls `XmlCall` could not parse."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_read = isinstance(properties, Mapping) and isinstance(required, list)
    if schema["type"] != "object" or not is_read:
        raise _refused_tool(f"the parameters of {name!r} must be a schema of an object")
    parts = []
    for n, (key, of_value) in enumerate(properties.items()):
        if not is_xml_key(key):
            raise _refused_tool(
                f"a parameter of {name!r} is called {key[:40]!r}: in this model's calls a name has "
                f"1 to {LONGEST_XML_KEY} characters, and no <, > or line break"
            )
        part = f"{rule}_{n}"
        parts.append(part if key in required else f"{part}?")
        value = _xml_value(of_value, schema)
        if value is None:
            value = f"{part}_text"
            yield f'{value}[suffix="</parameter>"]: /(?s:.*)/'
        else:
            value += ' "\\n</parameter>"'
        yield " ".join((f"{part}:", json.dumps(f"<parameter={key}>\n"), value, '"\\n"'))
    head = json.dumps(f"<function={name}>\n")
    yield " ".join((f"{rule}:", head, *parts, '"</function>"'))


def _xml_value(of_value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return an argument's value in Lark's notation: strings without quotes, all else as JSON.

    None if it may be any string. schema: root of references. Raises: ApiError."""
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
    if not all(map(is_xml_value, strings)):
        raise _refused_tool("a choice with </parameter> in it cannot be told from a value's end")
    values = [json.dumps(text) for text in strings]
    if others:
        shared = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        values.append(lark_json({"anyOf": others, **shared}))
    return f"({' | '.join(values)})" if values else None


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
            "(Hermes', Llama 3's, Mistral's, Qwen3-Coder's, gpt-oss' or DeepSeek's)",
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
