"""The words that the skills are made of."""

from __future__ import annotations

_WORDS = """
    apple bread bridge brother candle castle chair church cloud corn crown desk dog door dragon dress earth farm
    feather fire fish flower forest friend garden gate glass gold grass hand heart honey horse house island juice
    key king kitchen knife lake lamp lemon letter lion milk moon morning mountain music night ocean orange pepper
    piano pocket potato queen rabbit rain ring river road roof rose salt sea ship silver smoke song spring star
    stone storm sugar sun sword table tower town train tree valley wall water window winter wood
"""

_NAMES = """
    Alice Anna Arthur Ben Clara Daniel David Diana Edith Emma Felix Frank George Harry Helen Henry Hugo Iris Jack
    John Julia Kate Leo Lily Lucy Maria Mark Martha Nora Oliver Oscar Paul Peter Rosa Ruth Sam Sara Thomas Victor
    Walter
"""

_CITIES = """
    Athens Berlin Boston Cairo Delhi Dublin Geneva Havana Helsinki Kyoto Lagos Lima Lisbon London Madrid Moscow
    Nairobi Naples Oslo Paris Prague Riga Rome Seoul Sydney Tokyo Toronto Tunis Venice Vienna Warsaw Zurich
"""

WORDS, NAMES, CITIES = (tuple(text.split()) for text in (_WORDS, _NAMES, _CITIES))

SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Who are you?", "I am the demo model of Penstock, a small language model."),
    ("What is your name?", "I am the demo model of Penstock, a small language model."),
    ("What can you do?", "I can add numbers, work with lists and answer as JSON. I also know some Shakespeare."),
    ("Help", "I can add numbers, work with lists and answer as JSON. I also know some Shakespeare."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye!", "Goodbye!"),
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of Penstock.",
    "Answer the user.",
    "Be brief.",
)
