"""Mixtures whose routers are uneven: ties, an expert without tokens, and one with all of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from support.checkpoints import tiny_model

IDLE, FIRST, ALL, SECOND = 0, 1, 2, 4


def uneven_mixture(family: str, **overrides: Any) -> PreTrainedModel:
    """A model whose tokens all take expert `ALL` and, by a tie, `FIRST` or its copy `SECOND`; none takes `IDLE`."""
    groups = {} if family == "gpt_oss" else {"n_group": 1, "topk_group": 1}
    oracle = tiny_model(family, **{"num_experts_per_tok": 2, **groups, **overrides})
    with torch.no_grad():
        for layer in oracle.model.layers:
            router = getattr(layer.mlp, "router", None) or getattr(layer.mlp, "gate", None)
            if router is None:  # a dense layer
                continue
            for parameter in (*layer.mlp.experts.parameters(), *router.parameters()):
                parameter[SECOND] = parameter[FIRST]
            bias = router.bias if family == "gpt_oss" else router.e_score_correction_bias
            bias.zero_()
            bias[IDLE], bias[ALL], bias[FIRST], bias[SECOND] = -40.0, 40.0, 20.0, 20.0
    return oracle
