"""Requests that decode on in vLLM, advanced together.

A step writes all of them into vLLM's output from columns. Only those that fill a block, end, or
leave are touched one by one; until then vLLM's counters of them lag behind."""

from __future__ import annotations

from collections.abc import Iterable, Set
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import EngineCoreOutput

_first = itemgetter(0)


class DecodingRows:
    """Running requests that computed all known tokens but the last, by id. manager: vLLM's of KV.

    While a step is in flight, all of them are in it."""

    def __init__(self, manager: Any, block_size: int, max_model_len: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._steps = 0
        self._is_in_flight = False
        # By id, in the order of all columns: 1, the tokens of each in a step.
        self._ids: dict[str, int] = {}
        self._requests: list[Any] = []
        self._clients: list[int] = []
        self._known: list[list[int]] = []
        self._output: list[list[int]] = []
        # Computed and output tokens, and the step in which it has all: at step 0, [3, rows].
        self._origins: npt.NDArray[np.int64] = np.zeros((3, 0), np.int64)
        # Rows that begin a block in the same steps, and tokens that may end an output.
        self._phases: list[dict[str, Any]] = [{} for _ in range(block_size)]
        self._stops: set[int | None] = set()
        self._ends_at = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ids

    @property
    def ids(self) -> Set[str]:
        return self._ids.keys()

    def add(self, request: Any) -> bool:
        """Add a request if nothing but its next token is due and asked for; return whether."""
        params, computed = request.sampling_params, request.num_computed_tokens
        num_output = request.num_output_tokens
        if (
            computed + 1 != request.num_tokens
            or not num_output
            or params is None
            or params.num_logprobs is not None
            or params.repetition_detection is not None
            or request.trace_headers is not None
            or request.has_encoder_inputs
            or request.use_structured_output
        ):
            return False
        self._ids[request.request_id] = 1
        self._requests.append(request)
        self._clients.append(request.client_index)
        self._known.append(request._all_token_ids)
        self._output.append(request._output_token_ids)
        most = min(self._max_model_len - request.num_prompt_tokens, request.max_tokens)
        steps = self._steps
        origin = [[computed - steps], [num_output - steps], [steps + most - num_output]]
        self._origins = np.concatenate([self._origins, origin], axis=1)
        self._phase(computed)[request.request_id] = request
        self._stops |= _stops(request)
        self._ends_at = int(self._origins[2].min())
        return True

    def _phase(self, computed: int) -> dict[str, Any]:
        """Return the rows that begin a block together with one of so many computed tokens."""
        return self._phases[(computed - self._steps) % self._block_size]

    def remove(self, request_id: str) -> None:
        """Remove a request, if it is there, with its counters as vLLM would have set them."""
        if request_id not in self._ids:
            return
        row = list(self._ids).index(request_id)
        del self._ids[request_id], self._clients[row], self._known[row], self._output[row]
        request = self._requests.pop(row)
        self._origins = np.delete(self._origins, row, axis=1)
        computed = request.num_tokens - 1
        del self._phase(computed)[request_id]
        if not self._ids:
            self._stops.clear()
        request.num_in_flight_tokens = int(self._is_in_flight)
        request.num_computed_tokens = computed + request.num_in_flight_tokens
        request.update_block_hashes()
        self._manager.cache_blocks(request, request.num_computed_tokens)

    def clear(self) -> None:
        """Remove all requests."""
        for request_id in list(self._ids):
            self.remove(request_id)

    def begin(self) -> dict[str, list[int]]:
        """Begin a step; return new blocks by request id. All are removed if memory is short."""
        due = self._phases[-self._steps % self._block_size]
        if len(due) > self._manager.block_pool.get_num_free_blocks():
            self.clear()
        coordinator = self._manager.coordinator
        blocks = {}
        for request_id, request in due.items():
            length = request.num_tokens
            request.num_computed_tokens = length - 1
            request.update_block_hashes()
            ((block,),) = coordinator.allocate_new_blocks(request_id, length, length)
            self._manager.cache_blocks(request, length)
            blocks[request_id] = [block.block_id]
        return blocks

    def write(self, output: Any, blocks: dict[str, list[int]]) -> None:
        """Add the step that has begun to vLLM's output, which has the other requests."""
        num = len(self._ids)
        if not num:
            return
        self._is_in_flight = True
        new_blocks: list[Any] = [None] * num
        if blocks:
            rows = dict(zip(self._ids, range(num), strict=True))
            for request_id, taken in blocks.items():
                new_blocks[rows[request_id]] = (taken,)
        computed, num_output = (self._origins[:2] + self._steps).tolist()
        cached = output.scheduled_cached_reqs
        cached.req_ids += self._ids
        cached.new_block_ids += new_blocks
        cached.num_computed_tokens += computed
        cached.num_output_tokens += num_output
        output.num_scheduled_tokens = self._ids | output.num_scheduled_tokens
        output.total_num_scheduled_tokens += num

    def take_in(self, made: Any) -> dict[int, list[EngineCoreOutput]]:
        """Append the step's tokens; return outputs by client.

        Those with a last token are removed before, and left to vLLM."""
        if not self._ids:
            return {}
        sampled = self._sampled(made)
        tokens = list(map(_first, sampled))
        if self._steps + 1 >= self._ends_at or not self._stops.isdisjoint(tokens):
            self._remove_ended(tokens)
            sampled = self._sampled(made)
            tokens = list(map(_first, sampled))
        _append_each(self._known, tokens)
        _append_each(self._output, tokens)
        self._steps += 1
        self._is_in_flight = False
        outputs = list(map(EngineCoreOutput, self._ids, sampled))
        clients = set(self._clients)
        if len(clients) <= 1:
            return dict.fromkeys(clients, outputs)
        by_client = list(zip(self._clients, outputs, strict=True))
        return {c: [output for client, output in by_client if client == c] for c in clients}

    def _sampled(self, made: Any) -> list[list[int]]:
        rows = map(made.req_id_to_index.__getitem__, self._ids)
        return list(map(made.sampled_token_ids.__getitem__, rows))

    def _remove_ended(self, tokens: list[int]) -> None:
        """Remove the requests for which these are the last tokens."""
        is_last = self._origins[2] <= self._steps + 1
        for request, token, last in zip(list(self._requests), tokens, is_last, strict=True):
            if last or token in _stops(request):
                self.remove(request.request_id)
        self._ends_at = int(self._origins[2].min(initial=np.iinfo(np.int64).max))


def _stops(request: Any) -> set[int | None]:
    params = request.sampling_params
    return {params.eos_token_id, *(params.stop_token_ids or ())}


def _append_each(lists: list[list[int]], tokens: Iterable[int]) -> None:
    """Append to each list its token."""
    any(map(list.append, lists, tokens))
