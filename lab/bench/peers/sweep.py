"""One run over models and batch sizes, which goes on where an earlier one was cut."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import PeerEngine
from lab.bench.peers.passes import PeerCell, shown, take_turns
from lab.bench.peers.plan import Progress, planned
from lab.bench.peers.report import Run, runs_of
from lab.bench.peers.store import Store, about_engine, about_model, about_setup
from lab.bench.peers.tuning import PeerTuner
from lab.bench.peers.verdict import Bar
from lab.bench.peers.workers_pool import Pool


class PeerSweep:
    """Measures, batch size by batch size, the engines in turn; each is kept when it is done."""

    def __init__(
        self,
        pool: Pool,
        store: Store,
        engines: Sequence[PeerEngine],
        bars: Sequence[Bar],
        repeats: int,
        *,
        quick: bool,
    ) -> None:
        self._engines = engines
        self._bars = bars
        self._repeats = repeats
        self._store = store
        self._pool = pool
        self._tuner = PeerTuner(pool, store, quick, self._say_trial)
        self._progress = Progress({})

    def measure(self, models: Sequence[PeerCheckpoint], batches: Sequence[int]) -> list[Run]:
        """The figures of every cell."""
        self._progress = Progress.start(models, batches)
        runs: list[Run] = []
        try:
            for model in models:
                cells = {b: self._cells(model, b) for b in batches}
                for batch in batches:
                    self._pool.keep([c.setup for b in batches if b >= batch for c in cells[b]])
                    runs += self._runs(model, batch, cells[batch])
        finally:
            self._pool.keep([])
        return runs

    def _cells(self, model: PeerCheckpoint, batch: int) -> list[PeerCell]:
        return planned(self._tuner, self._engines, model, batch, self._bars)

    def _runs(self, model: PeerCheckpoint, batch: int, cells: Sequence[PeerCell]) -> list[Run]:
        about = {
            "batch": batch,
            "passes": self._repeats,
            "setups": [about_setup(cell.setup) for cell in cells],
            **self._about(model, cells),
        }
        kept = self._store.get(about)
        if kept is None:
            take_turns(cells, self._repeats, self._pool, self._say)
            runs = runs_of(cells, self._tuner.tried, self._repeats)
            if all(cell.error is None for cell in cells):
                self._store.put(about, runs)
        else:
            runs = kept["found"]
        self._progress.finish(model, batch, kept=kept is not None)
        when = "measured" if kept is None else f"kept from {kept['when']}"
        self._tell(f"{model.name}, batch {batch}: {when}")
        return runs

    def _about(self, model: PeerCheckpoint, cells: Sequence[PeerCell]) -> dict[str, Any]:
        engines = {cell.setup.engine.name: cell.setup.engine for cell in cells}
        return {"of": about_model(model), "engines": [about_engine(e) for e in engines.values()]}

    def _say_trial(self, cell: PeerCell) -> None:
        self._say_cell(cell, f"{shown(cell.trial)}/s in a trial")

    def _say(self, cell: PeerCell) -> None:
        rate = f"{shown(cell.passes[-1].tokens_per_s)}/s" if cell.passes else "warm"
        self._say_cell(cell, rate)

    def _say_cell(self, cell: PeerCell, rate: str) -> None:
        setup = cell.setup
        draft = f"{setup.drafter} {setup.draft_tokens}" if setup.draft_tokens else "target only"
        what = f"{setup.model.name} {cell.batch} {setup.engine.name} {draft} {dict(setup.settings)}"
        self._tell(f"{what}: {cell.error or rate}")

    def _tell(self, line: str) -> None:
        print(f"[{self._progress}] {line}", file=sys.stderr, flush=True)
