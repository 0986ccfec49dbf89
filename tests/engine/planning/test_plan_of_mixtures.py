"""A plan of a large mixture of experts, from the headers of a checkpoint without contents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.config import LoadConfig
from penstock.device.limits import MemoryLimit
from penstock.engine.planning import plan
from penstock.engine.planning.plan import plan_engine
from penstock.loader.loader import peek_weights
from penstock.parallel import ParallelState
from support.checkpoints import edit_config, tiny_config

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, EXPERTS, MIDDLE, VOCAB = 2048, 48, 32, 4, 128, 128, 768, 151_936
GIB = 1 << 30
VALUES_PER_FILE = 1 << 30


def weights() -> Iterator[tuple[str, list[int]]]:
    """Tensors of Qwen3-30B-A3B."""
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", [HIDDEN]
        yield f"{prefix}.post_attention_layernorm.weight", [HIDDEN]
        yield f"{prefix}.self_attn.q_proj.weight", [HEADS * HEAD, HIDDEN]
        yield f"{prefix}.self_attn.k_proj.weight", [KV_HEADS * HEAD, HIDDEN]
        yield f"{prefix}.self_attn.v_proj.weight", [KV_HEADS * HEAD, HIDDEN]
        yield f"{prefix}.self_attn.o_proj.weight", [HIDDEN, HEADS * HEAD]
        yield f"{prefix}.self_attn.q_norm.weight", [HEAD]
        yield f"{prefix}.self_attn.k_norm.weight", [HEAD]
        yield f"{prefix}.mlp.gate.weight", [EXPERTS, HIDDEN]
        for expert in range(EXPERTS):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", [MIDDLE, HIDDEN]
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", [MIDDLE, HIDDEN]
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", [HIDDEN, MIDDLE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as sparse files: headers, and nothing behind them."""
    path = tmp_path_factory.mktemp("qwen3-30b-a3b")
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 40_960}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
    experts = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": MIDDLE,
        "norm_topk_prob": True,
    }
    tiny_config("qwen3_moe", **sizes, **heads, **experts, intermediate_size=6144).save_pretrained(path)
    edit_config(path, architectures=["Qwen3MoeForCausalLM"], torch_dtype="bfloat16")
    shard: dict[str, list[int]] = {}
    shards = [shard]
    for name, shape in weights():
        if sum(map(math.prod, shard.values())) > VALUES_PER_FILE:
            shard = {}
            shards.append(shard)
        shard[name] = shape
    for number, one in enumerate(shards, 1):
        _write_header(path / f"model-{number:05}-of-{len(shards):05}.safetensors", one)
    files = {
        name: f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number, one in enumerate(shards, 1)
        for name in one
    }
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def _write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)


def test_headers_are_read_of_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    shapes = dict(weights())
    _write_header(tmp_path / "model.safetensors", shapes)
    tensors = dict(peek_weights(tmp_path, LoadConfig(), ParallelState()))
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert {(tensor.dtype, tensor.device.type) for tensor in tensors.values()} == {(torch.bfloat16, "meta")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "bits"), [({}, (16.0, 16.1)), ({"quantization": "int4"}, (4.5, 7.0))], ids=["bfloat16", "int4"]
)
def test_a_mixture_of_30_billion_parameters_is_planned_from_its_headers(
    folder: Path, options: dict[str, str], bits: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_memory_of", lambda *_: MemoryLimit(128 * GIB, 128 * GIB))
    found = plan_engine(str(folder), device="cpu", max_model_len=8192, max_num_seqs=32, **options)
    num_parameters = sum(math.prod(shape) for _, shape in weights())
    assert num_parameters == 30_532_122_624
    # The norms of queries and keys are repeated by head.
    assert found.num_parameters == pytest.approx(num_parameters, rel=1e-5)
    assert bits[0] <= 8 * found.weights / num_parameters <= bits[1]
    assert found.kv_bytes_per_token % (2 * LAYERS * KV_HEADS * HEAD) == 0
    assert found.max_model_len == 8192
