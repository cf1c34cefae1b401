"""Each engine's own best: settings, drafter and draft length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import BY_POLICY, PeerEngine
from lab.bench.peers.passes import FULL, SHORT, PeerCell
from lab.bench.peers.store import Store, about_model, about_setup
from lab.bench.peers.workers_pool import Pool, WorkerError, WorkerSetup

Batches = Sequence[int]

FIRST_LENGTH = 4


@dataclass
class PeerTuner:
    """Tries setups of one engine after the other; each trial is kept in `store`.

    A small model's trial is two whole passes, a large one's a single short pass. quick: the first
    settings and drafter, nothing tried.
    """

    pool: Pool
    store: Store
    quick: bool
    on_pass: Callable[[PeerCell], None]
    tried: list[PeerCell] = field(default_factory=list)
    _settings: dict[tuple[str, str, int], PeerCell | None] = field(default_factory=dict)

    def target_cell(self, engine: PeerEngine, model: PeerCheckpoint, batch: int) -> PeerCell:
        """Target-only, with the best settings. Where none can be run, measuring says why."""
        setups = [WorkerSetup(engine, model, s) for s in engine.settings_for(model)]
        if self.quick:
            return PeerCell(setups[0], batch)
        place = engine.name, model.shape, batch
        if place not in self._settings:
            self._settings[place] = self._best([self._trial(setup, batch) for setup in setups])
        best = self._settings[place]
        if best is None:
            return PeerCell(setups[0], batch)
        return PeerCell(replace(best.setup, model=model), batch, trial=best.best)

    def draft_cell(self, engine: PeerEngine, model: PeerCheckpoint, batch: int) -> PeerCell | None:
        """With the best drafter and draft length; None for an engine that has none here, or could
        run none."""
        drafters = engine.drafters_for(model)
        if not drafters or not engine.can_draft(batch):
            return None
        setup = self.target_cell(engine, model, batch).setup
        if self.quick:
            return PeerCell(replace(setup, drafter=drafters[0], draft_tokens=FIRST_LENGTH), batch)
        firsts = [
            self._trial(replace(setup, drafter=drafter, draft_tokens=FIRST_LENGTH), batch)
            for drafter in drafters
        ]
        best = self._best(firsts)
        if best is None:
            return None
        best = self._best_length(best)
        return PeerCell(best.setup, batch, trial=best.best)

    def _best_length(self, first: PeerCell) -> PeerCell:
        """From one length to its neighbours, on either side as long as that gains."""
        lengths = sorted(k for k in first.setup.engine.draft_tokens if k != BY_POLICY)
        middle = lengths.index(FIRST_LENGTH)
        best = first
        for side in (lengths[:middle][::-1], lengths[middle + 1 :]):
            last = first
            for length in side:
                cell = self._trial(replace(first.setup, draft_tokens=length), first.batch)
                if cell.best <= last.best:
                    break
                last = cell
            best = max(best, last, key=lambda cell: cell.best)
            if last is not first:
                break
        if BY_POLICY in first.setup.engine.draft_tokens:
            policy = self._trial(replace(first.setup, draft_tokens=BY_POLICY), first.batch)
            best = max(best, policy, key=lambda cell: cell.best)
        return best

    @staticmethod
    def _best(cells: Sequence[PeerCell]) -> PeerCell | None:
        ran = [cell for cell in cells if cell.best > 0]
        return max(ran, key=lambda cell: cell.best) if ran else None

    def _trial(self, setup: WorkerSetup, batch: int) -> PeerCell:
        """Measured once in all runs; failures, once in each."""
        for cell in self.tried:
            if (cell.setup, cell.batch) == (setup, batch):
                return cell
        cell = PeerCell(setup, batch)
        self.tried.append(cell)
        about = {"trial": about_setup(setup), "batch": batch, "of": about_model(setup.model)}
        kept = self.store.get(about)
        if kept is not None:
            cell.trial = kept["found"]
            return cell
        self.pool.keep([setup])
        large = setup.model.is_gguf
        try:
            worker = self.pool.worker(setup)
            cell.warm_up(worker)
            work, count = (SHORT, 1) if large else (FULL, 2)
            cell.trial = max(cell.play(worker, work).tokens_per_s for _ in range(count))
            self.store.put(about, cell.trial)
        except WorkerError as error:
            cell.error = str(error)
        self.on_pass(cell)
        return cell


NEAR = 0.8
"""Of the best peer's trial: a large model's peers below it are not measured further."""


def near_the_best(cells: Sequence[PeerCell]) -> list[PeerCell]:
    """Penstock's cells, and of the peers' those that may be the best when all are measured."""
    peers = [cell.trial for cell in cells if not cell.is_ours]
    bar = NEAR * max(peers, default=0.0)
    return [cell for cell in cells if cell.is_ours or cell.trial >= bar]
