"""Base of all request bodies, and their fields of structured outputs (OpenAI's and vLLM's)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request

from penstock.api.errors import ApiError, from_validation
from penstock.engine.grammar import GrammarKind

_Schema = dict[str, Any] | bool | str
"""A JSON schema: an object, or its text."""

_Choice = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]

_ANY_OBJECT = {"type": "object"}

_Model = TypeVar("_Model", bound=BaseModel)
_T = TypeVar("_T")


async def validated(model: type[_Model], http: Request) -> _Model:
    """Parse the body of a request. Raises: ApiError."""
    # By pydantic, not FastAPI: it refuses invalid Unicode and says what is wrong with broken JSON.
    try:
        return model.model_validate_json(await http.body())
    except ValidationError as error:
        raise from_validation(error) from error


async def unless_gone(http: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do work for a client. Raises: ApiError if the client disconnects before; as `work`."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Body(BaseModel):
    """A strictly typed JSON object, in which null means that a field is absent, and 6.0 is 6."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: _whole(value) for name, value in data.items() if value is not None}
        return data


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an integer, also in lists; else the value."""
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_of_object(value: Any) -> Any:
    """Return an object as JSON, and anything else as it is."""
    return json.dumps(value) if isinstance(value, dict) else value


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
