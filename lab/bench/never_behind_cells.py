"""The grid of `lab.bench.never_behind`, and which of its cells are held out."""

from __future__ import annotations

import itertools
import tomllib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.never_behind_scenes import (
    KNOWING,
    arrivals,
    beside_a_stranger,
    clients,
    four_tenants,
    servers,
)
from lab.bench.never_behind_systems import Cell
from lab.bench.several_drafters import TEXTS, scene, with_choice
from penstock.core.policies.bundles import AUTO, BUNDLES

BEFORE, SARATHI = "vllm_v1, priced", "sarathi, priced"
STRANGER, CARELESS = "beside one who accepts nothing", "vllm_v1, fixed 4"
LENGTHS = ("none", *(f"fixed {k}" for k in (1, 2, 3, 4, 6, 8)), "goodspeed")
ADMISSIONS = ("vllm_v1", "sarathi", "fluid_guided")
HELD_OUT = Path(__file__).with_name("held_out.toml")
PROFILES = {
    "A100": "a100-llama2-7b",
    "H100": "h100-llama2-7b",
    "A40": "a40-llama2-7b",
    "CPU": "zoo-grown",
}
_BATCHES = (1, 8, 32)
_SECOND, _READING = ("the price of a second",), ("a drafter's reading",)
_MEMORY, _TENANTS = ("the price of memory", "the margin of memory"), ("values of tenants",)
_TARGETS = ("values of targets", "the right values")

_BUNDLED = (*(name for name in BUNDLES if name != AUTO), BEFORE, SARATHI)
_ARRIVALS = (*_BUNDLED, *(f"fluid_guided, fixed {k}" for k in (1, 2, 4)))
_ALONE = (*(f"vllm_v1, {n}" for n in LENGTHS), BEFORE)
_SEPARATE = (*(f"{a}, {n}" for a in ADMISSIONS for n in LENGTHS), BEFORE, SARATHI)
"""`fluid_guided, priced` is `auto` where there is one drafter."""


def cells(data: Path) -> list[Cell]:
    """All, held out or not."""
    named = tomllib.loads(HELD_OUT.read_text(encoding="utf-8"))
    held_out = {name for names in named.values() for name in names}
    found = [*_first(data), *added(data), *with_look_up(data)]
    return [replace(cell, held_out=cell.name in held_out) for cell in found]


def added(data: Path) -> list[Cell]:
    """Cells of which every second one is held out."""
    return [*_other_machines(data), *_gsm8k(data), *_several(data), *_far_servers()]


def with_look_up(data: Path) -> list[Cell]:
    """Look-up beside two drafters, in recorded texts; every second one is held out, too."""
    found = []
    machines = {"CPU": "qwen2.5-coder-1.5b-zen4", "A100": PROFILES["A100"]}
    for often, (short, profile), batch in itertools.product(TEXTS, machines.items(), _BATCHES):
        name = f"texts {often} {profile}"
        drafters = scene(name, data).drafters
        rivals = (
            *(f"fluid_guided, {n}, {d}" for n in ("priced", "fixed 3") for d in drafters),
            *("fluid_guided, priced, none", "vllm_v1, none", BEFORE),
        )
        at = partial(with_choice, name, data, batch, False)
        found.append(Cell(f"{short}: look-up {often}, batch {batch}", at, rivals, kind="look-up"))
    return found


def every_second(names: Iterable[str]) -> list[str]:
    """Names to hold out: every second in the order of their CRC-32, an order without a meaning."""
    return sorted(names, key=lambda name: zlib.crc32(name.encode()))[1::2]


# --- the first cells ------------------------------------------------------------------------------


def _first(data: Path) -> list[Cell]:
    return [*_loads(data), *_closed_loops(data), *_near_servers()]


def _loads(data: Path) -> list[Cell]:
    """Arrivals on the A100."""
    found = []
    for has_drafts in (True, False):
        told, loads = "drafts" if has_drafts else "no drafts", partial(arrivals, data, has_drafts)
        rivals = _ARRIVALS if has_drafts else _BUNDLED
        names = ("conversation", "code", "summaries")
        for name, share in itertools.product(names, (0.5, 0.8, 0.95, 1.2)):
            at = partial(loads, name, share)
            found.append(_of_arrivals(f"{name} at {share}, {told}", at, rivals))
        tight = 0.012 if has_drafts else 0.02
        others: dict[str, tuple[float, dict[str, Any], Sequence[str], str]] = {
            "conversation, KV for a quarter": (0.8, {"memory": 0.25}, _MEMORY, "s"),
            "27 tenants": (1.2, {"num_tenants": 27}, _TENANTS, "tokens/s"),
            "tight TPOT for a third": (0.8, {"tight": tight}, _TARGETS, "of targets"),
        }
        for name, (share, options, prices, unit) in others.items():
            at = partial(loads, "conversation", share, **options)
            prices = prices if has_drafts else ()
            found.append(Cell(f"{name}, {told}", at, rivals, prices, unit, "arrivals"))
    at = partial(arrivals, data, True, "code", 0.8, drafter=0.33)
    cell = _of_arrivals("code at 0.8, drafter 0.33", at, _ARRIVALS)
    return [*found, replace(cell, without=_READING)]


def _of_arrivals(name: str, measure: Any, rivals: Sequence[str]) -> Cell:
    return Cell(name, measure, rivals, unit="s", kind="arrivals")


def _closed_loops(data: Path) -> list[Cell]:
    """Clients on the A100."""
    found = []
    closed = partial(clients, data)
    for batch, records in itertools.product((32, 64), ("gsm8k", "sharegpt")):
        at = partial(closed, batch, 0.05, records, memory=0.25)
        name = f"KV for a quarter of {batch}, {records}"
        found.append(Cell(name, at, _SEPARATE, kind="memory"))
    found.append(Cell("four tenants of 8 clients", four_tenants, _ALONE, _TENANTS, kind="clients"))
    for share in (0.33, 0.05):
        at, systems = partial(beside_a_stranger, share), (AUTO, CARELESS)
        rivals = (*(f"{system}{KNOWING}" for system in systems), CARELESS, BEFORE)
        found.append(Cell(f"{STRANGER}, drafter {share}", at, rivals, kind=STRANGER))
        at = partial(closed, 8, share, "sharegpt", prompt=12_000)
        prices = _READING if share > 0.05 else ()
        name = f"batch 8, drafter {share}, prompts of 12,000"
        found.append(Cell(name, at, _ALONE, prices, kind="clients"))
    shares, records_of = (0.33, 0.05), ("sharegpt", "gsm8k")
    for batch, share, records in itertools.product((64, 32, 8, 1), shares, records_of):
        at = partial(closed, batch, share, records)
        prices = _SECOND if (batch, share) == (64, 0.33) else ()
        name = f"batch {batch}, drafter {share}, {records}"
        found.append(Cell(name, at, _ALONE, prices, kind="clients"))
    return found


def _near_servers() -> list[Cell]:
    axes = itertools.product((4, 16), (0.005, 0.03, 0.1, 0.3), (0.03, 0.1))
    return [_of_servers(*axis) for axis in axes]


def _of_servers(num: int, trip: float, verify: float) -> Cell:
    name = f"{num} draft servers, {1000 * trip:g} ms, step {1000 * verify:g} ms"
    kind = "far servers" if trip >= 0.3 else "servers"
    return Cell(name, partial(servers, num, trip, verify), _ALONE, kind=kind)


# --- the added cells ------------------------------------------------------------------------------


def _other_machines(data: Path) -> list[Cell]:
    """The loads of the A100 on other machines."""
    found = []
    for short in ("H100", "A40", "CPU"):
        profile = PROFILES[short]
        for name, has_drafts in (("conversation", True), ("code", True), ("conversation", False)):
            told, rivals = ("drafts", _ARRIVALS) if has_drafts else ("no drafts", _BUNDLED)
            at = partial(arrivals, data, has_drafts, name, 0.8, profile=profile)
            found.append(_of_arrivals(f"{short}: {name} at 0.8, {told}", at, rivals))
        for batch, share in itertools.product(_BATCHES, (0.05, 0.33)):
            # Each record is met with both drafters.
            records = ("sharegpt", "gsm8k")[(batch == 8) == (share > 0.05)]
            at = partial(clients, data, batch, share, records, profile=profile)
            name = f"{short}: batch {batch}, drafter {share}, {records}"
            found.append(Cell(name, at, _ALONE, kind="clients"))
    return found


def _gsm8k(data: Path) -> list[Cell]:
    """Short prompts with easy answers."""
    found = []
    for (short, profile), share in itertools.product(PROFILES.items(), (0.8, 1.2)):
        at = partial(arrivals, data, True, "gsm8k", share, profile=profile)
        found.append(_of_arrivals(f"{short}: gsm8k at {share}, drafts", at, _ARRIVALS))
    return found


def _several(data: Path) -> list[Cell]:
    """Five drafters to choose from; other machines and texts than where its parts are compared
    (`lab.bench.selection_parts`)."""
    found = []
    for short, has_words in (("A40", True), ("H100", False), ("CPU", False), ("V100", False)):
        name = "spin 30B" if short == "V100" else f"family {PROFILES[short]}"
        whose = "Spin's" if short == "V100" else "the family's"
        drafters = scene(name, data).drafters
        rivals = (
            *(f"fluid_guided, {n}, {d}" for n in ("priced", "fixed 3") for d in drafters),
            "fluid_guided, priced, lbss",
            "spin",
            "vllm_v1, none",
            BEFORE,
        )
        for batch in _BATCHES:
            at = partial(with_choice, name, data, batch, has_words)
            told = f"{short}: {whose} five, batch {batch}"
            found.append(Cell(told, at, rivals, kind="choice"))
    return found


def _far_servers() -> list[Cell]:
    """A round trip of 300 ms, with steps that are short and long beside it."""
    return [_of_servers(num, 0.3, step) for num in (2, 8) for step in (0.03, 0.1, 0.3)]
