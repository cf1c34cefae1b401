"""The page at `/dashboard`: figures of the server, and a playground.

Its files load nothing from other servers and need no key; the data that they request does."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Header, Response

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
