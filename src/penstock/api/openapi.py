"""`/openapi.json`: the endpoints, with the bodies that they read themselves. `/health` is left out:
FastAPI cannot describe two methods of one endpoint."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock import __version__
from penstock.api.bodies import ChatBody, CompletionBody

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of an endpoint that reads its body as `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    error = {"$ref": _REF.format(model="Error")}
    refused = {"description": "Refused", "content": {"application/json": {"schema": error}}}
    return {"requestBody": {"required": True, "content": content}, "responses": {"4XX": refused}}


def install(app: FastAPI) -> None:
    """Describe the application as OpenAPI."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="Penstock", version=__version__, routes=app.routes)
            _, bodies = models_json_schema(
                [(ChatBody, "validation"), (CompletionBody, "validation")], ref_template=_REF
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {**bodies["$defs"], "Error": _ERROR}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
