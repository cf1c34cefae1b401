"""Text-to-SQL: a schema and a question, answered by a query and its explanation."""

from __future__ import annotations

from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "sql"

_THEMES: dict[str, str] = w.TABLES["sql"]["themes"]
"""Three tables of a theme, each with its columns."""

_NUMERIC = set(w.each(w.TABLES["sql"]["numeric"]))
_AGG = {"SUM": "the total", "AVG": "the average", "MAX": "the highest", "MIN": "the lowest"}


def _kind(column: str) -> str:
    if column in _NUMERIC:
        return "INTEGER"
    return "DATE" if column.endswith("_on") else "TEXT"


def _say(column: str) -> str:
    return column.replace("_", " ")


class _Schema:
    """Two or three tables of a theme; the second refers to the first."""

    def __init__(self, rng: Random) -> None:
        theme = rng.choice(list(_THEMES))
        tables = [
            (name, columns.split())
            for name, _, columns in (t.partition(": ") for t in _THEMES[theme].split("; "))
        ]
        rng.shuffle(tables)
        self.tables = dict(tables[: rng.choice((2, 3))])
        if rng.random() < 0.5:
            prefix = w.invented(rng, 1)
            self.tables = {f"{prefix}_{name}": cols for name, cols in self.tables.items()}
        names = list(self.tables)
        self.parent, self.child = names[0], names[1]
        self.key = self.parent.split("_")[-1].rstrip("s") + "_id"

    def text(self) -> str:
        lines = []
        for name, columns in self.tables.items():
            fields = ["id INTEGER", *(f"{c} {_kind(c)}" for c in columns)]
            if name == self.child:
                fields.append(f"{self.key} INTEGER")
            lines.append(f"CREATE TABLE {name} ({', '.join(fields)});")
        return "\n".join(lines)

    def split(self, table: str) -> tuple[list[str], list[str]]:
        columns = self.tables[table]
        numbers = [c for c in columns if c in _NUMERIC]
        return [c for c in columns if c not in _NUMERIC], numbers


def _where(rng: Random, text: list[str], numbers: list[str], pre: str = "") -> tuple[str, str]:
    if numbers and (not text or rng.random() < 0.6):
        column, value = rng.choice(numbers), rng.randint(1, 99) * rng.choice((1, 10))
        op, word = rng.choice(((">", "above"), ("<", "below"), (">=", "at least")))
        return f"{pre}{column} {op} {value}", f"whose {_say(column)} is {word} {value}"
    column = rng.choice(text)
    if column.endswith("_on"):
        day = f"{rng.randint(2001, 2029)}-{rng.randint(1, 12):02d}-01"
        return f"{pre}{column} > '{day}'", f"whose {_say(column)} is after {day}"
    name = w.invented(rng, 2).capitalize()
    return f"{pre}{column} = '{name}'", f"whose {_say(column)} is {name}"


def _select(rng: Random, s: _Schema) -> tuple[str, str, str]:
    table = rng.choice(list(s.tables))
    text, numbers = s.split(table)
    cond, words = _where(rng, text, numbers)
    column = rng.choice(s.tables[table])
    sql = f"SELECT {column}\nFROM {table}\nWHERE {cond}"
    question = f"Show the {_say(column)} of all {table} {words}"
    explain = f"It reads the table {table}, keeps the rows {words} and returns {column}."
    if numbers and rng.random() < 0.6:
        order, n = rng.choice(numbers), rng.randint(3, 20)
        sql += f"\nORDER BY {order} DESC\nLIMIT {n}"
        question += f", the {n} with the highest {_say(order)} first"
        explain += f" The rows are sorted by {order} from high to low, and {n} are kept."
    return question + ".", sql + ";", explain


def _group(rng: Random, s: _Schema) -> tuple[str, str, str]:
    usable = [t for t in s.tables if all(s.split(t))]
    if not usable:
        return _select(rng, s)
    table = rng.choice(usable)
    text, numbers = s.split(table)
    by, value = rng.choice(text), rng.choice(numbers)
    agg = rng.choice(list(_AGG))
    sql = f"SELECT {by}, {agg}({value}) AS result\nFROM {table}\nGROUP BY {by}"
    question = f"For each {_say(by)} in {table}, what is {_AGG[agg]} {_say(value)}?"
    explain = f"It groups {table} by {by} and computes {_AGG[agg]} {value} of each group."
    if rng.random() < 0.5:
        n = rng.randint(2, 50)
        sql += f"\nHAVING COUNT(*) > {n}"
        question = question[:-1] + f", counting only groups of more than {n} rows?"
        explain += f" Groups of {n} rows or fewer are dropped."
    return question, sql + ";", explain


def _join(rng: Random, s: _Schema) -> tuple[str, str, str]:
    ptext, pnum = s.split(s.parent)
    ctext, cnum = s.split(s.child)
    cond, words = _where(rng, ctext, cnum, "c.")
    shown = rng.choice(ptext + pnum)
    sql = (
        f"SELECT p.{shown}, c.{rng.choice(ctext + cnum)}\nFROM {s.parent} AS p\n"
        f"JOIN {s.child} AS c ON c.{s.key} = p.id\nWHERE {cond};"
    )
    question = f"List the {_say(shown)} of {s.parent} that have {s.child} {words}."
    explain = (
        f"It joins {s.parent} and {s.child} where {s.key} of {s.child} equals id of "
        f"{s.parent}, and keeps the {s.child} {words}."
    )
    return question, sql, explain


def _count(rng: Random, s: _Schema) -> tuple[str, str, str]:
    shown = rng.choice(s.tables[s.parent])
    sql = (
        f"SELECT p.{shown}, COUNT(c.id) AS n\nFROM {s.parent} AS p\n"
        f"LEFT JOIN {s.child} AS c ON c.{s.key} = p.id\nGROUP BY p.id\nORDER BY n DESC;"
    )
    question = f"How many {s.child} does each of the {s.parent} have? Show {_say(shown)} too."
    explain = (
        f"It counts the {s.child} of each of the {s.parent}; a left join keeps those without any. "
        f"The largest count comes first."
    )
    return question, sql, explain


def _change(rng: Random, s: _Schema) -> tuple[str, str, str]:
    usable = [t for t in s.tables if s.split(t)[1]]
    if not usable:
        return _select(rng, s)
    table = rng.choice(usable)
    text, numbers = s.split(table)
    cond, words = _where(rng, text, numbers)
    column, n = rng.choice(numbers), rng.randint(2, 90)
    if rng.random() < 0.5:
        return (
            f"Delete all {table} {words}.",
            f"DELETE FROM {table}\nWHERE {cond};",
            f"It removes from {table} the rows {words}; the other rows stay.",
        )
    return (
        f"Raise the {_say(column)} of {table} {words} by {n}.",
        f"UPDATE {table}\nSET {column} = {column} + {n}\nWHERE {cond};",
        f"It adds {n} to {column} in the rows of {table} {words}.",
    )


def generate(rng: Random) -> Example:
    """One schema with one or two questions, their queries and explanations."""
    schema = _Schema(rng)
    makers = (_select, _select, _group, _join, _join, _count, _change)
    question, query, explain = rng.choice(makers)(rng, schema)
    answer = f"```sql\n{query}\n```\n{explain}"
    if rng.random() < 0.4:
        second, query2, explain2 = rng.choice(makers)(rng, schema)
        question = f"1. {question} 2. {second}"
        answer = f"1.\n{answer}\n2.\n```sql\n{query2}\n```\n{explain2}"
    lead = rng.choice(("Write SQL for this.", "Translate to SQL.", "Use these tables."))
    return ask(DOMAIN, f"{lead}\n{schema.text()}\n{question}", answer)
