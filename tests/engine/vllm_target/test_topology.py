"""GoodSpeed's picture: a verification server on vLLM's workers, draft servers at the far ends of
cables, users at either; every process as people start it, and everything breaks in turn."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from tests.api.routing import free_port
from tests.engine.small_family import write_family
from tests.engine.vllm_target.programs import environment
from tests.serving.certificates import write_certificates
from tests.serving.links import Delay, sum_of
from tests.serving.program import LONG, START, Program, announced, program

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

ROUND_TRIP_S = 0.03
MODELS = ("near", "far")


@dataclass(frozen=True)
class Edge:
    """A network namespace with one cable to here, and the link over it to the draft port."""

    name: str
    number: int

    @property
    def here(self) -> str:
        return f"10.201.{self.number}.1"

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *arguments]

    def plug(self, state: str) -> None:
        """state: up or down, without a word to either end's connections."""
        ip("link", "set", self.name, state)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def edge(number: int) -> Iterator[Edge]:
    made = Edge(f"edge{os.getpid()}-{number}", number)
    ip("netns", "add", made.name)
    try:
        ip("link", "add", made.name, "type", "veth", "peer", "name", "cable", "netns", made.name)
        ip("address", "add", f"{made.here}/24", "dev", made.name)
        far = ("-n", made.name)
        ip(*far, "address", "add", f"10.201.{number}.2/24", "dev", "cable")
        for device in ("cable", "lo"):
            ip(*far, "link", "set", device, "up")
        made.plug("up")
        yield made
    finally:
        ip("netns", "delete", made.name)


@contextmanager
def draft_server(place: Edge, port: int, model: Path, folder: Path) -> Iterator[Program]:
    """It has users at its own place only."""
    code = [*START[:-1], "draft", "--connect", f"{place.here}:{port}", "--listen", "127.0.0.1:8001"]
    code += ["--ca", str(folder / "ca.pem"), "--model", str(model)]
    log = folder / f"{model.name}.log"
    with (
        log.open("a") as errors,
        subprocess.Popen(
            place.command(*code),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environment(), "PENSTOCK_TOKEN": model.name},
        ) as process,
    ):
        try:
            yield Program(process, announced(process, log), log)
        finally:
            process.kill()


def users(url: str, *prefix: str, **fields: Any) -> subprocess.Popen[str]:
    """They all ask at once."""
    command = [*prefix, sys.executable, "-m", "tests.serving.users", url, json.dumps(fields)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def texts(running: subprocess.Popen[str]) -> dict[str, str]:
    output, _ = running.communicate(timeout=LONG)
    assert running.returncode == 0
    return dict(json.loads(output))


def in_the_middle(server: Program, *drafters: str) -> None:
    """Wait until each has had some tens of drafts verified since now, on whichever stream."""

    def counts() -> list[float]:
        metrics = httpx.get(f"{server.url}/metrics", timeout=LONG).text
        name = "spec_decode_num_drafts_total"
        return [sum_of(metrics, name, f'drafter="{drafter}') for drafter in drafters]

    before, end = counts(), time.monotonic() + LONG
    while any(now < then + 20 for now, then in zip(counts(), before, strict=True)):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def edges() -> Iterator[list[Edge]]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and `ip`")
    with ExitStack() as stack:
        try:
            made = [stack.enter_context(edge(number)) for number in (1, 2)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield made


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Of the verification server; its draft port is behind links."""
    write_certificates(tmp_path, {"server": "ca"}, "IP:10.201.1.1,IP:10.201.2.1")
    servers = {
        name: {"tenant": "default", "token_sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name in MODELS
    }
    tls = {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}
    listen = f"127.0.0.1:{free_port()}"
    # It always drafts, whether it pays or not.
    engine = {"allocation": {"name": "fixed"}}
    return {"engine": engine, "drafters": {"listen": listen, "tls": tls, "servers": servers}}


def test_nothing_is_lost(edges: list[Edge], settings: dict[str, Any], tmp_path: Path) -> None:
    family = write_family(tmp_path)
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(settings))
    options = ["--engine", "vllm", "--set", "vllm.tensor_parallel=2"]
    options += ["--set", "vllm.args.enforce_eager=true"]
    options += ["--dtype", "float32", "--kv-tokens", "16384"]
    options += ["--config", str(tmp_path / "serve.yaml"), str(family["target"])]
    behind = int(settings["drafters"]["listen"].rpartition(":")[2])
    logs = (tmp_path / f"serve{n}.log" for n in itertools.count())

    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        links = [Delay(behind, place.here, ROUND_TRIP_S / 2) for place in edges]
        for link in links:
            stack.enter_context(portal.wrap_async_context_manager(link.running()))

        def serving() -> Any:
            return program(next(logs), *options, environment=environment(2))

        def drafting(n: int) -> Any:
            return draft_server(edges[n], links[n].port, family[MODELS[n]], tmp_path)

        def local_users(n: int) -> subprocess.Popen[str]:
            return users("http://127.0.0.1:8001", *edges[n].command())

        server = stack.enter_context(serving())
        expected = texts(users(server.url, speculation={"drafter": "none"}))
        assert len(set(expected.values())) == len(expected)
        other = texts(users(server.url, temperature=0.9, seed=1))
        assert all(other[name] != expected[name] for name in other)

        stack.enter_context(drafting(1))
        with drafting(0) as doomed:
            everybody = [local_users(0), local_users(1), users(server.url)]
            in_the_middle(server, *MODELS)
            assert [texts(some) for some in everybody] == [expected] * 3

            lost, rest = local_users(0), [local_users(1), users(server.url)]
            in_the_middle(server, *MODELS)
            doomed.process.kill()
            lost.communicate(timeout=LONG)
            assert lost.returncode
            assert [texts(some) for some in rest] == [expected] * 2

        with drafting(0):
            cut_off, centre = local_users(0), users(server.url)
            in_the_middle(server, MODELS[0])
            edges[0].plug("down")
            assert texts(centre) == expected
            assert cut_off.poll() is None
            edges[0].plug("up")
            assert texts(cut_off) == expected

            waiting = [local_users(0), local_users(1)]
            in_the_middle(server, *MODELS)
            server.process.kill()
            again = stack.enter_context(serving())
            assert [texts(some) for some in waiting] == [expected] * 2
            assert texts(users(again.url)) == expected
