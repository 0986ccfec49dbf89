"""Options that no machine can have are refused by name, before anything is taken for them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, ModelNotFound


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"num_threads": 10**9}, "1 to 1,024"),
        ({"max_num_seqs": 10**9}, "1 to 65,536"),
        ({"max_num_batched_tokens": 2**40}, "1 to 16,777,216"),
    ],
)
def test_a_number_that_no_machine_has_is_refused(options: dict[str, Any], allowed: str) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}={options[name]} is not valid. Allowed: an integer from {allowed}"):
        EngineConfig.create("demo", **options)


def test_a_name_that_is_no_path_is_refused() -> None:
    with pytest.raises(ModelNotFound, match=r"model='\.\./.*File name too long"):
        EngineConfig.create("../" * 5000)
