"""Responses of llama.cpp's completions: JSON objects, or an event for each new text."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.api.bodies import GenerationBody
from penstock.api.choices import Delta, ResponseChoice, TokenText
from penstock.api.errors import ApiError
from penstock.api.llamacpp.bodies import LlamaBody
from penstock.api.responses import Form, Generation, JsonDict, by_choice, event, logprob_entries

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer

_ENDS = {"length": "limit", "stop": "eos"}


class LlamaFormat(Form):
    """One JSON object, a list of them for several choices, or events without `[DONE]`.

    context: the most tokens of a request."""

    def __init__(self, model_name: str, tokenizer: Tokenizer, body: LlamaBody, context: int):
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._body = body
        self._context = context
        self._started_at = time.perf_counter()

    def response(
        self, choices: Sequence[ResponseChoice], deltas: Sequence[Delta]
    ) -> JsonDict | list[JsonDict]:
        made = [self._whole(choices[delta.index], delta) for delta in by_choice(deltas)]
        return made[0] if len(made) == 1 else made

    async def events(self, job: Generation, body: GenerationBody) -> AsyncIterator[bytes]:
        try:
            async for delta in job.deltas():
                choice = job.choices[delta.index]
                if delta.text or delta.tokens:
                    piece = self._said(choice, delta)
                    if self._body.timings_per_token:
                        piece["timings"] = self._timings(choice)
                    yield event(piece)
                if delta.finish_reason is not None:
                    end = Delta(delta.index, "", (), delta.finish_reason)
                    yield event(self._whole(choice, end))
        except ApiError as error:
            yield event(error.body())

    def _said(self, choice: ResponseChoice, delta: Delta) -> JsonDict:
        made: JsonDict = {
            "index": choice.index,
            "content": delta.text,
            "tokens": [token.token_id for token in delta.tokens],
            "id_slot": -1,
            "stop": False,
            "tokens_predicted": choice.usage.num_tokens,
            "tokens_evaluated": choice.request.prompt_len,
        }
        if self._body.n_probs and delta.tokens:
            made["completion_probabilities"] = self._probabilities(delta.tokens)
        return made

    def _whole(self, choice: ResponseChoice, delta: Delta) -> JsonDict:
        made = self._said(choice, delta)
        if not self._body.return_tokens:
            made["tokens"] = []
        request, sampling = choice.request, choice.request.sampling
        end = "word" if choice.stop_string else _ENDS.get(str(delta.finish_reason), "none")
        num, most = choice.usage.num_tokens, self._body.max_tokens
        is_full = request.prompt_len + num >= self._context
        biases = [{"token": token, "bias": bias} for token, bias in sampling.logit_bias]
        fields = self._body.response_fields
        ids = () if fields and "prompt" not in fields else request.prompt_token_ids or ()
        made |= {
            "stop": delta.finish_reason is not None,
            "model": self._model_name,
            "generation_settings": {**self._body.settings, "logit_bias": biases},
            "prompt": self._tokenizer.decode(ids, skip_special_tokens=False),
            "has_new_line": choice.has_line_break,
            "truncated": end == "limit" and is_full and not 0 <= most <= num,
            "stop_type": end,
            "stopping_word": choice.stop_string or "",
            "tokens_cached": choice.usage.num_cached_tokens,
            "timings": self._timings(choice),
        }
        return {f: v for f in fields for v in _inside(made, f.split("/"))} if fields else made

    def _timings(self, choice: ResponseChoice) -> JsonDict:
        now, used = time.perf_counter(), choice.usage
        first = choice.first_output_at or now
        num_read = choice.request.prompt_len - used.num_cached_tokens
        drafts = {"draft_n": used.num_draft_tokens, "draft_n_accepted": used.num_accepted_tokens}
        return {
            "cache_n": used.num_cached_tokens,
            **_timed("prompt", num_read, first - self._started_at),
            **_timed("predicted", used.num_tokens, now - first),
            **(drafts if used.num_draft_tokens else {}),
        }

    def _probabilities(self, tokens: Sequence[TokenText]) -> list[JsonDict]:
        entries = logprob_entries(tokens, self._tokenizer)
        for token, entry in zip(tokens, entries, strict=True):
            entry["id"] = token.token_id
            for (token_id, _), other in zip(token.logprob.top, entry["top_logprobs"], strict=True):
                other["id"] = token_id
        return entries


def _inside(found: Any, path: Sequence[str]) -> list[Any]:
    """Return what is at a path, if anything is."""
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return []
        found = found[name]
    return [found]


def _timed(what: str, num: int, seconds: float) -> JsonDict:
    times = {"ms": 1e3 * seconds, "per_token_ms": 1e3 * seconds / max(1, num)}
    told = {"n": num, **times, "per_second": num / max(seconds, 1e-9)}
    return {f"{what}_{name}": value for name, value in told.items()}
