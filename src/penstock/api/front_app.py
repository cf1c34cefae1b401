"""The HTTP application in front of several models' applications: what concerns all of them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from penstock.api import errors
from penstock.api.app import add_middleware, listed
from penstock.api.dashboard import add_home
from penstock.api.front import Front
from penstock.api.http import ApiKeys
from penstock.api.ollama.models import add_models
from penstock.api.service import model_card


def front_app(front: Front) -> FastAPI:
    """Build the application in front of several models'."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    errors.install(app)
    add_middleware(app, front.config)
    checked, pool = [Depends(front.caller_of)], front.pool
    viewers = ApiKeys({}) if front.config.open_metrics else front.api_keys

    @app.get("/v1/models", dependencies=checked)
    async def models() -> dict[str, Any]:
        return listed(front.cards())

    @app.get("/v1/models/{model_id:path}", dependencies=checked)
    async def model(model_id: str) -> dict[str, Any]:
        return model_card(front.named(model_id), model_id, front.started_at)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        models = {m.names[0]: {"problem": m.problem, **m.info.description} for m in pool.each}
        state, status = ("unavailable", 503) if pool.is_ending else ("ok", 200)
        return JSONResponse({"status": state, "models": models}, status)

    @app.get("/metrics")
    async def metrics(
        model: str | None = None, authorization: Annotated[str | None, Header()] = None
    ) -> Response:
        viewers.check_operator(authorization)
        text = await front.metrics(None if model is None else front.named(model))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def known(http: Request) -> list[dict[str, Any]]:
        front.check(http)
        return front.cards()

    add_home(app, known)
    add_models(app, front, checked)
    app.router.default = front
    return app
