"""Copying summaries: articles of invented names and facts, answered by copying their sentences."""

from __future__ import annotations

from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "summary"

_LEAD, _BODY, _LAST = (w.TABLES["summary"][part] for part in ("lead", "body", "last"))


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
