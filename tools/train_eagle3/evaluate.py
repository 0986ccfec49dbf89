"""Measures the acceptance of an EAGLE-3 head's draft tokens, on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tools.train_demo.dialogue import held_out_conversation
from tools.train_demo.shakespeare import speech_starts
from tools.train_demo.skills import SKILLS, Split
from tools.train_demo.skills import draw as draw_exercise
from tools.train_demo.tokenizer import BEGIN, token_ids
from torch import Tensor

from penstock import SamplingParams

from .head import Eagle3Head, load_head
from .target import Target, draw
from .texts import continued

SEED = 2025
NUM_DRAFTS = 4
NUM_SPEECHES = 64
SHORTEST_PROMPT, LONGEST_PROMPT = 4, 40
EXERCISES_PER_SKILL = 6
NUM_DISTRACTORS = 3
NEW_TOKENS = 64
TEMPERATURES = (0.0, 0.7, 1.0)
ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of draft tokens after one prompt, or after several.

    num_drafted: by position, in how many rounds there was a draft, not counting those for tokens beyond the end.
    num_accepted: by position, in how many of the rounds it was accepted, which takes that those before it were.
    """

    num_drafted: list[int]
    num_accepted: list[int]

    @property
    def shares(self) -> list[float]:
        """Acceptance rate by position."""
        return [accepted / drafted for accepted, drafted in zip(self.num_accepted, self.num_drafted, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens that a forward pass of the target gives."""
        return 1 + sum(self.num_accepted) / self.num_drafted[0]


def total(parts: Sequence[Acceptance]) -> Acceptance:
    """All prompts together."""
    drafted, accepted = (
        [sum(counts) for counts in zip(*columns, strict=True)]
        for columns in ((part.num_drafted for part in parts), (part.num_accepted for part in parts))
    )
    return Acceptance(drafted, accepted)


@dataclass(frozen=True)
class Score:
    """Acceptance on one kind of prompts at one temperature: of each prompt, and of all."""

    kind: str
    temperature: float
    of_prompts: list[Acceptance]
    of_all: Acceptance


@dataclass(frozen=True)
class Evaluation:
    """Results of the evaluation of a head. prompts: by kind, as token ids."""

    num_parameters: int
    num_drafts: int
    new_tokens: int
    prompts: dict[str, list[list[int]]]
    scores: list[Score]


def evaluate(folder: Path, target: Target, held_out_plays: str) -> Evaluation:
    """Measure the head in the folder."""
    head = load_head(folder, target.model.config)
    prompts = {"plays": speeches(target, held_out_plays), "chat": questions(target)}
    scores = []
    for kind, prompts_of_kind in prompts.items():
        for temperature in TEMPERATURES:
            of_prompts = acceptance(head, target, prompts_of_kind, temperature)
            scores.append(Score(kind, temperature, of_prompts, total(of_prompts)))
            shares = " ".join(f"{share:.1%}" for share in scores[-1].of_all.shares)
            print(f"{kind} at temperature {temperature}: accepted by position {shares}", flush=True)
    return Evaluation(sum(weight.numel() for weight in head.parameters()), NUM_DRAFTS, NEW_TOKENS, prompts, scores)


def speeches(target: Target, plays: str) -> list[list[int]]:
    """Openings of speeches of the held-out plays."""
    rng = Random(SEED)
    starts = rng.sample(speech_starts(plays)[:-20], NUM_SPEECHES)
    lengths = [rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in starts]
    return [
        token_ids(target.tokenizer, BEGIN + plays[start : start + 1000])[:length]
        for start, length in zip(starts, lengths, strict=True)
    ]


def questions(target: Target) -> list[list[int]]:
    """Conversations that end with a question of a held-out exercise, half of them after unrelated turns."""
    rng = Random(SEED)
    conversations = [
        held_out_conversation(draw_exercise(skill, Split.HELD_OUT, rng), rng, NUM_DISTRACTORS * (number % 2))
        for skill in SKILLS
        for number in range(EXERCISES_PER_SKILL)
    ]
    texts = target.tokenizer.apply_chat_template(
        [list(messages[:-1]) for messages in conversations], add_generation_prompt=True, tokenize=False
    )
    return [token_ids(target.tokenizer, text) for text in texts]


def acceptance(head: Eagle3Head, target: Target, prompts: Sequence[list[int]], temperature: float) -> list[Acceptance]:
    """Acceptance for each prompt. Prompt number i has the seed i; the head samples with the target's noise."""
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=NEW_TOKENS) for seed in range(len(prompts))]
    rows = continued(target.folder, prompts, params)
    parts: list[Acceptance] = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        is_accepted_SBT = accepted_drafts(head, target, rows[some], temperature, torch.arange(len(rows))[some])
        for number, (row, prompt) in enumerate(zip(rows[some], prompts[some], strict=True)):
            parts.append(_walk(is_accepted_SBT[:, number].tolist(), len(prompt), len(row)))
    return parts


@torch.inference_mode()
def accepted_drafts(
    head: Eagle3Head, target: Target, rows: Sequence[list[int]], temperature: float, seeds_B: Tensor
) -> Tensor:
    """Acceptance of draft tokens, bool [drafts, B, T]: at position t those drafted after token t + 1.

    A draft is only ever accepted after accepted ones, which are the row's own tokens: so all are computed at once.
    """
    length = max(len(row) for row in rows)
    ids_BT = torch.tensor([row + [0] * (length + NUM_DRAFTS + 1 - len(row)) for row in rows])
    places_T = torch.arange(length)
    aux_BTA = target.states(ids_BT).aux_BTA[:, places_T]
    embedded = target.embedded(ids_BT[:, 1:])
    so_far_BT = torch.ones(len(rows), length, dtype=torch.bool)
    accepted = []
    for step, hidden_BTE in enumerate(head.rollout(aux_BTA, embedded, NUM_DRAFTS, places_T)):
        logits_BTV = torch.full((*so_far_BT.shape, head.config.vocab_size), float("-inf"))
        logits_BTV[..., head.target_ids] = head.logits(hidden_BTE)
        drawn_BT = draw(
            logits_BTV.flatten(0, 1),
            torch.full((so_far_BT.numel(),), temperature),
            seeds_B.repeat_interleave(length),
            (places_T + 1 + step).repeat(len(rows)),
        ).view_as(so_far_BT)
        so_far_BT = so_far_BT & (drawn_BT == ids_BT[:, places_T + 2 + step])
        accepted.append(so_far_BT)
    return torch.stack(accepted)


def _walk(is_accepted_ST: list[list[bool]], prompt_length: int, length: int) -> Acceptance:
    """Rounds from the prompt's end on, each of which starts after the accepted drafts and the target's own token."""
    num_drafted, num_accepted = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS
    place = prompt_length - 1
    while (num_left := length - place - 2) > 0:
        of_round = [of_step[place] for of_step in is_accepted_ST[:num_left]]
        for position, is_accepted in enumerate(of_round):
            num_drafted[position] += 1
            num_accepted[position] += is_accepted
        place += sum(of_round) + 1
    return Acceptance(num_drafted, num_accepted)
