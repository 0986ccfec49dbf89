"""GGUF files load as the model that they were written from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from penstock import LLM, SamplingParams
from penstock.checkpoints.gguf.container import read_header
from penstock.config import EngineConfig, ModelConfig
from penstock.errors import CheckpointError, ModelNotFound, UnsupportedFeature, UnsupportedModel
from penstock.loader.gguf.blocks import map_tensors
from penstock.loader.gguf.tensors import GgufWeights
from support.checkpoints import save_checkpoint, tiny_model
from support.gguf_files import FAMILIES, finish, random_blocks, write_gguf
from support.transformers_models import tiny_transformers_model

# Rows of whole blocks of 32; Gemma's scale as it follows from the size.
_SIZES = {"intermediate_size": 128}
_SIZES_OF = {
    "gpt2": {"n_inner": 128},
    "gemma2": {**_SIZES, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3": {**_SIZES, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6},
}
_PROMPT = [5, 17, 3, 88, 41, 9, 64, 23, 7, 11]
_QUANTISED = [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
_ONLY_DEQUANTISED = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def _tiny(family: str, **overrides):
    return tiny_model(family, **{**_SIZES_OF.get(family, _SIZES), **overrides})


def _greedy(model, num_tokens: int = 12) -> list[int]:
    prompt = torch.tensor([_PROMPT])
    with torch.inference_mode():
        ids = model.generate(prompt, do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0)
    return ids[0, len(_PROMPT) :].tolist()


def _generate(path: Path, num_tokens: int = 12, **options) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    options = {"dtype": "float32", "quantization": "none", "kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(path, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": _PROMPT}], params)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_each_architecture_generates_the_tokens_of_its_model(family, tmp_path):
    model = _tiny(family)
    path = write_gguf(model, family, tmp_path / "tiny.gguf")
    assert _generate(path) == _greedy(model)


@pytest.mark.parametrize("kind", _QUANTISED, ids=lambda kind: kind.name)
def test_a_quantised_file_generates_the_tokens_of_its_dequantised_model(kind, tmp_path):
    model = _tiny("llama")
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf", kind)
    assert _generate(path) == _greedy(model)


@pytest.mark.parametrize("kind", _ONLY_DEQUANTISED, ids=lambda kind: kind.name)
def test_blocks_are_dequantised_as_by_the_package_gguf(kind, tmp_path):
    blocks = random_blocks(kind, 4, 512)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=kind)
    finish(writer)
    weights = GgufWeights.find(tmp_path)
    assert weights is not None
    ((name, values),) = weights.iterate()
    assert name == "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(values.clone().numpy(), gguf.quants.dequantize(blocks, kind))
    ((_, meta),) = weights.iterate_without_memory()
    assert (meta.shape, meta.dtype, meta.is_meta) == (values.shape, values.dtype, True)


def test_an_architecture_without_an_implementation_here_runs_through_transformers(tmp_path):
    model = tiny_transformers_model("Starcoder2ForCausalLM", intermediate_size=128)
    path = write_gguf(model, "starcoder2", tmp_path / "tiny.gguf", Type.Q8_0)
    assert _generate(path) == _greedy(model)


def test_a_tied_head_stays_tied(tmp_path):
    model = _tiny("llama", tie_word_embeddings=True)
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf")
    assert _generate(path) == _greedy(model)
    assert ModelConfig.load(path).hf_config["tie_word_embeddings"] is True


def test_factors_of_llama_3_frequencies_are_those_of_its_scaling(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from penstock.layers.rope_scaling import read_rope_parameters, rope_frequencies

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = _tiny("llama", rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    model.register_buffer("rope_freqs_of_test", plain / frequencies)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("rope_freqs.weight", (plain / frequencies).numpy())
    writer.add_tensor("token_embd.weight", np.zeros((97, 64), dtype=np.float32))
    for add in ("context_length", "embedding_length", "block_count", "head_count", "feed_forward_length"):
        getattr(writer, f"add_{add}")({"context_length": 128, "embedding_length": 64, "head_count": 4}.get(add, 2))
    writer.add_layer_norm_rms_eps(1e-5)
    finish(writer)
    config = ModelConfig.load(path).hf_config
    found, factor = rope_frequencies(read_rope_parameters(config, head_size=16, num_positions=128))
    assert factor == 1.0
    torch.testing.assert_close(found, frequencies, rtol=1e-6, atol=0)


def test_a_split_model_is_loaded_by_any_of_its_files(tmp_path):
    model = _tiny("llama")
    whole = write_gguf(model, "llama", tmp_path / "whole.gguf")
    parts = _split(whole, tmp_path / "parts", 3)
    assert _generate(parts[0]) == _generate(parts[2]) == _greedy(model)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks tiny-00002-of-00003\.gguf"):
        ModelConfig.load(parts[0])


def test_the_only_model_of_a_folder_is_found(tmp_path):
    model = _tiny("qwen3")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(model, "qwen3", folder / "tiny.gguf")
    assert _generate(folder, load_format="gguf") == _greedy(model)
    write_gguf(model, "qwen3", folder / "other.gguf")
    with pytest.raises(ModelNotFound, match=r"several GGUF models: other\.gguf, tiny\.gguf"):
        ModelConfig.load(folder)


def test_a_config_json_beside_the_file_takes_precedence(tmp_path):
    model = _tiny("qwen3")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_gguf(model, "qwen3", folder / "tiny.gguf")
    written = {**ModelConfig.load(path).hf_config, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(written))
    assert ModelConfig.load(folder).longest_context == 64
    assert _generate(folder, load_format="gguf", tokenizer=path) == _greedy(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "rwkv7"}, r"general\.architecture='rwkv7'.*Supported: deepseek2, .*qwen3"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8: a mixture of experts"),
    ],
)
def test_unsupported_models_are_refused_by_name(changes, message, tmp_path):
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.load(path)


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf", changes={"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre='klingon'.*option tokenizer"):
        LLM(path)
    assert _generate(path, tokenizer="demo")


def test_a_truncated_file_is_refused_by_tensor_and_offset(tmp_path):
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf")
    last = read_header(path).tensors[-1]
    path.write_bytes(path.read_bytes()[: last.start + 7])
    with pytest.raises(CheckpointError, match=rf"{last.name} needs the bytes {last.start} to \d+"):
        LLM(path)


def test_a_tensor_of_an_unknown_type_is_refused_by_name_and_offset(tmp_path):
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf")
    info = replace(read_header(path).tensors[3], kind=99)
    with pytest.raises(UnsupportedFeature, match=rf"{info.name} at offset {info.start} is of type 99"):
        list(map_tensors([info]))


def test_rows_that_are_not_whole_blocks_are_refused_by_name_and_offset(tmp_path):
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf")
    info = replace(read_header(path).tensors[0], shape=(4, 48), kind=int(Type.Q8_0))
    with pytest.raises(CheckpointError, match=rf"{info.name} at offset {info.start} has the shape \[4, 48\].*32"):
        list(map_tensors([info]))


def test_requests_end_with_each_token_that_ends_a_turn(tmp_path):
    tokens = {"t": 0, "1": 1, "t1": 2, "<|eot_id|>": 3, "<|im_end|>": 4, "<|start|>": 5}
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf", tokens=list(tokens))
    assert ModelConfig.load(path).eos_token_ids == {2, 3, 4}


def test_every_cut_through_the_header_is_refused(tmp_path):
    data = write_gguf(_tiny("llama", vocab_size=8), "llama", tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = read_header(tmp_path / "tiny.gguf").tensors[0].start
    for length in range(0, header - 32, 13):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_header(cut)


def test_a_header_reads_as_by_the_package_gguf(tmp_path):
    path = write_gguf(_tiny("llama"), "llama", tmp_path / "tiny.gguf", Type.Q8_0)
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert [(one.name, one.shape, one.kind, one.start) for one in ours.tensors] == [
        (one.name, tuple(reversed(one.shape.tolist())), int(one.tensor_type), one.data_offset) for one in theirs.tensors
    ]
    for key, value in ours.metadata.items():
        if key != "GGUF.version":
            assert value == pytest.approx(theirs.fields[key].contents()), key


def test_big_endian_files_are_refused(tmp_path):
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(UnsupportedFeature, match="big-endian"):
        ModelConfig.load(path)


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(_tiny("llama"), "llama", path)
    assert ModelConfig.load(path).architecture == "LlamaForCausalLM"
    write_gguf(_tiny("qwen3"), "qwen3", path)
    assert ModelConfig.load(path).architecture == "Qwen3ForCausalLM"


def test_the_plan_counts_the_weights_as_they_are_held(tmp_path):
    from penstock.engine.planning.plan import plan_engine

    model = _tiny("llama")
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf", Type.Q8_0)
    save_checkpoint(model, tmp_path / "float32")
    options = {"kv_cache_memory_bytes": 1 << 22, "quantization": "none"}
    planned, expected = plan_engine(path, **options), plan_engine(tmp_path / "float32", **options)
    assert planned.stages[0].memory["weights"] == expected.stages[0].memory["weights"]
    assert EngineConfig.create(path, **options).model.checkpoint_dtype == "bfloat16"


def _split(path: Path, folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    reader = gguf.GGUFReader(path)
    paths = []
    for number in range(count):
        paths.append(folder / f"tiny-{number + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(paths[-1], "llama")
        if number == 0:
            for key, entry in reader.fields.items():
                if key.startswith("GGUF.") or key == "general.architecture":
                    continue
                subtype = entry.types[-1] if len(entry.types) > 1 else None
                writer.add_key_value(key, entry.contents(), entry.types[0], subtype)
            writer.add_uint16("split.count", count)
        for tensor in list(reader.tensors)[number::count]:
            writer.add_tensor(tensor.name, tensor.data)
        finish(writer)
    return paths
