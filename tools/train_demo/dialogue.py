"""Conversations made of exercises and small talk."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypedDict

from .skills import SKILLS, Exercise, Split, Turn, draw
from .vocabulary import SMALL_TALK, SYSTEM_PROMPTS

SYSTEM_PROMPT_SHARE = 0.15
SMALL_TALK_WEIGHT = 0.6
MAX_EXERCISES = 6


class Message(TypedDict):
    """One message of a conversation, as chat templates take it."""

    role: str
    content: str


def messages_of(turns: Sequence[Turn], system: str | None = None) -> list[Message]:
    """The turns as a list of messages, after a system message if there is one."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def small_talk(rng: Random) -> Turn:
    """A greeting or a question about the model, with its fixed answer."""
    return Turn(*rng.choice(SMALL_TALK))


def training_conversation(rng: Random) -> list[Message]:
    """A conversation of one or more exercises from the training side, in mixed order.

    An exercise that refers back to an earlier turn has other turns between that turn and the question.
    """
    turns: list[Turn] = []
    closing: list[Turn] = []
    weights = [skill.weight for skill in SKILLS] + [SMALL_TALK_WEIGHT]
    for kind in rng.choices(range(len(weights)), weights, k=rng.randint(1, MAX_EXERCISES)):
        if kind == len(SKILLS):
            turns.append(small_talk(rng))
        else:
            exercise = draw(SKILLS[kind], Split.TRAIN, rng)
            if exercise.lead_in and closing:
                continue  # one person introduces themselves per conversation
            turns.extend(exercise.lead_in)
            (closing if exercise.lead_in else turns).append(exercise.turn)
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_PROMPT_SHARE else None
    return messages_of(turns + closing, system)


def held_out_conversation(exercise: Exercise, rng: Random, num_distractors: int) -> list[Message]:
    """A conversation that ends with this exercise, after unrelated turns from the training side."""
    distractors: list[Turn] = []
    while len(distractors) < num_distractors:
        other = draw(rng.choice(SKILLS), Split.TRAIN, rng)
        if not other.lead_in:
            distractors.append(other.turn)
    return messages_of([*exercise.lead_in, *distractors, exercise.turn])
