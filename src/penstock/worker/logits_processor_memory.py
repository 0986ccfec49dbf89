"""What custom logits processors keep, which only they know: they are made once, and their tensors counted."""

from __future__ import annotations

import torch

from penstock.config import SamplingConfig
from penstock.device import Device
from penstock.runner.sampling import ProcessorContext
from penstock.runner.sampling.custom_processors import CustomProcessors
from penstock.runner.sampling.load_processors import load_logits_processors
from penstock.runner.sampling.thinking_budget import ThinkingBudget


def measure_logits_processors(
    sampling: SamplingConfig, device: Device, *, max_num_reqs: int, max_model_len: int, vocab_size: int
) -> int:
    """Bytes of the tensors that an engine's custom logits processors make with themselves.

    Raises ConfigError when one cannot be loaded or made.
    """
    classes = [found for found in load_logits_processors(sampling.logits_processors) if found is not ThinkingBudget]
    if not classes:
        return 0
    num_slots = max_num_reqs + 1
    # Like the runner's own table, it takes no memory before it is written to.
    token_ids = device.allocate(num_slots * max_model_len * 4).view(torch.int32).view(num_slots, max_model_len)
    context = ProcessorContext(device, num_slots, vocab_size, token_ids)
    with device.measure_peak() as peak:
        CustomProcessors(context, classes)
    return peak.bytes_above_start
