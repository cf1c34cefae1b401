"""The report: rounds, prompt lookup, and what a clairvoyant choice is worth."""

import io
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from lab.zoo.evidence import NGRAM  # noqa: E402
from lab.zoo.report import DecodeTimes, report  # noqa: E402
from penstock.zoo.registry import heads_of  # noqa: E402

pytestmark = pytest.mark.slow


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


def test_report_follows_heads_without_pricing_them():
    times = DecodeTimes(lambda n: 1e-3, {"draft-base": 1e-4})
    console = Console(file=io.StringIO(), width=160)
    data = report(domains=("math",), per_domain=1, limit=24, times=times, console=console)
    for mode in ("sampled", "greedy"):
        found = {c["drafter"]: c for c in data[mode]["cells"] if c["domain"] == "all"}
        for head in heads_of("target-large"):
            shares = found[head.name]["accepted_drafts"]
            assert shares[0] > 0.3
            assert (found[head.name]["best_draft_length"], len(shares)) == (0, 4)
        assert found["draft-base"]["tokens_per_s"] > 0
