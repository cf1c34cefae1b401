"""One choice of a response while it grows: its text, its usage, how speculation went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api.errors import ApiError
from penstock.api.text import TextStream, TokenText
from penstock.core.types import FinishReason, Output, Request
from penstock.serving.speculated import Speculated

_STATUS = {FinishReason.REFUSED: 400, FinishReason.ERROR: 500, FinishReason.CANCELLED: 503}


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice adds to what its client has: text, the tokens behind it, perhaps the end."""

    index: int
    text: str
    tokens: Sequence[TokenText]
    finish_reason: FinishReason | None


class Choice:
    """Takes in the outputs of one engine request. `opens_prompt`: the first choice of its prompt,
    which is counted once."""

    def __init__(
        self, index: int, request: Request, text: TextStream, *, opens_prompt: bool
    ) -> None:
        self.index = index
        self.request = request
        self.opens_prompt = opens_prompt
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.speculated = Speculated()
        self._text = text

    def take(self, output: Output) -> Delta | None:
        """Take in an output; None if there is nothing to show for it yet.

        Raises: ApiError where the engine gave the request up.
        """
        if output.finish_reason in _STATUS:
            self.finish_reason = output.finish_reason
            status = _STATUS[output.finish_reason]
            message = output.error or str(output.finish_reason)
            if status == 503:
                raise ApiError(status, message, code="engine_unavailable", retry_after_s=1.0)
            raise ApiError(status, message, code="engine_error")
        self.num_cached_tokens += output.num_cached_tokens
        self.speculated.observe(output)
        self._add(output)
        if self._text.stopped:
            self.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            self._text.finish()
            self.finish_reason = FinishReason.STOP if self._text.stopped else output.finish_reason
        text, tokens = self._text.take()
        if text or tokens or self.finish_reason is not None:
            return Delta(self.index, text, tokens, self.finish_reason)
        return None

    def _add(self, output: Output) -> None:
        """Tokens up to the end of the text. A stop token counts, but is not shown."""
        num_hidden = int(output.finish_reason is FinishReason.STOP)
        shown = output.token_ids[: len(output.token_ids) - num_hidden]
        self.num_tokens += self._text.add(shown, output.logprobs)
        if not self._text.stopped:
            self.num_tokens += num_hidden


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Usage of a response so far. A prompt counts once, however many choices it has."""
    prompt_tokens = sum(c.request.prompt_len for c in choices if c.opens_prompt)
    completion_tokens = sum(c.num_tokens for c in choices)
    speculated = Speculated()
    for choice in choices:
        speculated.add(choice.speculated)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(c.num_cached_tokens for c in choices if c.opens_prompt)
        },
        "speculation": speculated.as_dict(),
    }
