"""What a client says about the length of its output reaches the scheduler's admission policy."""

from typing import Any

import httpx
import pytest
from tests.serving.fakes import SLOW_FACTORY
from tests.serving.harness import RunningServer, running_server, serve_config

HEADER = "X-Penstock-Expected-Output-Tokens"


def post(server: RunningServer, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": [50, 60, 70], "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_the_type_of_a_request() -> None:
    """`wait` begins one of the short type alone, not of the long."""
    options = {"output_lens": [4, 64], "thresholds": [1, 2]}
    engine = {"admission": {"name": "wait", "options": options}}
    with running_server(serve_config(engine), SLOW_FACTORY) as server:
        body = {"max_tokens": 8, "stop_token_ids": [50]}
        assert post(server, **body, expected_output_tokens=3).status_code == 200
        assert post(server, {HEADER: "3"}, **body).status_code == 200
        assert post(server, {HEADER: "30"}, **body, expected_output_tokens=3).status_code == 200
        assert post(server, **body, timeout=0.3).status_code == 504


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many", "", "9" * 40])
def test_a_header_that_is_no_count(server: RunningServer, value: str) -> None:
    refused = post(server, {HEADER: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == HEADER
    assert refused.json()["error"]["type"] == "invalid_request_error"
