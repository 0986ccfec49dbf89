"""Training schedule: steps, row lengths and learning rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Schedule fields that the recipes of all models share."""

    num_steps: int
    warmup_steps: int
    decay_share: float
    tokens_per_step: int = 2048
    row_length: int = 256
    long_row_length: int = 1024
    long_row_every: int = 8
    max_grad_norm: float = 1.0

    def lr_factor(self, step: int) -> float:
        """Learning rate at a step relative to the highest: a warm-up, a plateau, then a line down to almost zero."""
        decay_steps = self.decay_share * self.num_steps
        return min((step + 1) / self.warmup_steps, 1.0, (self.num_steps - step) / decay_steps)

    def row_length_at(self, step: int) -> int:
        """Most steps have short rows; some have rows as long as the context, so that all positions are learnt."""
        return self.long_row_length if step % self.long_row_every == self.long_row_every - 1 else self.row_length
