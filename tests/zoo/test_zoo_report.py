"""The report: rounds, prompt lookup, and what a clairvoyant choice is worth."""

import io
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from lab.zoo.evidence import NGRAM  # noqa: E402
from lab.zoo.manifest import heads_of  # noqa: E402
from lab.zoo.report import DecodeTimes, report  # noqa: E402

pytestmark = pytest.mark.slow


def test_report_on_the_bundled_family():
    out = io.StringIO()
    names = ("draft-tiny", "draft-base", "draft-code", "draft-data", "draft-lang")
    heads = [head.name for head in heads_of("target-large")]
    times = DecodeTimes(lambda n: 1e-3, dict.fromkeys((*names, *heads), 1e-4))
    console = Console(file=out, width=160)
    data = report(
        domains=("chat", "sql"),
        per_domain=1,
        limit=8,
        times=times,
        as_json=True,
        console=console,
    )
    assert json.loads(out.getvalue())["target"] == "target-large"
    for mode in ("sampled", "greedy"):
        assert data[mode]["choice"]["gain"] >= 0
        assert {c["drafter"] for c in data[mode]["cells"]} == {"none", NGRAM, *names, *heads}


def test_report_prices_heads_by_steps_of_their_own():
    console = Console(file=io.StringIO(), width=160)
    data = report(domains=("math",), per_domain=1, limit=24, console=console)
    for mode in ("sampled", "greedy"):
        found = {c["drafter"]: c for c in data[mode]["cells"] if c["domain"] == "all"}
        for head in heads_of("target-large"):
            cell = found[head.name]
            assert cell["accepted_drafts"][0] > 0.3
            # What they come to is of the machine: `best_draft_length` may be 0 on a busy one.
            assert cell["draft_seconds"] > 0
            assert cell["tokens_per_s"] > 0
