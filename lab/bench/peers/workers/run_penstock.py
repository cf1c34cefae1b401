"""Penstock's engine in this process, as `penstock bench engine` drives it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from worker import Prompts, WorkerLoad, serve

from penstock import __version__
from penstock.config import NGRAM, EngineConfig, PolicyConfig
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import load_engine
from penstock.engine.timing import dummy_verify
from penstock.serving.offline import complete


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
        self.names = (f"request-{i}" for i in itertools.count())
        return {"version": __version__, **self.engine.describe()}

    def step(self, context: int, rows: int) -> Callable[[], object]:
        return partial(dummy_verify, self.engine.executor.target, (rows,), context)

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        requests = [
            Request(
                id=next(self.names),
                prompt_len=len(prompt),
                prompt_token_ids=tuple(prompt),
                max_tokens=new_tokens,
                sampling=SamplingParams(temperature=0.0),
                drafter=self.drafter,
            )
            for prompt in prompts
        ]
        completions = complete(self.engine.loop, requests, len(requests))
        for completion in completions:
            if completion.error:
                raise RuntimeError(completion.error)
        return [completion.token_ids for completion in completions]


if __name__ == "__main__":
    serve(Penstock())
