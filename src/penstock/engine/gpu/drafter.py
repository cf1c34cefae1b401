"""A model whose drafting loop is one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.core.types import DraftOrder
from penstock.engine.batch import IntArray
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.gpu.graphs import GraphRunner, Late
from penstock.engine.gpu.rounds import draws_of, next_batch
from penstock.engine.gpu.static_batch import MAX_WINDOW
from penstock.engine.sequences import TokenBuffer


class GraphDrafter(ModelDrafter):
    """A model whose drafting loop is one CUDA graph, for requests that are verified by equality."""

    def __init__(
        self,
        name: str,
        runner: GraphRunner,
        max_model_len: int,
        vocab: int | None = None,
    ) -> None:
        super().__init__(name, runner, max_model_len, vocab)
        self._graphs = runner

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        drafted = self.start(orders, texts)
        if drafted is None:
            return super().draft(orders, texts)
        rows = drafted.tolist()
        tokens = [row[: o.max_draft_tokens] for row, o in zip(rows, orders, strict=True)]
        return Drafts([Draft(t, [-1] * len(t)) for t in tokens])

    @torch.inference_mode()
    def start(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> torch.Tensor | None:
        """Draft without waiting: [orders, most tokens] int32 on the device, of which each order's
        own number counts. None, and nothing done, where only the ordinary way can."""
        params, ratio = self._sampling.of(list(texts))
        limits = np.array([o.max_draft_tokens for o in orders], dtype=np.int32)
        if ratio.any() or not params.is_plain or limits.min() < 1:
            return None
        self._extend_tables(orders)
        reach = max(o.start + o.num_catch_up_tokens + o.max_draft_tokens for o in orders)
        orders = self._read_ahead(orders, texts, reach)
        first = self._catch_up(orders, texts, [1] * len(orders), reach)
        steps = int(limits.max())
        positions = first.seq_lens.astype(np.int64) + np.arange(steps)[:, None]
        draws = draws_of(params, np.tile(np.arange(len(orders)), steps), positions.reshape(-1))
        return self._graphs.draft(first, limits, draws, self._num_guessed)

    def room(self, request_id: str) -> int:
        """Tokens that the request's blocks, and the model's positions, hold."""
        blocks = self._tables.num_blocks(request_id) * self.runner.block_size
        return min(blocks, self._graphs.num_positions)

    @torch.inference_mode()
    def start_next(
        self,
        texts: Sequence[TokenBuffer],
        ends: IntArray,
        limits: IntArray,
        known: torch.Tensor,
        short: torch.Tensor | None,
        most_short: int,
    ) -> torch.Tensor:
        """As `start`, behind a round that is not over.

        ends: [n], positions of the texts' last tokens if the whole round is accepted; known: [2 *
        n] int32 on the device, the last two tokens of each; short: see `Late`, each at most
        `most_short`.
        """
        steps = int(limits.max())
        tables = self._gather([t.request.id for t in texts], int((ends + limits).max()))
        first = next_batch(ends - 1, np.full_like(limits, 2), tables, last_only=True)
        params, _ = self._sampling.of(list(texts))
        of_row = np.tile(np.arange(len(texts)), steps)
        positions = (ends + 1 + np.arange(steps)[:, None]).reshape(-1)
        draws = draws_of(params, of_row, positions, most_short)
        # A token that it does not know: the plan will not ask for the draft behind that.
        tokens = known.clamp(max=self.runner.config.vocab_size - 1)
        places = np.arange(2 * len(texts), dtype=np.int32)
        late = Late(places, tokens, short)
        return self._graphs.draft(first, limits, draws, self._num_guessed, late)

    def _read_ahead(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer], reach: int
    ) -> list[DraftOrder]:
        """Read what is too long for a graph, a prompt mostly; returns orders for the rest."""
        long = [i for i, o in enumerate(orders) if o.num_catch_up_tokens > MAX_WINDOW]
        rest = list(orders)
        if long:
            read = [
                orders[i]._replace(num_catch_up_tokens=orders[i].num_catch_up_tokens - 1)
                for i in long
            ]
            self._graphs.forward(
                self._catch_up(read, [texts[i] for i in long], [0] * len(long), reach)
            )
            for i, done in zip(long, read, strict=True):
                start = done.start + done.num_catch_up_tokens
                rest[i] = orders[i]._replace(start=start, num_catch_up_tokens=1)
        return rest
