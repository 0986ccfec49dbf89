"""Options that nothing would go by in an arrangement are refused, with the other option that is in their way."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.config.parallel import ParallelConfig
from penstock.errors import ConfigError

LAUNCHED = {"distributed_executor_backend": "external_launcher"}


@pytest.mark.parametrize(
    ("option", "without", "needed"),
    [
        ({"pipeline_layers": (6,)}, {}, None),
        ({"cp_kv_cache_interleave_size": 2}, {"tensor_parallel_size": 2}, {"decode_context_parallel_size": 2}),
        ({"enable_sp": True}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"sp_min_token_num": 8}, {"tensor_parallel_size": 2}, {"enable_sp": True}),
        ({"ray_placement": "SPREAD"}, {"tensor_parallel_size": 2}, {"distributed_executor_backend": "ray"}),
        ({"start_timeout_s": 9.0}, LAUNCHED, {"distributed_executor_backend": "ray"}),
        (
            {"data_parallel_size_local": 2},
            {"data_parallel_size": 4, "data_parallel_rank": 3, **LAUNCHED},
            {"distributed_executor_backend": None},
        ),
        (
            {"data_parallel_rank_local": 0},
            {"data_parallel_size": 4, "data_parallel_rank": 3, **LAUNCHED},
            {"distributed_executor_backend": None},
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    option: dict[str, Any], without: dict[str, Any], needed: dict[str, Any] | None
) -> None:
    """`needed`: with this besides, it has an effect; None where nothing helps."""
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=rf"^{name}=.* has no effect with .*Leave it out, or change"):
        ParallelConfig(**without, **option)
    if needed is not None:
        assert getattr(ParallelConfig(**{**without, **needed}, **option), name) == value


def test_what_is_said_as_it_is_anyway_is_taken() -> None:
    ParallelConfig(enable_sp=False, sp_min_token_num=256, cp_kv_cache_interleave_size=1, ray_placement="PACK")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2048),
        ({"max_num_batched_tokens": None}, 2048),
        ({"pipeline_parallel_size": 2}, 512),
        ({"pipeline_parallel_size": 2, "max_num_batched_tokens": None}, 512),
        ({"pipeline_parallel_size": 2, "max_num_batched_tokens": 2048}, 2048),
    ],
)
def test_stages_get_small_steps_unless_a_request_says_otherwise(options: dict[str, Any], expected: int) -> None:
    assert EngineConfig.create("demo", **options).scheduler.max_num_batched_tokens == expected
