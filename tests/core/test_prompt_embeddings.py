"""Prompts of embeddings: answers equal those of Transformers' inputs_embeds in float32, however the work is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import LLM, RequestOutput, SamplingParams
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest, UnsupportedParameter
from support.checkpoints import save_checkpoint, tiny_model
from support.engines import bytes_of_blocks, random_prompts
from support.multimodal_models import picture, save_multimodal, save_tokenizer, saved_tensor, words
from support.transformers_models import FAMILIES, save_for_fallback, tiny_transformers_model

TOLERANCE = 1e-4
NUM_TOKENS = 8
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 96, "enable_prompt_embeds": True}
LENGTHS = (1, 4, 17, 40, 33)
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


def embeddings(length: int, width: int, seed: int = 0) -> Tensor:
    """Rows of random numbers of the size of a trained model's embeddings, [length, width]."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randn(length, width, generator=generator) * 0.5


def expected(model: PreTrainedModel, rows: Tensor, penalty: float = 1.0) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens of Transformers, and the log-probabilities at each."""
    with torch.no_grad():
        made = model.generate(
            inputs_embeds=rows.unsqueeze(0),
            attention_mask=torch.ones(1, len(rows), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=penalty,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return made.sequences[0].tolist(), [torch.log_softmax(row[0].float(), -1) for row in made.logits]


def assert_continues(model: PreTrainedModel, rows: Tensor, output: RequestOutput, penalty: float = 1.0) -> None:
    """Tokens and log-probabilities are those of Transformers, up to a token that is as likely as another one."""
    tokens, logits = expected(model, rows, penalty)
    sampled = output.outputs[0]
    assert sampled.logprobs is not None
    for token, own, row, logprobs in zip(tokens, sampled.token_ids, logits, sampled.logprobs, strict=True):
        for token_id, value in logprobs.items():
            assert abs(float(row[token_id]) - value.logprob) <= TOLERANCE
        if own != token:
            assert penalty == 1
            assert float(row.max() - row[own]) <= TOLERANCE
            break


def answer(llm: LLM, prompts: list[Any], **params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**{**GREEDY, "logprobs": 2, **params}), use_tqdm=False)


def as_prompts(rows: list[Tensor]) -> list[Any]:
    return [{"prompt_embeds": one} for one in rows]


# By name: family of the library's own models, or class that runs through Transformers, and its fields.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "sliding_window": 9}),
    "gemma3": ("gemma3", {"num_hidden_layers": 3, "sliding_window": 8}),
    "gpt2": ("gpt2", {}),
    "granite": ("granite", {"embedding_multiplier": 3.0}),
    "opt": FAMILIES["opt-post-norm"],
    "gpt-neox": FAMILIES["gpt-neox"],
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    family, fields = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    if family.endswith("ForCausalLM"):
        made = tiny_transformers_model(family, **fields)
        save_for_fallback(made, folder)
    else:
        made = tiny_model(family, **fields)
        save_checkpoint(made, folder)
    save_tokenizer(folder)
    return made, folder


def width_of(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().embedding_dim)


@pytest.mark.each_value_quick
def test_answers_equal_those_of_transformers(model: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = model
    rows = [embeddings(length, width_of(oracle)) for length in LENGTHS]
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False, fast_paths="off") as llm:
        alone = [answer(llm, [prompt])[0] for prompt in as_prompts(rows)]
    for one, output in zip(rows, alone, strict=True):
        assert_continues(oracle, one, output)
    with LLM(str(folder), **OPTIONS, max_num_batched_tokens=13) as llm:
        (text,) = answer(llm, [{"prompt_token_ids": [5, 6, 7, 8, 9]}])
        for _ in range(2):
            *outputs, beside = answer(llm, [*as_prompts(rows), {"prompt_token_ids": [5, 6, 7, 8, 9]}])
            assert beside.outputs[0].logprobs == text.outputs[0].logprobs
            for output, other in zip(outputs, alone, strict=True):
                assert output.outputs[0].token_ids == other.outputs[0].token_ids
                assert output.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("llama")
    made = tiny_model("llama")
    save_checkpoint(made, folder)
    save_tokenizer(folder)
    return made, folder


def test_embeddings_of_tokens_answer_as_the_tokens(llama: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = llama
    ids = [5, 17, 40, 3, 77, 21, 8]
    rows = oracle.get_input_embeddings()(torch.tensor(ids)).detach()
    with LLM(str(folder), **OPTIONS) as llm:
        by_ids, by_rows = answer(llm, [{"prompt_token_ids": ids}, {"prompt_embeds": rows, "prompt": "shown"}])
        by_array, by_batch, saved = answer(
            llm,
            [
                {"prompt_embeds": rows.numpy()},
                {"prompt_embeds": rows.unsqueeze(0)},
                {"prompt_embeds": saved_tensor(rows)},
            ],
        )
    assert by_rows.prompt == "shown"
    assert by_rows.prompt_token_ids == [0] * len(ids)
    for output in (by_rows, by_array, by_batch, saved):
        assert output.outputs[0].logprobs == by_ids.outputs[0].logprobs


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow)],
    ids=["one worker", "two stages"],
)
@pytest.mark.parametrize("family", ["zamba2", "recurrent_gemma"])
@pytest.mark.each_value_quick
def test_hybrid_models_answer_embeddings_of_tokens_as_the_tokens(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    oracle = tiny_model(family)
    save_checkpoint(oracle, tmp_path)
    save_tokenizer(tmp_path)
    prompts = random_prompts((20, 7), oracle.config.vocab_size)
    rows = [oracle.get_input_embeddings()(torch.tensor(ids)).detach() for ids in prompts]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        by_ids = answer(llm, [{"prompt_token_ids": ids} for ids in prompts])
    with LLM(str(tmp_path), **OPTIONS, **options, max_num_batched_tokens=13) as llm:
        # The second time from snapshots.
        for _ in range(2):
            for output, expected in zip(answer(llm, as_prompts(rows)), by_ids, strict=True):
                assert output.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_dtypes_are_taken_exactly(llama: tuple[PreTrainedModel, Path], dtype: torch.dtype) -> None:
    _, folder = llama
    rows = embeddings(21, 64).to(dtype)
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False) as llm:
        outputs = answer(llm, [{"prompt_embeds": one} for one in (rows, rows.float(), saved_tensor(rows))])
    assert all(output.outputs[0].logprobs == outputs[0].outputs[0].logprobs for output in outputs)


def test_prefixes_are_shared_by_content(llama: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = llama
    first = embeddings(50, 64)
    # Other rows from the 33rd on; from the 3rd on; as many rows with other values.
    changed = [first.clone(), first.clone(), embeddings(50, 64, seed=3)]
    changed[0][33:] += 1
    changed[1][3] += 1
    with LLM(str(folder), **{**OPTIONS, "block_size": 16}) as llm:
        assert answer(llm, as_prompts([first]))[0].num_cached_tokens == 0
        counts = []
        for rows in (first, *changed):
            (output,) = answer(llm, as_prompts([rows]))
            assert_continues(oracle, rows, output)
            counts.append(output.num_cached_tokens)
        # Placeholders are no tokens: a prompt of their ids shares nothing.
        assert answer(llm, [{"prompt_token_ids": [0] * 50}])[0].num_cached_tokens == 0
    assert counts == [48, 32, 0, 0]


def test_preempted_requests_go_on_as_if_undisturbed(llama: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = llama
    rows = [embeddings(length, 64, seed=1) for length in (30, 28, 31, 29)]
    options = {**OPTIONS, "max_model_len": 48, "max_num_batched_tokens": 16}
    with LLM(str(folder), **options, kv_cache_memory_bytes=bytes_of_blocks(folder, 25, **options)) as llm:
        outputs = answer(llm, as_prompts(rows))
        preempted = next(metric for metric in llm.get_metrics() if "preempt" in metric.name)
    assert preempted.value > 0
    for one, output in zip(rows, outputs, strict=True):
        assert_continues(oracle, one, output)


def test_the_repetition_penalty_knows_no_tokens_of_the_prompt(llama: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = llama
    rows = embeddings(12, 64)
    with LLM(str(folder), **OPTIONS) as llm:
        (output,) = answer(llm, as_prompts([rows]), repetition_penalty=1.7)
    assert_continues(oracle, rows, output, penalty=1.7)


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.slow
def test_ranks_take_their_share(llama: tuple[PreTrainedModel, Path], options: dict[str, Any]) -> None:
    oracle, folder = llama
    rows = [embeddings(length, 64) for length in (20, 7)]
    with LLM(str(folder), **OPTIONS, **options, max_num_batched_tokens=13) as llm:
        for one, output in zip(rows, answer(llm, as_prompts(rows)), strict=True):
            assert_continues(oracle, one, output)


def test_drafts_change_no_answer(llama: tuple[PreTrainedModel, Path]) -> None:
    oracle, folder = llama
    rows = embeddings(20, 64)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(folder), **OPTIONS, speculative_config=drafts) as llm:
        (output,) = answer(llm, as_prompts([rows]))
    assert_continues(oracle, rows, output)


def test_one_engine_takes_images_and_embeddings(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "qwen3-vl")
    rows = embeddings(23, 64)
    image: Any = {
        "prompt": f"<vision_start> <image> <vision_end> {words(7, 8, 9)}",
        "multi_modal_data": {"image": [picture(40, 24, 1)]},
    }
    prompts = [image, {"prompt_embeds": rows}, words(*range(10, 21))]
    with LLM(str(tmp_path), **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [answer(llm, [prompt])[0] for prompt in prompts]
        together = answer(llm, prompts)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_rows_that_are_too_large_end_their_own_request_only(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("gpt2"), tmp_path)
    save_tokenizer(tmp_path)
    rows, huge = embeddings(40, 64), embeddings(40, 64)
    huge[20] = 3e38
    prompts: list[Any] = [words(*range(10, 31)), {"prompt_embeds": rows}, {"prompt_embeds": rows[:21]}]
    with LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=13) as llm:
        alone = [answer(llm, [prompt])[0] for prompt in prompts]
        for _ in range(2):
            failed, *others = answer(llm, [{"prompt_embeds": huge}, *prompts])
            assert failed.is_invalid
            assert (failed.error or "").startswith("prompt_embeds may have values that are too large")
            for one, other in zip(alone, others, strict=True):
                assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_what_needs_tokens_is_refused_by_name(llama: tuple[PreTrainedModel, Path]) -> None:
    rows, folder = embeddings(4, 64), str(llama[1])
    with LLM(folder, **OPTIONS) as llm:
        for name, value in (("prompt_logprobs", 1), ("truncate_prompt_tokens", 2)):
            with pytest.raises(UnsupportedParameter, match=f"{name} is not for prompts of embeddings"):
                llm.generate({"prompt_embeds": rows}, SamplingParams(**{name: value}), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="prompt_embeds and prompt_token_ids"):
            llm.generate({"prompt_embeds": rows, "prompt_token_ids": [5]}, use_tqdm=False)
        with pytest.raises(InvalidRequest, match=r"prompt_embeds has the shape \[4, 48\]. Allowed: \[tokens, 64\]"):
            llm.generate({"prompt_embeds": torch.zeros(4, 48)}, use_tqdm=False)
        with pytest.raises(ContextTooLong, match="97 tokens"):
            llm.generate({"prompt_embeds": torch.zeros(97, 64)}, use_tqdm=False)
    with LLM(folder, dtype="float32") as llm, pytest.raises(UnsupportedParameter, match="enable_prompt_embeds"):
        llm.generate({"prompt_embeds": rows}, use_tqdm=False)
    with pytest.raises(ConfigError, match="enable_prompt_embeds=True is not valid .* which pools"):
        LLM(folder, runner="pooling", enable_prompt_embeds=True)
