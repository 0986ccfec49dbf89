"""Of classes of Transformers without a table of their own, a plan from headers says what the running engine uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.worker.estimate import LIBRARY_BYTES
from support.engines import SMALL, make_core
from support.transformers_models import save_for_fallback, tiny_transformers_model, wider_overrides

TOLERANCE = 0.1
OPTIONS = {**SMALL, "max_num_batched_tokens": 3000, "model_impl": "transformers"}
SHAPE: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_SPARSE_LATER = ["dense", "sparse", "sparse"]
# With a gate and without, with norms in other places, with windows, with joined projections, with experts; with layers
# of several kinds, with gates on attention's result, with positions that are added.
CLASSES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"num_hidden_layers": 5},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "BeamForCausalLM": {"mlp_layer_types": _SPARSE_LATER},
    "BioGptForCausalLM": {},
    "BitNetForCausalLM": {},
    "CohereForCausalLM": {},
    "Dots1ForCausalLM": {"num_hidden_layers": 4},
    "Ernie4_5ForCausalLM": {},
    "Exaone4ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "GPTBigCodeForCausalLM": {"n_inner": 704},
    "Gemma4ForCausalLM": {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 2000},
    "Gemma4UnifiedForCausalLM": {"global_head_dim": 64},
    "GemmaForCausalLM": {},
    "GlmForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {"moe_topk": 2},
    "LagunaForCausalLM": {"mlp_layer_types": _SPARSE_LATER},
    "MiniMaxM2ForCausalLM": {},
    "MiniMaxM3VLForCausalLM": {"shared_intermediate_size": 320},
    "ModernBertDecoderForCausalLM": {"num_hidden_layers": 4},
    "NemotronForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "PhimoeForCausalLM": {},
    "SeedOssForCausalLM": {"tie_word_embeddings": True},
}
_PLAN_ALL = """
import json, sys
from penstock.engine.plan import plan_engine
options = json.loads(sys.argv[1])
plans = {folder: plan_engine(folder, **options).to_dict() for folder in sys.argv[2:]}
imported = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
print(json.dumps({"plans": plans, "imported": imported}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for class_name, changes in CLASSES.items():
        made[class_name] = tmp_path_factory.mktemp(class_name)
        overrides = {**wider_overrides(class_name), **SHAPE, **changes}
        save_for_fallback(tiny_transformers_model(class_name, **overrides), made[class_name])
    return made


@pytest.fixture(scope="module")
def planned(folders: dict[str, Path]) -> dict[str, Any]:
    """The plans of all classes, made by a process of their own, and what that has imported."""
    paths = [str(folder) for folder in folders.values()]
    command = [sys.executable, "-c", _PLAN_ALL, json.dumps(OPTIONS), *paths]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(result.stdout))


def test_nothing_is_imported_that_takes_seconds(planned: dict[str, Any]) -> None:
    assert planned["imported"] == []


@pytest.mark.parametrize("class_name", CLASSES)
def test_a_plan_from_headers_is_what_the_engine_uses(
    folders: dict[str, Path], planned: dict[str, Any], class_name: str
) -> None:
    folder = folders[class_name]
    plan = planned["plans"][str(folder)]
    assert plan["remark"] == (
        f"estimated as a decoder of usual layers, since the layers of {class_name} are not known beforehand"
    )
    core = make_core(folder, **OPTIONS)
    memory, num_blocks = core.memory_plan, core.kv_cache_config.num_blocks
    (bytes_per_token,) = core.collective_rpc(
        lambda worker: sum(spec.page_size_bytes / spec.block_size for spec in worker.get_kv_cache_spec().values())
    )
    core.close()
    assert plan["kv_cache"]["bytes_per_token"] == bytes_per_token
    assert plan["kv_cache"]["num_blocks"] == num_blocks
    parts = {name: plan["memory"][name] for name in ("weights", "activations", "sampling")}
    assert parts["weights"] == pytest.approx(memory.weights, rel=TOLERANCE)
    assert parts["sampling"] == pytest.approx(memory.sampling, rel=TOLERANCE)
    assert parts["activations"] - LIBRARY_BYTES == pytest.approx(memory.activations - LIBRARY_BYTES, rel=TOLERANCE)
    assert sum(parts.values()) == pytest.approx(memory.weights + memory.activations + memory.sampling, rel=TOLERANCE)
