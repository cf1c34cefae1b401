"""Prompts and systems of `lab.bench.choice`, and an engine of this process that they are served
by."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from lab.bench.real_prompts import PARTS, RealPrompt, real_prompts, token_ids
from lab.common.cells import Cells, Figures
from lab.common.families import SPIN
from lab.common.live import decode, make_loop
from lab.common.statistics import made_while_busy, rotated
from penstock.cli.terminal import with_progress
from penstock.config import SUFFIX, DrafterConfig, EngineConfig, PolicyConfig
from penstock.core.loop import Loop
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.serving.offline import complete

MODEL, OTHER = "model", "other"
BEHIND = "behind look-up"
KINDS = {
    "completion": "code",
    "edit": "edit",
    "chat": "chat",
    "structured": "JSON",
    "summary": "summary",
}
"""Kinds of prompts, and what they are called here."""
AGAIN = "edit again"
CONTEXT = 384
"""Latest tokens of a prompt, which every system reads."""
_FIRST_EDIT = 300
"""Most tokens of an answer that is edited again."""
_BLOCK = 4
"""Requests of a client, where there are several, before the next system's turn."""


@dataclass(frozen=True)
class Asked:
    """One request. label: of its kind; origin: where its text is from."""

    label: str
    origin: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class System:
    """A way to serve. drafters: that it has, besides look-up; wanted: what each request asks for,
    by its index; chooses: it decides for each request."""

    drafters: tuple[str, ...]
    looks_up: bool = True
    selection: str = AUTO_DRAFTER
    allocation: str = "priced"
    wanted: str | Sequence[str] = AUTO_DRAFTER

    @property
    def is_fixed(self) -> bool:
        return self.wanted != AUTO_DRAFTER


class Bench:
    """The engine, its prompts, and the loops of all systems after what they learn from."""

    def __init__(self, args: argparse.Namespace, kept: Cells) -> None:
        self.args = args
        self.models = (MODEL,) if args.other is None else (MODEL, OTHER)
        self.engine = _load(args)
        tokenizer = load_tokenizer(self.engine.tokenizer_path)
        self._loops: dict[str, Loop] = {}
        if args.case != "unlike":
            answers = kept.measure("first edits", partial(self._first_edits, tokenizer))
            self.learn = seat_prompts(tokenizer, PARTS[0], args.warm, answers)
            self.held = seat_prompts(tokenizer, PARTS[1], args.prompts, answers)
        else:
            self.learn = _prompts(tokenizer, PARTS[0], args.warm)
            self.held = _prompts(tokenizer, PARTS[1], args.prompts)

    def systems(self) -> dict[str, System]:
        """The control is not among them."""
        fixed = {
            NO_DRAFTER: System((), False, wanted=NO_DRAFTER),
            SUFFIX: System((), wanted=SUFFIX),
        }
        for name in self.models:
            if self.args.case == "unlike":
                fixed[name] = System((name,), False, wanted=name)
            fixed[f"{name} {BEHIND}"] = System((name,), wanted=name)
        rivals = {name: System(self.models, selection=name) for name in SPIN}
        rivals["goodspeed"] = System(self.models, selection="single", allocation="goodspeed")
        return {**fixed, **rivals, AUTO_DRAFTER: System(self.models)}

    def play(self, systems: Mapping[str, System], turn: int) -> dict[str, Figures]:
        """Serve the held prompts once by every system, each after those to learn from.

        They take turns at every few prompts: a slow minute of the machine meets all of them."""
        loops = {name: self._learned(name, system) for name, system in systems.items()}
        order = list(range(len(self.held)))
        random.Random(turn).shuffle(order)
        size = 1 if self.args.clients == 1 else _BLOCK * self.args.clients
        told: dict[str, dict[int, Figures]] = {name: {} for name in systems}
        busy: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        blocks = [order[begin : begin + size] for begin in range(0, len(order), size)]
        for n, numbers in enumerate(with_progress(blocks, len(blocks), f"turn {turn + 1}")):
            block = {i: self.held[i] for i in numbers}
            for name in rotated(list(systems), turn + n):
                found = self._serve(loops[name], block, systems[name], f"{name} {turn}")
                told[name] |= found
                busy[name].append(while_busy([*found.values()], self.args.clients))
        return {name: _figures(busy[name], told[name]) for name in systems}

    def _learned(self, name: str, system: System) -> Loop:
        """Return a loop that has served the prompts to learn from, and nothing else."""
        if name not in self._loops:
            loop = self._loops[name] = self._loop(system)
            if name != NO_DRAFTER:
                learn = random.Random(0).sample([*enumerate(self.learn)], len(self.learn))
                self._serve(loop, dict(learn), _learning(system), name)
        scheduler = deepcopy(self._loops[name].scheduler)
        return Loop(scheduler, self.engine.executor, self.engine.clock)

    def _first_edits(self, tokenizer: Tokenizer) -> Figures:
        """The target's answers to the edits, by where their text is from."""
        system = System((), wanted=SUFFIX)
        asked = []
        for part, num in ((PARTS[0], self.args.warm), (PARTS[1], self.args.prompts)):
            asked += [_asked(p, tokenizer) for p in _first(part, "edit", num)]
        requests = [
            replace(self._request(a, a.origin, SUFFIX), max_tokens=_FIRST_EDIT) for a in asked
        ]
        done = complete(self._loop(system), requests, self.args.clients)
        return {c.request.id: tokenizer.decode(c.token_ids) for c in done}

    def _loop(self, system: System) -> Loop:
        named = PolicyConfig.from_name
        look_up = deepcopy(self.engine.scheduler.look_up) if system.looks_up else None
        selection = SPIN.get(system.selection) or named(system.selection)
        return make_loop(
            self.engine,
            selection,
            named(system.allocation),
            AUTO_DRAFTER,
            named("fluid_guided"),
            look_up,
            system.drafters,
        )

    def _serve(
        self, loop: Loop, asked: Mapping[int, Asked], system: System, name: str
    ) -> dict[int, Figures]:
        """Serve requests by their numbers. Raises: RuntimeError for one that fails."""
        requests = []
        for i, one in asked.items():
            wanted = system.wanted if isinstance(system.wanted, str) else system.wanted[i]
            requests.append(self._request(one, f"{name} {i}", wanted))
        timed = decode(loop, requests, self.args.clients)
        # Another loop would take in what its drafters still do.
        while loop.num_plans_in_flight:
            loop.wait()
            loop.take_in(())
        return {
            i: {
                "kind": one.label,
                "tokens": len(t.token_ids),
                "all_tokens": len(t.completion.token_ids),
                "seconds": t.seconds,
                "ended": t.ended,
                "text": hash(tuple(t.completion.token_ids)),
                "drafts": dict(t.completion.usage.drafts),
            }
            for (i, one), t in zip(asked.items(), timed, strict=True)
        }

    def _request(self, asked: Asked, name: str, wanted: str) -> Request:
        return Request(
            id=name,
            prompt_len=len(asked.token_ids),
            prompt_token_ids=asked.token_ids,
            max_tokens=self.args.tokens,
            stop_token_ids=frozenset(self.engine.eos_token_ids),
            sampling=SamplingParams(temperature=0.0),
            drafter=wanted,
        )


def _load(args: argparse.Namespace) -> Engine:
    on_its_own = partial(DrafterConfig, device="cpu:1")
    drafters = {
        MODEL: on_its_own(path=str(args.model), max_num_seqs=1 if args.case != "unlike" else None)
    }
    if args.other is not None:
        drafters[OTHER] = on_its_own(path=str(args.other))
    room = CONTEXT + max(args.tokens, _FIRST_EDIT) + 32
    return load_engine(
        EngineConfig(
            target=args.target,
            drafters=drafters,
            device="cpu:0",
            look_up=SUFFIX,
            kv_tokens=(8 + args.clients) * room,
            max_model_len=room,
        )
    )


def while_busy(requests: Sequence[Figures], clients: int) -> tuple[float, float]:
    """Tokens and seconds of a block, while every client has a request."""
    names = ("ended", "seconds", "all_tokens")
    ended, seconds, tokens = (np.array([r[name] for r in requests]) for name in names)
    return made_while_busy(ended - seconds, ended, tokens, clients)


def _figures(busy: Sequence[tuple[float, float]], told: Mapping[int, Figures]) -> Figures:
    """Return the figures of all requests, in the order of their prompts. busy: of each block."""
    tokens, seconds = (sum(column) for column in zip(*busy, strict=True))
    return {
        "seconds": seconds,
        "tokens": tokens,
        "requests": [told[i] for i in range(len(told))],
    }


def _learning(system: System) -> System:
    """The same without a choice for each of the held prompts."""
    return system if isinstance(system.wanted, str) else replace(system, wanted=AUTO_DRAFTER)


def _first(part: str, kind: str, num: int) -> list[RealPrompt]:
    return [p for p in _all_prompts() if p.part == part and p.kind == kind][:num]


_all_prompts = cache(real_prompts)


def _asked(prompt: RealPrompt, tokenizer: Tokenizer) -> Asked:
    tokens = token_ids(prompt, tokenizer)[-CONTEXT:]
    return Asked(KINDS[prompt.kind], prompt.origin, tokens)


def _prompts(tokenizer: Tokenizer, part: str, num: int) -> list[Asked]:
    """So many of each kind."""
    return [_asked(p, tokenizer) for kind in KINDS for p in _first(part, kind, num)]


def seat_prompts(
    tokenizer: Tokenizer, part: str, num: int, answers: Mapping[str, str]
) -> list[Asked]:
    """New code, and as many edits of what was edited before."""
    again = []
    for first, then in zip(_first(part, "edit", num), _first(part, "edit", 99)[1:], strict=False):
        instruction = (then.message or "").partition("\n\n")[0]
        messages = [
            {"role": "user", "content": first.message or ""},
            {"role": "assistant", "content": answers[first.origin]},
            {"role": "user", "content": instruction},
        ]
        tokens = tuple(tokenizer.apply_chat_template(messages))[-CONTEXT:]
        again.append(Asked(AGAIN, first.origin, tokens))
    new = [_asked(p, tokenizer) for p in _first(part, "completion", num)]
    return [one for pair in zip(new, again, strict=False) for one in pair]
