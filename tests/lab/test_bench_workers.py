"""Worker processes: their protocol, and that they stand still between commands."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import bench
from lab.bench.workers import Worker, WorkerError

TOY = """
import threading
from lab.bench.workers import answer_commands

def spin():
    while True:
        pass

def answer(do, command):
    print("noise on standard output")
    if do == "fail":
        raise ValueError("no such model")
    threading.Thread(target=spin, daemon=True).start()
    return command

answer_commands(answer)
"""

Start = Callable[[Path], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def started_from(script: Path) -> Worker:
        started.append(Worker(script, tmp_path / "log"))
        return started[-1]

    yield started_from
    for worker in started:
        worker.close()


@pytest.fixture
def worker(start: Start, tmp_path: Path) -> Worker:
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    return start(script)


def cpu_ticks(worker: Worker) -> int:
    fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_worker_stands_still_between_commands(worker: Worker) -> None:
    assert worker.ask(do="spin", args=[1]) == {"args": [1]}
    time.sleep(0.05)
    before = cpu_ticks(worker)
    time.sleep(0.3)
    assert cpu_ticks(worker) == before
    assert worker.ask(do="spin", args=[2]) == {"args": [2]}


def test_a_failure_is_told_and_the_worker_lives_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="ValueError: no such model"):
        worker.ask(do="fail")
    assert worker.ask(do="spin") == {}


def test_a_dead_worker_is_an_error_not_a_wait(worker: Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(WorkerError, match="ended with status"):
        worker.ask(do="spin")


@pytest.mark.parametrize("name", ["vllm_engine_worker", "vllm_arrivals_worker"])
def test_workers_start_where_vllm_is_missing(name: str, start: Start) -> None:
    worker = start(Path(bench.__file__).with_name(f"{name}.py"))
    with pytest.raises(WorkerError, match="KeyError: 'none'"):
        worker.ask(do="load", kind="none")
