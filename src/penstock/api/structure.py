"""Structured outputs: OpenAI's and vLLM's fields, and their compilation to a grammar."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator

from penstock.api.body import Body
from penstock.api.errors import ApiError
from penstock.engine.grammar import GrammarCompiler, GrammarError, GrammarKind, grammar_of

_COMPILE_S = 20.0
"""Timeout of a grammar, including those queued before it and the loading of the vocabulary."""

_Schema = dict[str, Any] | bool | str
"""A JSON schema: an object, or its text."""

_Choice = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]

_ANY_OBJECT = {"type": "object"}


class Structure(NamedTuple):
    """A requested structure, with the field that requests it."""

    field: str
    kind: GrammarKind
    value: Any


class NamedSchema(Body):
    """OpenAI's json_schema. strict: ignored; every schema is enforced."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = ""
    description: str = ""
    schema_: _Schema = Field(default=True, alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """OpenAI's response_format."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is to be given with type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """Structured outputs of vLLM. disable_any_whitespace: ignored; JSON has no extra whitespace."""

    model_config = ConfigDict(extra="forbid")

    json_: _Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: _Choice | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = True


class StructuredBody(Body):
    """Fields of structured outputs, of which one may be given. guided_*: vLLM's older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Choice | None = None
    guided_grammar: str | None = None

    @property
    def structures(self) -> list[Structure]:
        """All structures given."""
        found: list[tuple[str, GrammarKind, Any]] = [
            ("guided_json", "json", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
        ]
        form, options = self.response_format, self.structured_outputs
        if form is not None and form.type != "text":
            named = form.json_schema
            schema = _ANY_OBJECT if named is None else named.schema_
            found.append(("response_format", "json", schema))
        if options is not None:
            found += [
                ("structured_outputs.json", "json", options.json_),
                ("structured_outputs.regex", "regex", options.regex),
                ("structured_outputs.choice", "choice", options.choice),
                ("structured_outputs.grammar", "grammar", options.grammar),
                (
                    "structured_outputs.json_object",
                    "json",
                    _ANY_OBJECT if options.json_object else None,
                ),
            ]
        return [Structure(*given) for given in found if given[2] is not None]


async def compiled(
    structures: list[Structure], ignore_eos: bool, compiler: GrammarCompiler
) -> str | None:
    """Return the validated grammar of a body, or None. Raises: ApiError."""
    if not structures:
        return None
    field, kind, value = structures[0]
    if len(structures) > 1:
        second = structures[1].field
        message = f"{second}: only one field may say what the text is to be, and {field} does"
        raise ApiError(400, message, param=second)
    if ignore_eos:
        message = f"{field}: is not allowed with ignore_eos, for its grammar ends the text"
        raise ApiError(400, message, param=field)
    try:
        async with asyncio.timeout(_COMPILE_S):
            grammar = await asyncio.to_thread(grammar_of, kind, value)
            # A timeout must not cancel a compilation that others wait for.
            await asyncio.shield(asyncio.wrap_future(compiler.compile(grammar)))
    except GrammarError as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_grammar") from error
    except TimeoutError as error:
        message = f"{field}: could not be compiled within {_COMPILE_S:g} s"
        raise ApiError(400, message, param=field, code="invalid_grammar") from error
    return grammar
