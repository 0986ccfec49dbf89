"""Options of recurrent states."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.config.cache import CacheConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode='some' is not valid. Allowed: align, all, none"),
        ({"mamba_block_size": 0}, "mamba_block_size=0 is not valid"),
        ({"mamba_block_size": 24}, "mamba_block_size=24 is not valid with block_size=16. Allowed: its multiples"),
        ({"mamba_cache_dtype": "float16"}, "mamba_cache_dtype='float16' is not valid"),
        ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype='int8' is not valid"),
    ],
    ids=str,
)
def test_what_is_not_valid_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**options)


def test_states_that_no_request_would_reach_are_refused() -> None:
    message = (
        r"mamba_block_size=144 is not valid with a context of 128 tokens: no state would be kept\. Use at most that"
    )
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create("demo", max_model_len=128, mamba_block_size=144)
    assert EngineConfig.create("demo", max_model_len=128, mamba_block_size=128).cache.mamba_block_size == 128


def test_states_are_float32_by_default_and_have_the_dtype_of_all_that_is_kept() -> None:
    assert CacheConfig().state_dtypes == ("float32", "float32")
    assert CacheConfig(mamba_cache_dtype="bfloat16").state_dtypes == ("bfloat16", "bfloat16")
    assert CacheConfig(mamba_ssm_cache_dtype="bfloat16").state_dtypes == ("float32", "bfloat16")
    assert CacheConfig(mamba_cache_dtype="bfloat16", mamba_ssm_cache_dtype="float32").state_dtypes[1] == "float32"


def test_without_prefix_caching_there_are_no_snapshots() -> None:
    assert CacheConfig(mamba_cache_mode="all").snapshots == "all"
    assert CacheConfig(mamba_cache_mode="all", enable_prefix_caching=False).snapshots == "none"
