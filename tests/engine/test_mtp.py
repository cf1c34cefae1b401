"""Heads inside the target: drafts as the reference's, and the target's own text."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB, small_llama, write_tokenizer
from tests.engine.small_heads import ReferenceHead, add_head
from tests.engine.small_models import CASES, Checkpoint, write_checkpoint
from tests.engine.test_exactness import (
    SAMPLINGS,
    Alone,
    make_loop,
    make_requests,
    run,
    timeless,
)
from tests.products import covering

from penstock.config import NGRAM, EngineConfig
from penstock.core.types import DraftOrder
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.drafts import Drafts
from penstock.engine.drafters.head import HeadDrafter
from penstock.engine.sequences import TokenBuffer

KINDS = ("qwen3-5", "llama")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An engine with a head, and the models of which it is made."""

    engine: Engine
    saved: Checkpoint
    tensors: dict[str, torch.Tensor]


def load(root: Path, kind: str, backend: str = "auto", **settings: Any) -> Loaded:
    """A hybrid target with a head in its folder, or a Llama with one beside it, and look-up and a
    small model that is hardly ever right."""
    case = CASES[kind]
    changes = case.changes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    changes |= {"eos_token_id": None}
    saved = write_checkpoint(root / "target", dataclasses.replace(case, changes=changes))
    beside = root / "head" if kind == "llama" else None
    tensors = add_head(root / "target", beside=beside)
    small_llama(1, seed=3).save_pretrained(root / "far")
    for name in ("target", "far"):
        write_tokenizer(root / name)
    drafters = {"mtp": str(beside or "mtp"), "far": str(root / "far"), "ngram": NGRAM}
    config = EngineConfig(
        target=root / "target",
        drafters=drafters,
        dtype="float32",
        backend=backend,
        **{"kv_tokens": 32 * 256, "num_threads": 1} | settings,
    )
    return Loaded(load_engine(config, calibrated=False), saved, tensors)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    @cache
    def one(kind: str, backend: str = "auto") -> Loaded:
        return load(tmp_path_factory.mktemp(f"{kind}-{backend}"), kind, backend)

    return one


@pytest.fixture(scope="module")
def by_itself(loaded: Callable[..., Loaded]) -> Callable[[str], Alone]:
    return cache(lambda kind: Alone(loaded(kind).engine, num=16))


def recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any, Any]]:
    """Texts, looked-up fronts and drafts of all that the head drafts from now on."""
    head = engine.executor.drafters["mtp"]
    found, honest = [], HeadDrafter.draft

    def draft(self: HeadDrafter, orders: list[DraftOrder], texts: list[TokenBuffer]) -> Drafts:
        drafts = honest(self, orders, texts)
        for order, text, one in zip(orders, texts, drafts.drafts, strict=True):
            found.append((text.tokens(0, text.length), order.front_token_ids, one.token_ids))
        return drafts

    assert isinstance(head, HeadDrafter)
    monkeypatch.setattr(HeadDrafter, "draft", draft)
    return found


@pytest.mark.parametrize(("kind", "backend"), covering(KINDS, ["native", "eager"], strength=2))
@pytest.mark.parametrize("small", [False, True])
def test_drafts_are_those_of_the_reference(loaded, monkeypatch, kind, backend, small) -> None:
    """In batches, behind rejected drafts, chunks of prompts and preemptions (then from zeros)."""
    one = loaded(kind, backend)
    found = recorded(one.engine, monkeypatch)
    memory = {"kv_tokens": 12 * 16, "max_num_batched_tokens": 48} if small else {}
    loop = make_loop(one.engine, learn=timeless(), look_up=False, **memory)
    run(loop, make_requests(SAMPLINGS["greedy"], 9, "mtp"))
    reference = ReferenceHead(one.saved, one.tensors)
    assert len(found) > 60
    right = [reference.draft(text, len(d), front) == d for text, front, d in found]
    if small:
        assert loop.scheduler.table.counters.preemptions > 0
        assert np.mean(right) > 0.5
    else:
        assert all(right)
