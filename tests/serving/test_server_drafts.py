"""A second server as the drafter of the first, over HTTP: killed, frozen, and with a key."""

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serving.harness import eventually
from tests.serving.program import LONG, Program, program

from penstock.zoo.registry import model_path

PROMPTS = ("SELECT name FROM", "The river", "2 + 2 =", "Dear")
KEY = "sk-between-servers"
SMALL = str(model_path("draft-base"))


def texts(running: Program, drafter: str) -> list[str]:
    spec = {"drafter": drafter}
    fields: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"n": 2}, {"stop": " a"}]
    return [
        running.text(p, max_tokens=48, speculation=spec, **given)
        for p, given in zip(PROMPTS, fields, strict=True)
    ]


def metric(running: Program, name: str) -> float:
    lines = httpx.get(f"{running.url}/metrics", timeout=LONG).text.splitlines()
    return sum(float(li.split()[-1]) for li in lines if li.startswith(name) and "edge" in li)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_second_server_drafts(tmp_path: Path, monkeypatch, fault: signal.Signals) -> None:
    monkeypatch.setenv("PENSTOCK_DRAFTER_KEY_EDGE", KEY)
    small = [SMALL, "--no-speculation", "--api-key", KEY]
    with program(tmp_path / "small.log", *small) as remote:
        # By its prices it would not draft for so small a target.
        given = ["--drafter", f"edge={remote.url}/v1", "--set", "allocation=fixed"]
        with program(tmp_path / "serve.log", *given) as running:
            eventually(lambda: "drafter edge answers" in running.log.read_text(), timeout=LONG)
            alone = texts(running, "none")
            assert texts(running, "edge") == alone
            assert metric(running, "penstock:spec_decode_num_accepted_tokens_total") > 0
            remote.process.send_signal(fault)
            assert texts(running, "edge") == alone
            assert texts(running, "auto") == alone
            said = httpx.get(f"{running.url}/health", timeout=LONG).text
            assert '"edge"' in said
            said += httpx.get(f"{running.url}/metrics", timeout=LONG).text + running.stop()
            assert KEY not in said
