"""llama.cpp's `/infill`: fill in the middle for editors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from uuid import uuid4

from fastapi import Depends, FastAPI, Request, Response

from penstock.api.bodies import GenerationBody, InfillBody
from penstock.api.choices import Delta, LineLimit, ResponseChoice, usage
from penstock.api.errors import ApiError
from penstock.api.http import Caller
from penstock.api.responses import Form, Generation, JsonDict, event
from penstock.api.schema import body_of
from penstock.api.service import Service


class InfillFormat(Form):
    """One JSON object, or an event for each new text, without `[DONE]`."""

    def __init__(self, model_name: str, fields: Sequence[str]) -> None:
        self._model = model_name
        self._fields = fields
        self._started_at = time.perf_counter()

    def response(self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]) -> JsonDict:
        (choice,), (delta,) = choices, deltas
        now, counted, cached = time.perf_counter(), usage(choices), choice.usage.num_cached_tokens
        first, made = choice.first_output_at or now, counted["completion_tokens"]
        timings = {
            **_timed("prompt", counted["prompt_tokens"] - cached, first - self._started_at),
            **_timed("predicted", made, now - first),
        }
        word = choice.stop_string or ""
        told = {"length": "limit", "stop": "word" if word else "eos"}
        whole = {
            **_said(delta),
            "model": self._model,
            "stop_type": told[str(delta.finish_reason)],
            "stopping_word": word,
            "tokens_predicted": made,
            "tokens_evaluated": counted["prompt_tokens"],
            "tokens_cached": cached,
            "truncated": False,
            "timings": timings,
        }
        flat = whole | {f"timings/{name}": value for name, value in timings.items()}
        return {f: flat[f] for f in self._fields if f in flat} if self._fields else whole

    async def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        try:
            async for delta in job.deltas():
                is_last = delta.finish_reason is not None
                yield event(self.response(job.choices, [delta]) if is_last else _said(delta))
        except ApiError as error:
            yield event(error.body())


def _said(delta: Delta) -> JsonDict:
    return {"index": 0, "content": delta.text, "stop": delta.finish_reason is not None}


def _timed(what: str, num: int, seconds: float) -> JsonDict:
    times = {"ms": 1e3 * seconds, "per_token_ms": 1e3 * seconds / max(1, num)}
    told = {"n": num, **times, "per_second": num / max(seconds, 1e-9)}
    return {f"{what}_{name}": value for name, value in told.items()}


def add_infill(app: FastAPI, service: Service, caller_of: Callable[..., Caller]) -> None:
    """Add the endpoint."""

    @app.post("/infill", openapi_extra=body_of(InfillBody))
    async def infill(http: Request, caller: Caller = Depends(caller_of)) -> Response:
        body = await service.read(InfillBody, http)
        form = InfillFormat(service.model_name, body.response_fields)
        files = [(file.filename, file.text) for file in body.input_extra]
        job_id, clips = f"infill-{uuid4().hex}", body.n_predict < 0
        choices = await service.prepare.completion(
            body.asked(), caller, job_id, clips=clips, files=files
        )
        choices[0].lines = LineLimit(body.n_indent, body.t_max_predict_ms / 1e3)
        return await service.answer(http, caller, body, choices, form)
