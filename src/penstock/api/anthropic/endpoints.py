"""Anthropic's endpoints, over the same service as OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from fastapi import Depends, FastAPI, Request, Response

from penstock.api.anthropic.bodies import MessagesBody, MessagesInput
from penstock.api.anthropic.format import PATH, MessagesFormat
from penstock.api.http import Caller
from penstock.api.schema import body_of, refusals
from penstock.api.service import Service


def add_messages(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    """Add the endpoints under `/v1/messages`."""
    errors = refusals("MessagesError")

    @app.post(PATH, openapi_extra=body_of(MessagesBody), responses=errors)
    async def messages(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(MessagesBody, http)
        job_id = f"msg_{uuid4().hex}"
        choices = await service.prepare.chat(body.as_chat(), caller, job_id, clips=True)
        form = MessagesFormat(job_id, service.model_name, body)
        return await service.answer(http, caller, body, choices, form)

    @app.post(
        f"{PATH}/count_tokens",
        openapi_extra=body_of(MessagesInput),
        responses=errors,
    )
    async def count_tokens(http: Request, caller: Caller = Depends(caller_of)) -> dict[str, int]:
        body = await service.read(MessagesInput, http)
        (choice,) = await service.prepare.chat(body.as_chat(), caller, "count", clips=True)
        return {"input_tokens": choice.request.prompt_len}
