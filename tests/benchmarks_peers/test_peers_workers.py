"""Worker processes: their protocol, and that they stand still between commands."""

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import ENGINES, WORKERS
from lab.bench.peers.passes import NEW_TOKENS, PeerCell
from lab.bench.peers.workers import worker as protocol
from lab.bench.peers.workers_pool import Worker, WorkerError, WorkerSetup

TOY = f"""
import sys, threading, time
sys.path.insert(0, {str(WORKERS)!r})
from worker import serve

def spin():
    while True:
        pass

class Toy:
    def load(self, what):
        print("noise on standard output")
        if what.settings["fail"]:
            raise ValueError("no such model")
        threading.Thread(target=spin, daemon=True).start()
        return {{"version": "toy"}}

    def run(self, prompts, new_tokens, draft_tokens):
        missing = 1 if draft_tokens == 13 else 0
        return [[p[0]] * (new_tokens - missing) for p in prompts]

    def step(self, context, rows):
        return lambda: time.sleep(0.006 * rows)

serve(Toy())
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    toy = Worker(Path(sys.executable), script, {}, tmp_path / "log")
    yield toy
    toy.close()


def load(worker: Worker, *, fail: bool = False) -> dict[str, Any]:
    return worker.ask(
        do="load",
        target="t",
        drafter=None,
        draft_tokens=0,
        batch=3,
        work="w",
        settings={"fail": fail},
    )


def cpu_ticks(worker: Worker) -> int:
    fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_worker_stands_still_between_commands(worker: Worker) -> None:
    assert load(worker) == {"facts": {"version": "toy"}}
    time.sleep(0.05)
    before = cpu_ticks(worker)
    time.sleep(0.3)
    assert cpu_ticks(worker) == before
    worker.ask(do="run", calls=[[[5]]] * 3, new_tokens=4, draft_tokens=0)


def test_a_failure_is_told_and_the_worker_lives_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="ValueError: no such model"):
        load(worker, fail=True)
    assert "facts" in load(worker)


def test_answers_of_another_length_are_refused(worker: Worker) -> None:
    load(worker)
    with pytest.raises(WorkerError, match="not 4 tokens"):
        worker.ask(do="run", calls=[[[5], [6]]], new_tokens=4, draft_tokens=13)


def test_a_dead_worker_is_an_error_not_a_wait(worker: Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(WorkerError, match="ended with status"):
        load(worker)


def test_every_call_of_a_pass_has_the_cells_batch(worker: Worker) -> None:
    load(worker)
    prompts = tuple((i, i) for i in range(32))
    model = PeerCheckpoint("toy", "toy", Path(), prompts=prompts)
    for batch, requests in ((1, 8), (8, 8), (32, 32)):
        cell = PeerCell(WorkerSetup(ENGINES["penstock"], model, {}), batch)
        assert cell.play(worker).tokens_per_s > 0
        assert cell.token_ids == [[i] * NEW_TOKENS for i in range(requests)]


@pytest.mark.parametrize("script", sorted(WORKERS.glob("run_*.py")), ids=lambda path: path.stem)
def test_workers_import_names_that_the_protocol_has(script: Path) -> None:
    """Their engines are installed elsewhere, so that no test imports them whole."""
    found = [n for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.ImportFrom)]
    names = {alias.name for node in found if node.module == "worker" for alias in node.names}
    assert {"WorkerLoad", "serve"} <= names
    assert all(hasattr(protocol, name) for name in names)
