"""Memory that an engine will take, found out before it starts."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from penstock.config import EngineConfig
from penstock.core.types import TARGET
from penstock.engine.memory import MemoryNeed
from penstock.serving.fork_context import LOAD_ENGINE, fork_context
from penstock.serving.messages import Ready


class EnginePlan(NamedTuple):
    """Settings, memory and description of an engine that has not started.

    info: as it will say; config: with the size of its KV memory"""

    config: EngineConfig
    need: MemoryNeed
    info: Ready

    @property
    def num_bytes(self) -> int:
        return self.need.weights + self.need.kv + self.need.states


def plan_engine(config: EngineConfig, num_engines: int) -> EnginePlan:
    """Return what an engine will take. Raises: ValueError.

    Without `kv_tokens` it has its part of the KV memory that one engine alone would have."""
    from penstock.engine.backends import resolve_placements
    from penstock.engine.build import sized_models

    models = sized_models(config, resolve_placements(config))
    if config.kv_tokens is None:
        models = dataclasses.replace(models, num_blocks=max(1, models.num_blocks // num_engines))
    tokens, target = models.num_blocks * config.block_size, models.shapes[TARGET]
    names = [] if config.head is None else [config.head[0]]
    names += [*config.drafter_models, *config.servers]
    names += [] if config.text_look_up is None else [config.text_look_up[0]]
    pooling, generates = models.uses()
    info = Ready(
        tokenizer_path=config.target,
        max_request_tokens=models.max_request_tokens,
        vocab_size=target.vocab_size,
        eos_token_ids=frozenset(target.eos_token_ids),
        drafters=tuple(names),
        description={"target": config.target_name, "kv_tokens": tokens},
        pooling=pooling,
        generates=generates,
    )
    return EnginePlan(config.model_copy(update={"kv_tokens": tokens}), models.need(), info)


def planned(config: EngineConfig, num_engines: int) -> EnginePlan:
    """Return `plan_engine`'s answer, found in a process of its own. Raises: as it."""
    with ProcessPoolExecutor(1, fork_context(LOAD_ENGINE)) as process:
        return process.submit(plan_engine, config, num_engines).result()
