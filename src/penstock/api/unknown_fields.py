"""Unknown fields of bodies: those that would change the answer are refused, others ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.api.bodies import ChatBody, GenerationBody, ModelBody
from penstock.api.errors import ApiError

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # which token is drawn
    "repeat_penalty": (1,), "typical_p": (1,), "top_a": (0,),
    "tfs_z": (1,), "tfs": (1,), "mirostat": (0,), "dynatemp_range": (0,), "xtc_probability": (0,),
    "dry_multiplier": (0,), "watermark": (False,), "allowed_token_ids": (), "bad_words": ([],),
    "logits_processors": ([],), "custom_logit_processor": (), "best_of": (1,),
    "use_beam_search": (False,), "length_penalty": (1,), "lora_path": (),
    "repetition_detection": (),
    # what shape the text has
    "structural_tag": (), "guided_whitespace_pattern": (),
    "json_schema": (), "regex": ("",), "ebnf": (), "grammar": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
    "web_search_options": (),
    # how long it is
    "min_new_tokens": (0,), "max_new_tokens": (), "n_predict": (),
    # what it goes on from
    "prompt": (), "messages": (), "suffix": ("",), "input_ids": (), "prompt_embeds": (),
    "truncate_prompt_tokens": (), "add_generation_prompt": (True,), "add_special_tokens": (False,),
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},),
    "documents": ([],), "session_params": ({},),
    # what is reported with it
    "echo": (False,), "include_stop_str_in_output": (False,), "no_stop_trim": (False,),
    "skip_special_tokens": (True,), "prompt_logprobs": (), "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,),
}  # fmt: skip
"""Unsupported fields that would change the answer, with the values at which they do not."""

_UNSUPPORTED_IN_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "function_call": (), "audio": (),
    "prefix": (False,), "partial": (False,),
}  # fmt: skip

# Bounds of the work per request and of the header's length.
_MAX_FIELDS = 256
_MAX_NAMES = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNNAMED = "other"
"""Stands for an ignored field whose name does not match `_NAME`."""


def ignored_fields(body: ModelBody) -> list[str]:
    """Return the names of ignored fields, each once; in messages without the message's index.

    Raises: ApiError for a field that would change the answer, or over _MAX_FIELDS unknown fields.
    """
    names: dict[str, None] = {}
    for path, name, value, unsupported in _unknown(body):
        if len(names) > _MAX_FIELDS:
            raise ApiError(400, f"the body has more than {_MAX_FIELDS} unknown fields")
        if name in unsupported:
            _check_neutral(_joined(*path, name), value, unsupported[name])
        else:
            known = _joined(*(part for part in path if isinstance(part, str)), name)
            names[known if _NAME.fullmatch(known) else UNNAMED] = None
    return list(names)


def header_value(names: Iterable[str]) -> str:
    """Join names to a header value of bounded length."""
    shown = list(names)
    more = ["..."] if len(shown) > _MAX_NAMES else []
    return ", ".join(shown[:_MAX_NAMES] + more)


def _unknown(
    body: ModelBody,
) -> Iterator[tuple[tuple[str | int, ...], str, Any, Mapping[str, tuple[object, ...]]]]:
    """Yield each unknown field's path, name, value, and the unsupported fields there."""
    for path, part in (((), body), *body.parts()):
        for name, value in (part.model_extra or {}).items():
            yield path, name, value, {**_UNSUPPORTED, **body.not_offered}
    if isinstance(body, GenerationBody) and body.stream_options is not None:
        for name, value in (body.stream_options.model_extra or {}).items():
            yield ("stream_options",), name, value, {}
    for index, message in enumerate(body.messages if isinstance(body, ChatBody) else ()):
        for name, value in (message.model_extra or {}).items():
            yield ("messages", index), name, value, _UNSUPPORTED_IN_MESSAGES
        for part in () if isinstance(message.content, str) else message.content:
            for name, value in (part.model_extra or {}).items():
                yield ("messages", index, "content"), name, value, {}
        for call in message.tool_calls:
            for name, value in (call.model_extra or {}).items():
                yield ("messages", index, "tool_calls"), name, value, {}


def _joined(*parts: str | int) -> str:
    return ".".join(map(str, parts))


def _check_neutral(where: str, value: Any, neutral: tuple[object, ...]) -> None:
    # In Python True == 1.
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    allowed = " or ".join(json.dumps(one) for one in neutral)
    what = f"only {allowed} is supported" if neutral else "is not supported"
    raise ApiError(400, f"{where}: {what}", param=where, code="unsupported_value")
