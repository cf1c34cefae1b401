"""The live benchmark of choosing: who learns begins every pass alike."""

from __future__ import annotations

from argparse import Namespace

from lab.bench.drafter_choice import measure_cell
from lab.bench.live_engine import make_texts
from lab.common.live import load, make_loop
from penstock.config import PolicyConfig
from penstock.zoo.registry import DEFAULT_TARGET


def test_a_pass_teaches_nothing_that_the_next_would_know() -> None:
    engine = load(DEFAULT_TARGET, 2, 8, dtype="float32")
    texts = make_texts(engine, 1, 8, 1.0)[:4]
    learner = make_loop(engine, PolicyConfig.of("adaptive"))
    unused = learner.scheduler.table.counters.version
    args = Namespace(repeats=2, temperature=1.0)
    found = measure_cell(engine, texts, {"adaptive": learner}, 2, args)
    assert [row["name"] for row in found["rows"]][-1] == "adaptive"
    # Nobody has ever come to it.
    assert learner.scheduler.table.counters.version == unused
