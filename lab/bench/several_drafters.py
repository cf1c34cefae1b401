"""Closed loops with several drafters to choose from, on the virtual clock.

So many clients send a request each, and the next when they have its answer. Lengths of drafts are
priced, so that systems differ in the choice of drafters alone.

- `family`: the bundled family's five models, with their measured acceptance in eight domains, as
  large beside the target as in its grown copies (on the CPU's profile: measured times).
- `spin`: Spin's five on a V100, on easy and hard text alike.
- `specialists`: four equally fast ones, each better in a domain of its own.
- `recorded`: look-up and EAGLE, each request's own record.
- `texts`: recorded texts of a model of 1.5 B, in which look-up finds `rarely` or `often`, with its
  two drafters.
- `servers`: three draft servers that all clients share.

With `words` the words of a prompt tell of its domain: half of them are from the domain's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.never_behind_scenes import drafter_like
from lab.bench.never_behind_systems import decisions, has_drafts, looks_up
from lab.common.cells import Figures
from lab.common.clients import log_normal, served
from lab.common.families import (
    FAMILY,
    SPECIALISTS,
    SPIN_DRAFTERS,
    SPIN_TEXTS,
    closed_loop,
    specialists_acceptances,
    specialists_profile,
    spin_acceptances,
    spin_profile,
)
from penstock.core.lookup import LookUp
from penstock.core.policies.bundles import BUNDLES
from penstock.fluid.step_profile import DrafterProfile, StepProfile
from penstock.sim.acceptance import (
    AcceptanceModel,
    DomainAcceptance,
    RecordedAcceptance,
    read_records,
)
from penstock.sim.domains import load_acceptance
from penstock.sim.links import DraftServer, Link
from penstock.sim.lookup import RecordedLookUp, read_texts
from penstock.sim.profiles import load_profile
from penstock.sim.run import Setup
from penstock.sim.workloads import Workload

_TARGET = 6.74  # billions of parameters
_ROUNDS = {1: 16, 8: 6, 32: 3}
"""Requests a client would be served without drafts, by the number of clients."""
_OUTPUT = 200
_VOCABULARY, _COMMON = 2000, 0.5
TEXTS = {"rarely": ("chat", "code"), "often": ("edit", "JSON", "summary")}
"""Kinds of recorded texts in which look-up finds so."""
_SERVERS = {"north": 0.001, "east": 0.0015, "south": 0.002}


@dataclass(frozen=True)
class Scene:
    """Drafters and what is accepted from them.

    acceptance, look_up: by seed. options: more fields of the `Setup`."""

    profile: StepProfile
    drafters: tuple[str, ...]
    acceptance: Callable[[int], AcceptanceModel]
    draft_servers: tuple[DraftServer, ...] = ()
    look_up: Callable[[int], LookUp | None] = lambda _: None
    options: Mapping[str, Any] = field(default_factory=dict)


@cache
def scene(name: str, data: Path) -> Scene:
    """FAMILY PROFILE, `spin TARGET`, `specialists RATIO CONTRAST`, `recorded SET`, `texts
    rarely|often PROFILE`, `servers`."""
    kind, *told = name.split()
    if kind == "family":
        return Scene(family_profile(told[0]), tuple(FAMILY), _family_acceptance)
    if kind == "spin":
        fit = spin_acceptances(tuple(SPIN_TEXTS))
        names = tuple(SPIN_DRAFTERS)
        return Scene(spin_profile(told[0]), names, lambda seed: DomainAcceptance(fit, seed))
    if kind == "specialists":
        ratio, contrast = map(float, told)
        fit = specialists_acceptances(contrast)
        profile = specialists_profile(ratio)
        return Scene(profile, SPECIALISTS, lambda seed: DomainAcceptance(fit, seed))
    if kind == "recorded":
        rows = read_records(data / f"accept_{told[0]}.jsonl.gz", ("ngram", "eagle"))
        target = load_profile("a100-llama2-7b")
        head = drafter_like(target, "eagle", 0.05)
        profile = replace(target, drafters=(DrafterProfile("ngram", (1,), (20e-6,)), head))
        return Scene(profile, ("ngram", "eagle"), lambda seed: RecordedAcceptance(rows, seed))
    if kind == "texts":
        return _of_texts(*told)
    fit = specialists_acceptances(0.4)
    servers = tuple(DraftServer(n, s, Link(0.0025)) for n, s in _SERVERS.items())
    profile = replace(load_profile("a100-llama2-7b"), drafters=())
    return Scene(profile, (), lambda seed: DomainAcceptance(fit, seed), servers)


def _of_texts(how_often: str, profile: str) -> Scene:
    """Texts in which look-up finds rarely or often, and their drafters: as measured, or of a third
    and an eighth of a step."""
    texts = read_texts(kinds=TEXTS[how_often])
    names, target = tuple(texts[0].right), load_profile(profile)
    if not {d.name for d in target.drafters}.issuperset(names):
        shares = zip(names, (1 / 3, 1 / 8), strict=True)
        target = replace(target, drafters=tuple(drafter_like(target, *pair) for pair in shares))

    def acceptance(seed: int) -> AcceptanceModel:
        return RecordedLookUp(texts, seed).acceptance(names)

    return Scene(target, names, acceptance, look_up=partial(RecordedLookUp, texts))


def family_profile(name: str) -> StepProfile:
    """A profile with the family's drafters: measured ones, else as large as in the grown copies."""
    target = load_profile(name)
    measured = {d.name: d for d in target.drafters}
    drafters = []
    for model, billions in FAMILY.items():
        if model in measured:
            share = measured[model].batch_seconds[0] / target.linear(1)
            reading = measured[model].per_catch_up_token
            drafters.append(drafter_like(target, model, share, reading))
        else:
            drafters.append(drafter_like(target, model, billions / _TARGET))
    return replace(target, drafters=tuple(drafters))


def _family_acceptance(seed: int) -> AcceptanceModel:
    return DomainAcceptance(load_acceptance(), seed)


def with_choice(name: str, data: Path, batch: int, words: bool, system: str, seed: int) -> Figures:
    """Figures of a system by its name."""
    found = scene(name, data)
    if not has_drafts(system):
        found = replace(found, drafters=(), draft_servers=())
        if not looks_up(system):
            found = replace(found, look_up=lambda _: None)
    chosen = decisions(system, remote=bool(found.draft_servers))
    if found.draft_servers and system not in BUNDLES:
        chosen["pipeline"] = "async"
    return clients(found, batch, words, chosen, seed)


def clients(
    scene: Scene, batch: int, words: bool, policies: Mapping[str, Any], seed: int
) -> Figures:
    """Tokens per second: `early`, in the first quarter of the time; `value`, in the second half."""
    rng = np.random.default_rng(seed)
    num = 20 * batch + 80
    prompts = log_normal(rng, num, 100, 0.8).clip(16, 400)
    load = closed_loop(prompts, log_normal(rng, num, _OUTPUT, 0.5).clip(32, 600))
    acceptance = scene.acceptance(seed)
    setup = Setup(
        scene.profile,
        block_size=16,
        acceptance=acceptance,
        drafters=scene.drafters,
        draft_servers=scene.draft_servers,
        look_up=scene.look_up(seed),
        seed=seed,
        **scene.options,
        **policies,
    )
    texts = prompt_words(acceptance, load, seed) if words else None
    step = scene.profile.decoding(batch)[0]
    seconds = _ROUNDS[batch] * _OUTPUT * step
    ends = (seconds / 4, seconds / 2, seconds)
    tokens = sum(served(setup, load, batch, ends, prompts=texts).values())
    early, _, late = (tokens / np.diff(ends, prepend=0.0)).tolist()
    return {"value": late, "early": early}


def prompt_words(acceptance: AcceptanceModel, load: Workload, seed: int) -> list[tuple[int, ...]]:
    """Prompts of which half of the words are from a vocabulary of their domain."""
    assert isinstance(acceptance, DomainAcceptance)
    names = list(acceptance.fit.domains)
    found = []
    for i, num in enumerate(load.prompt_len.tolist()):
        rng = np.random.default_rng((11, seed, i))
        ranks = np.minimum(rng.zipf(1.3, num), _VOCABULARY) - 1
        own = 1 + names.index(acceptance.domain_of(str(i)))
        vocabulary = np.where(rng.random(num) < _COMMON, 0, own)
        found.append(tuple((ranks + _VOCABULARY * vocabulary).tolist()))
    return found
