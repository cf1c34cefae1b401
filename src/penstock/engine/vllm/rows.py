"""Requests that decode on in vLLM, advanced together.

A step writes all of them into vLLM's output from columns. Only those that fill a block, end, or
leave are touched one by one; until then vLLM's counters of them lag behind."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import EngineCoreOutput

_NEVER = 2**62


class DecodingRows:
    """Running requests that computed all known tokens but the last. manager: vLLM's of KV.

    While a step is in flight, all of them are in it."""

    def __init__(self, manager: Any, block_size: int, max_model_len: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._steps = 0
        self._num_in_flight = 0
        self.ids: dict[str, int] = {}
        """Tokens of each request in a step, which is 1; the order is that of all columns."""
        self._requests: list[Any] = []
        self._clients: list[int] = []
        self._texts: tuple[list[list[int]], list[list[int]]] = [], []
        # Computed and output tokens at step 0, [2, rows].
        self._origins: npt.NDArray[np.int64] = np.zeros((2, 0), np.int64)
        # Requests that begin a block in the same steps.
        self._phases: list[dict[str, Any]] = [{} for _ in range(block_size)]
        # Step in which the first may reach its length, and tokens that may end one.
        self._ends_at = _NEVER
        self._stops: set[int | None] = set()

    def add(self, request: Any) -> bool:
        """Add a request if nothing but its next token is due and asked for; return whether."""
        params, computed = request.sampling_params, request.num_computed_tokens
        num_output = request.num_output_tokens
        if (
            computed + 1 != request.num_tokens
            or not num_output
            or params.num_logprobs is not None
            or params.repetition_detection is not None
            or request.trace_headers is not None
            or request.has_encoder_inputs
            or request.use_structured_output
        ):
            return False
        self.ids[request.request_id] = 1
        self._requests.append(request)
        self._clients.append(request.client_index)
        self._texts[0].append(request._all_token_ids)
        self._texts[1].append(request._output_token_ids)
        origin = [[computed - self._steps], [num_output - self._steps]]
        self._origins = np.concatenate([self._origins, origin], axis=1)
        self._phase(computed)[request.request_id] = request
        self._ends_at = min(self._ends_at, self._steps + self._left(request))
        self._stops |= _stops(request)
        return True

    def _phase(self, computed: int) -> dict[str, Any]:
        """Return the rows that begin a block together with one of so many computed tokens."""
        return self._phases[(computed - self._steps) % self._block_size]

    def _left(self, request: Any) -> int:
        room: int = self._max_model_len - request.num_tokens
        left: int = request.max_tokens - request.num_output_tokens
        return min(left, room)

    def remove(self, request_id: str) -> None:
        """Remove a request, if it is there, with its counters as vLLM would have set them."""
        if request_id not in self.ids:
            return
        row = list(self.ids).index(request_id)
        request = self._requests.pop(row)
        del self.ids[request_id], self._clients[row], self._texts[0][row], self._texts[1][row]
        self._origins = np.delete(self._origins, row, axis=1)
        del self._phase(request.num_tokens - 1)[request_id]
        if not self.ids:
            self._stops.clear()
        request.num_in_flight_tokens = self._num_in_flight
        request.num_computed_tokens = request.num_tokens - 1 + self._num_in_flight
        request.update_block_hashes()
        self._manager.cache_blocks(request, request.num_computed_tokens)

    def clear(self) -> None:
        """Remove all requests."""
        for request_id in list(self.ids):
            self.remove(request_id)

    def begin(self) -> dict[str, list[int]]:
        """Begin a step; return new blocks by id. All requests are removed if memory is short."""
        due = self._phases[-self._steps % self._block_size]
        if len(due) > self._manager.block_pool.get_num_free_blocks():
            self.clear()
        blocks, take = {}, self._manager.coordinator.allocate_new_blocks
        for request_id, request in due.items():
            length = request.num_tokens
            request.num_computed_tokens = length - 1
            request.update_block_hashes()
            ((block,),) = take(request_id, length, length)
            self._manager.cache_blocks(request, length)
            blocks[request_id] = [block.block_id]
        return blocks

    def write(self, output: Any, blocks: dict[str, list[int]]) -> None:
        """Add the step that has begun to vLLM's output, which has the other requests."""
        self._num_in_flight = 1
        new_blocks: list[Any] = [None] * len(self.ids)
        if blocks:
            rows = dict(zip(self.ids, range(len(self.ids)), strict=True))
            for request_id, taken in blocks.items():
                new_blocks[rows[request_id]] = (taken,)
        computed, num_output = (self._origins + self._steps).tolist()
        cached = output.scheduled_cached_reqs
        cached.req_ids += self.ids
        cached.new_block_ids += new_blocks
        cached.num_computed_tokens += computed
        cached.num_output_tokens += num_output
        output.num_scheduled_tokens = self.ids | output.num_scheduled_tokens
        output.total_num_scheduled_tokens += len(self.ids)

    def take_in(self, made: Any) -> dict[int, list[EngineCoreOutput]]:
        """Append the step's tokens; return outputs by client.

        Requests that end with theirs are removed before, and left to vLLM."""
        sampled, tokens = self._sampled(made)
        if self._steps + 1 >= self._ends_at or not self._stops.isdisjoint(tokens):
            rows = list(zip(self._requests, tokens, strict=True))
            for request in [r for r, t in rows if self._left(r) == 1 or t in _stops(r)]:
                self.remove(request.request_id)
            self._ends_at = self._steps + min(map(self._left, self._requests), default=_NEVER)
            sampled, tokens = self._sampled(made)
        for texts in self._texts:
            any(map(list.append, texts, tokens))
        self._steps += 1
        self._num_in_flight = 0
        outputs = list(map(EngineCoreOutput, self.ids, sampled))
        clients = set(self._clients)
        if len(clients) < 2:
            return dict.fromkeys(clients, outputs)
        pairs = list(zip(self._clients, outputs, strict=True))
        return {c: [output for client, output in pairs if client == c] for c in clients}

    def _sampled(self, made: Any) -> tuple[list[list[int]], list[int]]:
        rows = map(made.req_id_to_index.__getitem__, self.ids)
        sampled = list(map(made.sampled_token_ids.__getitem__, rows))
        return sampled, list(map(itemgetter(0), sampled))


def _stops(request: Any) -> set[int | None]:
    params = request.sampling_params
    return {params.eos_token_id, *(params.stop_token_ids or ())}
