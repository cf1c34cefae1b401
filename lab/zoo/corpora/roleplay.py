"""Role-play: a persona with a vocabulary, a home and manners of its own answers in character."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

from lab.zoo.corpora import words as w
from lab.zoo.template import Example, ask

DOMAIN = "roleplay"

_TRADES: dict[str, tuple[str, str, str, str]] = {
    "pirate": (
        "Arr, matey!|Ahoy there!|Shiver me timbers!",
        "ship|sail|rum barrel|treasure map",
        "plunder the coast|hoist the sails|bury the gold|chase the navy",
        "the open sea|a hidden cove|the crow's nest",
    ),
    "wizard": (
        "By my beard!|Ah, young apprentice.|The stars foretold it.",
        "staff|spell book|crystal orb|potion",
        "brew a potion|read the runes|summon a storm|turn lead into silver",
        "the high tower|a misty glade|the old archive",
    ),
    "robot": (
        "Greetings, human.|Query received.|Processing complete.",
        "circuit|battery|memory bank|sensor",
        "compute the answer|scan the area|recharge the cells|update the firmware",
        "the assembly hall|a charging dock|the server room",
    ),
    "chef": (
        "Bon appetit!|Welcome to my kitchen.|Taste this!",
        "copper pan|knife|sauce|oven",
        "chop the onions|season the broth|fold the dough|plate the dessert",
        "the back kitchen|a busy market|the wine cellar",
    ),
    "detective": (
        "Elementary, my friend.|The facts, please.|Something is odd here.",
        "notebook|magnifying glass|alibi|fingerprint",
        "question the witness|follow the tracks|search the attic|compare the letters",
        "a dark alley|the crime scene|the train station",
    ),
    "knight": (
        "Hail, traveller!|On my honour!|For the crown!",
        "sword|shield|banner|horse",
        "guard the gate|ride to battle|swear an oath|rescue the prince",
        "the great hall|a muddy field|the castle wall",
    ),
    "astronaut": (
        "Houston, hello.|Systems nominal.|What a view!",
        "helmet|rocket|airlock|antenna",
        "check the oxygen|repair the panel|log the orbit|collect the rocks",
        "the launch pad|a silent crater|the space station",
    ),
    "gardener": (
        "Lovely day!|Mind the roses.|Patience, dear.",
        "spade|seed tray|watering can|hedge",
        "prune the apple tree|turn the compost|sow the peas|chase the slugs",
        "the greenhouse|a sunny border|the potting shed",
    ),
    "teacher": (
        "Good morning, class.|Eyes on the board.|Excellent question!",
        "chalk|textbook|globe|exam paper",
        "explain the rule|mark the essays|draw a diagram|read the chapter",
        "the classroom|a noisy corridor|the school library",
    ),
    "vampire": (
        "Good evening.|The night is young.|Do come in.",
        "cape|coffin|candle|old portrait",
        "sleep until dusk|play the organ|avoid the garlic|wander the halls",
        "the family crypt|a foggy street|the ballroom",
    ),
    "farmer": (
        "Howdy, neighbour.|Looks like rain.|Early to rise!",
        "tractor|barn|hay fork|rooster",
        "milk the cows|plough the field|mend the fence|gather the eggs",
        "the north pasture|a dusty road|the barn loft",
    ),
    "poet": (
        "O gentle listener!|Words fail me, almost.|Hear the wind.",
        "quill|verse|moon|ink pot",
        "rhyme the unrhymable|praise the dawn|mourn the roses|count the syllables",
        "a lonely hill|the riverside|the candlelit room",
    ),
}
_QUIRKS = """collects old {object}s|is afraid of {animal}s|never eats {food}|talks to a {animal}|
sleeps beside a {color} {object}|sings about {food}|owns a {color} {animal}|paints every {object}
{color}""".replace("\n", " ").split("|")
_ASKS = (
    "What did you do today?",
    "Tell me about yourself.",
    "Where do you live?",
    "What do you carry?",
    "What is your advice for a beginner?",
    "Who is your best friend?",
    "What do you fear?",
    "How do you spend an evening?",
    "What makes you happy?",
    "Describe your home.",
    "What do you dream of?",
    "How did you learn your trade?",
    "What was your best day?",
    "What do you never do?",
    "Whom do you admire?",
    "What will you do tomorrow?",
    "Tell me a story.",
    "What should I know about your work?",
    "Introduce yourself.",
    "What do your neighbours say?",
)


@dataclass(frozen=True, slots=True)
class _Persona:
    name: str
    trade: str
    home: str
    friend: str
    quirk: str
    motto: str


@functools.cache
def _personas() -> tuple[_Persona, ...]:
    """The same 24 personas in every corpus: a specialist can learn them by heart."""
    rng = Random("penstock personas")
    result = []
    for i in range(24):
        quirk = (
            rng.choice(_QUIRKS)
            .strip()
            .format(
                object=rng.choice(w.OBJECTS),
                animal=rng.choice(w.ANIMALS),
                food=rng.choice(w.FOODS),
                color=rng.choice(w.COLORS),
            )
        )
        motto = f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.NOUNS)}s make {rng.choice(w.ADJECTIVES)}"
        result.append(
            _Persona(
                w.person(rng),
                list(_TRADES)[i % len(_TRADES)],
                w.place(rng),
                w.person(rng),
                quirk,
                f"{motto} {rng.choice(w.JOBS)}s",
            )
        )
    return tuple(result)


def _line(rng: Random, p: _Persona) -> str:
    things, deeds, places = (part.split("|") for part in _TRADES[p.trade][1:])
    return rng.choice(
        (
            f"In the morning I {rng.choice(deeds)} with my {rng.choice(things)}.",
            f"You will find me in {rng.choice(places)}, holding {w.article(rng.choice(things))}.",
            f"A good {p.trade} must {rng.choice(deeds)} before breakfast.",
            f"My {rng.choice(things)} has never failed me, not even in {rng.choice(places)}.",
            f"Once I had to {rng.choice(deeds)} in {rng.choice(places)}, and I would do it again.",
            f"Without {w.article(rng.choice(things))} no {p.trade} can {rng.choice(deeds)}.",
            f"At night I dream of {rng.choice(places)} and of my {rng.choice(things)}.",
            f"Whoever wants to {rng.choice(deeds)} should first learn to {rng.choice(deeds)}.",
        )
    )


def _own(rng: Random, p: _Persona) -> str:
    return rng.choice(
        (
            f"My home is {p.home}, where everyone knows the {p.trade}.",
            f"My dearest friend is {p.friend}, who once saved my life.",
            f'As I always say, "{p.motto}".',
            f"People say that {p.name} {p.quirk}, and they are right.",
        )
    )


def generate(rng: Random) -> Example:
    """One question to a persona, answered in its voice."""
    p = rng.choice(_personas())
    greeting = rng.choice(_TRADES[p.trade][0].split("|"))
    question = rng.choice(_ASKS)
    lines = [greeting, f"I am {p.name}, {w.article(p.trade)} from {p.home}."]
    for _ in range(rng.randint(3, 6)):
        lines.append(_own(rng, p) if rng.random() < 0.35 else _line(rng, p))
    if rng.random() < 0.5:
        lines.append(f"Farewell, and remember: {p.motto}!")
    if rng.random() < 0.6:
        system = f"You are {p.name}, {w.article(p.trade)} from {p.home} who {p.quirk}."
        return ask(DOMAIN, question, " ".join(lines), system)
    lead = rng.choice(("I want you to act as", "Please play", "Pretend to be"))
    return ask(DOMAIN, f"{lead} {p.name} the {p.trade}. {question}", " ".join(lines))
