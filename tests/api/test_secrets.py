"""A secret that is planted wherever one can be, and looked for wherever something is said."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import yaml
from tests.serving.harness import eventually

from penstock.config import hash_of_key

SERVE = [sys.executable, "-m", "penstock.cli", "serve"]
SECRET = "sk-planted-"
FILE_KEY, OPERATOR_KEY, OPTION_KEY, WRONG_KEY, EDGE_TOKEN = (SECRET + c for c in "fopwe")
PLACES = ("/health", "/version", "/metrics", "/dashboard", "/openapi.json", "/v1/models", "/nope")


def said_by_a_server(path: Path) -> tuple[str, str]:
    """What its answers and its logs say, through mistakes, a reload and the death of an engine."""
    env = {**os.environ, "PENSTOCK_API_KEY": OPTION_KEY, "PENSTOCK_TOKEN": EDGE_TOKEN}
    process = subprocess.Popen(
        [*SERVE, "target-large", "--state", "none", "--config", str(path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where tests are run with it ignored a server would ignore it, too.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    assert process.stdout is not None
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reading.start()
    try:
        url = eventually(
            lambda: next((li.split()[-1] for li in lines if "serving on" in li), None), timeout=120
        )
        answers = []
        for key in (FILE_KEY, OPERATOR_KEY, OPTION_KEY, WRONG_KEY):
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
                got = [client.get(place) for place in PLACES]
                for body in (b"{", b'{"prompt": "a", "max_tokens": 4}', b'{"n": 0}'):
                    got.append(client.post("/v1/completions", content=body))
                answers += [f"{answer.headers} {answer.text}" for answer in got]
        path.write_text(f"engine: {{tenants: {{a: {{api_keys: [{WRONG_KEY}]}}}}}}\n")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: any("not taken over" in line for line in lines))
        os.kill(httpx.get(f"{url}/health").json()["engine"]["pid"], signal.SIGKILL)
        eventually(lambda: any("died" in line for line in lines))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        reading.join(10)
        process.stdout.close()
    return "\n".join(answers), "".join(lines)


@pytest.mark.slow
def test_no_secret_is_told(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    settings = {
        "port": 0,
        "log_format": "json",
        "metrics_keys": [hash_of_key(OPERATOR_KEY)],
        "engine": {"tenants": {"a": {"api_keys": [hash_of_key(FILE_KEY)]}}},
        "drafters": {
            "listen": "127.0.0.1:0",
            "servers": {"edge": {"token_sha256": hash_of_key(EDGE_TOKEN).removeprefix("sha256:")}},
        },
    }
    path.write_text(yaml.safe_dump(settings))
    answers, logs = said_by_a_server(path)
    hashes = [hash_of_key(k).removeprefix("sha256:") for k in (FILE_KEY, OPERATOR_KEY, OPTION_KEY)]
    for what in (answers, logs):
        assert SECRET not in what
        assert not any(known in what for known in hashes)
    read = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
    told = [line for line in read if line["logger"] == "penstock.access"]
    assert len(told) > 30, "the logs were looked at"
    assert all(line["request_id"] and line["seconds"] >= 0 for line in told)
    assert {line["status"] for line in told} >= {200, 400, 401, 404}
    assert "invalid_api_key" in answers
    assert "penstock:engine_up" in answers
