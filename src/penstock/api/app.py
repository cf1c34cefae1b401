"""The HTTP application: OpenAI's endpoints, health, metrics and dashboard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import uuid4

from fastapi import Depends, FastAPI, Header, Request, Response, params
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from penstock import __version__
from penstock.api import errors
from penstock.api.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    header_value,
    ignored_fields,
)
from penstock.api.choices import ResponseChoice
from penstock.api.dashboard import add_dashboard
from penstock.api.http import (
    EXPECTED_OUTPUT_TOKENS,
    IGNORED_FIELDS,
    REQUEST_ID,
    ApiKeys,
    BodyLimit,
    Caller,
    ResponseHeaders,
    client_network,
)
from penstock.api.metrics import Metrics
from penstock.api.prepare import RequestBuilder
from penstock.api.response_bodies import ResponsesBody
from penstock.api.response_format import ResponsesFormat
from penstock.api.responses import (
    ChatFormat,
    CompletionFormat,
    EventStream,
    Form,
    Generation,
    collected,
)
from penstock.api.token_bodies import DetokenizeBody, TokenizeBody
from penstock.config import ServeConfig
from penstock.serving.client import RequestClient

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

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
_REFUSED = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be served", "content": _REFUSED},
    "5XX": {"description": "The server cannot serve", "content": _REFUSED},
}
_BODIES = (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)
_Body = TypeVar("_Body", bound=GenerationBody)
_Read = TypeVar("_Read", bound=BaseModel)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` of an endpoint whose body is a `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    count = {"type": "integer", "minimum": 1}
    return {
        "parameters": [{"name": EXPECTED_OUTPUT_TOKENS, "in": "header", "schema": count}],
        "requestBody": {"required": True, "content": content},
    }


def _describe(app: FastAPI) -> None:
    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="Penstock", version=__version__, routes=app.routes)
            _, bodies = models_json_schema(
                [(body, "validation") for body in _BODIES], ref_template=_REF
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {**bodies["$defs"], "Error": _ERROR}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


class Service:
    """State shared by the endpoints."""

    def __init__(self, config: ServeConfig, client: RequestClient, tokenizer: Tokenizer) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.model_name = config.served_model_name or config.engine.target_name
        self.started_at = int(time.time())
        self._timeout_s = config.request_timeout_s
        self._max_wait_s = config.max_wait_s
        self.metrics = Metrics(self.model_name)
        self.prepare = RequestBuilder(
            self.model_name,
            tokenizer,
            client.info,
            config.engine.verification,
            lambda: client.drafters,
            client.room.most_of,
            client.quotas,
        )

    async def read(self, model: type[_Body], http: Request) -> _Body:
        """Validate the body of a generation request. Raises: ApiError."""
        body = await _validated(model, http)
        told = http.headers.get(EXPECTED_OUTPUT_TOKENS)
        if told is not None and body.expected_output_tokens is None:
            body = body.model_copy(update={"expected_output_tokens": _count(told)})
        ignored = ignored_fields(body)
        if isinstance(body, ChatBody):
            names = body.chat_template_kwargs
            ignored += self.prepare.unused_fields(body.reasoning_effort, names)
        elif isinstance(body, ResponsesBody):
            ignored += self.prepare.unused_fields(body.reasoning.effort)
        self.metrics.count_ignored_fields(ignored)
        http.state.ignored_fields = header_value(ignored)
        return body

    def model_card(self) -> dict[str, Any]:
        """Return the model's entry in `/v1/models`."""
        engine = self.client.info
        card = {
            "id": self.model_name,
            "object": "model",
            "created": self.started_at,
            "owned_by": "penstock",
            "max_model_len": engine.max_request_tokens,
            "drafters": list(self.client.drafters),
        }
        if engine.draft_model is not None:
            card["draft_model"] = engine.draft_model
        return card

    async def answer(
        self,
        http: Request,
        caller: Caller,
        body: GenerationBody,
        choices: list[ResponseChoice],
        form: Form,
    ) -> Response:
        """Run the choices and return their response. Raises: ApiError."""
        limits = [t for t in (body.timeout, self._timeout_s) if t is not None]
        deadline = asyncio.get_running_loop().time() + min(limits) if limits else None
        job = await Generation.start(
            self.client, self.metrics, choices, caller.client, deadline, self._max_wait_s
        )
        if body.stream:
            return EventStream(job, form, body)
        return await collected(job, form, http)


async def _validated(model: type[_Read], http: Request) -> _Read:
    """Parse a body. Raises: ApiError."""
    # By pydantic, not FastAPI: it refuses invalid Unicode and says what is wrong with broken JSON.
    try:
        return model.model_validate_json(await http.body())
    except ValidationError as error:
        raise errors.from_validation(error) from error


def _count(told: str) -> int:
    if not (told.isascii() and told.isdigit() and len(told) < 10 and int(told) > 0):
        name = EXPECTED_OUTPUT_TOKENS
        raise errors.ApiError(400, f"{name}: must be a whole number of at least 1", param=name)
    return int(told)


def create_app(config: ServeConfig, client: RequestClient, tokenizer: Tokenizer) -> FastAPI:
    """Build the application in front of a started client and the target's tokenizer.

    Its state holds `metrics`, which draft servers share, and `api_keys`, which may be reloaded."""
    # No documentation pages: they load scripts from other servers.
    app = FastAPI(openapi_url="/openapi.json", docs_url=None, redoc_url=None, responses=_RESPONSES)
    errors.install(app)
    _describe(app)
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
    service = Service(config, client, tokenizer)
    app.state.metrics = service.metrics
    api_keys = ApiKeys(config.engine.tenants, config.metrics_keys)
    app.state.api_keys = api_keys
    _add_openai(app, service, api_keys)
    viewers = ApiKeys({}) if config.open_metrics else api_keys
    _add_operations(app, service, viewers)
    add_dashboard(app, client, service.metrics, viewers)
    return app


def _add_openai(app: FastAPI, service: Service, api_keys: ApiKeys) -> None:
    def caller_of(http: Request, authorization: Annotated[str | None, Header()] = None) -> Caller:
        return api_keys.caller(authorization, client_network(http.scope))

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionBody))
    async def completions(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(CompletionBody, http)
        job_id = f"cmpl-{uuid4().hex}"
        choices = await service.prepare.completion(body, caller, job_id)
        form = CompletionFormat(
            job_id, service.model_name, service.tokenizer, logprobs=body.logprobs is not None
        )
        return await service.answer(http, caller, body, choices, form)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatBody))
    async def chat_completions(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(ChatBody, http)
        job_id = f"chatcmpl-{uuid4().hex}"
        choices = await service.prepare.chat(body, caller, job_id)
        form = ChatFormat(job_id, service.model_name, service.tokenizer, logprobs=body.logprobs)
        return await service.answer(http, caller, body, choices, form)

    @app.post("/v1/responses", openapi_extra=_body_of(ResponsesBody))
    async def responses(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(ResponsesBody, http)
        job_id = f"resp_{uuid4().hex}"
        choices = await service.prepare.chat(body.as_chat(), caller, job_id)
        form = ResponsesFormat(job_id, service.model_name, body)
        return await service.answer(http, caller, body, choices, form)

    @app.post("/v1/embeddings", dependencies=[Depends(caller_of)])
    async def embeddings() -> None:
        raise errors.ApiError(
            400,
            f"the model {service.model_name!r} makes text and no embeddings",
            param="model",
            code="unsupported_model",
        )

    _add_tokens(app, service, [Depends(caller_of)])

    @app.get("/v1/models", dependencies=[Depends(caller_of)])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    # A model's name may contain slashes.
    @app.get("/v1/models/{model_id:path}", dependencies=[Depends(caller_of)])
    async def model(model_id: str) -> dict[str, Any]:
        service.prepare.check_model(model_id)
        return service.model_card()


def _add_tokens(app: FastAPI, service: Service, dependencies: Sequence[params.Depends]) -> None:
    @app.post("/tokenize", dependencies=dependencies, openapi_extra=_body_of(TokenizeBody))
    async def tokenize(http: Request) -> dict[str, Any]:
        body = await _validated(TokenizeBody, http)
        token_ids = await service.prepare.token_ids(body)
        strings = service.tokenizer.strings(token_ids) if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": service.client.info.max_request_tokens,
            "tokens": token_ids,
            "token_strs": strings,
        }

    @app.post("/detokenize", dependencies=dependencies, openapi_extra=_body_of(DetokenizeBody))
    async def detokenize(http: Request) -> dict[str, str]:
        body = await _validated(DetokenizeBody, http)
        return {"prompt": await service.prepare.text(body)}

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
