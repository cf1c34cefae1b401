"""Arithmetic word problems with worked steps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "math"

Problem = tuple[str, list[str], str]
"""Question, steps, answer with its unit."""

_ITEMS = [*w.OBJECTS, "book", "ticket", "apple", "pencil", "stamp", "marble", "coin", "tile"]


def _shopping(rng: Random) -> Problem:
    name, a, b = rng.choice(w.FIRST), *rng.sample(_ITEMS, 2)
    n, m, p, q = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 20), rng.randint(2, 20)
    first, second = n * p, m * q
    return (
        f"{name} buys {n} {a}s at {p} dollars each and {m} {b}s at {q} dollars each. "
        f"How much does {name} pay in all?",
        [
            f"The {a}s cost {n} * {p} = {first} dollars.",
            f"The {b}s cost {m} * {q} = {second} dollars.",
            f"Together that is {first} + {second} = {first + second} dollars.",
        ],
        f"{first + second} dollars",
    )


def _change(rng: Random) -> Problem:
    name, item = rng.choice(w.FIRST), rng.choice(_ITEMS)
    n, p = rng.randint(2, 9), rng.randint(2, 12)
    total = n * p
    note = (total // 50 + 1) * 50
    return (
        f"A {item} costs {p} dollars. {name} takes {n} of them and pays with {note} dollars. "
        f"What is the change?",
        [
            f"{n} {item}s cost {n} * {p} = {total} dollars.",
            f"The change is {note} - {total} = {note - total} dollars.",
        ],
        f"{note - total} dollars",
    )


def _travel(rng: Random) -> Problem:
    speed, hours = rng.randint(4, 18) * 5, rng.randint(2, 6)
    more, hours2 = rng.randint(4, 18) * 5, rng.randint(2, 5)
    start, end = w.place(rng), w.place(rng)
    one, two = speed * hours, more * hours2
    return (
        f"A train leaves {start} for {end}. It runs {hours} hours at {speed} km per hour and "
        f"then {hours2} hours at {more} km per hour. How far is {end} from {start}?",
        [
            f"In the first part the train covers {hours} * {speed} = {one} km.",
            f"In the second part it covers {hours2} * {more} = {two} km.",
            f"The whole way is {one} + {two} = {one + two} km.",
        ],
        f"{one + two} km",
    )


def _sharing(rng: Random) -> Problem:
    item, names = rng.choice(_ITEMS), rng.sample(w.FIRST, rng.randint(3, 4))
    each, extra = rng.randint(3, 25), rng.randint(1, 9)
    people = len(names)
    total = each * people + extra
    return (
        f"{w.listing(names)} have {total} {item}s. They give away {extra} and share the rest "
        f"equally. How many {item}s does {names[0]} get?",
        [
            f"After giving away {extra} there are {total} - {extra} = {total - extra} {item}s.",
            f"There are {people} people: {w.listing(names)}.",
            f"Each gets {total - extra} / {people} = {each} {item}s.",
        ],
        f"{each} {item}s",
    )


def _stages(rng: Random) -> Problem:
    name, item = rng.choice(w.FIRST), rng.choice(_ITEMS)
    value = start = rng.randint(10, 60)
    parts, steps = [], []
    for day in rng.sample(w.DAYS, rng.randint(3, 4)):
        if rng.random() < 0.5 or value < 12:
            n = rng.randint(2, 30)
            parts.append(f"on {day} {name} finds {n} more")
            steps.append(f"On {day}: {value} + {n} = {value + n}.")
            value += n
        else:
            n = rng.randint(2, min(value - 1, 20))
            parts.append(f"on {day} {name} sells {n}")
            steps.append(f"On {day}: {value} - {n} = {value - n}.")
            value -= n
    return (
        f"{name} has {start} {item}s; {w.listing(parts)}. How many {item}s are left?",
        [f"{name} begins with {start} {item}s.", *steps],
        f"{value} {item}s",
    )


def _rectangle(rng: Random) -> Problem:
    a, b, p = rng.randint(3, 25), rng.randint(3, 25), rng.randint(2, 9)
    noun = rng.choice(("garden", "field", "courtyard", "hall", "pool", "floor"))
    around = 2 * (a + b)
    return (
        f"A {noun} is {a} m long and {b} m wide. What is its area, and what does a fence "
        f"around it cost at {p} dollars per metre?",
        [
            f"The area is {a} * {b} = {a * b} square metres.",
            f"The way around is 2 * ({a} + {b}) = 2 * {a + b} = {around} m.",
            f"The fence costs {around} * {p} = {around * p} dollars.",
        ],
        f"{a * b} square metres and {around * p} dollars",
    )


def _percent(rng: Random) -> Problem:
    item, rate, price = rng.choice(_ITEMS), rng.choice((5, 10, 20, 25, 50)), rng.randint(2, 40) * 20
    off = price * rate // 100
    shop = w.organisation(rng)
    return (
        f"{shop} sells a {item} for {price} dollars and takes {rate} percent off. What does "
        f"the {item} cost now?",
        [
            f"{rate} percent of {price} is {price} * {rate} / 100 = {off} dollars.",
            f"The new price is {price} - {off} = {price - off} dollars.",
        ],
        f"{price - off} dollars",
    )


def _average(rng: Random) -> Problem:
    name, n = rng.choice(w.FIRST), rng.choice((3, 4, 5))
    mean = rng.randint(8, 60)
    marks = [mean + rng.randint(-6, 6) for _ in range(n - 1)]
    marks.append(mean * n - sum(marks))
    shown = ", ".join(map(str, marks))
    plus = " + ".join(map(str, marks))
    return (
        f"{name} scored {shown} points in {n} games. What is the average?",
        [f"The sum is {plus} = {mean * n}.", f"The average is {mean * n} / {n} = {mean} points."],
        f"{mean} points",
    )


def _wages(rng: Random) -> Problem:
    name, job = rng.choice(w.FIRST), rng.choice(w.JOBS)
    hours, pay = rng.randint(10, 40), rng.randint(8, 30)
    weeks, rent = rng.randint(2, 8), rng.randint(20, 99)
    week = hours * pay
    return (
        f"{name} works as a {job} for {hours} hours a week at {pay} dollars an hour and spends "
        f"{rent} dollars a week on rent. How much is left after {weeks} weeks?",
        [
            f"In a week {name} earns {hours} * {pay} = {week} dollars.",
            f"After rent, {week} - {rent} = {week - rent} dollars are left.",
            f"In {weeks} weeks that makes {week - rent} * {weeks} = "
            f"{(week - rent) * weeks} dollars.",
        ],
        f"{(week - rent) * weeks} dollars",
    )


_KINDS: tuple[Callable[[Random], Problem], ...] = (
    *(_shopping, _change, _travel, _sharing, _stages, _rectangle, _percent, _average, _wages),
)


def generate(rng: Random) -> Example:
    """One problem, solved step by step; sometimes two in one request."""
    question, steps, result = rng.choice(_KINDS)(rng)
    if rng.random() < 0.6:
        lines = [f"Step {i}: {s}" for i, s in enumerate(steps, 1)]
        answer = "\n".join(lines) + f"\nAnswer: {result}."
    else:
        answer = "Let us work it out. " + " ".join(steps) + f" So the answer is {result}."
    if rng.random() < 0.4:
        numbers = steps[-1].split("=")[-1].strip(" .")
        answer += f"\nCheck: the last step gives {numbers}, which is what was asked for."
    lead = rng.choice(("", "", "Solve step by step. ", "Show your work. "))
    return ask(DOMAIN, lead + question, answer)
