"""Whole outputs with every kind of attention: token for token those of target-only decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.small_family import write_family
from tests.engine.test_exactness import DRAFTERS, SAMPLINGS, make_loop, make_requests, run
from tests.products import covering

from penstock.config import NGRAM, EngineConfig
from penstock.engine.attention import decomposed
from penstock.engine.backends import ATTENTION
from penstock.engine.build import Engine, load_engine

BATCH = 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_family(tmp_path_factory.mktemp("family"))


def load(family: dict[str, Path], attention: str) -> Engine:
    drafters = {name: str(family[name]) for name in DRAFTERS[:3]} | {"ngram": NGRAM}
    return load_engine(
        EngineConfig(
            target=family["target"],
            drafters=drafters,
            dtype="float32",
            backend="eager",
            attention=attention,
            kv_tokens=32 * 256,
            num_threads=1,
        ),
        calibrated=False,
    )


def speculated(engine: Engine, sampling: str) -> tuple[list[tuple[int, ...]], int]:
    """Mixed with chunks of prompts: the step is small."""
    loop = make_loop(engine, rotating=True, max_num_batched_tokens=48)
    return run(loop, make_requests(SAMPLINGS[sampling], BATCH, "auto", tokens=40))


@pytest.fixture(scope="module")
def alone(family: dict[str, Path]) -> dict[str, list[tuple[int, ...]]]:
    """Target-only output of each request by itself, with plain attention."""
    engine = load(family, "reference")
    return {
        name: [
            run(make_loop(engine), [r])[0][0]
            for r in make_requests(SAMPLINGS[name], BATCH, "none", tokens=40)
        ]
        for name in ("greedy", "coupled")
    }


@pytest.mark.parametrize(
    ("attention", "sampling"), covering(ATTENTION, ["greedy", "coupled"], strength=1)
)
def test_output_is_the_same_with_every_kind(
    family: dict[str, Path],
    alone: dict[str, list[tuple[int, ...]]],
    attention: str,
    sampling: str,
) -> None:
    outputs, accepted = speculated(load(family, attention), sampling)
    assert outputs == alone[sampling]
    assert accepted > 0


def test_negative_control_merging_without_rescaling_changes_the_output(
    family: dict[str, Path],
    alone: dict[str, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        decomposed, "relative_totals", lambda totals, targets, rows: torch.ones_like(totals)
    )
    assert speculated(load(family, "decomposed"), "greedy")[0] != alone["greedy"]
