"""Adapters of the command line."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.features.lora.modules import read_lora_modules
from penstock.features.lora.request import LoRARequest


def fields(adapter: LoRARequest) -> tuple[str, int, str, str]:
    return adapter.lora_name, adapter.lora_int_id, adapter.lora_path, adapter.base_model_name


def test_adapters_are_given_as_name_and_path_or_as_json() -> None:
    found = read_lora_modules(
        [
            "plays=adapters/plays=1",
            '{"name": "poems", "path": "p"}',
            '{"name": "a", "path": "b", "base_model_name": "c"}',
            '{"name": "d", "path": "e", "base_model_name": null}',
        ]
    )
    assert [fields(adapter) for adapter in found] == [
        ("plays", 1, "adapters/plays=1", ""),
        ("poems", 2, "p", ""),
        ("a", 3, "b", "c"),
        ("d", 4, "e", ""),
    ]


@pytest.mark.parametrize(
    "module",
    [
        "plays",
        "=path",
        "plays=",
        "{plays}",
        '{"name": "plays"}',
        '{"name": 1, "path": "p"}',
        '{"name": "a", "path": "b", "rank": 8}',
    ],
)
def test_another_form_is_refused_with_those_that_are_allowed(module: str) -> None:
    with pytest.raises(ConfigError, match="Allowed: name=path, or .*base_model_name"):
        read_lora_modules([module])


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="'a' twice"):
        read_lora_modules(["a=x", '{"name": "a", "path": "y"}'])
