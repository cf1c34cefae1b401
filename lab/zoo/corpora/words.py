"""Word lists and makers of invented names that the domains draw from."""

from __future__ import annotations

from random import Random


def each(text: str) -> list[str]:
    """The words of `text`: long lists are easier to read without quotes."""
    return text.split()


FIRST = each("""
    Ada Boris Clara Dmitri Elena Farid Greta Hugo Ines Jonas Keiko Lars Mina Nadia Omar Priya
    Quentin Rosa Stefan Tara Ulrich Vera Wanda Xavier Yusuf Zoe Arlo Bianca Cedric Delia Emil
    Fiona Gideon Hanna Igor Jasmine Kofi Lucia Marek Noor Oscar Petra Rafael Sonia Tobias Uma
    Viktor Willa Anton Beatriz Carlos Doris Esther Felix Gloria Henrik Ivana Julian Kira Leon
    Marta Nils
""")

ONSET = each("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sk st t th tr v w z")
NUCLEUS = each("a e i o u ai ea io ou ee")
CODA = each("n r l s t m nd rk lt ss x sh ck rn mp v th")
PLACE_END = each("ton ville ford burg stead mouth haven field wick dale port holm")
ORG_END = each("""
    Group Labs Institute Council Works Foundation Systems Partners Union Museum Trust Agency
    Society Bank Airways Motors Theatre Academy
""")

ANIMALS = each("""
    otter heron badger lynx falcon tortoise salmon raven hedgehog beaver gecko walrus ibis mole
    puffin stoat marten newt toad crane vole bison yak tapir
""")
FOODS = each("""
    noodles lentils pancakes dumplings risotto curry tacos olives mushrooms pears plums figs
    almonds walnuts honey yoghurt cheese bread soup salad porridge pickles beans rice
""")
OBJECTS = each("""
    lantern compass kettle ladder violin hammer basket mirror candle blanket barrel wheel needle
    bottle ribbon carpet saddle anchor chisel bucket pillow shovel trumpet clock
""")
COLORS = each("""
    red blue green amber violet grey white black silver golden crimson teal scarlet ivory purple
    orange
""")
ADJECTIVES = each("""
    quiet narrow ancient bright hollow gentle rapid steady bitter curious fragile heavy humble
    jagged lively modest polished rough sudden tidy vivid weary wooden broken calm dusty eager
    faded grand hidden
""")
NOUNS = each("""
    river bridge garden market harbour library tower valley meadow station workshop orchard
    mountain village canal temple bakery quarry forest island castle museum lighthouse factory
    school hospital stadium theatre cellar courtyard
""")
VERBS_PAST = each("""
    built repaired painted sold moved measured closed opened studied rescued restored designed
    replaced tested founded expanded inspected renamed borrowed donated
""")
MONTHS = each("""January February March April May June July August September October November
December""")
DAYS = each("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
JOBS = each("""carpenter pilot nurse botanist baker engineer lawyer sailor teacher painter librarian
farmer geologist tailor plumber surgeon editor gardener chemist historian""")


def syllable(rng: Random, *, closed: float = 0.5) -> str:
    """One invented syllable, ending in a consonant with probability `closed`."""
    tail = rng.choice(CODA) if rng.random() < closed else ""
    return rng.choice(ONSET) + rng.choice(NUCLEUS) + tail


def invented(rng: Random, syllables: int = 2) -> str:
    """An invented word in lower case."""
    return "".join(
        syllable(rng, closed=0.25 if i + 1 < syllables else 0.7) for i in range(syllables)
    )


def surname(rng: Random) -> str:
    """An invented surname."""
    return invented(rng, rng.choice((1, 2, 2))).capitalize()


def person(rng: Random) -> str:
    """A first name from the list with an invented surname."""
    return f"{rng.choice(FIRST)} {surname(rng)}"


def place(rng: Random) -> str:
    """An invented town."""
    return invented(rng, 1).capitalize() + rng.choice(PLACE_END)


def organisation(rng: Random) -> str:
    """An invented organisation."""
    return f"{invented(rng, rng.choice((1, 2))).capitalize()} {rng.choice(ORG_END)}"


def article(noun: str) -> str:
    """`noun` with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def listing(items: list[str], word: str = "and") -> str:
    """``a, b and c``."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + f" {word} {items[-1]}"


def pick(rng: Random, table: dict[str, list[str]]) -> tuple[str, str]:
    """A key of `table` and one of its values."""
    key = rng.choice(list(table))
    return key, rng.choice(table[key])
