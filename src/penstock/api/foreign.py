"""Fields of other engines' requests: ignored, unless the answer would mean something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.api.bodies import ChatBody, GenerationBody
from penstock.api.errors import ApiError

_UNOFFERED: Mapping[str, tuple[object, ...]] = {
    # which token is drawn
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "repeat_penalty": (1,), "logit_bias": ({},), "min_p": (0,), "typical_p": (1,), "top_a": (0,),
    "tfs_z": (1,), "tfs": (1,), "mirostat": (0,), "dynatemp_range": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "watermark": (False,), "allowed_token_ids": (), "bad_words": ([],),
    "logits_processors": ([],), "custom_logit_processor": (), "best_of": (1,),
    "use_beam_search": (False,), "length_penalty": (1,), "lora_path": (),
    "repetition_detection": (),
    # what shape the text has
    "response_format": ({"type": "text"},), "structured_outputs": ({},), "structural_tag": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "json_schema": (), "regex": ("",), "ebnf": (), "grammar": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
    "web_search_options": (),
    # how long it is
    "min_tokens": (0,), "min_new_tokens": (0,), "max_new_tokens": (), "n_predict": (),
    # what it goes on from
    "prompt": (), "messages": (), "suffix": ("",), "input_ids": (), "prompt_embeds": (),
    "truncate_prompt_tokens": (), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},),
    "documents": ([],), "session_params": ({},),
    # what is reported with it
    "echo": (False,), "include_stop_str_in_output": (False,), "no_stop_trim": (False,),
    "skip_special_tokens": (True,), "prompt_logprobs": (), "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
}  # fmt: skip
"""Fields by which the answer would change, with the values at which it does not."""

_UNOFFERED_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "tool_calls": ([],), "tool_call_id": (), "function_call": (), "audio": (),
    "prefix": (False,), "partial": (False,),
}  # fmt: skip

_MAX_FIELDS = 256
_MAX_NAMES = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNNAMED = "other"
"""Stands for a name that is too long, or has characters that no engine's fields have."""


def ignored_fields(body: GenerationBody) -> list[str]:
    """Names of the fields that were ignored, each once; in messages without the message's number.

    Raises: ApiError for a field that would change the answer, and for more fields than any engine
    has.
    """
    names: dict[str, None] = {}
    for path, name, value, unoffered in _unknown(body):
        if len(names) > _MAX_FIELDS:
            raise ApiError(400, f"the body has more than {_MAX_FIELDS} unknown fields")
        if name in unoffered:
            _check_neutral(_joined(*path, name), value, unoffered[name])
        else:
            known = _joined(*(part for part in path if isinstance(part, str)), name)
            names[known if _NAME.fullmatch(known) else UNNAMED] = None
    return list(names)


def header_value(names: Iterable[str]) -> str:
    """Names as the value of one header of bounded length."""
    shown = list(names)
    more = ["..."] if len(shown) > _MAX_NAMES else []
    return ", ".join(shown[:_MAX_NAMES] + more)


def _unknown(
    body: GenerationBody,
) -> Iterator[tuple[tuple[str | int, ...], str, Any, Mapping[str, tuple[object, ...]]]]:
    """Where a field is, its name, its value, and what is not offered there."""
    for name, value in (body.model_extra or {}).items():
        yield (), name, value, _UNOFFERED
    if body.stream_options is not None:
        for name, value in (body.stream_options.model_extra or {}).items():
            yield ("stream_options",), name, value, {}
    for index, message in enumerate(body.messages if isinstance(body, ChatBody) else ()):
        for name, value in (message.model_extra or {}).items():
            yield ("messages", index), name, value, _UNOFFERED_IN_MESSAGES
        for part in () if isinstance(message.content, str) else message.content:
            for name, value in (part.model_extra or {}).items():
                yield ("messages", index, "content"), name, value, {}


def _joined(*parts: str | int) -> str:
    return ".".join(map(str, parts))


def _check_neutral(where: str, value: Any, neutral: tuple[object, ...]) -> None:
    # true is no 1, and false no 0.
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    allowed = " or ".join(json.dumps(one) for one in neutral)
    what = f"only {allowed} is supported" if neutral else "is not supported"
    raise ApiError(400, f"{where}: {what}", param=where, code="unsupported_value")
