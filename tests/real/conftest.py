"""The model in the engine, and in Transformers."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import pytest
import torch
import transformers

from penstock import LLM
from support.real_model import EXACT, MODEL


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", **EXACT, max_model_len=8192, kv_cache_memory_bytes="512MiB") as llm:
        yield llm


@pytest.fixture(scope="session")
def oracle():
    """Transformers' model, with the weights that the package gguf reads."""
    reader = gguf.GGUFReader(MODEL.path)
    fields = {key.partition(".")[2]: entry.contents for key, entry in reader.fields.items()}
    heads = {"attn_q": fields["attention.head_count"](), "attn_k": fields["attention.head_count_kv"]()}
    config = transformers.LlamaConfig(
        vocab_size=fields["vocab_size"](),
        hidden_size=fields["embedding_length"](),
        intermediate_size=fields["feed_forward_length"](),
        num_hidden_layers=fields["block_count"](),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=fields["context_length"](),
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"](),
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]()},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            rotated = heads.get(tensor.name.split(".")[-2])
            if rotated is not None:
                values = values.view(rotated, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
            weight.copy_(values)
    return model
