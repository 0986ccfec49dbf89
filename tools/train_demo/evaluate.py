"""Measures an exported demo model: loss on held-out plays, and skills on held-out exercises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from .dialogue import Message, held_out_conversation, messages_of
from .skills import SKILLS, Split, Turn, draw
from .tokenizer import token_ids
from .vocabulary import SMALL_TALK

SEED = 2024
EXERCISES_PER_SKILL = 300
NUM_DISTRACTORS = 3
GENERATION_BATCH_SIZE = 50
MAX_NEW_TOKENS = 64
LOSS_WINDOW = 256
LOSS_BATCH_SIZE = 16
SAMPLE_PROMPT = "ROMEO:"
SAMPLE_TOKENS = 160


@dataclass(frozen=True)
class SkillScore:
    """Share of held-out exercises answered exactly: as a conversation's only question, and after other turns."""

    name: str
    example: str
    alone: float
    after_other_turns: float


@dataclass(frozen=True)
class Evaluation:
    """Results of the evaluation of a model. Losses are on held-out plays."""

    nats_per_token: float
    bits_per_byte: float
    skills: tuple[SkillScore, ...]
    small_talk: float
    sample: str
    sample_seed: int
    num_parameters: int
    vocab_size: int


class Answers(Protocol):
    """Interface of a model whose skills are measured."""

    def accuracy(self, conversations: Sequence[Sequence[Message]]) -> float:
        """Share of conversations whose last message the model reproduces exactly."""


@dataclass
class DemoModel:
    """The model folder as a user would load it, with its bfloat16 weights computed in float32."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, folder: Path) -> DemoModel:
        """Load the folder through the Auto classes of Transformers."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))

    @torch.inference_mode()
    def answers(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """Greedy answers to conversations that end with a user's message."""
        answers: list[str] = []
        for first in range(0, len(conversations), GENERATION_BATCH_SIZE):
            inputs = self.tokenizer.apply_chat_template(
                [list(messages) for messages in conversations[first : first + GENERATION_BATCH_SIZE]],
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
            output = self.model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
            new = output[:, inputs["input_ids"].shape[1] :]
            answers += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    def accuracy(self, conversations: Sequence[Sequence[Message]]) -> float:
        """Share of conversations whose last message the model reproduces exactly."""
        answers = self.answers([messages[:-1] for messages in conversations])
        right = [messages[-1]["content"] == answer for messages, answer in zip(conversations, answers, strict=True)]
        return sum(right) / len(right)

    @torch.inference_mode()
    def total_nats(self, text: str) -> tuple[float, int]:
        """Total negative log-likelihood of the text, read in separate windows, and its number of tokens."""
        ids = token_ids(self.tokenizer, text)
        num_windows = len(ids) // LOSS_WINDOW
        windows = torch.tensor(ids[: num_windows * LOSS_WINDOW]).view(num_windows, LOSS_WINDOW)
        begin = torch.full((num_windows, 1), self.tokenizer.bos_token_id)
        total = 0.0
        for rows in torch.cat((begin, windows), dim=1).split(LOSS_BATCH_SIZE):
            logits = self.model(rows[:, :-1]).logits
            total += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
        return total, windows.numel()

    @torch.inference_mode()
    def sample(self, prompt: str, seed: int) -> str:
        """A sampled continuation of the prompt, prompt included."""
        torch.manual_seed(seed)
        inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = self.model.generate(
            **inputs, do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=SAMPLE_TOKENS
        )
        return str(self.tokenizer.decode(output[0], skip_special_tokens=True))


def evaluate(folder: Path, held_out_plays: str) -> Evaluation:
    """Measure the model in the folder."""
    demo = DemoModel.load(folder)
    nats, num_tokens = demo.total_nats(held_out_plays)
    nats_per_token = nats / num_tokens
    bytes_per_token = len(held_out_plays.encode()) / len(token_ids(demo.tokenizer, held_out_plays))
    return Evaluation(
        nats_per_token=nats_per_token,
        bits_per_byte=nats_per_token / bytes_per_token / math.log(2),
        skills=tuple(skill_scores(demo)),
        small_talk=demo.accuracy([messages_of([Turn(*pair)]) for pair in SMALL_TALK]),
        sample=demo.sample(SAMPLE_PROMPT, SEED),
        sample_seed=SEED,
        num_parameters=demo.model.num_parameters(),
        vocab_size=demo.model.config.vocab_size,
    )


def skill_scores(demo: Answers) -> list[SkillScore]:
    """Scores on held-out exercises, the same ones for every model."""
    rng = Random(SEED)
    scores = []
    for skill in SKILLS:
        exercises = list(dict.fromkeys(draw(skill, Split.HELD_OUT, rng) for _ in range(EXERCISES_PER_SKILL)))
        alone = [held_out_conversation(exercise, rng, num_distractors=0) for exercise in exercises]
        later = [held_out_conversation(exercise, rng, num_distractors=NUM_DISTRACTORS) for exercise in exercises]
        scores.append(SkillScore(skill.name, skill.example, demo.accuracy(alone), demo.accuracy(later)))
        print(f"{skill.name}: {scores[-1].alone:.1%} alone, {scores[-1].after_other_turns:.1%} later", flush=True)
    return scores
