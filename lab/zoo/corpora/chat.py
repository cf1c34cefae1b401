"""Open chat in several turns; the answers depend on the topic and on what was said before."""

from __future__ import annotations

import functools
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, Message

DOMAIN = "chat"

_TABLES = w.TABLES["chat"]
_TOPICS: dict[str, list[str]] = _TABLES["topics"]
"""Things, verbs and facts of a topic."""
_MOODS: dict[str, list[str]] = _TABLES["moods"]
_OPEN, _REPLY, _MORE = _TABLES["open"], _TABLES["reply"], _TABLES["more"]


@functools.cache
def _clubs() -> tuple[tuple[str, str, str, str], ...]:
    """A fixed list of clubs (topic, name, town, leader) that the assistant recommends."""
    rng = Random("penstock clubs")
    return tuple(
        (
            topic,
            f"{w.invented(rng, 2).capitalize()} {rng.choice(w.NOUNS)} club",
            w.place(rng),
            w.person(rng),
        )
        for topic in _TOPICS
        for _ in range(2)
    )


def _slots(rng: Random, topic: str, mood: str) -> dict[str, str]:
    things, verbs, facts = (part.split("|") for part in _TOPICS[topic])
    return {
        "topic": topic,
        "mood": mood,
        "thing": rng.choice(things),
        "verb": rng.choice(verbs),
        "fact": rng.choice(facts),
        "name": rng.choice(w.FIRST),
    }


def _answer(rng: Random, topic: str, mood: str, first: bool, count: int) -> str:
    lines = [_MOODS[mood][0]] if first else []
    for template in rng.sample(_REPLY, count):
        line = template.format(**_slots(rng, topic, mood))
        lines.append(line[0].upper() + line[1:])
    if rng.random() < 0.4:
        _, club, town, leader = rng.choice([c for c in _clubs() if c[0] == topic])
        lines.append(f"You could visit the {club} in {town} and ask for {leader}.")
    lines.append(_MOODS[mood][1] if rng.random() < 0.6 else f"Enjoy your {topic}!")
    return " ".join(lines)


def generate(rng: Random) -> Example:
    """A conversation of one to three turns on one topic, in one mood."""
    topic, mood = rng.choice(list(_TOPICS)), rng.choice(list(_MOODS))
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append(Message("system", f"You are a friendly assistant who loves {topic}."))
    turns = rng.choice((1, 2, 2, 3))
    for turn in range(turns):
        said = rng.choice(_OPEN if turn == 0 else _MORE).format(**_slots(rng, topic, mood))
        messages.append(Message("user", said[0].upper() + said[1:]))
        last = turn == turns - 1
        count = rng.randint(4, 7) if last else rng.randint(1, 2)
        messages.append(Message("assistant", _answer(rng, topic, mood, turn == 0, count)))
    return Example(DOMAIN, tuple(messages))
