"""Log-probabilities of a prompt's tokens, which need logits at every position of it."""

from __future__ import annotations

from penstock.core.types import TokenLogprob
from penstock.engine.batch import BatchWriter, IntArray
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import token_logprobs
from penstock.engine.sequences import TokenBuffer

_MOST_ROWS = 64
"""Rows of logits at a time: one may be half a megabyte."""


class PromptScores:
    """Computes the prompts of requests that ask for it, in passes of their own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._found: dict[str, list[TokenLogprob]] = {}

    @property
    def num_requests(self) -> int:
        """That have something to tell."""
        return len(self._found)

    def wants(self, text: TokenBuffer) -> bool:
        """Whether a request's prompt is still to be scored, or is being scored."""
        request = text.request
        return request.sampling.num_prompt_logprobs is not None and (
            text.length == request.prompt_len
        )

    def read(self, text: TokenBuffer, start: int, end: int, tables: IntArray) -> None:
        """Compute known tokens start..end - 1, before which all are computed. tables: [1, blocks],
        of the request."""
        request = text.request
        num_top = request.sampling.num_prompt_logprobs
        assert num_top is not None
        found = self._found.setdefault(request.id, [])
        del found[start:]  # from before a preemption
        for begin in range(start, end, _MOST_ROWS):
            stop = min(end, begin + _MOST_ROWS)
            writer = BatchWriter()
            writer.add(begin, text.tokens(begin, stop), stop - begin)
            logits = self._runner.forward(writer.batch(tables))
            following = text.tokens(begin + 1, min(stop + 1, request.prompt_len))
            if following:
                found += token_logprobs(logits[: len(following)], following, num_top)

    def take(self, request_id: str) -> tuple[TokenLogprob, ...]:
        """Of a request that samples, once."""
        return tuple(self._found.pop(request_id, ()))

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._found.pop(request_id, None)
