"""Workers of vLLM's that compute nothing but the next token, and remember what their KV holds: a
wrong block table, or a chunk that leaves out a position, is found at once."""

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

STOP_TOKEN = 7


def next_token(text: tuple[int, ...]) -> int:
    """What the model makes of a text: so and so, but always the same."""
    return random.Random(hash(text)).randrange(8 if len(text) % 9 == 0 else 7)


def whole_output(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Alone, without a scheduler."""
    text = prompt
    while len(text) < len(prompt) + max_tokens:
        text += (next_token(text),)
        if text[-1] == STOP_TOKEN:
            break
    return list(text[len(prompt) :])


@dataclass
class _Sequence:
    text: list[int]
    blocks: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)


class FakeWorker:
    """accuracy: probability that a draft token is right. keeps_drafts: as the second model runner.

    longest_drafts: verified in a step, by request.
    """

    def __init__(
        self,
        block_size: int,
        num_drafts: int,
        accuracy: float,
        *,
        is_async: bool,
        keeps_drafts: bool = False,
    ):
        self._block_size = block_size
        self._num_drafts = num_drafts
        self._accuracy = accuracy
        self._is_async = is_async
        self._keeps_drafts = is_async or keeps_drafts
        self._random = random.Random(0)
        self._sequences: dict[str, _Sequence] = {}
        self._kv: dict[tuple[int, int], int] = {}
        self.longest_drafts: dict[str, int] = {}
        self.num_accepted = 0

    def run(self, step: Any) -> ModelRunnerOutput:
        """Compute a step, in the order in which they were scheduled."""
        for request_id in step.finished_req_ids:
            self._sequences.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            # The second model runner is told of resumed requests as if they were new.
            text = list(new.prefill_token_ids or new.prompt_token_ids)
            self._sequences[new.req_id] = _Sequence(text, list(new.block_ids[0]))
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                sequence.blocks, sequence.draft = [], []
            if cached.new_block_ids[i] is not None:
                sequence.blocks += cached.new_block_ids[i][0]
            starts[request_id] = cached.num_computed_tokens[i]
        ids = list(step.num_scheduled_tokens)
        made = [
            self._compute(
                i,
                starts[i],
                step.num_scheduled_tokens[i],
                step.scheduled_spec_decode_tokens.get(i, []),
            )
            for i in ids
        ]
        return ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, made)

    def _compute(self, request_id: str, start: int, num: int, scheduled: list[int]) -> list[int]:
        sequence = self._sequences[request_id]
        text = sequence.text
        # Asynchronous steps are told of drafts' places only, as if all before had been accepted.
        draft = sequence.draft[: len(scheduled)] if self._keeps_drafts else scheduled
        num_known = num - len(scheduled)
        if self._is_async:
            start = min(start, len(text) - 1)
        for position in range(start):
            self._check(sequence, text, position)
        known = text[: start + num_known]
        for position in range(start, start + num_known):
            self._write(sequence, text, position)
        if len(known) < len(text):
            return []
        longest = self.longest_drafts.get(request_id, 0)
        # Rows that only pad a batch to its usual size have no draft token.
        self.longest_drafts[request_id] = max(longest, sum(token >= 0 for token in draft))
        tokens = [next_token(tuple(text))]
        for token in draft:
            if token != tokens[-1]:
                break
            self._write(sequence, [*text, *tokens], len(text) + len(tokens) - 1)
            tokens.append(next_token((*text, *tokens)))
        self.num_accepted += len(tokens) - 1
        text += tokens
        sequence.draft = self._propose(text)
        return tokens

    def _propose(self, text: list[int]) -> list[int]:
        draft: list[int] = []
        while len(draft) < self._num_drafts:
            right = next_token((*text, *draft))
            draft.append(right if self._random.random() < self._accuracy else 0)
        return draft

    def take_drafts(self, ids: list[str]) -> DraftTokenIds:
        """What it would verify next."""
        return DraftTokenIds(ids, [list(self._sequences[i].draft) for i in ids])

    def _place(self, sequence: _Sequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self._block_size], position % self._block_size

    def _write(self, sequence: _Sequence, text: list[int], position: int) -> None:
        self._kv[self._place(sequence, position)] = hash(tuple(text[: position + 1]))

    def _check(self, sequence: _Sequence, text: list[int], position: int) -> None:
        held = self._kv.get(self._place(sequence, position))
        if held != hash(tuple(text[: position + 1])):
            raise AssertionError(f"the KV of position {position} is not there")
