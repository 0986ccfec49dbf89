"""The simple skills of the demo model: exercises that a script can write, and grade, without limit.

Every exercise has a *subject* (an operand pair, a list of words, a person in a city). A hash of the subject decides
whether it is for training or held out, so a held-out pair of numbers is new to the model in every skill that uses
numbers, in both orders and in every phrasing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

from .vocabulary import CITIES, NAMES, WORDS

HELD_OUT_SHARE = 0.1


class Split(Enum):
    """Which side of the wall a subject is on."""

    TRAIN = "train"
    HELD_OUT = "held-out"


@dataclass(frozen=True)
class Turn:
    """One question of the user and the answer the model should give."""

    question: str
    answer: str


@dataclass(frozen=True)
class Exercise:
    """Something to ask and its only right answer. `lead_in` holds turns that the question refers back to."""

    subject: str
    turn: Turn
    lead_in: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Skill:
    """A kind of exercise, and how often it appears in training relative to the others."""

    name: str
    example: str
    weight: float
    make: Callable[[Random], Exercise]


def split_of(subject: str) -> Split:
    """The side of the wall a subject is on: the same on every machine and in every run."""
    digest = hashlib.sha256(subject.encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    return Split.HELD_OUT if fraction < HELD_OUT_SHARE else Split.TRAIN


def draw(skill: Skill, split: Split, rng: Random) -> Exercise:
    """A random exercise of this skill whose subject is on the given side of the wall."""
    while True:
        exercise = skill.make(rng)
        if split_of(exercise.subject) is split:
            return exercise


def _two_numbers(rng: Random) -> tuple[int, int, str]:
    """Two numbers of two digits, and their subject, which does not depend on their order."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return a, b, f"numbers {min(a, b)} {max(a, b)}"


def _some_words(rng: Random, fewest: int, most: int) -> tuple[list[str], str, str]:
    """A list of different words, its subject, and what to write between the words."""
    words = rng.sample(WORDS, rng.randint(fewest, most))
    return words, "words " + " ".join(words), rng.choice((", ", " "))


def _a_person(rng: Random) -> tuple[str, str, str]:
    """A name, a city, and their subject."""
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    return name, city, f"person {name} {city}"


def _add(rng: Random) -> Exercise:
    a, b, subject = _two_numbers(rng)
    asked = rng.choice(("What is {} + {}?", "How much is {} + {}?", "Add {} and {}.", "{} + {} = ?"))
    return Exercise(subject, Turn(asked.format(a, b), f"{a} + {b} = {a + b}."))


def _add_as_json(rng: Random) -> Exercise:
    a, b, subject = _two_numbers(rng)
    asked = rng.choice(("What is {} + {}? Answer as JSON.", "Add {} and {} and answer as JSON."))
    return Exercise(subject, Turn(asked.format(a, b), json.dumps({"a": a, "b": b, "sum": a + b})))


def _compare(rng: Random) -> Exercise:
    a, b, subject = _two_numbers(rng)
    asked = rng.choice(("Which is larger, {} or {}?", "Compare {} and {}."))
    answer = f"{a} and {b} are equal." if a == b else f"{max(a, b)} is larger than {min(a, b)}."
    return Exercise(subject, Turn(asked.format(a, b), answer))


def _count_up(rng: Random) -> Exercise:
    first = rng.randint(1, 89)
    last = first + rng.randint(3, 10)
    asked = rng.choice(("Count from {} to {}.", "Write the numbers from {} to {}."))
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    return Exercise(f"range {first} {last}", Turn(asked.format(first, last), numbers))


def _repeat(rng: Random) -> Exercise:
    words, subject, separator = _some_words(rng, 2, 8)
    asked = rng.choice(("Repeat this list: {}", "Repeat after me: {}", "Say this again: {}"))
    return Exercise(subject, Turn(asked.format(separator.join(words)), separator.join(words)))


def _reverse(rng: Random) -> Exercise:
    words, subject, separator = _some_words(rng, 2, 5)
    asked = rng.choice(("Reverse this list: {}", "Write this list backwards: {}"))
    return Exercise(subject, Turn(asked.format(separator.join(words)), separator.join(reversed(words))))


def _pick(rng: Random) -> Exercise:
    words, subject, separator = _some_words(rng, 3, 6)
    position, index = rng.choice((("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    asked = rng.choice(("What is the {} word of this list: {}", "Give me the {} word: {}"))
    return Exercise(
        subject, Turn(asked.format(position, separator.join(words)), f"The {position} word is {words[index]}.")
    )


def _count_words(rng: Random) -> Exercise:
    words, subject, separator = _some_words(rng, 2, 6)
    asked = rng.choice(("How many words are in this list: {}", "Count these words: {}"))
    return Exercise(subject, Turn(asked.format(separator.join(words)), f"{len(words)} words."))


def _list_as_json(rng: Random) -> Exercise:
    words, subject, separator = _some_words(rng, 2, 5)
    asked = rng.choice(("Give this list as JSON: {}", "Write this list as a JSON array: {}"))
    return Exercise(subject, Turn(asked.format(separator.join(words)), json.dumps(words)))


def _person_as_json(rng: Random) -> Exercise:
    name, city, subject = _a_person(rng)
    age = rng.randint(18, 89)
    told = rng.choice(("{name} is {age} years old and lives in {city}.", "{name} lives in {city} and is {age}."))
    asked = rng.choice(("{} Answer as JSON.", "Write this as JSON: {}"))
    question = asked.format(told.format(name=name, age=age, city=city))
    return Exercise(subject, Turn(question, json.dumps({"name": name, "age": age, "city": city})))


def _remember(rng: Random) -> Exercise:
    name, city, subject = _a_person(rng)
    told = rng.choice(("My name is {} and I live in {}.", "I am {} from {}."))
    lead_in = Turn(told.format(name, city), f"Nice to meet you, {name}.")
    question, answer = rng.choice(
        (("What is my name?", f"Your name is {name}."), ("Where do I live?", f"You live in {city}."))
    )
    return Exercise(subject, Turn(question, answer), (lead_in,))


SKILLS = (
    Skill("add", "What is 47 + 38?", 3.0, _add),
    Skill("add as JSON", "Add 47 and 38 and answer as JSON.", 1.0, _add_as_json),
    Skill("compare", "Which is larger, 47 or 38?", 1.0, _compare),
    Skill("count up", "Count from 7 to 12.", 0.6, _count_up),
    Skill("repeat", "Repeat this list: apple, river, stone", 2.0, _repeat),
    Skill("reverse", "Reverse this list: apple, river, stone", 1.6, _reverse),
    Skill("pick", "What is the second word of this list: apple, river, stone", 1.2, _pick),
    Skill("count words", "How many words are in this list: apple, river, stone", 0.5, _count_words),
    Skill("list as JSON", "Give this list as JSON: apple, river, stone", 0.8, _list_as_json),
    Skill("person as JSON", "Anna is 31 years old and lives in Oslo. Answer as JSON.", 1.0, _person_as_json),
    Skill("remember", "My name is Anna and I live in Oslo. (later) Where do I live?", 1.4, _remember),
)
