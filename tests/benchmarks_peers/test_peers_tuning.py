"""What is tried, what is measured after it, and that a cut run goes on."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import ENGINES
from lab.bench.peers.store import Store
from lab.bench.peers.sweep import PeerSweep
from lab.bench.peers.tuning import PeerTuner
from lab.bench.peers.verdict import gguf_bars
from lab.bench.peers.workers_pool import Pool, Worker, WorkerError, WorkerSetup

Rate = Callable[[WorkerSetup], float]
PROMPTS = tuple((i,) for i in range(32))


class Told:
    """A worker whose speed is told by its setup; 0 fails."""

    def __init__(self, setup: WorkerSetup, rate: Rate, asked: list[dict[str, Any]]) -> None:
        self.setup, self.rate, self.asked = setup, rate, asked
        self.facts: dict[str, Any] = {}

    def ask(self, **command: Any) -> dict[str, Any]:
        self.asked.append({"setup": replace(self.setup, draft_tokens=0), **command})
        rate = self.rate(replace(self.setup, draft_tokens=command["draft_tokens"]))
        if not rate:
            raise WorkerError("cannot run this")
        ids = [[7] * command["new_tokens"] for call in command["calls"] for _ in call]
        wall = len(ids) * command["new_tokens"] / rate
        return {"token_ids": ids, "wall_s": wall, "cpu_s": 2 * wall, "other_s": 0.0}


class TellingPool:
    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.asked: list[dict[str, Any]] = []

    def worker(self, setup: WorkerSetup) -> Worker:
        return cast("Worker", Told(setup, self.rate, self.asked))

    def keep(self, setups: Collection[WorkerSetup]) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path) -> PeerCheckpoint:
    files = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    for file in files:
        file.write_text(file.stem)
    return PeerCheckpoint("target mixed", "target", files[0], {"model": files[1]}, PROMPTS, True)


def tuner(pool: TellingPool, folder: Path, *, quick: bool = False) -> PeerTuner:
    store = Store(folder / "measured.jsonl")
    return PeerTuner(cast("Pool", pool), store, quick, lambda cell: None)


LLAMACPP, PENSTOCK, OPENVINO = (ENGINES[name] for name in ("llamacpp", "penstock", "openvino"))


@pytest.mark.parametrize(
    ("rates", "best", "tried"),
    [
        ({2: 1, 4: 2, 6: 3, 8: 4}, 8, {2, 4, 6, 8}),
        ({2: 1, 4: 3, 6: 2, 8: 9}, 4, {2, 4, 6}),
        ({2: 3, 4: 2, 6: 9, 8: 9}, 2, {2, 4}),
    ],
)
def test_lengths_are_tried_as_long_as_they_gain(rates, best, tried, model, tmp_path) -> None:
    pool = TellingPool(lambda setup: rates.get(setup.draft_tokens, 1.0))
    cell = tuner(pool, tmp_path).draft_cell(LLAMACPP, model, 1)
    assert cell is not None
    assert (cell.setup.draft_tokens, cell.trial) == (best, rates[best])
    assert {order["draft_tokens"] for order in pool.asked} - {0} == tried


def test_settings_of_a_large_model_are_tried_at_every_batch_size_by_one_pass(
    model: PeerCheckpoint, tmp_path: Path
) -> None:
    """What is best for one request need not be for many."""
    best = {batch: LLAMACPP.gguf_settings[i] for batch, i in ((1, 2), (8, 0), (32, 3))}
    pool = TellingPool(lambda setup: 1.0)
    tuning = tuner(pool, tmp_path)
    for batch, settings in best.items():
        pool.rate = lambda setup, settings=settings: 2.0 if setup.settings == settings else 1.0
        assert tuning.target_cell(LLAMACPP, model, batch).setup.settings == settings
    # One request warms up, then one call of the batch.
    sizes = [[len(call) for call in order["calls"]] for order in pool.asked]
    tries = len(LLAMACPP.gguf_settings)
    assert sizes == [[1], [1] * 4] * tries + [[1], [8]] * tries + [[1], [32]] * tries
    code = replace(model, name="target code")
    assert tuning.target_cell(LLAMACPP, code, 1).setup.model.name == "target code"
    assert len(pool.asked) == len(sizes)


def names(cells: Collection[Any]) -> list[tuple[str, str]]:
    return [(cell.setup.engine.name, cell.mode) for cell in cells]


def sweep(pool: TellingPool, folder: Path, model: PeerCheckpoint) -> PeerSweep:
    store, bars = Store(folder / "measured.jsonl"), gguf_bars([model])
    return PeerSweep(cast("Pool", pool), store, [PENSTOCK, LLAMACPP], bars, 2, quick=False)


def test_a_cut_run_goes_on_behind_what_it_has_measured(model, tmp_path, capsys) -> None:
    pool = TellingPool(lambda setup: 1.0 + (setup.draft_tokens > 0))
    runs = sweep(pool, tmp_path, model).measure([model], [1])
    num_first = len(pool.asked)
    more = sweep(pool, tmp_path, model).measure([model], [1, 8])
    asked = pool.asked[num_first:]
    assert more[: len(runs)] == runs
    assert {(run["engine"], run["batch"]) for run in more} == {
        (engine, batch) for engine in ("penstock", "llamacpp") for batch in (1, 8)
    }
    # At batch 1 nothing was computed again: a call is the one that warms up, or of eight.
    assert {len(call) for order in asked for call in order["calls"]} == {1, 8}
    assert all(len(order["calls"]) == 1 for order in asked)
    lines = capsys.readouterr().err.splitlines()
    assert any("[1 of 2 done] target mixed, batch 1: kept from" in line for line in lines)
    assert "[2 of 2 done" in lines[-1]
