"""Rotary frequencies (RoPE), and the scaling methods for longer contexts.

Every function returns (float32 [R / 2] radians per position, factor on cosines and sines) for R rotated dimensions,
and equals its namesake in Transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.context_length import rope_settings, rope_type_of
from penstock.config.checks import is_positive_float32
from penstock.errors import ModelError, UnsupportedFeature

logger = logging.getLogger(__name__)
_DEFAULT_THETA = 10000.0
# Types that need a factor, unless they have another setting.
_FACTOR_UNLESS = {"linear": "", "llama3": "", "dynamic": "alpha", "yarn": "original_max_position_embeddings"}
_KEEP_PRETRAINED_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """RoPE settings of `config.json`.

    rotary_dim: rotated dimensions of a head. max_position_embeddings: the configuration's.
    num_positions: positions that the engine serves, from 0 on.
    settings: settings of the `rope_type`.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    num_positions: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def original_max_position_embeddings(self) -> int:
        """Context length before scaling."""
        return int(self.number("original_max_position_embeddings", self.max_position_embeddings))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive setting; null counts as absent. Raises ModelError for a missing or invalid one."""
        value = self.settings.get(name)
        value = default if value is None else value
        if value is None or not is_positive_float32(value):
            raise ModelError(
                f"The rotary embedding of config.json (rope_type={self.rope_type!r}) has {name}={value!r}. "
                "It must be a positive number, and finite in float32."
            )
        return value

    def numbers(self, name: str) -> Tensor:
        """Return a list setting with a positive number for each pair of dimensions: float32 [R / 2]."""
        values, length = self.settings.get(name), self.rotary_dim // 2
        if not isinstance(values, list) or len(values) != length or not all(map(is_positive_float32, values)):
            raise ModelError(
                f"The rotary embedding of config.json (rope_type={self.rope_type!r}) has {name}={values!r}. "
                f"It must be a list of {length} positive numbers, one for each pair of rotated dimensions."
            )
        return torch.tensor(values, dtype=torch.float32, device="cpu")


def read_rope_parameters(
    hf_config: Mapping[str, Any],
    *,
    head_size: int,
    num_positions: int,
    may_be_partial: bool = False,
    default_theta: float = _DEFAULT_THETA,
) -> RopeParameters:
    """Read the settings of Transformers 4 (`rope_theta`, `rope_scaling`) or Transformers 5 (`rope_parameters`).

    may_be_partial: the model supports `partial_rotary_factor`. default_theta: of an absent `rope_theta`.
    Raises ModelError for invalid fields, UnsupportedFeature for an unknown `rope_type`.
    """
    settings = rope_settings(hf_config)
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json has rope_parameters={settings!r}. It must be an object, or null.")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedFeature(
            f"config.json has rope_parameters for each kind of layer ({', '.join(settings)}). "
            "Only one rotary embedding for all layers is supported."
        )
    partial = _given("partial_rotary_factor", settings, hf_config)
    rotary_dim = _rotary_dim(head_size, partial, may_be_partial)
    rope_type = rope_type_of(settings)
    if rope_type not in ROPE_FUNCTIONS:
        raise UnsupportedFeature(
            f"config.json asks for rope_type={rope_type!r}. Supported: {', '.join(sorted(ROPE_FUNCTIONS))}."
        )
    theta = _given("rope_theta", settings, hf_config)
    theta = default_theta if theta is None else theta
    own = dict(settings)
    # As in Transformers, a field of the model itself overrides the one among the rotary settings.
    if rope_type in _KEEP_PRETRAINED_LENGTH and hf_config.get("original_max_position_embeddings") is not None:
        own["original_max_position_embeddings"] = hf_config["original_max_position_embeddings"]
    positions = hf_config.get("max_position_embeddings")
    if not isinstance(positions, int):
        raise ModelError(f"config.json has max_position_embeddings={positions!r}. It must be a positive integer.")
    rope = RopeParameters(rope_type, theta, rotary_dim, positions, num_positions, {**own, "rope_theta": theta})
    rope.number("rope_theta")
    if rope_type in _FACTOR_UNLESS and own.get(_FACTOR_UNLESS[rope_type]) is None:
        rope.number("factor")
    return rope


def _given(name: str, *objects: Mapping[str, Any]) -> Any:
    """Return the field of the first object that has it; null counts as absent."""
    return next((one[name] for one in objects if one.get(name) is not None), None)


def _rotary_dim(head_size: int, partial: Any, may_be_partial: bool) -> int:
    """Number of leading dimensions of a head that are rotated; `partial` is their share, None for all."""
    if partial in (None, 1):
        return head_size
    if not may_be_partial:
        raise UnsupportedFeature(f"config.json has partial_rotary_factor={partial!r}. Only 1.0 is supported here.")
    if not isinstance(partial, (int, float)) or isinstance(partial, bool) or not 0 < partial <= 1:
        raise ModelError(f"config.json has partial_rotary_factor={partial!r}. It must be in (0, 1].")
    rotary_dim = int(head_size * partial)
    if rotary_dim == 0 or rotary_dim % 2 != 0:
        raise UnsupportedFeature(
            f"config.json has partial_rotary_factor={partial!r}, which rotates {rotary_dim} of a head's {head_size} "
            "dimensions. Only a positive even number of them is supported, since rotary embedding rotates pairs."
        )
    return rotary_dim


def rope_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """Compute the frequencies of the configured `rope_type`."""
    return ROPE_FUNCTIONS[rope.rope_type](rope)


def default_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """theta^(-2i / R) (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    return 1.0 / _periods(rope.theta, rope.rotary_dim), 1.0


def linear_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """All positions divided by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""
    inv_freq, scaling = default_frequencies(rope)
    return inv_freq / rope.number("factor"), scaling


def dynamic_ntk_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """A larger base for contexts beyond the model's own ("dynamic NTK", by u/emozilla).

    Transformers changes the base as a sequence grows. Keys in a paged cache cannot change after they are written, so
    the base is constant here, that of the longest sequence that the engine serves. Up to `max_position_embeddings` both
    equal the default embedding.
    """
    length = max(rope.num_positions, rope.max_position_embeddings)
    if length > rope.max_position_embeddings:
        warn_about_stretched_base(length, rope.max_position_embeddings)
    factor, dim = rope.number("factor"), rope.rotary_dim
    stretch = factor * length / rope.max_position_embeddings - (factor - 1)
    return 1.0 / _periods(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def llama3_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """Long wavelengths divided by `factor`, short ones kept, a blend between (Llama 3.1)."""
    inv_freq, scaling = default_frequencies(rope)
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"config.json has low_freq_factor={low!r}, which must be below high_freq_factor={high!r}.")
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * inv_freq / factor + kept_share * inv_freq, scaling


def yarn_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """YaRN: high frequencies are kept, low ones divided by `factor`, and attention is scaled.

    Peng et al. 2023, https://arxiv.org/abs/2309.00071.
    """
    original, dim = rope.original_max_position_embeddings, rope.rotary_dim
    factor = rope.number("factor", rope.max_position_embeddings / original)
    bounds = [
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.number("beta_fast", 32), rope.number("beta_slow", 1))
    ]
    if rope.settings.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
    if low == high:
        high += 0.001
    divided_share = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    periods = _periods(rope.theta, dim)
    inv_freq = divided_share / (factor * periods) + (1 - divided_share) / periods
    return inv_freq, _yarn_attention_scaling(rope, factor)


def longrope_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """LongRoPE: each frequency is divided by its own factor, and attention is scaled.

    Ding et al. 2024, https://arxiv.org/abs/2402.13753. There are two lists of factors: `short_factor` for sequences up
    to the pretrained length and `long_factor` beyond. Transformers switches as a sequence grows. Keys in a paged cache
    cannot change after they are written, so here the longest sequence that the engine serves decides for all.
    """
    original = rope.original_max_position_embeddings
    is_long = rope.num_positions > original
    stretch = {name: rope.numbers(name) for name in ("short_factor", "long_factor")}
    if is_long:
        warn_about_long_factors(rope.num_positions, original)
    periods = stretch["long_factor" if is_long else "short_factor"] * _periods(rope.theta, rope.rotary_dim)
    factor = rope.number("factor", rope.max_position_embeddings / original)
    sharpening = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / periods, rope.number("attention_factor", sharpening)


def warn_about_long_factors(num_positions: int, original: int) -> None:
    """Warn which of longrope's factors are in use, and about their cost in quality."""
    logger.warning(
        "The model stretches its rotary embedding (longrope). Since up to %s tokens are served, all sequences use "
        "its factors for long ones. For best quality on shorter ones, start with max_model_len=%s or less.",
        f"{num_positions:,}",
        original,
    )


def warn_about_stretched_base(num_positions: int, original: int) -> None:
    """Warn that "dynamic" scales the rotary embedding of all sequences, and about its cost in quality."""
    logger.warning(
        "The model stretches its rotary embedding (dynamic NTK). Since up to %s tokens are served, all sequences use "
        "the base for that length. For best quality on shorter ones, start with max_model_len=%s or less.",
        f"{num_positions:,}",
        original,
    )


def _yarn_attention_scaling(rope: RopeParameters, factor: float) -> float:
    if rope.settings.get("attention_factor") is not None:
        return rope.number("attention_factor")

    if rope.settings.get("mscale") and rope.settings.get("mscale_all_dim"):
        return attention_sharpening(factor, rope.number("mscale")) / attention_sharpening(
            factor, rope.number("mscale_all_dim")
        )
    return attention_sharpening(factor, 1.0)


def attention_sharpening(factor: float, mscale: float) -> float:
    """Factor of YaRN on queries and keys of contexts that are `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _periods(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return torch.pow(theta, exponents)


ROPE_FUNCTIONS: Mapping[str, Callable[[RopeParameters], tuple[Tensor, float]]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_ntk_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
}
