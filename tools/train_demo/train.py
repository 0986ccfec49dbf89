"""The training loop: Muon for the matrices, AdamW for the rest, a fixed number of steps."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from .batches import Batch, BatchMaker, Mix
from .head_start import give_head_start
from .model import ModelShape, TrainingLlama
from .muon import Muon
from .schedule import Schedule

REPORT_EVERY = 20


@dataclass(frozen=True)
class Recipe(Schedule):
    """Hyperparameters of training."""

    seed: int = 1616
    num_steps: int = 2600
    rows: Mix = field(default_factory=lambda: Mix(plays=0.25, chat=0.625, echo=0.125))
    loss_weights: Mix = field(default_factory=lambda: Mix(plays=0.3, chat=0.5, echo=0.2))
    muon_lr: float = 0.006
    adam_lr: float = 3e-3
    warmup_steps: int = 40
    decay_share: float = 0.5


@dataclass(frozen=True)
class TrainingRecord:
    """Time and final losses of training; the losses are averages over the last steps, in nats per token."""

    num_steps: int
    num_tokens: int
    num_play_tokens: int
    seconds: float
    cpu_seconds: float
    plays_loss: float
    chat_loss: float
    echo_loss: float


class Optimizer:
    """Muon for the matrices inside the layers; AdamW for the embedding and the norms."""

    def __init__(self, model: TrainingLlama, recipe: Recipe) -> None:
        matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
        inside = {id(matrix) for matrix in matrices}
        self.others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(self.others, betas=(0.9, 0.95), weight_decay=0.0)
        self.recipe = recipe

    def step(self, step: int) -> None:
        """Update all parameters from their gradients, then drop the gradients."""
        factor = self.recipe.lr_factor(step)
        nn.utils.clip_grad_norm_(self.others, self.recipe.max_grad_norm)
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(self.recipe.muon_lr * factor)


def train(plays: str, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> tuple[TrainingLlama, TrainingRecord]:
    """Train a model from scratch on the plays and on generated conversations."""
    torch.manual_seed(recipe.seed)
    model = TrainingLlama(ModelShape(vocab_size=len(tokenizer)))
    give_head_start(model)
    optimizer = Optimizer(model, recipe)
    batches = BatchMaker(plays, tokenizer, recipe.seed)

    started, cpu_started = time.monotonic(), time.process_time()
    average = torch.zeros(3)
    weights = torch.tensor(astuple(recipe.loss_weights))
    num_tokens = num_play_tokens = 0
    for step in range(recipe.num_steps):
        row_length = recipe.row_length_at(step)
        batch = batches.make(recipe.rows.shares_of(recipe.tokens_per_step // row_length), row_length)
        num_tokens += batch.ids_BT.numel()
        num_play_tokens += batch.num_rows[0] * row_length
        losses = _loss_of_each_kind(model, batch)
        (losses @ weights).backward()
        optimizer.step(step)
        present = torch.tensor(batch.num_rows) > 0
        average = average.lerp(losses.detach(), 1 / min(step + 1, REPORT_EVERY)).where(present, average)
        if (step + 1) % REPORT_EVERY == 0:
            _report(step + 1, recipe.num_steps, average, time.monotonic() - started)

    record = TrainingRecord(
        num_steps=recipe.num_steps,
        num_tokens=num_tokens,
        num_play_tokens=num_play_tokens,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu_started,
        plays_loss=average[0].item(),
        chat_loss=average[1].item(),
        echo_loss=average[2].item(),
    )
    return model, record


def _loss_of_each_kind(model: TrainingLlama, batch: Batch) -> Tensor:
    """Mean loss over the predicted tokens of each kind of row, [3]; 0 where there is none."""
    losses = model.losses(batch.ids_BT, batch.targets_BT, batch.wanted_BT)
    num_tokens = [int(rows.sum()) for rows in batch.wanted_BT.split(batch.num_rows)]
    return torch.stack([part.sum() / max(part.numel(), 1) for part in losses.split(num_tokens)])


def _report(step: int, num_steps: int, average: Tensor, seconds: float) -> None:
    minutes_left = seconds / step * (num_steps - step) / 60
    plays, chat, echo = average.tolist()
    losses = f"{plays:.3f} plays, {chat:.3f} chat, {echo:.3f} echo"
    print(f"step {step:5d} of {num_steps}  loss {losses}  {minutes_left:4.1f} minutes left", flush=True)
