"""Rotary frequencies: how fast each pair of dimensions turns, and how models stretch that to longer contexts.

Every function gives (float32 [R / 2] radians per position, factor on cosines and sines) for R rotated dimensions, and
equals its namesake in Transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError, UnsupportedFeature

_DEFAULT_THETA = 10000.0
_KEEP_PRETRAINED_LENGTH = ("llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """What `config.json` says about rotary embedding.

    rotary_dim: dimensions of a head that turn. max_position_embeddings: the configuration's.
    num_positions: positions that the engine serves, from 0 on.
    settings: what belongs to `rope_type` alone.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    num_positions: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def original_max_position_embeddings(self) -> int:
        """Positions that the model saw before its context was stretched."""
        return int(self.number("original_max_position_embeddings", self.max_position_embeddings))

    def number(self, name: str, default: float | None = None) -> float:
        """A positive setting; null counts as absent. Raises ModelError when there is none, or it is no such number."""
        value = self.settings.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ModelError(
                f"The rotary embedding of config.json (rope_type={self.rope_type!r}) has {name}={value!r}. "
                "It must be a positive number."
            )
        return value


def read_rope_parameters(hf_config: Mapping[str, Any], *, rotary_dim: int, num_positions: int) -> RopeParameters:
    """Understands Transformers 4 (`rope_theta`, `rope_scaling`) and Transformers 5 (`rope_parameters`).

    Raises ModelError when the fields are damaged, UnsupportedFeature for a kind of embedding that is not known here.
    """
    settings = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json has rope_parameters={settings!r}. It must be an object, or null.")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedFeature(
            f"config.json has rope_parameters for each kind of layer ({', '.join(settings)}). "
            "Only one rotary embedding for all layers is supported."
        )
    partial = settings.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedFeature(f"config.json has partial_rotary_factor={partial!r}. Only 1.0 is supported here.")
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type not in ROPE_FUNCTIONS:
        raise UnsupportedFeature(
            f"config.json asks for rope_type={rope_type!r}. Supported: {', '.join(sorted(ROPE_FUNCTIONS))}."
        )
    theta = settings.get("rope_theta", hf_config.get("rope_theta", _DEFAULT_THETA))
    own = dict(settings)
    # Transformers lets a field of the model itself win over the one among the rotary settings.
    if rope_type in _KEEP_PRETRAINED_LENGTH and "original_max_position_embeddings" in hf_config:
        own["original_max_position_embeddings"] = hf_config["original_max_position_embeddings"]
    positions = hf_config.get("max_position_embeddings")
    if not isinstance(positions, int):
        raise ModelError(f"config.json has max_position_embeddings={positions!r}. It must be a positive integer.")
    rope = RopeParameters(rope_type, theta, rotary_dim, positions, num_positions, {**own, "rope_theta": theta})
    rope.number("rope_theta")
    return rope


def rope_frequencies(rope: RopeParameters) -> tuple[Tensor, float]:
    """The frequencies of whatever kind the model asks for."""
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

    Transformers changes the base as a sequence grows. Keys in a paged cache must not change after they are written,
    so here the base is constant, that of the longest sequence which the engine serves. Up to
    `max_position_embeddings` both are the default embedding.
    """
    length = max(rope.num_positions, rope.max_position_embeddings)
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
    """Dimensions that turn often are kept, slow ones divided by `factor`, and attention is sharpened.

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


def _yarn_attention_scaling(rope: RopeParameters, factor: float) -> float:
    if rope.settings.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def sharpening(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.settings.get("mscale") and rope.settings.get("mscale_all_dim"):
        return sharpening(rope.number("mscale")) / sharpening(rope.number("mscale_all_dim"))
    return sharpening(1.0)


def _periods(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return torch.pow(theta, exponents)


ROPE_FUNCTIONS: Mapping[str, Callable[[RopeParameters], tuple[Tensor, float]]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_ntk_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
}
