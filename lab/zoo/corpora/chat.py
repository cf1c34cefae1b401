"""Open chat in several turns; the answers depend on the topic and on what was said before."""

from __future__ import annotations

import functools
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, Message

DOMAIN = "chat"

_TOPICS: dict[str, tuple[str, str, str]] = {
    "cooking": (
        "a thick soup|fresh pasta|a lemon cake|roasted roots",
        "stir|season|taste|simmer",
        "kitchen smells wonderful|recipe is older than I am|secret is good butter",
    ),
    "music": (
        "an old waltz|a slow blues|a choir piece|my first chord",
        "hum|tune|rehearse|record",
        "rhythm carries everything|concert lasted until midnight|violin sounds like a voice",
    ),
    "hiking": (
        "the north ridge|a forest trail|the lake path|a steep gorge",
        "climb|wander|pack|rest",
        "view is worth the climb|weather turns quickly|boots must be dry",
    ),
    "films": (
        "a silent comedy|a space drama|an old western|a spy story",
        "watch|review|quote|discuss",
        "ending surprised everyone|actor learned to fence|cinema was almost empty",
    ),
    "pets": (
        "my grey cat|a nervous puppy|two goldfish|a talking parrot",
        "feed|brush|train|cuddle",
        "vet was very kind|basket stands by the window|little one sleeps all day",
    ),
    "work": (
        "the weekly report|a difficult client|our new office|the late project",
        "plan|present|delegate|finish",
        "meeting could have been a letter|boss likes short notes|deadline moved again",
    ),
    "weather": (
        "a sudden storm|the first snow|a foggy morning|this heat",
        "forecast|endure|enjoy|avoid",
        "clouds came from the west|rain is good for the garden|wind broke my umbrella",
    ),
    "books": (
        "a long novel|a book of riddles|some old letters|a crime story",
        "read|lend|finish|recommend",
        "second chapter is the best|author never travelled|library keeps a first edition",
    ),
    "sport": (
        "the local team|a morning run|a chess match|the swimming club",
        "train|stretch|win|cheer",
        "referee was fair|last minute decided it|coach never shouts",
    ),
    "travel": (
        "a night train|the harbour town|a desert road|the island ferry",
        "book|explore|photograph|leave",
        "hotel had no curtains|locals were friendly|ticket cost almost nothing",
    ),
    "garden": (
        "the rose bed|my tomato plants|a young pear tree|the herb pots",
        "water|prune|plant|weed",
        "soil is rich this year|bees love the lavender|snails ate the lettuce",
    ),
    "games": (
        "a card trick|the new puzzle|a board game|an old arcade",
        "play|solve|bluff|restart",
        "rules fit on one page|last level is unfair|dice never lie",
    ),
}
_MOODS: dict[str, tuple[str, str]] = {
    "happy": ("That is wonderful to hear!", "Keep that good feeling."),
    "tired": ("You sound as if you need some rest.", "Take it slowly today."),
    "bored": ("Let us find something new then.", "A small change can help a lot."),
    "worried": ("I understand that this troubles you.", "It will probably turn out well."),
    "curious": ("I like that you ask.", "There is always more to learn."),
    "proud": ("You have every reason to be proud.", "Tell your friends about it."),
}
_OPEN = (
    "I feel {mood} about {thing} today.",
    "Can we talk about {topic}? I am {mood}.",
    "I want to {verb} {thing}, but I am {mood}.",
    "Hello! {thing} made me {mood}.",
    "My friend {name} says {thing} is easy. I am {mood}.",
)
_REPLY = (
    "When it comes to {topic}, I would {verb} {thing} first.",
    "You know, the {fact}.",
    "Many people {verb} {thing} without thinking, and they miss the best.",
    "If you {verb} a little every day, {thing} will feel natural.",
    "I once heard that the {fact}, and I still believe it.",
    "To {verb} {thing} takes patience, but the {fact}.",
    "Have you tried to {verb} {thing} with a friend?",
    "{topic} teaches us that the {fact}.",
)
_MORE = (
    "What would you do first?",
    "And what about {thing}?",
    "Why should I {verb}?",
    "Tell me more.",
    "Is it true that the {fact}?",
    "{name} does not agree. What do you say?",
)


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
