"""SmolLM2-135M-Instruct from its published GGUF file: `make real` fetches it and runs these tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import jsonschema
import pytest
import torch
import transformers

import penstock
from penstock import LLM, SamplingParams
from penstock.bench.quality.run import evaluate
from penstock.config import EngineConfig
from penstock.config.published import PUBLISHED
from penstock.contract import StructuredOutputsParams

_MODEL = PUBLISHED["smollm2"]
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not _MODEL.is_fetched, reason="smollm2 is not in the cache folder: `make real` fetches it"),
]
_PROMPTS = [
    "The capital of France is",
    "In 1984, 12345 people",
    "def fib(n):\n",
    "Der Hund läuft über die Straße. 你好",
    "1, 2, 3, 4,",
]
_SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"city": {"const": "Paris"}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    },
]
_GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", quantization="none", max_model_len=4096, kv_cache_memory_bytes="512MiB") as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle():
    """Transformers' model, with the weights that the package gguf reads."""
    reader = gguf.GGUFReader(_MODEL.path)
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


def _expected(oracle, token_ids: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = oracle.generate(
            torch.tensor([token_ids]), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
        )
    return ids[0, len(token_ids) :].tolist()


def _greedy(llm: LLM, prompts=_PROMPTS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, _GREEDY)]


def test_greedy_tokens_are_those_of_transformers(llm, oracle):
    for output in llm.generate(_PROMPTS, _GREEDY):
        assert list(output.outputs[0].token_ids) == _expected(oracle, output.prompt_token_ids, 32), output.prompt


def test_tokens_of_a_long_prompt_are_those_of_transformers(llm, oracle):
    prompt = " ".join(f"Item {number} costs {number * 7 % 90} euros." for number in range(280)) + " Item 281 costs"
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(output.prompt_token_ids) > 2500
    assert list(output.outputs[0].token_ids) == _expected(oracle, output.prompt_token_ids, 8)


@pytest.mark.parametrize("text", [*_PROMPTS, " a  b\n\n c", "<|im_start|>user\nHi<|im_end|>", "it's 3.14 \t€"])
def test_every_text_survives_the_tokenizer(llm, text):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_digits_are_tokens_of_their_own(llm):
    assert len(llm.get_tokenizer().encode("12345")) == 5


def test_a_chat_of_several_turns_keeps_to_the_template_and_ends_its_turns(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    (first,) = llm.chat(messages, params)
    assert first.prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Paris" in first.outputs[0].text
    assert first.outputs[0].finish_reason == "stop"
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "And of Italy?"}]
    (second,) = llm.chat(messages, params)
    assert second.prompt.startswith(first.prompt + first.outputs[0].text + "<|im_end|>\n")
    assert "Rome" in second.outputs[0].text


@pytest.mark.parametrize("schema", _SCHEMAS, ids=["object", "array", "constant"])
def test_output_follows_a_schema(llm, schema):
    params = SamplingParams(temperature=0, max_tokens=128, structured_outputs=StructuredOutputsParams(json=schema))
    (output,) = llm.chat([{"role": "user", "content": "Answer in JSON about Paris and Alice, 30 years old."}], params)
    jsonschema.validate(json.loads(output.outputs[0].text), schema)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"speculative_config": {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 3}},
        # Three ranks: the model has nine heads and three KV heads.
        {"tensor_parallel_size": 3},
    ],
    ids=["ngram", "draft_model", "tensor_parallel"],
)
def test_other_ways_to_compute_give_the_same_tokens(llm, options):
    expected = _greedy(llm)
    with LLM("smollm2", quantization="none", max_model_len=512, kv_cache_memory_bytes="64MiB", **options) as other:
        assert _greedy(other) == expected


# Rise of the loss, and mean change of a token's log-probability, that a format may cost.
_LIMITS = {"int8": (0.01, 0.1), "int4": (0.06, 0.6)}


def _rescaled(model: transformers.LlamaForCausalLM, folder: Path) -> Path:
    """Save a model of the same function whose weights lie on no grid of the file's, with features of unequal size."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                factors = torch.rand(norm.weight.shape[0], generator=random) * 1.5 + 0.5
                norm.weight /= factors
                for reader in readers:
                    reader.weight *= factors
            factors = torch.rand(mlp.down_proj.in_features, generator=random) * 1.5 + 0.5
            mlp.up_proj.weight /= factors[:, None]
            mlp.down_proj.weight *= factors
    model.save_pretrained(folder)
    for file in EngineConfig.create("smollm2").model.tokenizer_folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("is_rescaled", [False, True], ids=["as published", "rescaled"])
def test_quantised_weights_keep_what_the_model_says(oracle, tmp_path, is_rescaled):
    model = str(_rescaled(oracle, tmp_path)) if is_rescaled else "smollm2"
    text = (Path(penstock.__file__).parents[2] / "LICENSE").read_text()
    options = {"device": "cpu", "kv_cache_memory_bytes": "128MiB"}
    _, results = evaluate(
        *(model, text, list(_LIMITS), options),
        against="float32",
        window=256,
        max_tokens=1024,
        on_measured=lambda format: None,
    )
    for result in results[1:]:
        loss_change, mean_change = _LIMITS[result.format]
        assert result.closeness.loss_change <= loss_change, result
        assert result.closeness.mean_change <= mean_change, result
