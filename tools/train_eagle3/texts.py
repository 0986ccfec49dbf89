"""What the head learns from: texts of the demo model's training, and continuations by the model itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tools.train_demo.batches import BatchMaker
from tools.train_demo.tokenizer import token_ids
from torch import Tensor

from penstock import LLM, SamplingParams

TEMPERATURES = (0.0, 0.7, 0.85, 1.0)
LONGEST_PROMPT = 48
KV_CACHE_BYTES = 256 << 20
VOCABULARY_CONVERSATION_ROWS = 400


@dataclass(frozen=True)
class Mix:
    """One number for each kind of row: plays, conversations, and the model's own continuations of plays."""

    plays: float
    chat: float
    own: float

    def shares_of(self, num_rows: int) -> tuple[int, int, int]:
        """Whole numbers of rows in these proportions: at least one of plays, and chat takes what is left over."""
        total = self.plays + self.chat + self.own
        plays = max(1, round(num_rows * self.plays / total))
        own = int(num_rows * self.own / total)
        return plays, num_rows - plays - own, own


@dataclass(frozen=True)
class Rows:
    """Tokens of rows, and whether the token that follows each of them is one to draft. Both [B, T]."""

    ids_BT: Tensor
    wanted_BT: Tensor


def continued(folder: Path, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The prompts with what the model of the folder goes on to say, as Penstock generates it."""
    with LLM(folder, device="cpu", num_threads=torch.get_num_threads(), kv_cache_memory_bytes=KV_CACHE_BYTES) as llm:
        outputs = llm.generate(prompts, list(params), use_tqdm=False)
    return [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]


def continued_speeches(folder: Path, batches: BatchMaker, num_rows: int, length: int) -> Tensor:
    """Rows [num_rows, length] that begin with a speech of the plays and go on as the model does, warm or greedy."""
    rng = batches.rng
    openings = batches.make((num_rows, 0, 0), LONGEST_PROMPT).ids_BT.tolist()
    prompts = [opening[: rng.randint(2, LONGEST_PROMPT)] for opening in openings]
    params = [
        SamplingParams(
            temperature=rng.choice(TEMPERATURES),
            seed=rng.getrandbits(62),
            max_tokens=length - len(prompt),
            ignore_eos=True,
        )
        for prompt in prompts
    ]
    return torch.tensor(continued(folder, prompts, params))


def drafted_vocabulary(plays: str, batches: BatchMaker, size: int) -> list[int]:
    """The ids of the tokens that are said most often in plays and in the assistant's turns, ascending."""
    rows = batches.make((0, VOCABULARY_CONVERSATION_ROWS, 0), 256)
    said = (token_ids(batches.tokenizer, plays), rows.targets_BT[rows.wanted_BT].tolist())
    shares: dict[int, float] = defaultdict(float)
    for ids in said:
        for token, count in Counter(ids).items():
            shares[token] += count / len(ids)
    most_often = sorted(shares, key=shares.__getitem__, reverse=True)[:size]
    never_said = (token for token in range(len(batches.tokenizer)) if token not in shares)
    return sorted([*most_often, *(next(never_said) for _ in range(size - len(most_often)))])


class RowMaker:
    """Mixes rows of plays, of conversations, and of the model's own."""

    def __init__(self, batches: BatchMaker, own_BT: Tensor, mix: Mix) -> None:
        self.batches = batches
        self.own_BT = own_BT
        self.mix = mix

    def make(self, num_rows: int, length: int) -> Rows:
        """Rows of `length` tokens. Where the model's own have another length, plays take their place."""
        plays, chat, own = self.mix.shares_of(num_rows)
        if length != self.own_BT.shape[1]:
            plays, own = plays + own, 0
        batch = self.batches.make((plays, chat, 0), length)
        if not own:
            return Rows(batch.ids_BT, batch.wanted_BT)
        own_BT = self.own_BT[self.batches.rng.sample(range(len(self.own_BT)), own)]
        is_wanted = torch.ones_like(own_BT, dtype=torch.bool)
        return Rows(torch.cat((batch.ids_BT, own_BT)), torch.cat((batch.wanted_BT, is_wanted)))
