"""Errors in the form of the endpoint's API: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from penstock.json_text import dumps

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_closed_request",
}
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, where `_TYPES` are OpenAI's."""
PROMPT_SHAPES = "must be a string, a list of strings, a list of token ids, or a list of such lists"
_SHAPES = {
    "prompt": PROMPT_SHAPES,
    "stop": "must be a string or a list of strings",
    "content": "must be a string or a list of text parts; images, audio and files are not read",
    "tool_choice": 'must be "none", "auto", "required" or an object that names functions',
}
"""Messages of fields with several shapes, for which pydantic reports an error per shape."""


class ApiError(Exception):
    """An error response with a one-line message. retry_after_s: sent as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body in the form of the API that has `path`; OpenAI's by default."""
        is_wrong = self.status < 500
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            other = "invalid_request_error" if is_wrong else "api_error"
            kind = _MESSAGES_TYPES.get(self.status, other)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _TYPES.get(self.status, "invalid_request_error" if is_wrong else "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "") -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        # Escaped: a message may quote invalid Unicode of the client.
        body = dumps(self.body(path), ensure_ascii=True)
        return Response(body, self.status, headers, media_type="application/json")


class ContextOverflow(ApiError):
    """A request that is longer than the context, in the words by which clients know it.

    num_tokens: of the prompt, at least. max_tokens: asked for behind it, where these do not fit"""

    def __init__(self, num_tokens: int, limit: int, param: str, max_tokens: int = 0) -> None:
        asked = (
            f"you requested {num_tokens + max_tokens} tokens ({num_tokens} in the prompt, "
            f"{max_tokens} in the completion)"
        )
        if not max_tokens:
            asked = f"your {param} resulted in at least {num_tokens} tokens; {limit - 1} leave room"
        message = f"This model's maximum context length is {limit} tokens. However, {asked}."
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self._in_messages = f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum"

    def body(self, path: str = "") -> dict[str, Any]:
        told = path.startswith("/v1/messages")
        return ApiError(400, self._in_messages).body(path) if told else super().body(path)


def from_validation(error: ValidationError) -> ApiError:
    """Return the first of pydantic's errors."""
    details = error.errors(include_url=False, include_input=False)
    details = [d for d in details if d["type"] == "too_long"] or details
    first, location = details[0], list(details[0]["loc"])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if not location:
        message = first["msg"].removeprefix("Value error, ")
        return ApiError(400, f"the body is wrong: {message}", code="invalid_body")
    shaped = next((i for i, part in enumerate(location) if part in _SHAPES), None)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field"
    elif shaped is not None and _num_shapes(details, location[: shaped + 1]) > 1:
        location = location[: shaped + 1]
        message = _SHAPES[str(location[-1])]
    where = _dotted(location)
    return ApiError(400, f"{where}: {message}", param=where, code=first["type"])


def _num_shapes(details: Sequence[Any], field: list[Any]) -> int:
    """Return how many shapes of a field were tried: their names are behind it in locations."""
    size = len(field)
    behind = {d["loc"][size] for d in details if list(d["loc"][:size]) == field != list(d["loc"])}
    return sum(isinstance(name, str) for name in behind)


def _dotted(location: Sequence[Any]) -> str:
    return ".".join(str(part) for part in location)


def install(app: FastAPI) -> None:
    """Give every error of `app` the body of its API."""

    @app.exception_handler(ApiError)
    async def own(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return ApiError(499, "the client closed the connection").response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code in (404, 405):
            message = f"no endpoint {request.method} {request.url.path}"
        response = ApiError(error.status_code, message).response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed on this request").response(request.url.path)
