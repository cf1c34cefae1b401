"""The report: rounds, prompt lookup, and what a clairvoyant choice is worth."""

import io
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from lab.zoo.evidence import (  # noqa: E402
    NGRAM,
)
from lab.zoo.report import DecodeTimes, report  # noqa: E402

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
