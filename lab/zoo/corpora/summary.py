"""Copying summaries: articles of invented names and facts, answered by copying their sentences."""

from __future__ import annotations

from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "summary"

_LEAD = (
    "{org} {verb} the {adj} {noun} in {place} on {day}, {month} {num}.",
    "The {adj} {noun} of {place} was {verb} by {org} in {month} {year}.",
    "{person}, a {job} from {place}, {verb} the {noun} of {org} last {month}.",
    "Residents of {place} learned on {day} that {org} had {verb} the {adj} {noun}.",
    "After {num} years, {org} has {verb} its {noun} near {place}.",
)
_BODY = (
    "The work cost {money} dollars and took {num} weeks.",
    "{person} of {org2} called the plan {adj} and {adj2}.",
    "{person} said that the {noun} needed {num} new {object}s before {month}.",
    "A report by {org2} counted {big} visitors between {month} and {month2}.",
    "The {color} {object} found by {person} will stay in {place2}.",
    "{place2}, which lies {num} miles away, offered {money} dollars.",
    "Critics such as {person} want the {noun} moved to {place2}.",
    "{org2} will send {num} {job}s from {place2} on {day}.",
    "Nobody had seen a {color} {animal} there since {year}.",
    "The code name of the project is {code}.",
    "{person} and {person2} carried {num} {object}s to {place2}.",
    "Tickets for the {adj} {noun} cost {num} dollars in {place2}.",
    "{person} was born in {place2} in {year} and trained as a {job}.",
    "The mayor, {person}, thanked {org2} for {big} {food}.",
)
_LAST = (
    "A decision by {org} is expected in {month} {year}.",
    "{person} will return to {place} on {day}.",
    "The next meeting of {org2} is on {month} {num}.",
    "Work on the {noun} ends in {month}, said {person}.",
)


def _facts(rng: Random) -> dict[str, str]:
    return {
        "org": w.organisation(rng),
        "org2": w.organisation(rng),
        "place": w.place(rng),
        "place2": w.place(rng),
        "person": w.person(rng),
        "person2": w.person(rng),
        "verb": rng.choice(w.VERBS_PAST),
        "adj": rng.choice(w.ADJECTIVES),
        "adj2": rng.choice(w.ADJECTIVES),
        "noun": rng.choice(w.NOUNS),
        "day": rng.choice(w.DAYS),
        "month": rng.choice(w.MONTHS),
        "month2": rng.choice(w.MONTHS),
        "num": str(rng.randint(2, 30)),
        "year": str(rng.randint(1950, 2030)),
        "money": f"{rng.randint(10, 999)},000",
        "big": f"{rng.randint(1, 99)},{rng.randint(0, 999):03d}",
        "job": rng.choice(w.JOBS),
        "object": rng.choice(w.OBJECTS),
        "color": rng.choice(w.COLORS),
        "animal": rng.choice(w.ANIMALS),
        "food": rng.choice(w.FOODS),
        "code": w.invented(rng, 3),
    }


def sentences(rng: Random, count: int) -> list[str]:
    """An article of `count` sentences about one invented event."""
    shared = _facts(rng)
    lead = rng.choice(_LEAD).format(**shared)
    middle = []
    for template in rng.sample(_BODY, count - 2):
        facts = _facts(rng)
        for key in ("org", "place", "noun"):
            facts[key] = shared[key]
        middle.append(template.format(**facts))
    return [lead, *middle, rng.choice(_LAST).format(**shared)]


def _headed(rng: Random, body: list[str]) -> Example:
    kept = body[: rng.randint(3, 5)]
    head = rng.choice(
        (
            "Summarise the article by its first {n} sentences.",
            "Give the first {n} sentences of this text.",
            "Shorten this article to its first {n} sentences.",
        )
    ).format(n=len(kept))
    if rng.random() < 0.5:
        answer = "Summary: " + " ".join(kept)
    else:
        answer = "\n".join(f"- {s}" for s in kept)
    return ask(DOMAIN, f"{head}\n\n{' '.join(body)}", answer)


def _whole(rng: Random, body: list[str]) -> Example:
    head = rng.choice(("Repeat this text exactly.", "Copy the text below.", "Say this again."))
    text = " ".join(body)
    return ask(DOMAIN, f"{head}\n\n{text}", text)


def _first_last(rng: Random, body: list[str]) -> Example:
    head = "Summarise the article by its first and last sentences, then name the project's people."
    names = [w.person(rng) for _ in range(4)]
    text = " ".join(body) + f" Present were {w.listing(names)}."
    answer = f"{body[0]} {body[-1]}\nPeople: {', '.join(names)}."
    return ask(DOMAIN, f"{head}\n\n{text}", answer)


def _numbered(rng: Random, body: list[str]) -> Example:
    head = rng.choice(("List the facts of the article.", "Turn the article into numbered facts."))
    answer = "\n".join(f"{i}. {s}" for i, s in enumerate(body, 1))
    return ask(DOMAIN, f"{head}\n\n{' '.join(body)}", answer)


def generate(rng: Random) -> Example:
    """One summary; every answer copies sentences of its article."""
    body = sentences(rng, rng.randint(5, 8))
    kind = rng.choices((_headed, _whole, _first_last, _numbered), (4, 3, 1, 3))[0]
    return kind(rng, body)
