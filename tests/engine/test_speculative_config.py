"""Valid and invalid values of `speculative_config`."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.sections import parse_json
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.errors import ConfigError

NGRAM = {"method": "ngram"}
SYNTHETIC = {**NGRAM, "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("ngram", "speculative_config='ngram'"),
        ({}, "method of speculative_config=None"),
        ({"method": "medusa"}, "'medusa'"),
        ({**NGRAM, "num_speculative_token": 3}, "num_speculative_token.*Did you mean num_speculative_tokens"),
        ({**NGRAM, "colour": "red"}, "'colour' .given: 'red'.*Allowed: method"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({**NGRAM, "adaptive": 1}, "adaptive=1"),
        ({**NGRAM, "model": "demo"}, "model='demo'.*'ngram' has no draft model"),
        ({**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min=3.*prompt_lookup_max=2"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min=0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob=1.5"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "suffix_decoding_max_spec_factor=-1"),
        ({**NGRAM, "rejection_sample_method": "block"}, "rejection_sample_method='block'.*exact, standard, synthetic"),
        ({**NGRAM, "synthetic_acceptance_length": 1.5}, "needs rejection_sample_method='synthetic'"),
        (SYNTHETIC, "needs one of synthetic_acceptance_rates and"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 3.5}, "synthetic_acceptance_length=3.5.*1 to 3"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "synthetic_acceptance_rates=.0.5.*2 numbers"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6]}, "that do not rise"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_named(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.create("demo", speculative_config=given)


def test_speculation_is_off_by_default() -> None:
    for options in ({}, {"speculative_config": None}):
        assert EngineConfig.create("demo", **options).speculative == SpeculativeConfig()
    assert SpeculativeConfig().num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_min": 5, "prompt_lookup_max": 5, "adaptive": True}),
        ({**NGRAM, "prompt_lookup_max": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
        ({**NGRAM, "prompt_lookup_min": 2}, {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
        ({**NGRAM, "num_speculative_tokens": None}, {"num_speculative_tokens": 5}),
        ({"method": "suffix"}, {"num_speculative_tokens": 24}),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, {"num_speculative_tokens": 9}),
    ],
    ids=str,
)
def test_what_is_left_out_has_a_default(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_option(given)
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_command_line_takes_json() -> None:
    assert parse_json("--speculative-config", '{"method": "ngram"}') == NGRAM
    with pytest.raises(ConfigError, match="--speculative-config 'ngram' is not valid"):
        parse_json("--speculative-config", "ngram")


@pytest.mark.parametrize(
    ("given", "method", "model"),
    [
        ({"model": "ngram"}, "ngram", None),
        ({"model": "suffix", "num_speculative_tokens": 3}, "suffix", None),
        ({"model": "[ngram]"}, "ngram", None),
        ({"method": "[ngram]", "num_speculative_tokens": 2}, "ngram", None),
        ({"model": "ngram_gpu"}, "ngram", None),
        ({"model": "mtp"}, "mtp", None),
        ({"method": "qwen3_next_mtp"}, "mtp", None),
        ({"model": "deepseek_mtp"}, "mtp", None),
        ({"model": "eagle3"}, "eagle3", None),
        ({"method": "eagle", "model": "./eagle"}, "eagle", "./eagle"),
        ({"method": "ngram", "model": "ngram"}, "ngram", None),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "ngram", None),
        ({"model": "some/small-llama", "draft_tensor_parallel_size": None}, "draft_model", "some/small-llama"),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, "eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B/"}, "eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B/"),
        ({"method": "draft_model", "model": "x/eagle"}, "draft_model", "x/eagle"),
    ],
)
def test_forms_of_vllm_are_accepted(given: dict[str, Any], method: str, model: str | None) -> None:
    config = SpeculativeConfig.from_option(given)
    assert (config.method, config.model) == (method, model)


@pytest.mark.parametrize("name", ["medusa", "mlp_speculator", "dflash"])
def test_a_method_that_is_not_here_is_no_folder(name: str) -> None:
    for given in ({"model": name}, {"method": name}, {"method": name, "model": "x/y"}):
        with pytest.raises(ConfigError, match=f"method of speculative_config='{name}'.*Allowed: ngram"):
            SpeculativeConfig.from_option(given)


def test_ranks_of_the_drafter_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=2.*Allowed: 1"):
        SpeculativeConfig.from_option({"method": "ngram", "draft_tensor_parallel_size": 2})
