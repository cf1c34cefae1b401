"""Tenants that change while the server runs: a file, and SIGHUP."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from tests.serving.fakes import SLOW_FACTORY
from tests.serving.harness import FORKS, eventually, load_libraries_once, serve_config

from penstock.api.errors import ApiError
from penstock.api.http import ApiKeys
from penstock.api.reload import Reload
from penstock.api.server import serve
from penstock.config import ConfigError, ServeConfig, TenantConfig, hash_of_key, read_yaml
from penstock.serving.logs import request_id

BODY = {"prompt": [50, 60, 70], "max_tokens": 4, "ignore_eos": True}


def keyed(**keys: str) -> dict[str, Any]:
    return {name: {"api_keys": [hash_of_key(key)]} for name, key in keys.items()}


class Stand:
    """A reload without a server. `found`: what there is to read."""

    def __init__(self, found: ServeConfig) -> None:
        self.found: ServeConfig | ConfigError = found
        self.api_keys = ApiKeys(found.engine.tenants, found.metrics_keys)
        self.told: list[dict[str, TenantConfig]] = []
        self.on_read: Callable[[], None] = lambda: None
        client: Any = SimpleNamespace(reconfigure=self.told.append)
        self.reload = Reload(found, self.read, client, self.api_keys)

    def read(self) -> ServeConfig:
        self.on_read()
        if isinstance(self.found, ConfigError):
            raise self.found
        return self.found

    def knows(self, key: str) -> bool:
        try:
            self.api_keys.caller(f"Bearer {key}", "network")
        except ApiError:
            return False
        return True


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")


async def test_a_signal_amid_a_request_is_not_the_request_s() -> None:
    stand = Stand(serve_config())
    seen: list[str | None] = []
    stand.on_read = lambda: seen.append(request_id.get())
    token = request_id.set("r1")
    try:
        stand.reload.start()
    finally:
        request_id.reset(token)
    while not stand.told:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert seen == [None]


async def test_keys_and_tenants_are_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(serve_config({"tenants": keyed(a="one")}))
    stand.found = serve_config({"tenants": keyed(b="two", c="three")})
    await stand.reload.run()
    assert [stand.knows(key) for key in ("one", "two", "three")] == [False, True, True]
    assert [*stand.told[0]] == ["b", "c"]
    assert caplog.messages == ["settings read again: 2 tenants, 2 API keys"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ConfigError("x.yaml is not YAML"), "x.yaml is not YAML"),
        (serve_config(), "there is no API key any more"),
        (
            serve_config(
                {
                    "fairness": False,
                    "tenants": {"a": {**keyed(a="2")["a"], "max_running_requests": 1}},
                }
            ),
            "was not set when the server started without fairness",
        ),
    ],
)
async def test_a_mistake_changes_nothing(caplog, found, said) -> None:
    stand = Stand(serve_config({"tenants": keyed(a="one"), "fairness": False}))
    stand.found = found
    await stand.reload.run()
    assert stand.knows("one")
    assert not stand.told
    (message,) = caplog.messages
    assert message.startswith("the settings are not taken over, the old ones hold: ")
    assert said in message
    assert "\n" not in message


async def test_what_needs_a_restart_is_named(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(serve_config({"tenants": keyed(a="one")}))
    stand.found = serve_config({"tenants": keyed(a="two"), "block_size": 32}, max_body_bytes=4096)
    await stand.reload.run()
    assert stand.knows("two")
    assert caplog.messages[0].endswith(
        "these wait for a restart: max_body_bytes, engine.block_size"
    )


def _serve(pipe: Connection, path: Path) -> None:
    def read() -> ServeConfig:
        return serve_config(**read_yaml(path))

    # As in a process that was not forked: the one behind it may be that of an engine.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    asyncio.run(serve(read(), pipe.send, SLOW_FACTORY, read_again=read))


@contextmanager
def server_of(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Its address, and what has it read the file again."""
    ours, theirs = FORKS.Pipe()
    load_libraries_once()
    process = FORKS.Process(target=_serve, args=(theirs, path))
    process.start()
    theirs.close()
    try:
        yield ours.recv(), lambda: os.kill(process.pid or 0, signal.SIGHUP)
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


def ask(url: str, key: str, **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)


@pytest.mark.slow
def test_sighup_changes_keys_and_limits_and_breaks_no_stream(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"

    def write(tenants: dict[str, Any]) -> None:
        path.write_text(yaml.safe_dump({"engine": {"tenants": tenants}}))

    write(keyed(old="one"))
    with server_of(path) as (url, hang_up):
        assert ask(url, "one").status_code == 200
        headers = {"Authorization": "Bearer one"}
        body = {**BODY, "max_tokens": 60, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
        ) as stream:
            write({"new": {**keyed(new="two")["new"], "requests_per_minute": 60}})
            hang_up()
            eventually(lambda: ask(url, "two").status_code == 200)
            assert ask(url, "one").status_code == 401
            last = [line for line in stream.iter_lines() if line.startswith("data: {")][-1]
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"

        path.write_text("engine: {tenants: [")
        hang_up()
        answers = [ask(url, "two", n=40) for _ in range(2)]
        assert [a.status_code for a in answers] == [200, 429], "the old file is in force"
        refused = answers[-1]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        wait_s = int(refused.headers["Retry-After"])
        assert 5 <= wait_s <= 25, "until there are 40 of the 60 again"
        assert ask(url, "two", n=10).status_code == 200, "for less there is room"
        usage = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer two"}).text
        assert (
            'requests_refused_total{model_name="target-large",reason="rate_limit",tenant="new"}'
            in (usage)
        )
