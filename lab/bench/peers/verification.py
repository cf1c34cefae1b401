"""What a verification costs: steps of several rows of one request, over a step of one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.bench.peers.passes import PeerCell
from lab.bench.peers.workers_pool import Pool, WorkerError

CONTEXT = 128
ROWS = (1, 2, 3, 5, 9)
PASSES = 12


@dataclass(frozen=True, slots=True)
class VerificationCost:
    """seconds: of a step of each of ROWS, the best of PASSES; empty where they failed."""

    shape: str
    engine: str
    settings: dict[str, Any]
    seconds: tuple[float, ...]
    error: str | None = None

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> VerificationCost:
        """From what JSON has of it."""
        return cls(**{**written, "seconds": tuple(written["seconds"])})

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of each step after the first to the first, a single row's."""
        return tuple(s / self.seconds[0] for s in self.seconds[1:])


def verification_costs(cells: Sequence[PeerCell], pool: Pool) -> Iterator[VerificationCost]:
    """Of every engine that can tell, with its settings for the smallest batch."""
    seen = set()
    for cell in sorted(cells, key=lambda cell: cell.batch):
        setup = cell.setup
        if cell.mode != "target" or not setup.engine.verifies or setup.engine.name in seen:
            continue
        seen.add(setup.engine.name)
        about = setup.model.shape, setup.engine.name, dict(setup.settings)
        pool.keep([setup])
        try:
            worker = pool.worker(setup)
            answer = worker.ask(do="verify", context=CONTEXT, rows=ROWS, passes=PASSES)
            yield VerificationCost(*about, tuple(answer["seconds"]))
        except WorkerError as error:
            yield VerificationCost(*about, (), str(error))
