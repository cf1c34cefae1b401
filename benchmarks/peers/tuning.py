"""Each engine's own best: settings, drafter and draft length, for every batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.peers.checkpoints import PeerCheckpoint
from benchmarks.peers.engines import PeerEngine, Settings
from benchmarks.peers.passes import PeerCell, take_turns
from benchmarks.peers.workers_pool import Pool, WorkerSetup

Batches = Sequence[int]


@dataclass
class PeerTuner:
    """Tries setups of one engine after the other; a setup's worth is its best of `passes`.

    quick: only the first settings and the first draft length of each engine.
    """

    pool: Pool
    passes: int
    quick: bool
    on_pass: Callable[[PeerCell], None]
    tried: list[PeerCell] = field(default_factory=list)
    _settings: dict[tuple[str, str, int], Settings] = field(default_factory=dict)

    def cells(self, engine: PeerEngine, model: PeerCheckpoint, batches: Batches) -> list[PeerCell]:
        """What is to be measured: target-only, draft length 4, and the best draft length; nothing
        for an engine that cannot read the model."""
        if not engine.settings_for(model):
            return []
        found = []
        for batch in batches:
            settings = self._best_settings(engine, model, batches)[batch]
            found.append(PeerCell(WorkerSetup(engine, model, settings), batch))
        speculative = [b for b in batches if engine.can_draft(b)]
        if engine.drafters_for(model):
            found += self._speculative(engine, model, speculative)
        return found

    def _best_settings(
        self, engine: PeerEngine, model: PeerCheckpoint, batches: Batches
    ) -> dict[int, Settings]:
        missing = [b for b in batches if (engine.name, model.shape, b) not in self._settings]
        candidates = [WorkerSetup(engine, model, s) for s in engine.settings_for(model)]
        best = self._try({b: candidates for b in missing})
        for batch in missing:
            # Where none can be run, the measurement says why.
            chosen = best[batch].setup.settings if batch in best else candidates[0].settings
            self._settings[engine.name, model.shape, batch] = chosen
        return {b: self._settings[engine.name, model.shape, b] for b in batches}

    def _speculative(
        self, engine: PeerEngine, model: PeerCheckpoint, batches: Batches
    ) -> list[PeerCell]:
        settings = self._best_settings(engine, model, batches)
        first, *others = engine.draft_tokens
        drafters = engine.drafters_for(model)
        by_drafter = self._try(
            {
                b: [WorkerSetup(engine, model, settings[b], d, first) for d in drafters]
                for b in batches
            }
        )
        by_length = self._try(
            {
                b: [cell.setup, *(replace(cell.setup, draft_tokens=k) for k in others)]
                for b, cell in by_drafter.items()
            }
        )
        setups = {(b, c.setup.key, c.setup.draft_tokens): c.setup for b, c in by_drafter.items()}
        setups |= {(b, c.setup.key, c.setup.draft_tokens): c.setup for b, c in by_length.items()}
        return [PeerCell(setup, batch) for (batch, _, _), setup in setups.items()]

    def _try(self, candidates: dict[int, list[WorkerSetup]]) -> dict[int, PeerCell]:
        """The fastest of the candidates of each batch size that can be run at all."""
        if self.quick:
            candidates = {b: setups[:1] for b, setups in candidates.items()}
        cells = [PeerCell(s, b) for b, setups in candidates.items() for s in setups]
        if all(len(setups) == 1 for setups in candidates.values()):
            return {cell.batch: cell for cell in cells}
        for key in dict.fromkeys(cell.setup.key for cell in cells):
            same = [cell for cell in cells if cell.setup.key == key]
            self.pool.keep([same[0].setup])
            take_turns(same, self.passes, self.pool, self.on_pass)
        self.tried += cells
        ran = [cell for cell in cells if cell.passes]
        batches = {cell.batch for cell in ran}
        return {b: max((c for c in ran if c.batch == b), key=lambda c: c.best) for b in batches}
