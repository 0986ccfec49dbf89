"""Stages of a pipeline, one after the other, compute what the whole model does; each has its own weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig
from penstock.loader.loader import load_model
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState
from support.checkpoints import oracle_logits, save_checkpoint, tiny_model
from support.plain_attention import plain_context
from support.ranks import SilentGroup

TOKENS = [3, 14, 15, 92, 65, 35]
LAYERS = (2, 3, 1)


def num_values(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": sum(LAYERS)}),
        ("llama", {"num_hidden_layers": sum(LAYERS), "tie_word_embeddings": True}),
        ("gpt2", {"n_layer": sum(LAYERS)}),
        ("gpt2", {"n_layer": sum(LAYERS), "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_stages_compute_what_the_whole_model_does(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = tiny_model(family, **changes)
    config = save_checkpoint(oracle, tmp_path)

    ranks = [
        ParallelState(pipeline=SilentGroup(rank, len(LAYERS)), pipeline_layers=LAYERS) for rank in range(len(LAYERS))
    ]
    stages: list[Any] = [
        load_model(config, LoadConfig(use_tqdm_on_load=False), rank, torch.device("cpu"), torch.float32)
        for rank in ranks
    ]
    given: tuple[torch.Tensor, ...] = ()
    ids, positions = torch.tensor(TOKENS, dtype=torch.int32), torch.arange(len(TOKENS))
    with torch.no_grad():
        for stage in stages:
            given = (stage(ids, positions, plain_context(stage, [len(TOKENS)]), *given),)
        logits = stages[-1].compute_logits(*given, NO_CONTEXT)
    torch.testing.assert_close(logits, oracle_logits(oracle, TOKENS), rtol=1e-4, atol=1e-4)
    # A tied embedding is in the last stage too.
    again = oracle.get_input_embeddings().weight.numel() if oracle.config.tie_word_embeddings else 0
    built = [find_model_class(config)(config, rank) for rank in ranks]
    assert sum(map(num_values, built)) == num_values(oracle) + again
