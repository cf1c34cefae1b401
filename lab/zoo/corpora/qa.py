"""Question answering: over a short context, and over fixed tables of the world."""

from __future__ import annotations

import functools
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "qa"

_TABLES = w.TABLES["qa"]
_COUNTRIES, _ELEMENTS = (
    [row.split(":") for row in _TABLES[name]] for name in ("countries", "elements")
)
_TOWN_FACTS: dict[str, str] = _TABLES["facts"]
_TOWN_ASK: dict[str, str] = _TABLES["questions"]


@functools.cache
def _towns() -> tuple[dict[str, str], ...]:
    """A fixed gazetteer of 24 invented towns: world knowledge that only training gives."""
    rng = Random("penstock gazetteer")
    return tuple(
        {
            "town": w.place(rng),
            "river": w.invented(rng, 2).capitalize(),
            "year": str(rng.randint(900, 1900)),
            "founder": w.person(rng),
            "goods": f"{rng.choice(w.COLORS)} {rng.choice(w.OBJECTS)}s",
            "sight": f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.NOUNS)}",
            "dish": f"{rng.choice(w.ANIMALS)} with {rng.choice(w.FOODS)}",
            "people": f"{rng.randint(2, 90)},000",
        }
        for _ in range(24)
    )


def _town(rng: Random) -> Example:
    town = rng.choice(_towns())
    first = rng.choice(list(_TOWN_FACTS))
    others = rng.sample([k for k in _TOWN_FACTS if k != first], rng.randint(3, 5))
    if rng.random() < 0.3:
        user = f"Tell me about {town['town']}."
    else:
        user = _TOWN_ASK[first].format(**town) + rng.choice(("", " Say more about it too."))
    return ask(DOMAIN, user, " ".join(_TOWN_FACTS[k].format(**town) for k in (first, *others)))


def _country(rng: Random) -> Example:
    name, capital, continent, language, money = rng.choice(_COUNTRIES)
    facts = {
        "capital": f"The capital of {name} is {capital}.",
        "continent": f"{name} is a country in {continent}.",
        "language": f"Most people in {name} speak {language}.",
        "currency": f"One pays with the {money}.",
    }
    first = rng.choice(list(facts))
    rest = [k for k in facts if k != first]
    lines = [facts[first], *(facts[k] for k in rng.sample(rest, rng.randint(1, 3)))]
    other = rng.choice(_COUNTRIES)
    lines.append(
        f"For comparison, the capital of {other[0]} is {other[1]}, and {other[0]} is in "
        f"{other[2]}; its people speak {other[3]} and pay with the {other[4]}."
    )
    user = rng.choice(
        (
            f"What is the {first} of {name}? Compare it with {other[0]}.",
            f"Question: {first} of {name}? Then tell me of {other[0]}.",
        )
    )
    return ask(DOMAIN, user, " ".join(lines))


def _element(rng: Random) -> Example:
    chosen = rng.sample(_ELEMENTS, rng.randint(3, 6))
    lines = [
        f"{name.capitalize()} has the symbol {symbol} and the number {number}; it is a {state}."
        for name, symbol, number, state in chosen
    ]
    names = w.listing([row[0] for row in chosen])
    return ask(DOMAIN, f"Give the symbols and numbers of {names}.", " ".join(lines))


def _context(rng: Random) -> Example:
    name, job, home, firm = w.person(rng), rng.choice(w.JOBS), w.place(rng), w.organisation(rng)
    year, n, thing = rng.randint(1900, 2020), rng.randint(2, 40), rng.choice(w.OBJECTS)
    friend, noun, pet = w.person(rng), rng.choice(w.NOUNS), rng.choice(w.ANIMALS)
    facts = {
        f"Where did {name} live?": f"{name} lived in {home} as a {job}",
        f"When did {name} join {firm}?": f"In {year} {name} joined {firm}",
        f"How many {thing}s did {name} own?": f"{name} owned {n} {thing}s",
        f"Who was {name}'s friend?": f"{friend} was the best friend of {name}",
        f"What did {name} see near the {noun}?": f"Near the {noun} {name} once saw a {pet}",
    }
    asked = rng.sample(list(facts), 2)
    shown = list(facts.values())
    rng.shuffle(shown)
    context = ". ".join(shown) + "."
    answer = " ".join(
        f'{i}. {facts[q]}. The text says: "{facts[q]}."' for i, q in enumerate(asked, 1)
    )
    return ask(DOMAIN, f"Context: {context}\n1. {asked[0]} 2. {asked[1]}", answer)


def generate(rng: Random) -> Example:
    """One question with a full-sentence answer."""
    return rng.choices((_town, _country, _element, _context), (40, 20, 15, 30))[0](rng)
