"""What is said beforehand of a model that runs through Transformers is what its weights and tensors take."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2CLS, ACT2FN

from penstock.config import EngineConfig
from penstock.device.dtypes import DtypeChoice
from penstock.device.tensor_memory import TensorMemory
from penstock.engine.model_sizes import ModelSizes, PlannedModel, size_model
from penstock.layers.linear import weights_size_bytes
from penstock.loader.headers import read_headers
from penstock.parallel import ParallelContext
from penstock.worker.estimate import LIBRARY_BYTES, resident_step
from penstock.worker.memory_plan import StepMemory
from penstock.worker.split_contexts import split_context_bytes
from penstock.worker.transformers_estimate import (
    ACTIVATION_TENSORS,
    estimate_transformers_activations,
    layers_of_class,
)
from penstock.worker.transformers_shape import read_transformers_shape
from penstock.worker.unloaded_model import try_without_memory
from penstock.worker.worker import Worker
from support.checkpoints import edit_config, save_checkpoint
from support.engines import SMALL
from support.transformers_models import FAMILIES, save_for_fallback, tiny_transformers_model

TOLERANCE = 0.1
NUM_TOKENS = 3000
OPTIONS = {**SMALL, "max_num_batched_tokens": NUM_TOKENS, "model_impl": "transformers"}
# Where attention takes the most, and where the feed-forward network does.
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 8},
    "network": {"hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 1},
}
DECODERS = {**FAMILIES, "persimmon": ("PersimmonForCausalLM", {})}
MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3},
    "Qwen2MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": 24,
    },
}


def save(folder: Path, class_name: str, overrides: dict[str, Any]) -> None:
    save_for_fallback(tiny_transformers_model(class_name, **overrides), folder)


def derive_and_measure(folder: Path, **options: Any) -> tuple[ModelSizes, int, StepMemory]:
    """Sizes without the model; and of the model as loaded, its weights and what a step takes."""
    engine = EngineConfig.create(str(folder), **{**OPTIONS, **options})
    worker = Worker(engine, ParallelContext())
    worker.init_device()
    worker.load_model()
    longest = worker._longest_context()
    headers = None if engine.load.load_format == "dummy" else read_headers(folder)
    derived = size_model(PlannedModel(engine, headers, worker.dtype, worker.dtype.name, "cpu", longest))
    weights, step = weights_size_bytes(worker.model), worker._measure_step(worker._limits(longest))
    assert list(derived.specs.values()) == list(worker.get_kv_cache_spec().values())
    worker.shutdown()
    return derived, weights, step


def resident(derived: ModelSizes) -> StepMemory:
    split = split_context_bytes(
        derived.specs.values(), derived.num_heads, max_model_len=128, num_threads=torch.get_num_threads(), device="cpu"
    )
    return resident_step(derived.step, "cpu", split)


def check(folder: Path, **options: Any) -> None:
    derived, weights, step = derive_and_measure(folder, **options)
    assert derived.remark == ""
    assert derived.weights == pytest.approx(weights, rel=TOLERANCE)
    planned = resident(derived)
    assert planned.activations - LIBRARY_BYTES == pytest.approx(step.activations - LIBRARY_BYTES, rel=TOLERANCE)
    assert planned.sampling == step.sampling


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(tmp_path: Path, name: str, shape: str) -> None:
    class_name, overrides = DECODERS[name]
    changes = {**overrides, **SHAPES[shape]}
    if class_name == "OPTForCausalLM":
        changes["ffn_dim"] = changes["intermediate_size"]
    if name == "smollm3":  # the first layer, in which less is alive, is not the only one that turns heads
        changes |= {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 0]}
    save(tmp_path, class_name, changes)
    check(tmp_path)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("class_name", MIXTURES)
def test_mixtures_of_experts(tmp_path: Path, class_name: str, shape: str) -> None:
    save(tmp_path, class_name, {**SHAPES[shape], **MIXTURES[class_name]})
    check(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*DECODERS, *MIXTURES])
def test_the_same_is_counted_in_a_run_without_values(tmp_path: Path, name: str, dtype: str) -> None:
    """In the precision of GPUs too, where norms and rotations make wider copies."""
    class_name, overrides = DECODERS[name] if name in DECODERS else (name, MIXTURES[name])
    changes = {**overrides, **SHAPES["network"]}
    if class_name == "OPTForCausalLM":
        changes["ffn_dim"] = changes["intermediate_size"]
    config = save_for_fallback(tiny_transformers_model(class_name, **changes), tmp_path)
    unloaded = try_without_memory(config, NUM_TOKENS, 16, DtypeChoice(dtype, "", dtype), dtype, "cpu")
    derived = estimate_transformers_activations(
        layers_of_class(config), read_transformers_shape(config), num_tokens=NUM_TOKENS, dtype=dtype, device="cpu"
    )
    assert derived == pytest.approx(unloaded.activations, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["plain", "tied", "int8", "bfloat16", "dummy"])
@pytest.mark.parametrize("class_name", ["Cohere2ForCausalLM", "OPTForCausalLM", "Qwen2MoeForCausalLM"])
def test_weights(tmp_path: Path, class_name: str, kind: str) -> None:
    """As the layers keep them: in the checkpoint's dtype, rounded, random; experts and positions as floats."""
    size = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2000, "tie_word_embeddings": kind == "tied"}
    size |= {"ffn_dim": 256} if class_name == "OPTForCausalLM" else {}
    model = tiny_transformers_model(class_name, **{**MIXTURES.get(class_name, {}), **size, "mlp_only_layers": []})
    save_checkpoint(model, tmp_path, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    options: dict[str, Any] = {"int8": {"quantization": "int8"}, "dummy": {"load_format": "dummy"}}.get(kind, {})
    derived, weights, _ = derive_and_measure(tmp_path, **options)
    assert derived.weights == pytest.approx(weights, rel=TOLERANCE)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("class_name", ["GemmaForCausalLM", "SeedOssForCausalLM"])
def test_the_built_model_has_what_a_head_packs_beside_its_embedding(
    tmp_path: Path, class_name: str, quantization: str | None
) -> None:
    """A scaled embedding cannot read the rows of what the head packs, so there are two; a plain one can.

    All sizes are of whole panels, which are 16 or 32 wide.
    """
    size = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 2048, "tie_word_embeddings": True}
    config = save_for_fallback(tiny_transformers_model(class_name, **size), tmp_path)
    config = dataclasses.replace(config, quantization=quantization)
    _, weights, _ = derive_and_measure(tmp_path, quantization=quantization)
    dtype = DtypeChoice("float32", "", "float32")
    built = try_without_memory(config, NUM_TOKENS, 16, dtype, "float32", "cpu")
    # Where bytes are multiplied four at a time, each row of 128 has a sum of 4 bytes too.
    assert built.weights == pytest.approx(weights, rel=0.01 if quantization is None else 0.04)


@pytest.mark.parametrize("activation", ["silu", "linear", "gelu_10", "gelu_new", "gelu_fast"])
@pytest.mark.parametrize("class_name", ["GraniteForCausalLM", "GPTNeoXForCausalLM", "Glm4ForCausalLM"])
def test_activations_that_hold_more_than_their_result(tmp_path: Path, class_name: str, activation: str) -> None:
    save(tmp_path, class_name, {**SHAPES["network"], "hidden_act": activation})
    check(tmp_path)


@pytest.mark.parametrize("activation", sorted(set(ACT2CLS) - {"prelu"}))
def test_every_activation_of_transformers_is_known(activation: str) -> None:
    """But for the one that has a weight, which no usual layer has."""
    x = torch.randn(64, 64)
    with torch.no_grad(), TensorMemory() as memory:
        ACT2FN[activation](x)
    held = 1 + memory.peak_bytes / (x.numel() * x.element_size())
    # xielu's masks hold a byte per value.
    assert ACTIVATION_TENSORS[activation] == int(held)


def test_what_is_not_known_beforehand_is_named_and_measured_without_memory(tmp_path: Path) -> None:
    save(tmp_path / "class", "SeedOssForCausalLM", {"hidden_act": "prelu"})
    save(tmp_path / "activation", "GraniteForCausalLM", {"hidden_act": "prelu"})
    for name, why in (
        (
            "class",
            "the layers of SeedOssForCausalLM are not known beforehand, and the checkpoint has "
            "model.layers.0.mlp.act_fn.weight",
        ),
        ("activation", "the activation 'prelu' is not known beforehand"),
    ):
        derived, weights, step = derive_and_measure(tmp_path / name)
        assert derived.remark == f"built and run without memory, since {why}"
        assert derived.weights == pytest.approx(weights, rel=TOLERANCE)
        planned = resident(derived)
        assert planned.activations - LIBRARY_BYTES == pytest.approx(step.activations - LIBRARY_BYTES, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("Cohere2ForCausalLM", {"num_hidden_layers": 9, "sliding_window": 8}),
        ("Qwen2MoeForCausalLM", {"num_hidden_layers": 5, "use_sliding_window": True, "max_window_layers": 3}),
        ("SmolLM3ForCausalLM", {"num_hidden_layers": 9, "use_sliding_window": True, "sliding_window": 8}),
        ("PersimmonForCausalLM", {}),
        ("PhiForCausalLM", {}),
        ("OPTForCausalLM", {"ffn_dim": 112}),
        ("StableLmForCausalLM", {}),
    ],
)
def test_absent_fields_mean_what_they_mean_to_transformers(
    tmp_path: Path, class_name: str, changes: dict[str, Any]
) -> None:
    save(tmp_path, class_name, {**MIXTURES.get(class_name, {}), "mlp_only_layers": [], **changes})
    absent = ("layer_types", "no_rope_layers", "rope_parameters", "hidden_act", "activation_function", "head_dim")
    edit_config(tmp_path, remove=(*absent, "mlp_only_layers", "do_layer_norm_before"))
    check(tmp_path)


def test_kinds_of_layers_decide_about_windows(tmp_path: Path) -> None:
    changes = {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2, "no_rope_layers": [1, 0]}
    save(tmp_path, "SmolLM3ForCausalLM", changes)
    edit_config(tmp_path, sliding_window=8)
    check(tmp_path)


def test_no_torch_is_imported_for_known_classes(tmp_path: Path) -> None:
    save(tmp_path / "a", "GPTNeoXForCausalLM", {})
    save(tmp_path / "b", "Qwen2MoeForCausalLM", MIXTURES["Qwen2MoeForCausalLM"])
    code = (
        "import sys\nfrom penstock.engine.plan import plan_engine\n"
        f"for name in 'ab': print(plan_engine({str(tmp_path)!r} + '/' + name, device='cpu').table())\n"
        "sys.exit(repr([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == "[]"
    assert "without memory" not in result.stdout
