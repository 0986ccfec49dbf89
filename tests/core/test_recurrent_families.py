"""Families with recurrent layers: tokens and log-probabilities are Transformers' in float32, however work is cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from core.plugins import assert_equal
from penstock.config import EngineConfig
from penstock.contract import RecurrentStateSpec, RpcCall, SamplingParams, StructuredOutputsParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.planning.plan import plan_engine
from penstock.kernels.native import NATIVE
from penstock.scheduler.kv_cache_plan import make_kv_cache_config
from support import constraints
from support.checkpoints import RECURRENT, VOCAB_SIZE, save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import (
    Result,
    add,
    assert_greedy_continuation,
    finish,
    greedy,
    make_core,
    random_prompts,
    run,
)

# Families with other layouts of heads, groups and layers, as (family, changes of its configuration).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-bias-untied": ("lfm2", {"conv_bias": True, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False}),
    "granite-dense-rope": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True, "attention_bias": True},
    ),
    "granite-one-group": ("granitemoehybrid", {"mamba_n_groups": 1, "time_step_limit": [0.5, 1.5], "mamba_d_conv": 2}),
    "falcon-norm": ("falcon_h1", {"mamba_rms_norm": True, "mlp_bias": True, "projectors_bias": True}),
    "falcon-norm-gates-first": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True, "attention_bias": True},
    ),
    "bamba-bias": ("bamba", {"attn_layer_indices": [0, 2], "mlp_bias": True, "attention_bias": True}),
    "mamba2-tied-bias": ("mamba2", {"tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False}),
    "mamba-bias-untied": (
        "mamba",
        {"tie_word_embeddings": False, "use_bias": True, "use_conv_bias": False, "time_step_rank": "auto"},
    ),
    "falcon_mamba-eps": (
        "falcon_mamba",
        {"mixer_rms_eps": 0.1, "conv_kernel": 2, "intermediate_size": 48, "state_size": 16},
    ),
    "jamba-dense-attention-last": (
        "jamba",
        {"num_experts": 1, "attn_layer_period": 2, "mamba_proj_bias": True, "mamba_dt_rank": 7},
    ),
    "nemotron-latent-groups": (
        "nemotron_h_moe",
        {"moe_latent_size": 24, "mlp_bias": True, "n_group": 3, "topk_group": 2, "norm_topk_prob": False},
    ),
    "zamba2-two-blocks-nope": (
        "zamba2",
        {
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "add_bias_linear": True,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        },
    ),
    "recurrent_gemma-attention-last": (
        "recurrent_gemma",
        {
            "block_types": ["recurrent", "attention"],
            "num_key_value_heads": 4,
            "attention_bias": True,
            "conv1d_width": 2,
            "lru_width": None,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron-bias": ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    "lfm2-attention-last": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 2}),
    "kimi_linear-attention-last": (
        "kimi_linear",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 2, "moe_renormalize": False},
    ),
    "minimax-window": (
        "minimax",
        {"sliding_window": 9, "head_dim": 24, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "linear_allow_neg_eigval": False,
            "linear_value_head_dim": 20,
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_next-attention-last": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 4,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen3_5-tied-mqa": (
        "qwen3_5",
        {
            "num_key_value_heads": 1,
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in RECURRENT}, **VARIANTS}
LENGTHS = (1, 40, 3, 17, 70)
NUM_TOKENS = 12
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 96, "kv_cache_memory_bytes": 24 << 20}
PROMPTS = random_prompts(LENGTHS, VOCAB_SIZE)
PARAMS = greedy(NUM_TOKENS, logprobs=3)
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
# Drafts of the second run, which earlier outputs give, are accepted.
SUFFIX = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}}
CHUNKS = (1, 7, 64)
# A shared expert with a gate is no operation of programs.
NOT_ONE_SEGMENT = ("qwen3_next", "qwen3_5_moe")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 13},
    {"fast_paths": "off", "async_scheduling": False},
    {"max_num_batched_tokens": 19, **NGRAM},
    {"max_num_batched_tokens": 24, **SUFFIX},
]


class Model:
    """A tiny checkpoint, its oracle, and the results of each prompt alone, whole, layer by layer."""

    def __init__(self, folder: Path, family: str, changes: dict[str, Any]) -> None:
        self.folder, self.family = folder, family
        self.oracle = tiny_model(family, **changes)
        save_checkpoint(self.oracle, folder)
        self.alone = self.run_each(fast_paths="off", max_num_batched_tokens=128)

    def run_each(self, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[Result]:
        """Each prompt by itself."""
        core = make_core(self.folder, **OPTIONS, **options, enable_prefix_caching=False)
        try:
            return [run(core, [prompt], PARAMS)[0] for prompt in prompts]
        finally:
            core.close()


@pytest.fixture(scope="module", params=[*RECURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("recurrent"), *MODELS[request.param])


@pytest.mark.each_value_quick
def test_tokens_and_log_probabilities_are_those_of_transformers(model: Model) -> None:
    for prompt, result in zip(PROMPTS, model.alone, strict=True):
        assert result.error is None, result.error
        assert len(result.tokens) == len(result.logprobs) == NUM_TOKENS
        assert_greedy_continuation(model.oracle, prompt, result)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.one_case_quick
def test_chunks_of_any_size_give_the_same_bits(model: Model, chunk: int) -> None:
    assert_equal(model.run_each(max_num_batched_tokens=chunk, max_num_seqs=1), model.alone)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.each_value_quick
def test_a_batch_has_the_bits_of_its_requests_alone(model: Model, options: dict[str, Any]) -> None:
    core = make_core(model.folder, **OPTIONS, **options)
    # The second time from snapshots.
    for _ in range(2):
        assert_equal(run(core, PROMPTS, PARAMS), model.alone)
    if "speculative_config" in options:
        metrics = core.scheduler.spec_decode_metrics
        is_suffix = options["speculative_config"]["method"] == "suffix"
        assert metrics.num_draft_tokens > metrics.num_accepted_tokens >= (20 if is_suffix else 0)
    core.close()


@pytest.mark.parametrize("options", [{}, NGRAM], ids=str)
@pytest.mark.one_case_quick
def test_prefix_hits_change_no_bit(model: Model, options: dict[str, Any]) -> None:
    shared = PROMPTS[1]
    prompts = [shared + tail for tail in random_prompts([1, 4, 9], VOCAB_SIZE, seed=6)]
    expected = model.run_each(prompts)
    core = make_core(model.folder, **OPTIONS, **options)
    assert run(core, [shared], PARAMS)[0].num_cached_tokens == 0
    for _ in range(2):
        results = run(core, prompts, PARAMS)
        assert_equal(results, expected)
        assert all(result.num_cached_tokens > 0 for result in results)
    core.close()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, **NGRAM}], ids=str)
@pytest.mark.one_case_quick
def test_preempted_requests_have_the_same_bits(
    model: Model, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    core = core_with_small_pools(model.folder, monkeypatch, **options)
    assert_equal(run(core, PROMPTS, PARAMS), model.alone)
    core.scheduler.kv_cache.check_integrity()
    assert core.scheduler.kv_cache.num_used_blocks == 0
    core.close()


def core_with_small_pools(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> EngineCore:
    """An engine with room for about two requests in each pool."""

    def sized(config: Any, specs: dict[str, Any], *others: Any) -> Any:
        from penstock.scheduler.kv_cache_plan import group_layers

        groups = group_layers(specs)
        counts = {group.pool: 14 if isinstance(group.spec, RecurrentStateSpec) else 30 for group in groups}
        return make_kv_cache_config(groups, [counts[pool] for pool in sorted(counts)])

    monkeypatch.setattr("penstock.engine.core.startup.size_kv_cache", sized)
    return make_core(folder, **{**OPTIONS, **options})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.one_case_quick
def test_quantised_weights_give_the_same_bits_in_any_chunks(model: Model, quantization: str) -> None:
    prompts = PROMPTS[1:4]
    expected = model.run_each(prompts, quantization=quantization, max_num_batched_tokens=128)
    core = make_core(model.folder, **OPTIONS, quantization=quantization, max_num_batched_tokens=7)
    for _ in range(2):
        assert_equal(run(core, prompts, PARAMS), expected)
    core.close()


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.one_case_quick
def test_bfloat16_checkpoints_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = tiny_model(family)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.bfloat16().float())
    save_checkpoint(oracle, tmp_path, dtype=torch.bfloat16)
    exact = {"dtype": "auto", "cpu_arithmetic": "float32", "kv_cache_dtype": "float32"}
    core = make_core(tmp_path, **{**OPTIONS, **exact})
    for prompt, result in zip(PROMPTS[1:4], run(core, PROMPTS[1:4], PARAMS), strict=True):
        assert result.error is None, result.error
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": "reference"}, {"kv_cache_dtype": "int8"}, {"block_size": 1}, {"max_model_len": 100_000}],
    ids=str,
)
@pytest.mark.one_case_quick
def test_a_model_without_attention_is_planned_and_served(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, "mamba2")
    planned = plan_engine(tmp_path, device="cpu")
    assert planned.max_model_len == 2048
    assert planned.concurrency > 1
    assert "no layer has attention" in planned.table()
    assert all(isinstance(group.spec, RecurrentStateSpec) for group in planned.kv_cache.groups)
    results = []
    for more in ({}, options):
        core = make_core(tmp_path, **{**OPTIONS, **more})
        results.append(run(core, PROMPTS[1:2], PARAMS))
        found = run(core, PROMPTS[1:2], PARAMS)
        assert found[0].num_cached_tokens >= 36
        assert core.scheduler.stats.num_used_blocks == 0
        assert_equal(found, results[-1])
        core.close()
    assert_equal(results[1], results[0])


@pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels")
@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_decoding_is_one_segment_of_a_program(model: Model) -> None:
    core = make_core(model.folder, **OPTIONS)
    run(core, PROMPTS[:2], PARAMS)

    def segments(worker: Any) -> set[int]:
        recorded = worker.runner.execution.programs._recorded.values()
        return {0 if found is None else found.num_segments for found in recorded}

    (found,) = core.collective_rpc(RpcCall(segments))
    assert (found == {1}) == (model.family not in NOT_ONE_SEGMENT)
    core.close()


@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid", "mamba2"])
@pytest.mark.one_case_quick
def test_constrained_outputs_have_their_form_with_and_without_drafts(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=constraints.VOCAB_SIZE)
    form = "(cat|dog)( and (cat|dog)){4}"
    params = SamplingParams(
        temperature=0.0, seed=0, max_tokens=80, structured_outputs=StructuredOutputsParams(regex=form)
    )
    found = []
    for options in ({}, {"max_num_batched_tokens": 16, **NGRAM}):
        core = make_core(tmp_path, tokenizer="demo", max_model_len=120, **options)
        results: dict[str, Result] = {}
        add(core, "r", constraints.encode("Who are you?"), params, eos_token_ids=frozenset({constraints.END}))
        finish(core, results)
        core.close()
        found.append(results["r"].tokens)
    assert re.fullmatch(form, constraints.demo_tokenizer().decode(found[0]))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, **NGRAM}],
    ids=str,
)
def test_ranks_and_stages_give_the_tokens_of_one_worker(model: Model, options: dict[str, Any]) -> None:
    core = make_core(model.folder, **OPTIONS, **options)
    for _ in range(2):
        for prompt, result in zip(PROMPTS, run(core, PROMPTS, PARAMS), strict=True):
            assert result.error is None, result.error
            assert_greedy_continuation(model.oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "recurrent_gemma"])
@pytest.mark.one_path(reason="configurations alone")
def test_models_whose_configurations_name_no_context_have_a_default_one_and_no_limit(
    family: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, family).folder
    config = EngineConfig.create(str(folder), device="cpu").model
    assert config.longest_context == (8192 if family == "recurrent_gemma" else 2048)
    assert EngineConfig.create(str(folder), device="cpu", max_model_len=100_000).model.planned_context == 100_000
