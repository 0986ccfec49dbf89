"""Models in every form that their weights take in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import FAMILIES, MIXTURES, RECURRENT
from support.quantized_checkpoints import W8A8, awq_layer, gptq_layer, int8_layer, packed_layer, w4a16

LOAD = LoadConfig(use_tqdm_on_load=False)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
# Quantised checkpoints by name: how a layer is quantised, and what config.json says.
QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq_layer(32, desc_act=False), {**_GPTQ, "desc_act": False}),
    "act-order": (gptq_layer(32, desc_act=True), {**_GPTQ, "desc_act": True}),
    "awq": (awq_layer(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "w4a16": (packed_layer(32, symmetric=False), w4a16(symmetric=False)),
    "w8a8": (int8_layer, W8A8),
}


def load(config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(config, LOAD, ParallelState(), torch.device("cpu"), dtype)


def family_cases(*, one_in: int = 1) -> list[Any]:
    """Parameters (family, quantization): all native families in floats, int8 and int4.

    The quick suite has one form of one in so many families; others are slow.
    """
    return [
        pytest.param(family, form, marks=[] if index % (3 * one_in) == one_in * number else [pytest.mark.slow])
        for index, family in enumerate([*FAMILIES, *MIXTURES, *RECURRENT])
        for number, form in enumerate([None, "int8", "int4"])
    ]
