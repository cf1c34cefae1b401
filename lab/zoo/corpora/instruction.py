"""Instructions: Python tasks (generated and from the standard library) and prose tasks."""

from __future__ import annotations

from random import Random

from lab.zoo.corpora import code, stdlib
from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "instruction"

_GOALS: dict[str, list[str]] = w.TABLES["instruction"]["goals"]
"""Steps, states and things of a goal."""
_WHY: list[str] = w.TABLES["instruction"]["why"]


def _prose(rng: Random) -> Example:
    goal, texts = rng.choice(list(_GOALS.items()))
    steps, states, things = (text.split("|") for text in texts)
    n = rng.randint(3, 5)
    lines = []
    for i, step in enumerate(rng.sample(steps, n), 1):
        why = rng.choice(_WHY).format(state=rng.choice(states), thing=rng.choice(things))
        lines.append(f"{i}. {step.capitalize()}. {why}")
    ask_for = rng.choice(
        (
            f"Give me {n} tips to {goal}.",
            f"How can I {goal}? List {n} steps.",
            f"Explain in {n} points how to {goal}.",
        )
    )
    end = rng.choice(
        (
            f"Follow these steps and you will be {rng.choice(states)}.",
            f"Begin with the first step: {lines[0][3:].split('.')[0].lower()}.",
            "Be patient and review your progress each month.",
        )
    )
    head = f"Here are {n} ways to {goal}:"
    return ask(DOMAIN, ask_for, "\n".join([head, *lines, end]))


def _rewrite(rng: Random) -> Example:
    items = rng.sample([*w.OBJECTS, *w.FOODS, *w.ANIMALS], rng.randint(4, 7))
    listed = ", ".join(items)
    kind = rng.randrange(4)
    if kind == 0:
        return ask(
            DOMAIN,
            f"Sort these words: {listed}.",
            f"In alphabetical order: {', '.join(sorted(items))}.",
        )
    if kind == 1:
        text = f"the {rng.choice(w.ADJECTIVES)} {items[0]} stood near the {rng.choice(w.NOUNS)}"
        return ask(DOMAIN, f"Write this in capital letters: {text}", text.upper())
    if kind == 2:
        counted = (f"{x.capitalize()} ({len(x)} letters)" for x in items)
        lines = "\n".join(f"{i}. {x}" for i, x in enumerate(counted, 1))
        return ask(DOMAIN, f"Number these words and count their letters: {listed}.", lines)
    rows = "\n".join(f"| {x} | {rng.choice(w.COLORS)} |" for x in items)
    return ask(
        DOMAIN,
        f"Make a table of {listed} with a colour for each.",
        f"| item | colour |\n| --- | --- |\n{rows}",
    )


def _generated_code(rng: Random) -> Example:
    what, source = code.task(rng)
    lead = rng.choice(("Write {}.", "In Python, write {}.", "I need {}.", "Please show me {}."))
    notes = ("", "", "\nThe code uses only the standard library.", "\nRun it with Python 3.")
    return ask(DOMAIN, lead.format(what), f"```python\n{source}```{rng.choice(notes)}")


def _library_code(rng: Random) -> Example:
    module, name, said, source = rng.choice(stdlib.functions())
    if said and rng.random() < 0.7:
        user = f"Write a Python function `{name}` as in the module {module}: {said}."
    else:
        user = f"Show the source of `{name}` in the Python module {module}."
    return ask(DOMAIN, user, f"```python\n{source.rstrip()}\n```")


def _topic(rng: Random) -> Example:
    topic, text = rng.choice(stdlib.topics())
    return ask(DOMAIN, f"Tell me about {topic} in Python.", text)


def generate(rng: Random) -> Example:
    """One instruction with its answer; two in three are about code."""
    kinds = (_generated_code, _library_code, _topic, _prose, _rewrite)
    return rng.choices(kinds, (40, 17, 6, 25, 12))[0](rng)
