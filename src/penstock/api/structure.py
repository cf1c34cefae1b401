"""What shape a text is to have: the fields of OpenAI's and of vLLM's API that say it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator

from penstock.api.body import Body
from penstock.api.errors import ApiError
from penstock.engine.grammar import GrammarCompiler, GrammarError, GrammarKind, grammar_of

_COMPILE_S = 20.0
"""Most that a client waits for its grammar, those of others before it included, and the server's
first one, for which a large vocabulary is read, too."""

_Schema = dict[str, Any] | bool | str
"""Of JSON: an object, or its text."""

_Choice = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]

_ANY_OBJECT = {"type": "object"}


class Structure(NamedTuple):
    """What was asked for, and in which field."""

    field: str
    kind: GrammarKind
    value: Any


class NamedSchema(Body):
    """strict, name, description: as OpenAI has them; every schema is kept to."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = ""
    description: str = ""
    schema_: _Schema = Field(default=True, alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is to be given with type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """One of these, as in vLLM. disable_any_whitespace changes nothing: there never is any."""

    model_config = ConfigDict(extra="forbid")

    json_: _Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: _Choice | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = True


class StructuredBody(Body):
    """At most one of these fields says what a text may be. guided_*: vLLM's older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Choice | None = None
    guided_grammar: str | None = None

    @property
    def structures(self) -> list[Structure]:
        """All that were given."""
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
    """The grammar that a body asks for, known to be one, or None. Raises: ApiError."""
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
            # Who waits no longer must not take it from others.
            await asyncio.shield(asyncio.wrap_future(compiler.compile(grammar)))
    except GrammarError as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_grammar") from error
    except TimeoutError as error:
        message = f"{field}: could not be compiled within {_COMPILE_S:g} s"
        raise ApiError(400, message, param=field, code="invalid_grammar") from error
    return grammar
