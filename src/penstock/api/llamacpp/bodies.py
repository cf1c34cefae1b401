"""The bodies of llama.cpp's endpoints, as completion requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, field_validator, model_validator

from penstock.api.bodies import Bias, CompletionBody, GenerationBody, TokenId
from penstock.api.body import Body, Structure
from penstock.core.types import MAX_LOGPROBS

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "n": "n_cmpl"}
_OTHER_NAMES = {
    "max_completion_tokens": "n_predict", "max_tokens": "n_predict", "n": "n_cmpl",
    "logprobs": "n_probs",
}  # fmt: skip
_UNSET: Mapping[str, tuple[object, ...]] = {
    "seed": (-1, 2**32 - 1), "cache_prompt": (True,), "id_slot": (-1,),
}  # fmt: skip
"""Values that mean that a field is not given, or what is done for every request."""
_WITHOUT: Mapping[str, Mapping[str, float]] = {
    "top_k": {"top_k": 0}, "top_p": {"top_p": 1.0}, "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}  # fmt: skip
"""Parameters by which a sampler does nothing."""
_SETTINGS = {
    "seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop", "max_tokens", "n", "ignore_eos", "stream", "n_probs", "grammar",
    "timings_per_token",
}  # fmt: skip

_Row = Annotated[list[TokenId | str], Field(fail_fast=True)]
"""Tokens and texts in a row."""
_Rows = Annotated[list[str | _Row], Field(fail_fast=True, max_length=1024)]


class _Asked(CompletionBody):
    """A completion whose structures have llama.cpp's names."""

    given: tuple[Structure, ...] = ()

    @property
    def structures(self) -> list[Structure]:
        return list(self.given)


class LlamaBody(GenerationBody):
    """Fields of `/completion` and `/infill`, with llama.cpp's names, defaults and values for none.

    n_predict: -1 is all of the context; 0 only reads the prompt. samplers: others are off;
    `infill`, which leaves little but the likeliest token, is greedy. logit_bias: also by texts,
    for each of their tokens. response_fields: the answer's; inner ones as `timings/prompt_n`."""

    model_config = ConfigDict(alias_generator=lambda name: _NAMES.get(name, name))
    not_offered: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "top_n_sigma": (-1,), "adaptive_target": (-1,), "min_keep": (0,), "grammar_lazy": (False,),
        "lora": ([],), "image_data": ([],), "post_sampling_probs": (False,),
    }  # fmt: skip

    max_tokens: int = Field(default=-1, ge=-1)
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    n_probs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    grammar: str = ""
    json_schema: dict[str, Any] | None = None
    samplers: list[str] | None = None
    return_tokens: bool = False
    timings_per_token: bool = False
    t_max_predict_ms: float = Field(default=0, allow_inf_nan=False)
    response_fields: list[str] = Field(default_factory=list, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _as_llamacpp(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {k: v for k, v in given.items() if v is not None and v not in _UNSET.get(k, ())}
        made = _DEFAULTS | known
        for other, name in _OTHER_NAMES.items():
            if other in made:
                made.setdefault(name, made.pop(other))
        return made

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _by_token(cls, given: Any) -> Any:
        pairs = [*given.items()] if isinstance(given, dict) else given
        made: dict[str, Any] = {}
        for pair in pairs if isinstance(pairs, list) else [pairs]:
            match pair:
                case [str(token), _] if isinstance(pair, list) and is_id(token):
                    raise ValueError(f"{token!r} means a token; give those of the text")
                case [token, bias] if isinstance(token, str) or is_id(str(token)):
                    made[str(token)] = -100 if bias is False else bias  # false: never
                case _:
                    raise ValueError("must be an object or a list of [token or text, bias]")
        return made

    @property
    def structures(self) -> list[Structure]:
        """All structures given."""
        schema = None if self.json_schema is None else self.json_schema or {"type": "object"}
        own = [
            Structure("json_schema", "json", schema),
            Structure("grammar", "grammar", self.grammar or None),
        ]
        return [*super().structures, *(one for one in own if one.value is not None)]

    @property
    def settings(self) -> dict[str, Any]:
        """The `generation_settings` of an answer, without `logit_bias`."""
        made = self.model_dump(by_alias=True, include=_SETTINGS)
        made["seed"] = -1 if self.seed is None else self.seed
        made["samplers"] = [*_WITHOUT] if self.samplers is None else self.samplers
        return {**made, "max_tokens": self.max_tokens, "stop": self.stops}

    def asked(
        self, prompts: Sequence[str | list[int]], logit_bias: Mapping[str, float]
    ) -> CompletionBody:
        """Return the equivalent request. logit_bias: by token."""
        fields = {name: getattr(self, name) for name in GenerationBody.model_fields}
        if self.samplers is not None:
            for sampler in _WITHOUT.keys() - {*self.samplers}:
                fields |= _WITHOUT[sampler]
            if "infill" in self.samplers:
                fields["temperature"] = 0.0
        if self.stream or self.return_tokens:
            # Tokens are told one by one with their origins.
            fields["speculation"] = self.speculation.model_copy(update={"origins": True})
        fields |= {
            "max_tokens": None if self.max_tokens < 0 else self.max_tokens,
            "logprobs": self.n_probs or None,
            "logit_bias": dict(logit_bias),
            "given": tuple(self.structures),
        }
        return _Asked.model_construct(**fields, prompt=list(prompts))


def is_id(token: str) -> bool:
    """Return whether the key of a bias is a token's number."""
    return token.isascii() and token.isdigit() and len(token) < 10


class LlamaCompletion(LlamaBody):
    """Body of `POST /completion`. prompt: a text, tokens, both in a row, or several of these."""

    prompt: Annotated[str | _Row | _Rows, Field(union_mode="left_to_right")]

    @field_validator("prompt", mode="before")
    @classmethod
    def _without_media(cls, given: Any) -> Any:
        return [*map(_text_of, given)] if isinstance(given, list) else _text_of(given)

    @property
    def sequences(self) -> list[str | list[int | str]]:
        """The prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if any(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if not isinstance(part, list)]]
        return [part for part in self.prompt if not isinstance(part, int)]


def _text_of(given: Any) -> Any:
    """Return the text of llama.cpp's object for a prompt with images, if it has none."""
    match given:
        case {"prompt_string": str(text), **rest} if not any(rest.values()):
            return text
    return given


class ExtraFile(Body):
    """Text of another file."""

    text: str
    filename: str = "tmp"


class InfillBody(LlamaBody):
    """Body of `POST /infill`. prompt: follows input_prefix."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field(default_factory=list, max_length=1024)
    prompt: str = ""
