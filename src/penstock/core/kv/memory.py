"""KV pools of all models, and the blocks that wait until no plan in flight reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.kv.blocks import BlockPool, hash_blocks
from penstock.core.state import RequestState, SequenceKV


@dataclass(slots=True)
class _Deferred:
    pool: BlockPool
    kv: SequenceKV
    readers: set[int]


class KVMemory:
    """Allocates, commits and releases KV for every model. A released block goes back to its pool
    only when every plan in flight that may read or write it has ended."""

    def __init__(self, pools: dict[str, BlockPool]) -> None:
        self.pools = pools
        self._deferred: list[_Deferred] = []
        self._released_tables: list[tuple[str, str]] = []

    @property
    def num_deferred_blocks(self) -> int:
        return sum(d.kv.num_blocks for d in self._deferred)

    def release(self, state: RequestState, pool_names: Sequence[str] | None = None) -> None:
        """Give up a request's KV, in the named pools or in all."""
        for name in list(state.kv) if pool_names is None else pool_names:
            kv = state.kv.pop(name, None)
            if kv is None:
                continue
            self._released_tables.append((state.request.id, name))
            readers: set[int] = set()
            if state.plans:
                readers = {plan_id for plan_id, pools in state.plans.items() if name in pools}
            if readers:
                self._deferred.append(_Deferred(self.pools[name], kv, readers))
            else:
                kv.give_back(self.pools[name])

    def plan_ended(self, plan_id: int) -> None:
        """Free what only this plan was still reading."""
        if not self._deferred:
            return
        for deferred in self._deferred:
            deferred.readers.discard(plan_id)
            if not deferred.readers:
                deferred.kv.give_back(deferred.pool)
        self._deferred = [d for d in self._deferred if d.readers]

    def drop_cache(self, pool_name: str) -> None:
        """A model has lost its KV: nothing in its prefix cache may be found again."""
        if pool_name in self.pools:
            self.pools[pool_name].drop_cache()

    def take_released_tables(self) -> tuple[tuple[str, str], ...]:
        """(request, pool) of tables released since the last call, for the executor to drop."""
        if not self._released_tables:
            return ()
        released, self._released_tables = tuple(self._released_tables), []
        return released

    def start_from_cache(self, state: RequestState, pool_name: str) -> SequenceKV:
        """A drafter's KV of a request, started from the prefix cache when it is new."""
        kv = state.kv_of(pool_name)
        if not kv.blocks and state.block_hashes:
            pool = self.pools[pool_name]
            usable = (state.num_known_tokens - 1) // pool.block_size
            kv.start_from(pool, pool.match(state.block_hashes[:usable]))
        return kv

    def commit(self, state: RequestState) -> None:
        """Offer the request's full, verified blocks to the prefix caches."""
        if not state.block_hashes and state.request.prompt_token_ids is None:
            return
        known = state.num_known_tokens
        for name, kv in state.kv.items():
            pool = self.pools[name]
            if not pool.prefix_caching:
                continue
            full = min(kv.num_computed_tokens, known) // pool.block_size
            if full == kv.num_committed_blocks:
                continue
            if full > len(state.block_hashes):
                self._extend_hashes(state, pool.block_size)
            for i in range(kv.num_committed_blocks, min(full, len(state.block_hashes))):
                pool.commit(kv.blocks[i], state.block_hashes[i])
                kv.num_committed_blocks = i + 1

    def _extend_hashes(self, state: RequestState, block_size: int) -> None:
        """Chain on the hashes of blocks that the output has filled. Only possible where the tokens
        are known; a request that came with hashes but no tokens shares its prompt alone."""
        prompt = state.request.prompt_token_ids
        if prompt is None:
            return
        start = len(state.block_hashes) * block_size
        known = (*prompt, *state.output_token_ids)[start:]
        parent = state.block_hashes[-1] if state.block_hashes else b""
        state.block_hashes += hash_blocks(known, block_size, state.request.tenant, parent)
