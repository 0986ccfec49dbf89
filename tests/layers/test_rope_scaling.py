"""Rotary frequencies are Transformers', for every kind and every setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.kernels.rotary import apply_rotary
from penstock.layers.rope_scaling import RopeParameters, read_rope_parameters, rope_frequencies
from penstock.layers.rotary import LayerRotations, RotaryEmbedding

HEAD_SIZES = st.sampled_from([16, 32, 64, 80, 128])
THETAS = st.sampled_from([10000.0, 500000.0, 1000000.0])
FACTORS = st.floats(1.0, 40.0)
ORIGINAL_LENGTHS = st.sampled_from([32, 512, 4096, 8192])
MAX_POSITIONS = 16384


def ours(head_size: int, rope: dict[str, Any], num_positions: int = MAX_POSITIONS) -> RopeParameters:
    config = {"max_position_embeddings": MAX_POSITIONS, "rope_parameters": rope}
    return read_rope_parameters(config, head_size=head_size, num_positions=num_positions, may_be_partial=True)


def theirs(head_size: int, rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        head_dim=head_size, max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(rope), hidden_size=64
    )


def assert_equal_to_transformers(head_size: int, rope: dict[str, Any]) -> None:
    inv_freq, scaling = rope_frequencies(ours(head_size, rope))
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs(head_size, rope), "cpu")
    torch.testing.assert_close(inv_freq, expected, rtol=5e-6, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


@given(HEAD_SIZES, THETAS)
@settings(deadline=None)
def test_default(head_size: int, theta: float) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    inv_freq, scaling = rope_frequencies(ours(head_size, rope))
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs(head_size, rope))
    assert torch.equal(inv_freq, expected)
    assert scaling == 1.0


@given(HEAD_SIZES, THETAS, FACTORS)
@settings(deadline=None)
def test_linear(head_size: int, theta: float, factor: float) -> None:
    assert_equal_to_transformers(head_size, {"rope_type": "linear", "rope_theta": theta, "factor": factor})


@given(HEAD_SIZES, THETAS, FACTORS, ORIGINAL_LENGTHS, st.floats(0.5, 2.0), st.floats(2.5, 8.0))
@settings(deadline=None)
def test_llama3(head_size: int, theta: float, factor: float, original: int, low: float, high: float) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    assert_equal_to_transformers(head_size, rope)


YARN_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "attention_factor": st.floats(0.5, 2.0),
        "mscale": st.floats(0.1, 2.0),
        "mscale_all_dim": st.floats(0.1, 2.0),
        "beta_fast": st.sampled_from([16, 32, 64.0]),
        "beta_slow": st.sampled_from([1, 2.0]),
        "truncate": st.booleans(),
        # 6 is less than one turn of the fastest pair, so that both ends of the ramp are 0.
        "original_max_position_embeddings": st.sampled_from([6, 32, 512, 8192]),
    },
)


# With a theta of 10, even the slowest pair turns more than once, and the ramp ends beyond the last dimension.
@given(HEAD_SIZES, st.sampled_from([10.0, 10000.0, 1000000.0]), FACTORS, YARN_OPTIONS)
@settings(deadline=None)
def test_yarn(head_size: int, theta: float, factor: float, options: dict[str, Any]) -> None:
    assert_equal_to_transformers(head_size, {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **options})


@st.composite
def longropes(draw: st.DrawFn, head_size: int, partial: float) -> dict[str, Any]:
    length = int(head_size * partial) // 2
    factors = st.lists(st.floats(1.0, 60.0, width=32), min_size=length, max_size=length)
    options: dict[str, Any] = draw(
        st.fixed_dictionaries({}, optional={"factor": st.floats(0.5, 40.0), "attention_factor": st.floats(0.5, 2.0)})
    )
    return {
        "rope_type": "longrope",
        "rope_theta": draw(THETAS),
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": draw(ORIGINAL_LENGTHS),
        "short_factor": draw(factors),
        "long_factor": draw(factors),
        **options,
    }


@given(st.data(), st.sampled_from([16, 64, 96, 128]), st.sampled_from([0.25, 0.75, 1.0]), st.integers(1, 3000))
@settings(deadline=None)
def test_longrope_is_transformers_at_the_engine_s_longest_sequence(
    data: st.DataObject, head_size: int, partial: float, num_positions: int
) -> None:
    rope = data.draw(longropes(head_size, partial))
    inv_freq, scaling = rope_frequencies(ours(head_size, rope, num_positions))
    expected, expected_scaling = ROPE_INIT_FUNCTIONS["longrope"](theirs(head_size, rope), "cpu", seq_len=num_positions)
    torch.testing.assert_close(inv_freq, expected, rtol=5e-6, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn", "dynamic"])
def test_a_part_of_a_head_turns_as_a_head_of_that_size(rope_type: str) -> None:
    settings = {"rope_type": rope_type, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    partial = {**settings, "rope_theta": 10000.0, "partial_rotary_factor": 0.4, "original_max_position_embeddings": 512}
    inv_freq, scaling = rope_frequencies(ours(80, partial))
    whole, whole_scaling = rope_frequencies(ours(32, {**partial, "partial_rotary_factor": 1.0}))
    assert torch.equal(inv_freq, whole)
    assert scaling == whole_scaling
    if rope_type != "dynamic":
        expected, _ = ROPE_INIT_FUNCTIONS[rope_type](theirs(80, partial), "cpu")
        torch.testing.assert_close(inv_freq, expected, rtol=5e-6, atol=0)


def test_longrope_says_which_factors_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope_frequencies(ours(16, rope, num_positions=512))
    assert not caplog.records
    rope_frequencies(ours(16, rope, num_positions=513))
    assert "max_model_len=512" in caplog.text


def test_layers_with_equal_rotary_parameters_share_a_table() -> None:
    near, far = (ours(16, {"rope_type": "default", "rope_theta": theta}, 50) for theta in (1e4, 1e6))
    layers = LayerRotations([near, near, far, ours(16, {"rope_type": "default", "rope_theta": 1e4}, 50)])
    assert len(layers.embeddings) == 2
    positions = torch.tensor([3, 49])
    rotations = layers(positions, torch.float32)
    heads = torch.randn(2, 3, 16)
    for rotation, rope in zip(rotations, (near, near, far, near), strict=True):
        actual, expected = heads.clone(), heads.clone()
        apply_rotary(actual, rotation)
        apply_rotary(expected, RotaryEmbedding(rope)(positions, torch.float32))
        assert torch.equal(actual, expected)


@given(HEAD_SIZES, THETAS, FACTORS, st.integers(1, 4 * MAX_POSITIONS))
@settings(deadline=None)
def test_dynamic_is_transformers_at_the_engine_s_longest_sequence(
    head_size: int, theta: float, factor: float, num_positions: int
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
    inv_freq, scaling = rope_frequencies(ours(head_size, rope, num_positions))
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs(head_size, rope), "cpu", seq_len=num_positions)
    torch.testing.assert_close(inv_freq, expected, rtol=5e-6, atol=0)
    assert scaling == 1.0


def test_dynamic_is_the_default_up_to_the_model_s_own_length() -> None:
    dynamic = rope_frequencies(ours(64, {"rope_type": "dynamic", "factor": 4.0}))
    default = rope_frequencies(ours(64, {"rope_type": "default"}))
    assert torch.equal(dynamic[0], default[0])


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 9.0, "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3}},
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "linear", "rope_theta": None, "factor": 2.0}},
    ],
)
def test_both_spellings_of_the_configuration_mean_the_same(config: dict[str, Any]) -> None:
    rope = read_rope_parameters({"max_position_embeddings": 64, **config}, head_size=8, num_positions=64)
    assert (rope.rope_type, rope.theta, rope.number("factor")) == ("linear", 7.0, 2.0)


def test_a_length_beside_the_rotary_settings_wins_over_the_one_among_them() -> None:
    config = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    }
    rope = read_rope_parameters(config, head_size=8, num_positions=64)
    assert rope.original_max_position_embeddings == 1024


def test_a_null_length_beside_the_rotary_settings_hides_none() -> None:
    config = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": None,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    }
    rope = read_rope_parameters(config, head_size=8, num_positions=64)
    assert rope.original_max_position_embeddings == 2048


def test_the_table_holds_transformers_cosines_and_sines() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    }
    positions = torch.arange(200)
    table = RotaryEmbedding(ours(32, rope)).table[positions]
    hidden = torch.empty(0)
    cos, sin = LlamaRotaryEmbedding(theirs(32, rope))(hidden, positions[None])
    torch.testing.assert_close(table[:, :16], cos[0, :, :16], rtol=0, atol=5e-5)
    torch.testing.assert_close(table[:, 16:], sin[0, :, 16:], rtol=0, atol=5e-5)


def test_the_table_has_values_even_if_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = RotaryEmbedding(ours(16, {"rope_type": "yarn", "factor": 2.0}, num_positions=8))
    assert layer.table.device.type == "cpu"
    assert layer.table.shape == (8, 16)
