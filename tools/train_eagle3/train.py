"""The training loop: a rollout of several drafts from every token, each compared with what the target would say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from tools.train_demo.batches import BatchMaker
from tools.train_demo.muon import Muon
from tools.train_demo.schedule import Schedule
from torch import Tensor, nn

from .head import Eagle3Head, warm_head
from .target import Target
from .texts import Mix, RowMaker, Rows, continued_speeches, drafted_vocabulary

REPORT_EVERY = 20


@dataclass(frozen=True)
class Recipe(Schedule):
    """Hyperparameters of training.

    num_drafts: draft steps in the loss; each weighs `draft_decay` of the one before.
    later_stride: stride of the positions at which drafts after the first are trained.
    """

    seed: int = 1623
    num_steps: int = 1600
    num_drafts: int = 4
    draft_decay: float = 0.8
    later_stride: int = 4
    draft_vocab_size: int = 1280
    num_own_rows: int = 768
    mix: Mix = field(default_factory=lambda: Mix(plays=0.125, chat=0.375, own=0.5))
    muon_lr: float = 0.012
    adam_lr: float = 3e-3
    warmup_steps: int = 20
    decay_share: float = 0.7


@dataclass(frozen=True)
class TrainingRecord:
    """Time of training, with the generation of texts; the losses, one per draft, are averages over the last steps."""

    num_steps: int
    num_tokens: int
    num_threads: int
    seconds: float
    cpu_seconds: float
    losses: list[float]


class Optimizer:
    """Muon for the matrices inside the head; AdamW for its output matrix and the norms."""

    def __init__(self, head: Eagle3Head, recipe: Recipe) -> None:
        matrices = [weight for part in (head.fc, head.midlayer) for weight in part.parameters() if weight.ndim == 2]
        inside = {id(matrix) for matrix in matrices}
        self.others = [parameter for parameter in head.parameters() if id(parameter) not in inside]
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


def train(plays: str, target: Target, recipe: Recipe) -> tuple[Eagle3Head, TrainingRecord]:
    """Train a head for the target."""
    started, cpu_started = time.monotonic(), time.process_time()
    torch.manual_seed(recipe.seed)
    batches = BatchMaker(plays, target.tokenizer, recipe.seed)
    own_BT = continued_speeches(target.folder, batches, recipe.num_own_rows, recipe.row_length)
    print(f"the target wrote {own_BT.numel():,} tokens in {time.monotonic() - started:.0f} seconds", flush=True)
    rows = RowMaker(batches, own_BT, recipe.mix)
    head = warm_head(target.model, drafted_vocabulary(plays, batches, recipe.draft_vocab_size))
    optimizer = Optimizer(head, recipe)

    average = torch.zeros(recipe.num_drafts)
    weights = recipe.draft_decay ** torch.arange(recipe.num_drafts)
    num_tokens = 0
    for step in range(recipe.num_steps):
        row_length = recipe.row_length_at(step)
        batch = rows.make(recipe.tokens_per_step // row_length, row_length)
        num_tokens += batch.ids_BT.numel()
        chosen_P = torch.arange(step % recipe.later_stride, row_length - recipe.num_drafts, recipe.later_stride)
        losses = draft_losses(head, target, batch, recipe.num_drafts, chosen_P)
        (losses @ weights).backward()
        optimizer.step(step)
        average = average.lerp(losses.detach(), 1 / min(step + 1, REPORT_EVERY))
        if (step + 1) % REPORT_EVERY == 0:
            _report(step + 1, recipe.num_steps, average, time.monotonic() - started)
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    num_threads = torch.get_num_threads()
    return head, TrainingRecord(recipe.num_steps, num_tokens, num_threads, seconds, cpu_seconds, average.tolist())


def draft_losses(head: Eagle3Head, target: Target, rows: Rows, num_drafts: int, chosen_P: Tensor) -> Tensor:
    """Divergence of the head's distribution from the target's at each draft, [num_drafts], in nats.

    The Kullback-Leibler divergence over the tokens that the head can draft: soft cross-entropy, less what no head can
    get below. First drafts are learnt at all places of the rows where the token is wanted, later ones at chosen places.
    """
    aux_BTA, logits_BTV = target.states(rows.ids_BT)
    places_T = torch.arange(rows.ids_BT.shape[1] - num_drafts)
    embedded = target.embedded(rows.ids_BT[:, 1:])
    losses = []
    for draft, hidden in enumerate(head.rollout(aux_BTA[:, places_T], embedded, num_drafts, chosen_P)):
        taken = (chosen_P if draft else places_T) + draft + 1
        is_wanted = rows.wanted_BT[:, taken]
        wished = logits_BTV[:, taken][is_wanted].index_select(-1, head.target_ids).log_softmax(dim=-1)
        drafted = head.logits(hidden[is_wanted]).log_softmax(dim=-1)
        losses.append(nn.functional.kl_div(drafted, wished, reduction="batchmean", log_target=True))
    return torch.stack(losses)


def _report(step: int, num_steps: int, average: Tensor, seconds: float) -> None:
    minutes_left = seconds / step * (num_steps - step) / 60
    losses = " ".join(f"{loss:.3f}" for loss in average.tolist())
    print(f"step {step:5d} of {num_steps}  loss by draft {losses}  {minutes_left:4.1f} minutes left", flush=True)
