"""Scales of an FP8 KV cache are read by each of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.config.load import SHARDED_STATE
from penstock.errors import CheckpointError, PenstockError, UnsupportedFeature
from penstock.kernels.paged_attention import CacheScales
from penstock.loader.loader import load_model
from penstock.loader.sharded_state import save_sharded_state
from penstock.loader.tensor_parallel_sizes import UnjoinedGroup
from penstock.models.attention_layers import attention_layers
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import edit_config, load_config, tiny_checkpoint, tiny_model
from support.scaled_caches import KV_CACHE_SCHEME, SCALES, add_tensors, save_scaled
from support.transformers_models import load

ATTENTION = "model.layers.0.self_attn"


def scales_of(model: CausalLM) -> list[CacheScales | None]:
    return [layer.cache_scales for layer in attention_layers(model).values()]


def approximately(scales: CacheScales | None, expected: tuple[float, float]) -> bool:
    return scales is not None and tuple(scales) == pytest.approx(expected)


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_a_layer_has_the_scales_of_its_attention(tmp_path: Path, names: tuple[str, str]) -> None:
    config = save_scaled(tiny_model("llama"), tmp_path, names)
    assert all(map(approximately, scales_of(load(config)), SCALES))


def test_a_pipeline_stage_has_those_of_its_layers(tmp_path: Path) -> None:
    config = save_scaled(tiny_model("llama"), tmp_path)
    (scales,) = scales_of(load(config, parallel=ParallelState(pipeline=UnjoinedGroup(2))))
    assert approximately(scales, SCALES[0])


def checkpoint_with(folder: Path, family: str = "llama", **scales: Any) -> ModelConfig:
    """A checkpoint with scales of its first layer's attention."""
    tiny_checkpoint(folder, family)
    add_tensors(folder, {f"{ATTENTION}.{name}": torch.tensor(value) for name, value in scales.items()})
    return load_config(folder)


def test_one_scale_may_be_both(tmp_path: Path) -> None:
    assert scales_of(load(checkpoint_with(tmp_path, kv_scale=[0.5], q_scale=2.0))) == [CacheScales(0.5, 0.5), None]


def test_a_latent_has_the_scale_of_keys(tmp_path: Path) -> None:
    first, *_ = scales_of(load(checkpoint_with(tmp_path, "deepseek_v3", k_scale=0.5, v_scale=0.25)))
    assert first == CacheScales(0.5, 0.5)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ({"k_scale": 1.0}, CheckpointError, "no v_scale"),
        ({"k_scale": 0.0, "v_scale": 1.0}, CheckpointError, r"self_attn.k_scale is 0.0.*positive"),
        ({"k_scale": [1.0, 2.0], "v_scale": 1.0}, UnsupportedFeature, r"self_attn.k_scale has 2 scales.*one per layer"),
    ],
)
def test_other_scales_are_refused(
    tmp_path: Path, scales: dict[str, Any], error: type[PenstockError], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(checkpoint_with(tmp_path, **scales))


def test_scales_of_no_attention_are_refused(tmp_path: Path) -> None:
    config = checkpoint_with(tmp_path)
    add_tensors(tmp_path, {"model.layers.7.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.7.self_attn.k_scale"):
        load(config)


def with_scheme(folder: Path, **changes: Any) -> ModelConfig:
    scheme = {"kv_cache_scheme": KV_CACHE_SCHEME | changes, "config_groups": {}}
    return edit_config(folder, quantization_config={"quant_method": "compressed-tensors", **scheme})


def test_a_scheme_without_quantised_weights_gives_a_float_model(tmp_path: Path) -> None:
    save_scaled(tiny_model("llama"), tmp_path)
    assert all(map(approximately, scales_of(load(with_scheme(tmp_path))), SCALES))
    for field, value in {"num_bits": 4, "type": "int", "strategy": "attn_head", "dynamic": True}.items():
        with pytest.raises(UnsupportedFeature, match=f"kv_cache_scheme.{field}={value!r}"):
            load(with_scheme(tmp_path, **{field: value}))


def test_a_sharded_state_keeps_the_scales(tmp_path: Path) -> None:
    config = save_scaled(tiny_model("llama"), tmp_path / "model")
    model = load(config)
    save_sharded_state(model, tmp_path / "state", ParallelState())
    (tmp_path / "state" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    how = LoadConfig(load_format=SHARDED_STATE, use_tqdm_on_load=False)
    again = load_model(load_config(tmp_path / "state"), how, ParallelState(), torch.device("cpu"), torch.float32)
    assert scales_of(again) == scales_of(model)
