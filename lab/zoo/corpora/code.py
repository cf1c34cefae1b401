"""Generated Python tasks: many small functions and classes with names that vary."""

from __future__ import annotations

from random import Random

from lab.zoo.corpora import words as w

_FIELDS, _THINGS = (w.each(w.TABLES["code"][name]) for name in ("fields", "things"))
_TEXTS = ("name", "title", "color", "owner", "path", "label", "status")
"""Fields that are no numbers."""

Task = tuple[str, str]
"""What is asked, and the code that answers it."""


def _type(field: str) -> str:
    return "str" if field in _TEXTS else "int"


def _dataclass(rng: Random) -> Task:
    thing, fields = rng.choice(_THINGS), rng.sample(_FIELDS, rng.randint(3, 5))
    cls = thing.capitalize()
    body = "\n".join(f"    {f}: {_type(f)}" for f in fields)
    show = ", ".join(f"{f}={{self.{f}}}" for f in fields)
    code = (
        f"from dataclasses import dataclass\n\n\n@dataclass\nclass {cls}:\n"
        f'    """One {thing}."""\n\n{body}\n\n'
        f'    def describe(self) -> str:\n        return f"{cls}({show})"\n'
    )
    return f"a dataclass {cls} with the fields {w.listing(fields)} and a method describe", code


def _class(rng: Random) -> Task:
    thing, (a, b) = rng.choice(_THINGS), rng.sample(_FIELDS, 2)
    cls, n = thing.capitalize(), rng.randint(1, 100)
    code = (
        f"class {cls}:\n    def __init__(self, {a}, {b}={n}):\n        self.{a} = {a}\n"
        f"        self.{b} = {b}\n\n    def set_{b}(self, {b}):\n        if {b} < 0:\n"
        f'            raise ValueError("{b} must not be negative")\n        self.{b} = {b}\n\n'
        f'    def __repr__(self):\n        return f"{cls}({{self.{a}!r}}, {{self.{b}!r}})"\n'
    )
    return f"a class {cls} with {a} and {b} (default {n}) and a checked setter for {b}", code


def _filter(rng: Random) -> Task:
    thing, field, n = rng.choice(_THINGS), rng.choice(_FIELDS), rng.randint(2, 500)
    op, word = rng.choice(((">", "above"), ("<", "below"), ("==", "equal to"), (">=", "at least")))
    name = f"select_{thing}s"
    code = (
        f"def {name}({thing}s, limit={n}):\n"
        f'    """Return the {thing}s whose {field} is {word} the limit."""\n'
        f"    result = []\n    for {thing} in {thing}s:\n"
        f'        if {thing}["{field}"] {op} limit:\n            result.append({thing})\n'
        f"    return result\n"
    )
    return f"a function {name} that keeps {thing}s whose {field} is {word} a limit of {n}", code


def _group(rng: Random) -> Task:
    thing, (a, b) = rng.choice(_THINGS), rng.sample(_FIELDS, 2)
    name = f"{b}_by_{a}"
    code = (
        f"from collections import defaultdict\n\n\ndef {name}({thing}s):\n"
        f'    """Add up the {b} of the {thing}s for each {a}."""\n'
        f"    totals = defaultdict(int)\n    for {thing} in {thing}s:\n"
        f"        totals[{thing}.{a}] += {thing}.{b}\n    return dict(totals)\n"
    )
    return f"a function {name} that sums the {b} of {thing}s for each {a}", code


def _sort(rng: Random) -> Task:
    thing, field, n = rng.choice(_THINGS), rng.choice(_FIELDS), rng.randint(2, 20)
    name = f"top_{thing}s"
    code = (
        f"def {name}({thing}s, n={n}):\n"
        f'    """Return the n {thing}s with the highest {field}."""\n'
        f"    ordered = sorted({thing}s, key=lambda {thing}: {thing}.{field}, reverse=True)\n"
        f"    return ordered[:n]\n"
    )
    return f"a function {name} that returns the {n} {thing}s with the highest {field}", code


def _read(rng: Random) -> Task:
    thing, (a, b) = rng.choice(_THINGS), rng.sample(_FIELDS, 2)
    kind, sep = rng.choice((("csv", ","), ("tsv", "\\t"), ("text", ";")))
    name = f"load_{thing}s"
    code = (
        f'def {name}(path):\n    """Read {thing}s from a {kind} file."""\n    {thing}s = []\n'
        f'    with open(path, encoding="utf-8") as file:\n        for line in file:\n'
        f'            {a}, {b} = line.rstrip("\\n").split("{sep}")\n'
        f'            {thing}s.append({{"{a}": {a}, "{b}": {b}}})\n    return {thing}s\n'
    )
    return f"a function {name} that reads {a} and {b} of {thing}s from a {kind} file", code


def _loop(rng: Random) -> Task:
    start, stop, k = rng.randint(0, 9), rng.randint(20, 200), rng.randint(2, 12)
    what, test = rng.choice(
        (
            (f"divisible by {k}", f"n % {k} == 0"),
            ("even", "n % 2 == 0"),
            ("odd", "n % 2 == 1"),
            (f"not divisible by {k}", f"n % {k} != 0"),
        )
    )
    how, begin, update = rng.choice(
        (
            ("the sum", "0", "total += n"),
            ("the count", "0", "total += 1"),
            ("the product", "1", "total *= n"),
            ("the sum of squares", "0", "total += n * n"),
        )
    )
    code = (
        f"total = {begin}\nfor n in range({start}, {stop}):\n    if {test}:\n"
        f'        {update}\nprint("{how} is", total)\n'
    )
    numbers = f"the numbers from {start} to {stop - 1} that are {what}"
    return f"a loop that prints {how} of {numbers}", code


def _test(rng: Random) -> Task:
    thing, field = rng.choice(_THINGS), rng.choice(_FIELDS)
    cls = thing.capitalize()
    values = [rng.randint(1, 99) for _ in range(3)]
    rows = "\n".join(
        f"    {thing}.set_{field}({v})\n    assert {thing}.{field} == {v}" for v in values
    )
    code = (
        f"import pytest\n\n\ndef test_{field}():\n    {thing} = {cls}()\n{rows}\n\n\n"
        f"def test_{field}_must_not_be_negative():\n    with pytest.raises(ValueError):\n"
        f"        {cls}().set_{field}(-1)\n"
    )
    return f"tests for the {field} of {cls} with the values {w.listing([*map(str, values)])}", code


def _parser(rng: Random) -> Task:
    fields = rng.sample(_FIELDS, rng.randint(2, 4))
    tool = rng.choice(_THINGS)
    rows = "\n".join(
        f'    parser.add_argument("--{f}", type={_type(f)}, help="the {f} of the {tool}")'
        for f in fields
    )
    code = (
        f"import argparse\n\n\ndef main() -> None:\n"
        f'    parser = argparse.ArgumentParser(description="Make one {tool}.")\n{rows}\n'
        f"    args = parser.parse_args()\n    print(args.{fields[0]})\n\n\n"
        f'if __name__ == "__main__":\n    main()\n'
    )
    return f"a command line for a {tool} with the options {w.listing(fields)}", code


def _text(rng: Random) -> Task:
    word = rng.choice(("words", "lines", "letters", "digits", "vowels", "spaces"))
    name = f"count_{word}"
    body = {
        "words": "return len(text.split())",
        "lines": "return len(text.splitlines())",
        "letters": "return sum(c.isalpha() for c in text)",
        "digits": "return sum(c.isdigit() for c in text)",
        "vowels": 'return sum(c in "aeiou" for c in text.lower())',
        "spaces": "return sum(c.isspace() for c in text)",
    }[word]
    sample = " ".join(rng.sample(w.NOUNS, 3))
    code = (
        f'def {name}(text: str) -> int:\n    """Return the number of {word} in the text."""\n'
        f'    {body}\n\n\nprint({name}("{sample}"))\n'
    )
    return f'a function {name} that counts {word}, and call it with "{sample}"', code


def _table(rng: Random) -> Task:
    name, thing = rng.choice(_FIELDS).upper() + "S", rng.choice(_THINGS)
    keys = rng.sample([*w.OBJECTS, *w.FOODS, *w.ANIMALS], rng.randint(4, 6))
    rows = "\n".join(f'    "{k}": {rng.randint(1, 999)},' for k in keys)
    code = (
        f"{name} = {{\n{rows}\n}}\n\n\ndef find_{thing}(key):\n"
        f"    return {name}.get(key)\n\n\nfor key in sorted({name}):\n"
        f"    print(key, {name}[key])\n"
    )
    return f"a dictionary {name} of {w.listing(keys)} with a lookup find_{thing}", code


_TASKS = (_dataclass, _class, _filter, _group, _sort, _read, _loop, _test, _parser, _text, _table)


def task(rng: Random) -> Task:
    """One task and the code that answers it."""
    return rng.choice(_TASKS)(rng)
