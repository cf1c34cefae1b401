"""The OpenAPI description: bodies by their models, errors in each API's form."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock import __version__
from penstock.api.anthropic.bodies import MessagesBody, MessagesInput
from penstock.api.bodies import ChatBody, CompletionBody
from penstock.api.http import EXPECTED_OUTPUT_TOKENS
from penstock.api.llamacpp.bodies import InfillBody, LlamaCompletion
from penstock.api.ollama.bodies import OllamaChat, OllamaEmbed, OllamaGenerate, OllamaShow
from penstock.api.response_bodies import ResponsesBody
from penstock.api.token_bodies import DetokenizeBody, EmbeddingBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "Error": _ERROR,
    "MessagesError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
    "OllamaError": {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
}
_BODIES = (
    ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody,
    LlamaCompletion, InfillBody, MessagesBody, MessagesInput, OllamaChat, OllamaGenerate,
    OllamaShow, EmbeddingBody, OllamaEmbed,
)  # fmt: skip


def refusals(error: str) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of endpoints whose errors have the schema of this name."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model=error)}}}
    return {
        "4XX": {"description": "The request cannot be served", "content": content},
        "5XX": {"description": "The server cannot serve", "content": content},
    }


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint whose body is a `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    count = {"type": "integer", "minimum": 1}
    return {
        "parameters": [{"name": EXPECTED_OUTPUT_TOKENS, "in": "header", "schema": count}],
        "requestBody": {"required": True, "content": content},
    }


def describe(app: FastAPI) -> None:
    """Make `/openapi.json` tell the bodies and errors."""

    def made_once() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="Penstock", version=__version__, routes=app.routes)
            _, bodies = models_json_schema(
                [(body, "validation") for body in _BODIES], ref_template=_REF
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {**bodies["$defs"], **_ERRORS}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = made_once  # type: ignore[method-assign]
