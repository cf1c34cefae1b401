"""Jobs in this process, in several, and on a Ray cluster: the same results in the same order."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.products import first_fast

from penstock.config import PolicyConfig
from penstock.sim.capacity import MeasuredCapacity, TooShort, capacity
from penstock.sim.parallel import Workers, WorkersError, workers
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup
from penstock.sim.workloads import Workload, make_workload

SETUP = Setup(load_profile("a100-llama2-7b"), PolicyConfig.from_name("fluid_guided"))
Cli = Callable[..., tuple[int, str, str]]
LOW = ("--workload", "low", "--profile", "a100-llama2-7b", "--admission", "fluid_guided")


def squared(number: int) -> tuple[int, int]:
    if number == 5:
        raise TooShort("five", MeasuredCapacity(5.0, 4.0, 6.0))
    return number**2, os.getpid()


def what_is_loaded(_: int) -> tuple[bool, str | None]:
    return "torch" in sys.modules, os.environ.get("OPENBLAS_NUM_THREADS")


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(num_requests: int, rate: float) -> Workload:
    return make_workload("low", num_requests=num_requests, rate=rate, seed=2)


def searched(pool: Workers, num_requests: int = 1000) -> tuple[MeasuredCapacity, list[float]]:
    """The answer, and the loads that the bisection asked for."""
    asked: list[float] = []
    load = partial(at, num_requests)
    found = capacity(
        SETUP,
        load,
        *(40.0, 120.0),
        tolerance=0.05,
        on_try=lambda rate, _: asked.append(rate),
        workers=pool,
    )
    return found, asked


@pytest.mark.slow
def test_processes_give_results_in_order() -> None:
    with workers(2) as pool:
        found = list(pool.map(squared, [3, 1, 4, 1]))
        loaded = list(pool.map(what_is_loaded, range(4)))
        assert pool.submit(squared, 9).result()[0] == 81
    assert [number for number, _ in found] == [9, 1, 16, 1]
    assert os.getpid() not in {pid for _, pid in found}
    assert set(loaded) == {(False, "1")}
    assert os.environ.get("OPENBLAS_NUM_THREADS") is None
    with workers(1) as pool:
        assert {pid for _, pid in pool.map(squared, [3, 1])} == {os.getpid()}


@pytest.mark.parametrize("num", first_fast([1, 2]))
def test_an_exception_is_the_job_s_own(num: int) -> None:
    with workers(num) as pool, pytest.raises(TooShort, match=r"^five$") as raised:
        list(pool.map(squared, range(9)))
    assert raised.value.estimate == MeasuredCapacity(5.0, 4.0, 6.0)
    with workers(num) as pool, pytest.raises(TooShort, match=r"^five$"):
        pool.submit(squared, 5).result()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_line() -> None:
    with pytest.raises(WorkersError, match="was killed"), workers(2) as pool:
        list(pool.map(killed, range(2)))


@pytest.mark.slow
def test_a_search_by_several_asks_what_one_would_ask() -> None:
    with workers(1) as pool:
        alone = searched(pool)
    with workers(3) as pool:
        together = searched(pool)
        with pytest.raises(TooShort, match="300 requests are too few"):
            searched(pool, 300)
    assert together == alone
    assert len(alone[1]) > 4


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    """As it comes from a terminal, to all processes, and as `kill` sends it, to one."""
    # Tests that were started in the background hand an ignored SIGINT down.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from penstock.cli import main; main()"
    command = [sys.executable, "-c", code, "capacity", *LOW, "--seeds", "20"]
    for send in (os.killpg, os.kill):
        with subprocess.Popen(
            [*command, "--workers", "2"], start_new_session=True, stderr=subprocess.PIPE
        ) as process:
            main = psutil.Process(process.pid)
            # The processes, and what keeps their semaphores.
            while len(children := main.children()) < 3 or any(
                c.cpu_times().user < 1 for c in children[1:]
            ):
                assert process.poll() is None
                time.sleep(0.05)
            send(process.pid, signal.SIGINT)
            assert process.stderr.read() == b""
        assert process.returncode == 130
        assert not psutil.wait_procs(children)[1]


@pytest.fixture
def cluster() -> str:
    """The address of a running Ray cluster: `ray start --head --num-cpus 2`."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    # Its machines know nothing of the tests.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    address = os.environ.get("PENSTOCK_TEST_RAY")
    if address is None:
        pytest.skip("PENSTOCK_TEST_RAY names no cluster")
    return address


def test_a_ray_cluster_gives_the_same(cluster: str) -> None:
    with workers(1) as pool:
        alone = searched(pool)
    with workers(ray=cluster) as pool:
        assert pool.num > 1
        assert searched(pool) == alone
        found = list(pool.map(squared, [3, 1, 4, 1]))
        with pytest.raises(TooShort, match=r"^five$") as raised:
            list(pool.map(squared, range(9)))
    assert raised.value.estimate == MeasuredCapacity(5.0, 4.0, 6.0)
    assert [number for number, _ in found] == [9, 1, 16, 1]
    assert os.getpid() not in {pid for _, pid in found}


def test_ray_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(cli, "capacity", *LOW, "--requests", 1000)
    code, _, err = run("--ray", "127.0.0.1:1", "--workers", 2)
    assert (code, err) == (
        2,
        "penstock: a Ray cluster is used whole: take --workers or --ray, not both\n",
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = run("--ray", "127.0.0.1:1")
    assert code == 2
    assert err == ("penstock: --ray needs ray, which is not installed: pip install ray\n")


def test_a_cluster_that_cannot_be_reached(cli: Cli) -> None:
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "127.0.0.1:many", "nonsense"):
        code, _, err = cli("capacity", *LOW, "--requests", 1000, "--ray", address)
        assert code == 2
        assert err.startswith(f"penstock: no Ray cluster can be reached at '{address}': ")
        assert err.count("\n") == 1


@pytest.mark.slow
def test_a_worker_s_complaint_is_one_line(cli: Cli) -> None:
    run = partial(cli, "capacity", *LOW, "--requests", 300, "--seeds", 2)
    code, _, err = run("--workers", 1)
    assert (code, err.count("\n")) == (2, 1)
    assert run("--workers", 2) == (code, "", err)


@pytest.mark.slow
def test_runs_over_seeds(cli: Cli, tmp_path: Path) -> None:
    run = partial(cli, "simulate", *LOW, "--requests", 100, "--rate", 50)
    found = [json.loads(run("--seeds", 3, "--workers", n, "--json")[1]) for n in (1, 2)]
    for report in found:
        for figures in report["by_seed"]:
            assert figures.pop("wall_s") > 0
    assert found[0] == found[1]
    single = json.loads(run("--seed", 2, "--json")[1])
    assert found[0]["by_seed"][2]["latency_s"] == single["latency_s"]
    mean = found[0]["over_seeds"]["latency_s.mean"]
    means = [figures["latency_s"]["mean"] for figures in found[0]["by_seed"]]
    assert mean["mean"] == pytest.approx(sum(means) / 3)
    assert mean["interval_95"][0] < mean["mean"] < mean["interval_95"][1]
    assert "time to first token, p99, s" in run("--seeds", 2, "--workers", 1)[1]
    code, _, err = run("--seeds", 2, "--plot", tmp_path / "run.png")
    assert (code, err) == (2, "penstock: --plot draws one run: take it without --seeds\n")
