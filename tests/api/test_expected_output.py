"""What a client says about the length of its output reaches the scheduler's admission policy."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.api.samples import samples
from tests.serving.fakes import SLOW_FACTORY
from tests.serving.harness import RunningServer, eventually, running_server, serve_config

HEADER = "X-Penstock-Expected-Output-Tokens"
FIELD = "expected_output_tokens"


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[RunningServer]:
    """The shortest job first, and never two."""
    options = {"max_num_seqs": 1}
    engine = {"admission": {"name": "sjf", "options": options}, "fairness": False}
    with running_server(serve_config(engine), SLOW_FACTORY) as running:
        yield running


def post(server: RunningServer, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": [50, 60, 70], "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("headers", "fields"),
    [({HEADER: "2"}, {}), ({}, {FIELD: 2}), ({HEADER: "30"}, {FIELD: 2}), ({}, {})],
)
def test_the_shortest_job_goes_first(one_at_a_time, headers, fields) -> None:
    """Of two with the same `max_tokens`, the later one by what it says."""
    answered: list[str] = []

    def ask(name: str, headers: dict[str, str], **fields: Any) -> None:
        assert post(one_at_a_time, headers, max_tokens=20, **fields).status_code == 200
        answered.append(name)

    def are_waiting(num: int) -> bool:
        found = samples(httpx.get(f"{one_at_a_time.url}/metrics", timeout=20).text)
        return found["penstock:num_requests_waiting"] == num

    url = f"{one_at_a_time.url}/v1/completions"
    running = {"prompt": [50], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=running, timeout=60) as first:
        lines = first.iter_lines()
        next(lines)
        earlier = threading.Thread(target=ask, args=("earlier", {}), kwargs={FIELD: 19})
        earlier.start()
        eventually(lambda: are_waiting(1))
        later = threading.Thread(target=ask, args=("later", headers), kwargs=fields)
        later.start()
        eventually(lambda: are_waiting(2))
    earlier.join(60)
    later.join(60)
    says_less = bool(headers or fields)
    assert answered == (["later", "earlier"] if says_less else ["earlier", "later"])


def test_the_type_of_a_request() -> None:
    """`wait` begins one of the short type alone, not of the long."""
    options = {"output_lens": [4, 64], "thresholds": [1, 2]}
    engine = {"admission": {"name": "wait", "options": options}}
    with running_server(serve_config(engine), SLOW_FACTORY) as server:
        body = {"max_tokens": 8, "stop_token_ids": [50]}
        assert post(server, **body, expected_output_tokens=3).status_code == 200
        assert post(server, {HEADER: "3"}, **body).status_code == 200
        assert post(server, **body, timeout=0.3).status_code == 504


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many", "", "9" * 40])
def test_a_header_that_is_no_count(server: RunningServer, value: str) -> None:
    refused = post(server, {HEADER: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == HEADER
    assert refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("value", [0, -1, 2.5, "2", True, [2]])
def test_a_field_that_is_no_count(server: RunningServer, value: object) -> None:
    refused = post(server, expected_output_tokens=value)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == FIELD
