"""The pages at `/`, what is served, and `/dashboard`: figures of the server, and a playground.

Their files load nothing from other servers and need no key; the data that they show do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from html import escape
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response

from penstock.api.errors import ApiError
from penstock.api.http import ApiKeys
from penstock.api.metrics import Metrics
from penstock.serving.client import RequestClient

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

_HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Text never becomes HTML.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_HOME = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Penstock</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><link rel="stylesheet" href="dashboard/style.css">
<header><h1>Penstock</h1><nav><a href="dashboard#playground">Chat</a>
<a href="dashboard">Dashboard</a><a href="openapi.json">API</a>
<a href="v1/models">Models</a><a href="health">Health</a></nav></header>
<main><section class="wide">{served}<p class="quiet">OpenAI's clients take this address with
<code>/v1</code>, Anthropic's and Ollama's as it is: docs/api.md in Penstock's source.
</section></main>"""


def add_home(app: FastAPI, models: Callable[[Request], list[dict[str, Any]]]) -> None:
    """Add the page at `/`; what does not read HTML gets the words that Ollama's clients expect.

    models: cards of what is served. Raises: ApiError for a caller who may not know."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def home(http: Request) -> Response:
        headers = {**_HEADERS, "Vary": "Accept"}
        if "text/html" not in http.headers.get("accept", ""):
            return Response("Ollama is running", media_type="text/plain", headers=headers)
        served = "<p>What is served is shown with an API key only.</p>"
        with suppress(ApiError):
            told = ((card["id"], ", ".join(card["drafters"]) or "none") for card in models(http))
            served = "".join(f"<h2>{escape(a)}</h2><p>Drafters: {escape(b)}</p>" for a, b in told)
        return Response(_HOME.format(served=served), media_type="text/html", headers=headers)


def add_dashboard(app: FastAPI, client: RequestClient, metrics: Metrics, api_keys: ApiKeys) -> None:
    """Add the page, its files and its list of requests."""
    page = {f.name: f for f in files(__package__).iterdir() if _type_of(f.name) is not None}
    bodies = {name: file.read_bytes() for name, file in page.items()}

    def send(name: str) -> Response:
        return Response(bodies[name], media_type=_type_of(name), headers=_HEADERS)

    @app.get("/dashboard", include_in_schema=False)
    async def show() -> Response:
        return send("index.html")

    @app.get("/dashboard/requests", include_in_schema=False)
    async def requests(authorization: Annotated[str | None, Header()] = None) -> dict[str, Any]:
        """All tenants' requests for an operator's key, otherwise the tenant's own."""
        tenant = api_keys.viewer(authorization)
        return {
            "model": metrics.model_name,
            "problem": client.problem,
            "drafters": client.drafters,
            "requests": metrics.recent.rows_of(tenant),
        }

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in bodies:
            raise ApiError(404, "not found")
        return send(name)


def _type_of(name: str) -> str | None:
    return _TYPES.get(name[name.rfind(".") :])
