"""The report: rounds, prompt lookup, and what a clairvoyant choice is worth."""

import io
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from lab.zoo.evidence import (  # noqa: E402
    NGRAM,
    AcceptanceTrace,
    lookup_runs,
    run_lengths,
    target_texts,
)
from lab.zoo.modeling import build  # noqa: E402
from lab.zoo.recipe import Shape  # noqa: E402
from lab.zoo.report import DecodeTimes, _Costs, choice, report, rounds  # noqa: E402


def _trace(domain, **agreement):
    runs = {n: run_lengths(np.array([c == "1" for c in bits])) for n, bits in agreement.items()}
    length = len(next(iter(agreement.values())))
    share = {n: bits.count("1") / length for n, bits in agreement.items()}
    return AcceptanceTrace(domain, length, runs, dict(share), dict(share))


def test_rounds_count_verifications():
    trace = _trace("chat", a="111110111")
    assert rounds(trace, "none", 0) == 9
    assert rounds(trace, "a", 2) == 3  # 3 tokens, then 2 + the wrong one, then 3
    assert rounds(trace, "a", 12) == 2


def test_choice_rewards_specialists_only():
    times = DecodeTimes(lambda n: 1.0, {"a": 0.0, "b": 0.0})
    apart = [_trace("x", a="1" * 26, b="0" * 26), _trace("y", a="0" * 26, b="1" * 26)]
    alike = [_trace("x", a="1" * 26, b="1" * 26), _trace("y", a="1" * 26, b="0" * 26)]
    assert choice(_Costs(apart, times)).gain == pytest.approx(28 / 4 - 1)
    assert choice(_Costs(alike, times)).gain == pytest.approx(0.0)


def test_lookup_finds_repeats():
    prompt = [5, 6, 7, 8, 9, 1]
    runs = lookup_runs(prompt, [5, 6, 7, 8, 9, 2])
    assert runs.tolist() == [0, 0, 3, 2, 1, 0]
    assert lookup_runs([1, 2, 3], [4, 5, 6]).tolist() == [0, 0, 0]


def test_padded_batch_continues_as_alone():
    model = build(Shape(64, 1, 2, 1, 16, 64), seed=0)
    prompts = [[1, 9, 5], [1, 30, 31, 32, 33, 5]]
    together = target_texts(model, prompts, None, 6)
    assert together == [target_texts(model, [p], None, 6)[0] for p in prompts]


def test_report_on_the_bundled_family():
    out = io.StringIO()
    names = ("draft-tiny", "draft-base", "draft-code", "draft-data", "draft-lang")
    times = DecodeTimes(lambda n: 1e-3, dict.fromkeys(names, 1e-4))
    console = Console(file=out, width=160)
    data = report(
        domains=("chat", "sql"),
        per_domain=1,
        limit=8,
        times=times,
        target="target-small",
        as_json=True,
        console=console,
    )
    assert json.loads(out.getvalue())["target"] == "target-small"
    for mode in ("sampled", "greedy"):
        assert data[mode]["choice"]["gain"] >= 0
        assert {c["drafter"] for c in data[mode]["cells"]} == {"none", NGRAM, *names}
