"""Contexts that are made rather than read: facts to hide, conversations, sums, records and labelled examples.

They stand for the parts of ProxyKV's training mixture that come as datasets (needles, GSM8K, SCBench's key-value and
many-shot subsets) where there are none. Each is text in which some tokens, names and numbers above all, will be needed
to repeat it and cannot be guessed. The words that facts are about, and how they are put, are none of those that
`evaluation.needles` hides: what is measured there has not been trained for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from nearfar.evaluation.needles import Fact

__all__ = ["SYNTHETIC", "TRAINING_FACTS", "synthetic_document"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PEOPLE = _words("""
    Agnes Bogdan Carmen Darius Edith Farid Gustav Hana Ivo Jolanta Kofi Lucia Marek Nadia Otto Petra Quentin Rania Sven
    Tamara Ulrich Vera Wanda Xavier Yara Zoltan
""")
_ANIMALS = _words("""
    badger beaver camel crane donkey eagle gazelle gecko heron horse iguana jackal lemur lobster magpie mole mule newt
    ostrich pelican pigeon puffin rabbit salmon seal spider stork swan tiger toad trout turtle weasel whale wolf yak
""")
_PLACES = _words("""
    airport barn brewery canteen cellar chapel courthouse dairy factory farm foundry gym harbour hospital kiosk
    laboratory laundry mill nursery office orchard palace pharmacy pier prison quarry school stable station tavern
""")
_TOWNS = _words("""
    Aarhus Basel Bergen Bilbao Bristol Denver Genoa Graz Houston Krakow Leeds Malmo Nantes Osaka Perth Seville Turin
    Utrecht Vienna Zagreb
""")
_OBJECTS = _words("""
    apples baskets bottles bricks candles chairs coins cups eggs hats jars keys lamps mugs notebooks pencils plates
    ropes shirts spoons stamps tickets toys umbrellas wheels
""")

# Statements end where five digits follow, as `evaluation.needles` has it.
TRAINING_FACTS: tuple[Fact, ...] = (
    Fact("The locker of the {key} keeper bears", "What does the locker of the {key} keeper bear?", _ANIMALS),
    Fact("Room {key} is rented under contract", "Under which contract is room {key} rented?", _ANIMALS),
    Fact("The gate of the {key} opens with", "With what does the gate of the {key} open?", _PLACES),
    Fact("Last year the {key} counted visitors:", "How many visitors did the {key} count last year?", _PLACES),
    Fact("{key} owes the bank exactly", "How much does {key} owe the bank?", _PEOPLE),
    Fact("The badge that {key} wears says", "What does the badge say that {key} wears?", _PEOPLE),
    Fact("{key} was born in a year written as", "How was the year of the birth of {key} written?", _PEOPLE),
    Fact("The train to {key} carries the sign", "Which sign does the train to {key} carry?", _TOWNS),
    Fact("In {key} the census found households:", "How many households did the census find in {key}?", _TOWNS),
    Fact("The warehouse holds, of {key}, a stock of", "What is the stock of {key} in the warehouse?", _OBJECTS),
    Fact("The order for {key} is filed as", "How is the order for {key} filed?", _OBJECTS),
)

_OPENINGS = (
    "Did you hear about {a}?", "I met {a} in {town} yesterday.", "Something odd happened at the {place}.",
    "{a} asked me about the {objects} again.", "We should talk about {town}.",
)  # fmt: skip
_REPLIES = (
    "No, tell me.", "{a} never said a word about it.", "The {place} is closed on Mondays, you know.",
    "I would ask {b}, who keeps the {animal}.", "That sounds like {b}.", "And what did it cost?",
    "Why {town}, of all places?",
)  # fmt: skip
_TELLINGS = (
    "{a} bought {n} {objects} for {m} crowns.", "The telephone of the {place} in {town} is {long}.",
    "{a} lives at {n} {animal} street, on floor {small}.", "Flight {letters}{n} leaves at {hour}:{minute}.",
    "{b} left the key with {a}, under the {animal}.", "The meeting with {b} moved to the {small}th, at {hour}.",
    "For the record, the sum was {long}, not {n}.", "The password is {letters}{n}{letters}.",
)  # fmt: skip


def _filled(template: str, rng: random.Random) -> str:
    return template.format(
        a=rng.choice(_PEOPLE), b=rng.choice(_PEOPLE), town=rng.choice(_TOWNS), place=rng.choice(_PLACES),
        objects=rng.choice(_OBJECTS), animal=rng.choice(_ANIMALS), n=rng.randrange(10, 1000), m=rng.randrange(2, 90),
        long=rng.randrange(10_000, 10_000_000), small=rng.randrange(1, 29), hour=rng.randrange(1, 24),
        minute=f"{rng.randrange(60):02}", letters="".join(rng.choice("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(2)),
    )  # fmt: skip


def _dialogue(rng: random.Random) -> str:
    """Two people who tell each other facts, a dozen lines."""
    first, second = rng.sample(_PEOPLE, 2)
    lines = [f"{first}: {_filled(rng.choice(_OPENINGS), rng)}"]
    for turn in range(rng.randint(8, 16)):
        said = _filled(rng.choice(_TELLINGS if rng.random() < 0.55 else _REPLIES), rng)
        if rng.random() < 0.3:
            said += " " + _filled(rng.choice(_TELLINGS), rng)
        lines.append(f"{(second, first)[turn % 2]}: {said}")
    return "\n".join(lines)


def _question(rng: random.Random) -> str:
    """A sum in words with its steps, as in GSM8K."""
    name, other, objects, place = (rng.choice(words) for words in (_PEOPLE, _PEOPLE, _OBJECTS, _PLACES))
    a, b, c, price = rng.randrange(12, 90), rng.randrange(3, 12), rng.randrange(2, 9), rng.randrange(2, 20)
    kind = rng.randrange(3)
    if kind == 0:
        return (
            f"Question: {name} had {a} {objects} and bought {b} boxes of {c} at the {place}. How many {objects} does "
            f"{name} have now?\nAnswer: The boxes hold {b} * {c} = {b * c} {objects}. Together that makes "
            f"{a} + {b * c} = {a + b * c}.\n#### {a + b * c}"
        )
    if kind == 1:
        return (
            f"Question: {other} sells {a} {objects} a day for ${price} each. What does {other} take in {c} days?\n"
            f"Answer: A day brings {a} * {price} = ${a * price}. In {c} days that is {a * price} * {c} = "
            f"${a * price * c}.\n#### {a * price * c}"
        )
    return (
        f"Question: {name} shares {a * b} {objects} among {b} friends, and {other} then gives each of them {c} more. "
        f"How many has each?\nAnswer: Each gets {a * b} / {b} = {a} {objects}. With {c} more that is "
        f"{a} + {c} = {a + c}.\n#### {a + c}"
    )


def _questions(rng: random.Random) -> str:
    return "\n\n".join(_question(rng) for _ in range(rng.randint(3, 6)))


def _records(rng: random.Random) -> str:
    """A JSON object of random keys and values, as in SCBench's key-value task."""

    def code() -> str:
        return "-".join(f"{rng.randrange(1 << 16):04x}" for _ in range(rng.randint(2, 4)))

    return "Extract the value of a key from this object:\n" + json.dumps(
        {code(): code() for _ in range(rng.randint(8, 20))}, indent=1
    )


def _many_shot(rng: random.Random) -> str:
    """Labelled examples of a rule that only they tell."""
    labels = rng.sample(_ANIMALS, 3)
    lines = ["Label each sentence."]
    for _ in range(rng.randint(8, 16)):
        kind = rng.randrange(3)
        words = (_PEOPLE, _TOWNS, _OBJECTS)[kind]
        subject = rng.choice(words)
        sentence = rng.choice((
            "Everyone at the {place} talked about {x}.", "{x} came up {n} times in the report.",
            "Nobody expected {x} in the {place}.", "The letter of the {small}th mentions {x}.",
        )).replace("{x}", subject)  # fmt: skip
        lines.append(f"Sentence: {_filled(sentence, rng)}\nLabel: {labels[kind]}")
    return "\n".join(lines)


SYNTHETIC: dict[str, Callable[[random.Random], str]] = {
    "dialogue": _dialogue,
    "questions": _questions,
    "records": _records,
    "many_shot": _many_shot,
}


def synthetic_document(kind: str, seed: int, number: int) -> str:
    """One short document; the same for the same kind, seed and number, on every machine.

    Args:
        kind: one of `SYNTHETIC`.

    Raises:
        ValueError: another kind.
    """
    if kind not in SYNTHETIC:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(SYNTHETIC)}")
    return SYNTHETIC[kind](random.Random(f"training/{kind}/{seed}/{number}"))
