"""Options that the OutOfMemory error of an engine suggests: each of them makes the plan fit."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.device.limits import MemoryLimit
from penstock.engine.planning.plan import plan_engine
from penstock.errors import OutOfMemory
from support.checkpoints import tiny_config

GIB = 1 << 30
ADVICE = re.compile(r"Any of these fits: (.*)\.\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.4B parameters with a context that needs 3 GiB of float32 KV cache."""
    folder = tmp_path_factory.mktemp("model")
    tiny_config(
        "llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8000,
        max_position_embeddings=65536,
    ).save_pretrained(folder)
    return folder


NO_PREFIXES = {"enable_prefix_caching": False}


def plan(model: Path, **options: Any) -> Any:
    return plan_engine(str(model), load_format="dummy", max_num_batched_tokens=256, max_num_seqs=4, **options)


@pytest.mark.parametrize(
    ("total", "options", "gib", "reason"),
    [
        # A token takes 48 KiB.
        (64, {"kv_cache_dtype": "float32"}, 16, "0.25 of memory, the default"),
        (8, {"kv_cache_dtype": "float32"}, 3, "one request of 65,536 tokens"),
        (64, {"kv_cache_dtype": "float32", "max_model_len": 2048}, 0.75, "what 4 requests and cached prefixes can use"),
        (64, {"max_model_len": 2048, "kv_cache_dtype": "float32", **NO_PREFIXES}, 0.375, "what 4 requests can use"),
        (64, {"kv_cache_dtype": "float32", "kv_cache_memory_bytes": 5 * GIB}, 5, "kv_cache_memory_bytes"),
        (16, {"kv_cache_dtype": "float32", "memory_fraction": 0.5}, 6.5, "memory_fraction"),
    ],
)
def test_the_plan_says_what_decides_the_size_of_the_kv_cache(
    total: int, options: dict[str, Any], gib: float, reason: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.planning.plan.memory_limit", lambda: MemoryLimit(total * GIB, total * GIB))
    planned = plan(model, device="cpu", **options)
    assert planned.to_dict()["kv_cache"]["reason"] == reason
    assert planned.kv_cache.size_bytes == pytest.approx(gib * GIB, rel=0.08)
    assert re.search(rf"  size, taken as it fills +[\d.]+ .iB  {reason}\n", planned.table())


@pytest.mark.parametrize(
    ("total", "free", "options", "advised"),
    [
        # Half of the memory is the default of the KV cache, and there is more.
        (16, 16, {"max_model_len": 65536, "kv_cache_memory_bytes": GIB}, {"max_model_len", "kv_cache_memory_bytes"}),
        (10, 10, {"memory_fraction": 0.25}, {"max_model_len", "kv_cache_dtype", "memory_fraction"}),
        (4, 4, {}, {"max_model_len", "kv_cache_dtype"}),
        (4, 2.4, {}, {"max_model_len", "quantization"}),
        (4, 2.6, {"kv_cache_dtype": "int8", "quantization": "int8", "max_model_len": 65536}, set()),
        (16, 3, {"dtype": "float32"}, {"max_model_len"}),
    ],
)
def test_every_option_that_is_advised_fits(
    total: float, free: float, options: dict[str, Any], advised: set[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MemoryLimit(int(total * GIB), int(free * GIB))
    monkeypatch.setattr("penstock.engine.planning.plan.memory_limit", lambda: limit)
    if not advised:
        plan(model, device="cpu", **options)
        return
    with pytest.raises(OutOfMemory) as caught:
        plan(model, device="cpu", **options)
    said = ADVICE.search(str(caught.value))
    assert said is not None, caught.value
    ways = [way for one in said[1].split("; ") for way in one.split(" or ")]
    found = set()
    for way in ways:
        changes = {name: ast.literal_eval(value) for name, value in (one.split("=") for one in way.split(" with "))}
        found |= set(changes)
        plan(model, device="cpu", **{**options, **changes})
    assert advised <= found
