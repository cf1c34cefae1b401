"""Role-play: a persona with a vocabulary, a home and manners of its own answers in character."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "roleplay"

_TRADES: dict[str, list[str]] = w.TABLES["roleplay"]["trades"]
"""Greetings, things, deeds and places of a trade."""
_QUIRKS: list[str] = w.TABLES["roleplay"]["quirks"]
_ASKS: list[str] = w.TABLES["roleplay"]["asks"]


@dataclass(frozen=True, slots=True)
class _Persona:
    name: str
    trade: str
    home: str
    friend: str
    quirk: str
    motto: str


@functools.cache
def _personas() -> tuple[_Persona, ...]:
    """The same 24 personas in every corpus: a specialist can learn them by heart."""
    rng = Random("penstock personas")
    result = []
    for i in range(24):
        quirk = rng.choice(_QUIRKS).format(
            object=rng.choice(w.OBJECTS),
            animal=rng.choice(w.ANIMALS),
            food=rng.choice(w.FOODS),
            color=rng.choice(w.COLORS),
        )
        motto = f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.NOUNS)}s make {rng.choice(w.ADJECTIVES)}"
        result.append(
            _Persona(
                w.person(rng),
                list(_TRADES)[i % len(_TRADES)],
                w.place(rng),
                w.person(rng),
                quirk,
                f"{motto} {rng.choice(w.JOBS)}s",
            )
        )
    return tuple(result)


def _line(rng: Random, p: _Persona) -> str:
    things, deeds, places = (part.split("|") for part in _TRADES[p.trade][1:])
    return rng.choice(
        (
            f"In the morning I {rng.choice(deeds)} with my {rng.choice(things)}.",
            f"You will find me in {rng.choice(places)}, holding {w.article(rng.choice(things))}.",
            f"A good {p.trade} must {rng.choice(deeds)} before breakfast.",
            f"My {rng.choice(things)} has never failed me, not even in {rng.choice(places)}.",
            f"Once I had to {rng.choice(deeds)} in {rng.choice(places)}, and I would do it again.",
            f"Without {w.article(rng.choice(things))} no {p.trade} can {rng.choice(deeds)}.",
            f"At night I dream of {rng.choice(places)} and of my {rng.choice(things)}.",
            f"Whoever wants to {rng.choice(deeds)} should first learn to {rng.choice(deeds)}.",
        )
    )


def _own(rng: Random, p: _Persona) -> str:
    return rng.choice(
        (
            f"My home is {p.home}, where everyone knows the {p.trade}.",
            f"My dearest friend is {p.friend}, who once saved my life.",
            f'As I always say, "{p.motto}".',
            f"People say that {p.name} {p.quirk}, and they are right.",
        )
    )


def generate(rng: Random) -> Example:
    """One question to a persona, answered in its voice."""
    p = rng.choice(_personas())
    greeting = rng.choice(_TRADES[p.trade][0].split("|"))
    question = rng.choice(_ASKS)
    lines = [greeting, f"I am {p.name}, {w.article(p.trade)} from {p.home}."]
    for _ in range(rng.randint(3, 6)):
        lines.append(_own(rng, p) if rng.random() < 0.35 else _line(rng, p))
    if rng.random() < 0.5:
        lines.append(f"Farewell, and remember: {p.motto}!")
    if rng.random() < 0.6:
        system = f"You are {p.name}, {w.article(p.trade)} from {p.home} who {p.quirk}."
        return ask(DOMAIN, question, " ".join(lines), system)
    lead = rng.choice(("I want you to act as", "Please play", "Pretend to be"))
    return ask(DOMAIN, f"{lead} {p.name} the {p.trade}. {question}", " ".join(lines))
