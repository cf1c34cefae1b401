"""Word lists and makers of invented names that the domains draw from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
)
"""Words and phrases, by domain."""


def each(text: str) -> list[str]:
    """The words of `text`: long lists are easier to read without quotes."""
    return text.split()


_WORDS = {name: each(text) for name, text in TABLES["words"].items()}
FIRST = _WORDS["first"]
ONSET = _WORDS["onset"]
NUCLEUS = _WORDS["nucleus"]
CODA = _WORDS["coda"]
PLACE_END = _WORDS["place_end"]
ORG_END = _WORDS["org_end"]
ANIMALS = _WORDS["animals"]
FOODS = _WORDS["foods"]
OBJECTS = _WORDS["objects"]
COLORS = _WORDS["colors"]
ADJECTIVES = _WORDS["adjectives"]
NOUNS = _WORDS["nouns"]
VERBS_PAST = _WORDS["verbs_past"]
MONTHS = _WORDS["months"]
DAYS = _WORDS["days"]
JOBS = _WORDS["jobs"]


def syllable(rng: Random, *, closed: float = 0.5) -> str:
    """One invented syllable, ending in a consonant with probability `closed`."""
    tail = rng.choice(CODA) if rng.random() < closed else ""
    return rng.choice(ONSET) + rng.choice(NUCLEUS) + tail


def invented(rng: Random, syllables: int = 2) -> str:
    """An invented word in lower case."""
    return "".join(
        syllable(rng, closed=0.25 if i + 1 < syllables else 0.7) for i in range(syllables)
    )


def surname(rng: Random) -> str:
    """An invented surname."""
    return invented(rng, rng.choice((1, 2, 2))).capitalize()


def person(rng: Random) -> str:
    """A first name from the list with an invented surname."""
    return f"{rng.choice(FIRST)} {surname(rng)}"


def place(rng: Random) -> str:
    """An invented town."""
    return invented(rng, 1).capitalize() + rng.choice(PLACE_END)


def organisation(rng: Random) -> str:
    """An invented organisation."""
    return f"{invented(rng, rng.choice((1, 2))).capitalize()} {rng.choice(ORG_END)}"


def article(noun: str) -> str:
    """`noun` with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(items: list[str], word: str = "and") -> str:
    """``a, b and c``."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + f" {word} {items[-1]}"
