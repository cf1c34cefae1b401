"""llama.cpp's own endpoints: completions, the chat template, and what the server is and does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from fastapi import Depends, FastAPI, Request, Response

from penstock import __version__
from penstock.api.bodies import ChatBody, CompletionBody
from penstock.api.errors import ApiError
from penstock.api.http import Caller
from penstock.api.llamacpp.bodies import ExtraFile, InfillBody, LlamaBody, LlamaCompletion, is_id
from penstock.api.llamacpp.format import LlamaFormat
from penstock.api.schema import body_of
from penstock.api.service import Service


def add_llamacpp(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    """Add the endpoints, beside those of tokens, which vLLM has, too."""

    async def answer(
        http: Request, caller: Caller, body: LlamaBody, asked: CompletionBody
    ) -> Response:
        job_id, context = f"llamacpp-{uuid4().hex}", service.client.info.max_request_tokens
        form = LlamaFormat(service.model_name, service.tokenizer, body, context)
        choices = await service.prepare.completion(asked, caller, job_id, clips=True)
        for choice in choices if body.t_max_predict_ms > 0 else ():
            choice.ends_line_after_s = body.t_max_predict_ms / 1e3
        return await service.answer(http, caller, body, choices, form)

    @app.post("/completion", openapi_extra=body_of(LlamaCompletion))
    @app.post("/completions", include_in_schema=False)
    async def completion(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(LlamaCompletion, http)
        return await answer(http, caller, body, await _completing(service, body))

    @app.post("/infill", openapi_extra=body_of(InfillBody))
    async def infill(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(InfillBody, http)
        return await answer(http, caller, body, await filling(service, body))

    @app.post("/apply-template", dependencies=[Depends(caller_of)], openapi_extra=body_of(ChatBody))
    async def apply_template(http: Request) -> dict[str, str]:
        body = await service.read(ChatBody, http)
        told = {"add_generation_prompt", "continue_final_message"} & body.model_fields_set
        if body.messages[-1].is_begun and not told:
            body = body.model_copy(update={"continue_final_message": True})
        return {"prompt": await service.prepare.chat_prompt(body)}

    _add_server(app, service, caller_of)


def _add_server(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    @app.get("/props", dependencies=[Depends(caller_of)])
    async def props() -> dict[str, Any]:
        client, told = service.client, service.tokenizer.info()
        return {
            "default_generation_settings": {
                "n_ctx": client.info.max_request_tokens,
                "params": LlamaCompletion(prompt="").settings,
            },
            "total_slots": _num_slots(service),
            "model_alias": service.model_name,
            "model_path": client.info.description.get("target", service.model_name),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": service.tokenizer.tool_template or "",
            "bos_token": told.get("bos_token", ""),
            "eos_token": told.get("eos_token", ""),
            "build_info": f"penstock {__version__}",
            "is_sleeping": not client.is_open,
        }

    @app.get("/slots")
    async def slots(
        fail_on_no_slot: str = "", caller: Caller = Depends(caller_of)
    ) -> list[dict[str, Any]]:
        """The tenant's running requests, and room for others of the longest length."""
        num_idle = max(0, _num_slots(service) - service.client.num_open)
        if fail_on_no_slot and not num_idle:
            raise ApiError(503, "no slot is idle", code="no_slot")
        rows = service.metrics.recent.rows_of(caller.tenant)
        made: list[dict[str, Any]] = [
            {
                "id_task": row["id"],
                "is_processing": True,
                "n_prompt_tokens": row["num_prompt_tokens"],
                "next_token": [{"has_next_token": True, "n_decoded": row["num_tokens"]}],
            }
            for row in rows
            if row["state"] != "ended"
        ]
        made += [{"is_processing": False}] * num_idle
        context, drafters = service.client.info.max_request_tokens, service.client.drafters
        shared = {"n_ctx": context, "speculative": bool(drafters)}
        return [{"id": place, **shared, **slot} for place, slot in enumerate(made)]


def _num_slots(service: Service) -> int:
    """Return how many requests of the longest length have memory at once; of others more have."""
    info = service.client.info
    num_tokens: int = info.description.get("kv_tokens", 0)
    return max(1, num_tokens // info.max_request_tokens)


async def _completing(service: Service, body: LlamaCompletion) -> CompletionBody:
    """Return the equivalent completion. Raises: ApiError."""
    prompts = list[str | list[int]]()
    for given in body.sequences:
        read = service.prepare.mixed_ids
        prompts.append(given if isinstance(given, str) else await read(given, "prompt"))
        await asyncio.sleep(0)  # so that other requests' streams go on
    return body.asked(prompts, await _biases(service, body))


async def _biases(service: Service, body: LlamaBody) -> dict[str, float]:
    """Return the biases by token. Raises: ApiError."""
    made = dict[str, float]()
    for key, bias in body.logit_bias.items():
        ids = [key] if is_id(key) else await service.prepare.text_ids(key, "logit_bias")
        made |= dict.fromkeys(map(str, ids), bias)
        await asyncio.sleep(0)
    return made


async def filling(service: Service, body: InfillBody) -> CompletionBody:
    """Return the equivalent completion; of too long other files the end. Raises: ApiError."""
    fill, text_ids = service.prepare.fill_tokens("input_suffix"), service.prepare.text_ids
    files = list[int]()
    for file in (*body.input_extra, ExtraFile(text="", filename="file")):
        files += [*fill.file, *await text_ids(f"{file.filename}\n{file.text}", "input_extra")]
    prefix = await text_ids(body.input_prefix + body.prompt, "input_prefix")
    prompt = fill.prompt(prefix, await text_ids(body.input_suffix, "input_suffix"))
    prompt = service.tokenizer.encode("") + prompt
    room = service.client.info.max_request_tokens - len(prompt) - max(1, body.max_tokens)
    asked = body.asked([files[-max(1, room) :] + prompt], await _biases(service, body))
    ends = [*body.stop_token_ids, *({} if body.ignore_eos else fill.ends)]
    return asked.model_copy(update={"stop_token_ids": ends})
