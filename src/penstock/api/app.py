"""The HTTP application: the endpoints of several APIs, health, metrics and dashboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, Request, Response, params
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from penstock import __version__
from penstock.api import errors
from penstock.api.anthropic.endpoints import add_messages
from penstock.api.bodies import ChatBody, CompletionBody
from penstock.api.body import validated
from penstock.api.dashboard import add_dashboard, add_home
from penstock.api.embeddings import add_embeddings
from penstock.api.http import (
    IGNORED_FIELDS,
    REQUEST_ID,
    ApiKeys,
    BodyLimit,
    Caller,
    ResponseHeaders,
    client_network,
)
from penstock.api.llamacpp.endpoints import add_llamacpp
from penstock.api.ollama.endpoints import add_ollama
from penstock.api.response_bodies import ResponsesBody
from penstock.api.response_format import ResponsesFormat
from penstock.api.responses import ChatFormat, CompletionFormat
from penstock.api.schema import body_of, describe, refusals
from penstock.api.service import Service
from penstock.api.token_bodies import DetokenizeBody, TokenizeBody, pieces
from penstock.config import ServeConfig
from penstock.serving.client import RequestClient

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer


def create_app(
    config: ServeConfig,
    client: RequestClient,
    tokenizer: Tokenizer,
    shared: ApiKeys | None = None,
) -> FastAPI:
    """Build the application in front of a started client and the target's tokenizer.

    Its state holds `metrics`, which draft servers share, and `api_keys`, which may be reloaded.
    shared: keys of an application before this one, which has the limits and headers, too."""
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(
        openapi_url="/openapi.json", docs_url=None, redoc_url=None, responses=refusals("Error")
    )
    errors.install(app)
    describe(app)
    if shared is None:
        add_middleware(app, config)
    service = app.state.service = Service(config, client, tokenizer)
    app.state.metrics = service.metrics
    api_keys = shared or ApiKeys(config.engine.tenants, config.metrics_keys)
    app.state.api_keys = api_keys
    caller_of = callers(api_keys)
    for add in (_add_openai, add_embeddings, add_messages, add_ollama, add_llamacpp):
        add(app, service, caller_of)
    viewers = ApiKeys({}) if config.open_metrics else api_keys
    _add_operations(app, service, viewers)
    add_dashboard(app, client, service.metrics, viewers)

    def models(http: Request) -> list[dict[str, Any]]:
        api_keys.caller(http.headers.get("authorization"), client_network(http.scope))
        return [*map(service.model_card, service.model_names)]

    add_home(app, models)
    return app


def add_middleware(app: FastAPI, config: ServeConfig) -> None:
    """Limit bodies, and add headers to answers."""
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED_FIELDS, "Retry-After"],
        )
    app.add_middleware(ResponseHeaders)


def callers(api_keys: ApiKeys) -> Callable[..., Caller]:
    """Return the dependency that identifies a caller by key, in OpenAI's or Anthropic's header."""

    def caller_of(
        http: Request,
        authorization: Annotated[str | None, Header()] = None,
        x_api_key: Annotated[str | None, Header()] = None,
    ) -> Caller:
        if authorization is None and x_api_key is not None:
            authorization = f"Bearer {x_api_key}"
        return api_keys.caller(authorization, client_network(http.scope))

    return caller_of


def _add_openai(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    @app.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def completions(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(CompletionBody, http)
        job_id = f"cmpl-{uuid4().hex}"
        choices = await service.prepare.completion(body, caller, job_id)
        form = CompletionFormat(
            job_id, service.model_name, service.tokenizer, logprobs=body.logprobs is not None
        )
        return await service.answer(http, caller, body, choices, form)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def chat_completions(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(ChatBody, http)
        job_id = f"chatcmpl-{uuid4().hex}"
        choices = await service.prepare.chat(body, caller, job_id)
        form = ChatFormat(job_id, service.model_name, service.tokenizer, logprobs=body.logprobs)
        return await service.answer(http, caller, body, choices, form)

    @app.post("/v1/responses", openapi_extra=body_of(ResponsesBody))
    async def responses(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(ResponsesBody, http)
        job_id = f"resp_{uuid4().hex}"
        choices = await service.prepare.chat(body.as_chat(), caller, job_id)
        form = ResponsesFormat(job_id, service.model_name, body)
        return await service.answer(http, caller, body, choices, form)

    _add_tokens(app, service, [Depends(caller_of)])

    @app.get("/v1/models", dependencies=[Depends(caller_of)])
    async def models() -> dict[str, Any]:
        return listed([*map(service.model_card, service.model_names)])

    # A model's name may contain slashes.
    @app.get("/v1/models/{model_id:path}", dependencies=[Depends(caller_of)])
    async def model(model_id: str) -> dict[str, Any]:
        service.prepare.check_model(model_id)
        return service.model_card(model_id)


def listed(data: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of `/v1/models`."""
    ids = [card["id"] for card in data] or [None]
    return {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": ids[0],
        "last_id": ids[-1],
    }


def _add_tokens(app: FastAPI, service: Service, dependencies: Sequence[params.Depends]) -> None:
    @app.post("/tokenize", dependencies=dependencies, openapi_extra=body_of(TokenizeBody))
    async def tokenize(http: Request) -> dict[str, Any]:
        body = await validated(TokenizeBody, http)
        token_ids = await service.prepare.token_ids(body)
        strings = service.tokenizer.strings(token_ids) if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": service.client.info.max_request_tokens,
            "tokens": pieces(token_ids, service.tokenizer) if body.with_pieces else token_ids,
            "token_strs": strings,
        }

    @app.post("/detokenize", dependencies=dependencies, openapi_extra=body_of(DetokenizeBody))
    async def detokenize(http: Request) -> dict[str, str]:
        body = await validated(DetokenizeBody, http)
        return dict.fromkeys(("prompt", "content"), await service.prepare.text(body))

    @app.get("/tokenizer_info", dependencies=dependencies)
    async def tokenizer_info() -> dict[str, Any]:
        return service.tokenizer.info()


def _add_operations(app: FastAPI, service: Service, api_keys: ApiKeys) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> JSONResponse:
        problem = service.client.problem
        if problem is not None:
            return JSONResponse({"status": "unavailable", "reason": problem}, 503)
        return JSONResponse({"status": "ok", "engine": service.client.info.description})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(authorization: Annotated[str | None, Header()] = None) -> Response:
        api_keys.check_operator(authorization)
        client = service.client
        text = service.metrics.render(
            await client.stats(),
            is_up=client.problem is None,
            num_restarts=client.num_restarts,
            refused=client.refused,
        )
        return Response(text, media_type=CONTENT_TYPE_LATEST)
