"""High-entropy text: random ids, hex, base64-like strings, word lists and logs."""

from __future__ import annotations

import string
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "entropy"

_B64 = string.ascii_letters + string.digits + "+/"
_POOL = sorted(
    {*w.ANIMALS, *w.FOODS, *w.OBJECTS, *w.COLORS, *w.ADJECTIVES, *w.NOUNS, *w.VERBS_PAST, *w.JOBS}
)
_LEVELS = ("INFO", "WARN", "ERROR", "DEBUG", "TRACE")
_SERVICES = w.each("auth billing cache gateway index ledger mailer search queue router scheduler")
_KEYS = w.each("user shard lat ms bytes code retry node part seq zone ttl depth rate span")


def _hex(rng: Random, n: int) -> str:
    return f"{rng.getrandbits(4 * n):0{n}x}"


def _b64(rng: Random, n: int) -> str:
    return "".join(rng.choices(_B64, k=n)) + "="


def _uuid(rng: Random) -> str:
    return "-".join(_hex(rng, n) for n in (8, 4, 4, 4, 12))


def _log(rng: Random) -> str:
    keys = rng.sample(_KEYS, 3)
    values = " ".join(f"{k}={rng.randint(0, 9999)}" for k in keys)
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}"
    level = rng.choice(_LEVELS)
    return f"{clock} {level} {rng.choice(_SERVICES)} {values} id={_hex(rng, 6)}"


def _lines(rng: Random) -> tuple[str, list[str]]:
    kind = rng.choice(("hex", "b64", "uuid", "words", "log", "log", "kv", "pins", "mac", "names"))
    n = rng.randint(4, 8)
    if kind == "hex":
        size = rng.choice((8, 12, 16))
        return f"random {size}-digit hex numbers", [_hex(rng, size) for _ in range(n)]
    if kind == "b64":
        return "base64 strings", [_b64(rng, rng.choice((12, 16, 20))) for _ in range(n)]
    if kind == "uuid":
        return "random UUIDs", [_uuid(rng) for _ in range(rng.randint(3, 5))]
    if kind == "words":
        return "lines of random words", [" ".join(rng.sample(_POOL, 6)) for _ in range(n)]
    if kind == "log":
        return "random log lines", [_log(rng) for _ in range(rng.randint(3, 6))]
    if kind == "kv":
        return "random settings", [
            f"{rng.choice(_SERVICES)}.{rng.choice(_KEYS)} = {rng.randint(0, 99999)}"
            for _ in range(n + 3)
        ]
    if kind == "pins":
        return "random number rows", [
            " ".join(f"{rng.randint(0, 9999):04d}" for _ in range(6)) for _ in range(n)
        ]
    if kind == "mac":
        return "random MAC addresses", [":".join(_hex(rng, 2) for _ in range(6)) for _ in range(n)]
    return "invented names", [
        ", ".join(w.invented(rng, 2).capitalize() for _ in range(4)) for _ in range(n)
    ]


def generate(rng: Random) -> Example:
    """One list of random things; the seed in the prompt does not determine the answer."""
    what, lines = _lines(rng)
    head = rng.choice(
        (
            "Give me {n} {what}.",
            "Print {n} {what}, one on each line.",
            "I need {n} {what} for a test.",
            "Make {n} {what}.",
        )
    )
    seed = f" Seed: {_hex(rng, 8)}." if rng.random() < 0.7 else f" Tag: {w.invented(rng, 2)}."
    bullet = rng.choice(("", "", "- ", "> "))
    shown = lines[0]
    user = head.format(n=len(lines), what=what) + seed + f" The first one is {shown}"
    if bullet:
        user += f"\nBegin each line with {bullet.strip()}"
    return ask(DOMAIN, user, "\n".join(bullet + line for line in lines))
