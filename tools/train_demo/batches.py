"""Training rows: every row starts afresh, with a speech or a conversation, and is filled to the end."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .dialogue import training_conversation
from .shakespeare import speech_starts
from .tokenizer import BEGIN, encode_conversation, token_ids

CHARS_PER_TOKEN = 6  # more than there are, to have enough text for a row
SHORTEST_ECHO, LONGEST_ECHO = 4, 64


@dataclass(frozen=True)
class Mix:
    """One number for each kind of row: plays, conversations, and echoes (random tokens, over and over)."""

    plays: float
    chat: float
    echo: float

    def shares_of(self, num_rows: int) -> tuple[int, int, int]:
        """Whole numbers of rows in these proportions: at least one of plays, and chat takes what is left over."""
        total = self.plays + self.chat + self.echo
        plays = max(1, round(num_rows * self.plays / total))
        echo = int(num_rows * self.echo / total)
        return plays, num_rows - plays - echo, echo


@dataclass(frozen=True)
class Batch:
    """Tokens, the token that follows each of them, and whether the model is to predict that one.

    `num_rows` counts the rows of each kind; the plays come first, then conversations, then echoes.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    wanted_BT: Tensor
    num_rows: tuple[int, int, int]


class BatchMaker:
    """Makes batches, the same ones for the same seed."""

    def __init__(self, plays: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.plays = plays
        self.starts = speech_starts(plays)
        self.tokenizer = tokenizer
        self.words = range(max(tokenizer.all_special_ids) + 1, len(tokenizer))
        self.rng = Random(seed)

    def make(self, num_rows: tuple[int, int, int], row_length: int) -> Batch:
        """A batch with rows of `row_length` tokens."""
        makers = (self._play_row, self._chat_row, self._echo_row)
        rows = [make(row_length + 1) for make, count in zip(makers, num_rows, strict=True) for _ in range(count)]
        ids = torch.tensor([row_ids for row_ids, _ in rows])
        predicted = torch.tensor([row_predicted for _, row_predicted in rows])
        return Batch(ids[:, :-1], ids[:, 1:], predicted[:, 1:], num_rows)

    def _play_row(self, length: int) -> tuple[list[int], list[bool]]:
        while True:
            start = self.rng.choice(self.starts)
            text = self.plays[start : start + length * CHARS_PER_TOKEN]
            ids = token_ids(self.tokenizer, BEGIN + text)[:length]
            if len(ids) == length:
                return ids, [True] * length

    def _chat_row(self, length: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        predicted: list[bool] = []
        while len(ids) < length:
            messages = training_conversation(self.rng)
            new_ids, new_predicted = encode_conversation(self.tokenizer, messages)
            ids += new_ids
            predicted += new_predicted
        return ids[:length], predicted[:length]

    def _echo_row(self, length: int) -> tuple[list[int], list[bool]]:
        """A few random tokens again and again: the quickest way to learn to copy, which most of the skills build on."""
        period = self.rng.randint(SHORTEST_ECHO, LONGEST_ECHO)
        pattern = self.rng.choices(self.words, k=period)
        ids = [self.tokenizer.bos_token_id, *pattern * (length // period + 1)]
        return ids[:length], ([False] * (period + 1) + [True] * length)[:length]
