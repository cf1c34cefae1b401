"""`penstock serve` in processes of its own, killed, frozen, without a disk for its log and with a
clock that jumps, while users ask: clean errors, soon served again, and nothing answered twice."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic

import httpx
import psutil
import pytest
from tests.api.routing import free_port
from tests.api.samples import samples
from tests.serving.harness import engine_pid, eventually
from tests.serving.load import Load
from tests.serving.program import START, program

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SERVED = ("--dtype", "float32", "--kv-tokens", "8192", "--set", "log_format=json")
SOON_S = 5.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with program(tmp_path_factory.mktemp("faults") / "log", *SERVED) as running:
        yield running.url


def metric(url: str, name: str) -> float:
    return samples(httpx.get(f"{url}/metrics", timeout=60).text).get(f"penstock:{name}", 0.0)


def engine_of(url: str) -> int:
    """Its process, once it is up."""
    return int(eventually(lambda: engine_pid(url)))


def test_a_killed_engine(url: str) -> None:
    """Three times. What the server says it has answered is what its users have."""
    load = Load(url)
    successes = metric(url, "request_success_total")
    with load.running():
        for _ in range(3):
            broken, began = load.outcomes["broken"], monotonic()
            os.kill(engine_of(url), signal.SIGKILL)
            assert load.seconds_until_served(began) < SOON_S
            assert load.outcomes["broken"] > broken
    learnt = len(load.expected)
    answered = metric(url, "request_success_total") - successes
    # vLLM's name, and vLLM's meaning: those that were broken off count, too.
    assert answered == learnt + load.outcomes["whole"] + load.outcomes["broken"]


def test_a_killed_process_that_holds_the_libraries(tmp_path: Path) -> None:
    """The engine does not notice; the next one waits for the libraries again."""
    with program(tmp_path / "log", *SERVED) as running:
        load = Load(running.url)
        with load.running():
            engine = psutil.Process(engine_of(running.url))
            engine.parent().kill()
            load.seconds_until_served(monotonic())
            assert set(load.outcomes) == {"whole"}
            began = monotonic()
            engine.kill()
            assert load.seconds_until_served(began) < 2 * SOON_S


def test_a_frozen_engine(tmp_path: Path) -> None:
    """It is found out, killed and replaced."""
    config = tmp_path / "serve.yaml"
    config.write_text("engine: {heartbeat_timeout_s: 4.0}")
    with program(tmp_path / "log", *SERVED, "--config", str(config)) as running:
        load = Load(running.url)
        with load.running():
            frozen, began = engine_of(running.url), monotonic()
            os.kill(frozen, signal.SIGSTOP)
            assert load.seconds_until_served(began) < 4 + SOON_S
            assert load.outcomes["broken"] > 0
            assert not psutil.pid_exists(frozen)


def test_a_frozen_server(url: str) -> None:
    """A pause, and nobody has lost anything."""
    load = Load(url)
    front = psutil.Process(engine_of(url)).parent().parent()
    with load.running():
        front.suspend()
        stood_still_at = monotonic()
        time.sleep(3)
        front.resume()
        load.seconds_until_served(stood_still_at)
    assert set(load.outcomes) == {"whole"}


def test_a_killed_server(tmp_path: Path) -> None:
    """Nothing of it is left, and another serves at its address."""
    port = str(free_port())
    with program(tmp_path / "first", *SERVED, "--port", port) as first, ExitStack() as stack:
        load = Load(first.url)
        with load.running():
            children = psutil.Process(first.process.pid).children(recursive=True)
            first.process.kill()
            first.process.wait()
            began = monotonic()
            stack.enter_context(program(tmp_path / "second", *SERVED, "--port", port))
            seconds = load.seconds_until_served(began)
            print(f"first token {seconds:.1f} s after the server was killed")  # pytest -rP
            assert seconds < SOON_S
            assert load.outcomes["cut"] > 0
            eventually(lambda: not any(child.is_running() for child in children))


@pytest.mark.parametrize("where", ["log", "log and output"])
def test_a_full_disk(tmp_path: Path, where: str) -> None:
    """Every write of the log fails, and that of the address, where it goes to the same disk."""
    port = free_port()
    command = [*START, "--port", str(port), "--state", "none", *SERVED]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(
            command, stderr=full, stdout=full if where != "log" else subprocess.DEVNULL
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: process.poll() is not None or _is_up(url), 120)
            assert process.poll() is None, f"it ended with {process.returncode}"
            load = Load(url)
            with load.running():
                began = monotonic()
                os.kill(engine_of(url), signal.SIGKILL)  # something to log
                assert load.seconds_until_served(began) < SOON_S
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


@contextmanager
def jumping(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """An environment in which the time of day is so many seconds off as the file says."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library, offset = folder / "clock_jump.so", folder / "offset"
    source = Path(__file__).with_name("clock_jump.c")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    offset.write_text("0")
    environment = {"LD_PRELOAD": str(library), "CLOCK_JUMP_FILE": str(offset)}
    yield {**os.environ, **environment}, offset


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    """A day ahead, a year back, and right again."""
    with (
        jumping(tmp_path) as (environment, offset),
        program(tmp_path / "log", *SERVED, environment=environment) as running,
    ):
        load = Load(running.url)
        engine = engine_of(running.url)
        with load.running():
            for seconds in (86_400, -31_536_000, 0):
                offset.write_text(str(seconds))
                assert load.seconds_until_served(monotonic()) < SOON_S
                answer = httpx.post(
                    f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}
                )
                assert abs(answer.json()["created"] - time.time() - seconds) < 60
        assert set(load.outcomes) == {"whole"}
        assert engine_of(running.url) == engine
        assert metric(running.url, "engine_restarts_total") == 0
        lines = [json.loads(line) for line in running.log.read_text().splitlines()]
        assert len({line["time"][:4] for line in lines}) > 1
        assert all(line.get("seconds", 0.0) < 60 for line in lines)
