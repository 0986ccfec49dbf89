"""Fields of `generation_config.json`: default sampling parameters, and end-of-sequence tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.checkpoints.json_file import shown
from penstock.errors import ModelError

GENERATION_CONFIG_FILE = "generation_config.json"
DO_SAMPLE = "do_sample"
# Fields that are read, and the sampling parameters that they set.
SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Token ids are 32-bit integers.
_MAX_TOKENS = 2**31


def end_token_ids(content: Mapping[str, Any], source: str) -> frozenset[int]:
    """Ids of `eos_token_id`; some checkpoints write -1 for none."""
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int and -1 <= one < _MAX_TOKENS for one in ids):
        raise ModelError(f"{source} has eos_token_id={shown(value)}. It must be a token id, a list of them, or null.")
    return frozenset(one for one in ids if one >= 0)
