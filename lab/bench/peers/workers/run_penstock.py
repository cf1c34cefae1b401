"""Penstock's engine in this process, as `penstock bench engine` drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker import Prompts, WorkerLoad, continued_by_penstock, serve

from penstock import __version__
from penstock.config import NGRAM, EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER
from penstock.engine.build import load_engine


class Penstock:
    """settings: those of `EngineConfig`. draft_tokens -1: lengths by the default policy."""

    def load(self, what: WorkerLoad) -> dict[str, Any]:
        drafter = NGRAM if what.is_ngram else what.drafter
        drafters = {} if drafter is None else {"drafter": drafter}
        settings = dict(what.settings)
        if what.draft_tokens > 0:
            settings["allocation"] = PolicyConfig(name="fixed", options={"k": what.draft_tokens})
        self.engine = load_engine(
            EngineConfig(
                target=Path(what.target),
                drafters=drafters,
                num_threads=2,
                kv_tokens=what.batch * 512,
                prefix_caching=False,
                **settings,
            )
        )
        self.drafter = NO_DRAFTER if drafter is None else "drafter"
        return {"version": __version__, **self.engine.describe()}

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        return continued_by_penstock(self.engine, prompts, new_tokens, self.drafter)


if __name__ == "__main__":
    serve(Penstock())
