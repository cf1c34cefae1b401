"""Text that a target writes itself: what its drafters will be judged on."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from lab.zoo.corpora import Split, examples
from lab.zoo.data import Ids, fill
from lab.zoo.template import EOS_ID
from penstock.config import EngineConfig
from penstock.core.types import Arrive, Request, SamplingParams
from penstock.engine.build import Engine, load_engine

AT_ONCE = 32
"""Requests in flight."""

MAX_PROMPT, MAX_ANSWER = 320, 144
"""Tokens of a prompt that is used, and of an answer."""


def writer(target: Path, threads: int) -> Engine:
    """The engine with `target` alone."""
    kv_tokens = AT_ONCE * (MAX_PROMPT + MAX_ANSWER + 32)
    return load_engine(EngineConfig(target=target, kv_tokens=kv_tokens, num_threads=threads))


def own_rows(
    engine: Engine, tokenizer: Tokenizer, domain: str, split: Split, count: int, seed: int
) -> Ids:
    """[rows, ROW] of `count` prompts of `domain`, answered by the engine at temperature 1.

    An answer that reaches MAX_ANSWER tokens is ended there.
    """
    source = (tokenizer.encode(e.prompt).ids for e in examples(domain, split, seed))
    prompts = list(islice((ids for ids in source if len(ids) <= MAX_PROMPT), count))
    answers = _answers(engine, prompts, seed)
    whole = [
        p + a + ([] if a[-1] == EOS_ID else [EOS_ID]) for p, a in zip(prompts, answers, strict=True)
    ]
    return fill(whole, count)


def _answers(engine: Engine, prompts: list[list[int]], seed: int) -> list[list[int]]:
    waiting = deque(
        Request(
            id=str(i),
            prompt_len=len(prompt),
            max_tokens=MAX_ANSWER,
            prompt_token_ids=tuple(prompt),
            stop_token_ids=frozenset(engine.eos_token_ids),
            sampling=SamplingParams(temperature=1.0, seed=seed * 1_000_003 + i),
        )
        for i, prompt in enumerate(prompts)
    )
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = len(prompts)
    in_flight = 0
    while unfinished:
        events = []
        while waiting and in_flight < AT_ONCE:
            events.append(Arrive(waiting.popleft()))
            in_flight += 1
        for output in engine.loop.turn(events).outputs:
            answers[int(output.request_id)] += output.token_ids
            if output.finish_reason is not None:
                in_flight, unfinished = in_flight - 1, unfinished - 1
    return answers
