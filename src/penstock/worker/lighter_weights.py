"""Bytes that int8 weights would save, for the advice of an engine that does not fit into memory."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig
from penstock.worker.capabilities import allows_options

# Of the bytes of a matrix in bfloat16, those that remain in int8, its scales included; of float32 fewer remain.
_INT8_SHARE = 0.52
_FLOAT_BYTES = 2


def saved_by_int8_weights(config: EngineConfig, weights: int) -> int:
    """Bytes that `quantization="int8"` saves of a worker's weights, at least; 0 where it is not possible.

    The embedding and the output projection are counted as they are.
    """
    model = config.model
    if model.quantization is not None or "quantization_config" in model.hf_config:
        return 0
    if not allows_options(replace(config, model=replace(model, quantization="int8"))):
        return 0
    kept = 2 * model.vocab_size * model.hidden_size * _FLOAT_BYTES
    return int((1 - _INT8_SHARE) * max(0, weights - kept))
