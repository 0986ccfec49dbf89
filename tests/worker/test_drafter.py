"""The model that drafts, in the worker: loaded beside its target, counted in the plan, kept over a reload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ConfigError, ModelError, ModelNotFound, PenstockError, UnsupportedFeature, UnsupportedModel
from penstock.worker.drafter import _head
from penstock.worker.memory_plan import bytes_of
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, edit_config, save_checkpoint, tiny_checkpoint
from support.counting import plan_and_run
from support.draft_heads import eagle3_weights, eagle_weights, write_head, write_mimo
from support.engines import SMALL, add, greedy, make_core, random_prompts, run
from support.transformers_models import save_for_fallback, tiny_transformers_model

PROMPTS = random_prompts([5, 21, 40], VOCAB_SIZE)
NUM_DRAFTS = 3


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "target", num_hidden_layers=5).folder


def options_for(folder: Path, method: str) -> dict[str, Any]:
    """Options of drafters with random weights, for `target`."""
    drafter = folder / method
    if method == "draft_model":
        tiny_checkpoint(drafter, "qwen3", seed=7, head_dim=16, num_key_value_heads=4)
    elif method == "eagle":
        write_head(drafter, eagle_weights())
    else:
        write_head(drafter, eagle3_weights(), draft_vocab_size=40)
    return {"method": method, "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}


def loaded_worker(core: EngineCore) -> Worker:
    assert core._engine is not None
    worker = core._engine.executor._wrapper.worker  # type: ignore[attr-defined]
    assert isinstance(worker, Worker)
    return worker


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_the_plan_counts_the_drafter(tmp_path: Path, target: Path, method: str) -> None:
    options = {"max_num_seqs": 40, "max_num_batched_tokens": 600, "max_model_len": 128, "dtype": "float32"}
    speculative = options_for(tmp_path, method)
    alone, _, _ = plan_and_run(target, **options)
    unloaded, weights, step = plan_and_run(target, **options, speculative_config=speculative)
    assert bytes_of(unloaded.terms, "weights") == weights
    assert bytes_of(unloaded.terms, "weights") > bytes_of(alone.terms, "weights")
    assert unloaded.num_parameters > alone.num_parameters
    assert bytes_of(unloaded.terms, "activations") == pytest.approx(bytes_of(step, "activations"), rel=0.1)
    assert len(unloaded.specs) > len(alone.specs)
    assert sum(name.startswith("draft.") for name in unloaded.specs) == len(unloaded.specs) - len(alone.specs)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_methods_without_a_model_are_planned_without_memory(target: Path, method: str) -> None:
    options = {"max_num_seqs": 40, "max_num_batched_tokens": 600, "max_model_len": 128, "dtype": "float32"}
    speculative = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    unloaded, weights, step = plan_and_run(target, **options, speculative_config=speculative)
    assert bytes_of(unloaded.terms, "weights") == weights
    assert bytes_of(unloaded.terms, "activations") == pytest.approx(bytes_of(step, "activations"), rel=0.1)
    assert bytes_of(unloaded.terms, "runner_state") == pytest.approx(bytes_of(step, "runner_state"), rel=0.1)


def test_a_draft_model_that_runs_through_transformers_is_planned_without_memory(tmp_path: Path, target: Path) -> None:
    save_checkpoint(tiny_transformers_model("GPTNeoXForCausalLM"), tmp_path / "drafter")
    options = {"max_num_seqs": 40, "max_num_batched_tokens": 600, "max_model_len": 128, "dtype": "float32"}
    speculative = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": NUM_DRAFTS}
    unloaded, weights, step = plan_and_run(target, **options, speculative_config=speculative)
    assert bytes_of(unloaded.terms, "weights") == weights
    assert bytes_of(unloaded.terms, "activations") == pytest.approx(bytes_of(step, "activations"), rel=0.1)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle", "eagle3"])
def test_no_full_steps_are_run_to_plan_a_method(
    tmp_path: Path, target: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    has_model = method not in ("ngram", "suffix")
    speculative = options_for(tmp_path, method) if has_model else {"method": method, "num_speculative_tokens": 2}
    make_core(target, speculative_config=speculative).close()
    assert "Full steps are run" not in caplog.text


def test_a_shipped_models_head_is_found_by_its_name_when_it_is_planned() -> None:
    plan = plan_engine("demo", **SMALL, speculative_config={"method": "eagle3", "num_speculative_tokens": 2})
    assert plan.num_parameters > plan_engine("demo", **SMALL).num_parameters


def test_a_large_drafters_activations_are_counted(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "target", max_position_embeddings=1024)
    tiny_checkpoint(tmp_path / "large", seed=7, max_position_embeddings=1024, intermediate_size=3000)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 600, "max_model_len": 601, "dtype": "float32"}
    speculative = {"method": "draft_model", "model": str(tmp_path / "large"), "num_speculative_tokens": 2}
    alone, _, _ = plan_and_run(tmp_path / "target", **options)
    unloaded, _, step = plan_and_run(tmp_path / "target", **options, speculative_config=speculative)
    assert bytes_of(unloaded.terms, "activations") == pytest.approx(bytes_of(step, "activations"), rel=0.1)
    assert bytes_of(unloaded.terms, "activations") > 5 * bytes_of(alone.terms, "activations")


def test_the_plan_counts_the_distributions_that_drafts_are_drawn_from(tmp_path: Path, target: Path) -> None:
    options = {"max_num_seqs": 40, "max_num_batched_tokens": 600, "max_model_len": 128, "dtype": "float32"}
    speculative = options_for(tmp_path, "eagle3")
    exact, _, _ = plan_and_run(target, **options, speculative_config=speculative)
    speculative["rejection_sample_method"] = "standard"
    standard, _, _ = plan_and_run(target, **options, speculative_config=speculative)
    more = bytes_of(standard.terms, "runner_state") - bytes_of(exact.terms, "runner_state")
    assert more == pytest.approx(41 * NUM_DRAFTS * VOCAB_SIZE * 4, rel=0.1)


def test_an_engines_plan_shows_it(tmp_path: Path, target: Path) -> None:
    speculative = options_for(tmp_path, "eagle3")
    alone = plan_engine(target, **SMALL)
    plan = plan_engine(target, **SMALL, speculative_config=speculative)
    assert plan.memory["weights"] > alone.memory["weights"]
    assert plan.kv_bytes_per_token == alone.kv_bytes_per_token * 6 // 5
    core = make_core(target, speculative_config=speculative)
    assert core.memory_plan["weights"] == plan.memory["weights"]
    assert core.kv_cache_config.pools[0].num_blocks == plan.kv_cache.pools[0].num_blocks
    core.close()


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_reload_of_the_target_keeps_the_drafter(tmp_path: Path, target: Path, method: str) -> None:
    new = tiny_checkpoint(tmp_path / "new", seed=2, num_hidden_layers=5).folder
    plain = make_core(new, dtype="float32")
    expected = [result.tokens for result in run(plain, PROMPTS, greedy(20))]
    plain.close()
    core = make_core(target, dtype="float32", speculative_config=options_for(tmp_path, method))
    run(core, PROMPTS, greedy(5))
    worker = loaded_worker(core)
    drafter = worker.weights.drafter
    core.collective_rpc(RpcCall("reload_weights", (str(new),)))
    assert core.reset_prefix_cache()
    assert [result.tokens for result in run(core, PROMPTS, greedy(20))] == expected
    assert worker.weights.drafter is drafter
    if method != "draft_model":
        assert drafter is not None
        assert drafter.target is worker.weights.model  # type: ignore[union-attr]
    core.close()


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_dummy_batches_touch_nothing(tmp_path: Path, target: Path, method: str) -> None:
    plain = make_core(target, dtype="float32")
    expected = [result.tokens for result in run(plain, PROMPTS, greedy(12))]
    plain.close()
    core = make_core(target, dtype="float32", speculative_config=options_for(tmp_path, method), async_scheduling=False)
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, greedy(12))
    worker, results = loaded_worker(core), {}
    for _ in range(3):
        for output in core.step():
            results.setdefault(output.req_id, []).extend(output.new_token_ids)
        cache = worker.runner.kv_cache
        before = [pages.clone() for pages in cache.memory_of_blocks(0, 1, cache.config.pools[0].num_blocks)]
        drafts = worker.runner.requests.draft_token_ids.tensor.clone()
        worker.execute_dummy_batch()
        after = list(cache.memory_of_blocks(0, 1, cache.config.pools[0].num_blocks))
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert torch.equal(drafts, worker.runner.requests.draft_token_ids.tensor)
    while core.has_unfinished_requests():
        for output in core.step():
            results.setdefault(output.req_id, []).extend(output.new_token_ids)
    assert [results[f"r{index}"] for index in range(len(PROMPTS))] == expected
    core.close()


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_random_weights_draft_too(tmp_path: Path, target: Path, method: str) -> None:
    core = make_core(target, load_format="dummy", speculative_config=options_for(tmp_path, method))
    assert [len(result.tokens) for result in run(core, PROMPTS, greedy(8))] == [8] * len(PROMPTS)
    core.close()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.each_value_quick
def test_the_drafters_cache_is_of_the_targets_dtype(
    tmp_path: Path, target: Path, method: str, kv_cache_dtype: str
) -> None:
    plain = make_core(target, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    expected = [result.tokens for result in run(plain, PROMPTS, greedy(20))]
    plain.close()
    options = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    core = make_core(target, **options, speculative_config=options_for(tmp_path, method))
    assert {group.spec.dtype for group in core.kv_cache_config.groups} == {kv_cache_dtype}  # type: ignore[union-attr]
    assert [result.tokens for result in run(core, PROMPTS, greedy(20))] == expected
    core.close()


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
@pytest.mark.processor
@pytest.mark.one_case_quick
def test_rounded_targets_are_drafted_for(tmp_path: Path, target: Path, method: str, options: dict[str, Any]) -> None:
    if method == "mtp":
        target = write_mimo(tmp_path / "mimo")
        speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    else:
        speculative = options_for(tmp_path, method)
    plain = make_core(target, **options)
    expected = [result.tokens for result in run(plain, PROMPTS, greedy(20))]
    plain.close()
    core = make_core(target, **options, speculative_config=speculative)
    assert [result.tokens for result in run(core, PROMPTS, greedy(20))] == expected
    core.close()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "qwen3", "phi3", "olmo2", "gpt2"])
def test_every_family_drafts_for_every_other(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path / "target", "gemma2", sliding_window=9)
    window = {} if family == "gpt2" else {"sliding_window": 9}
    tiny_checkpoint(tmp_path / "drafter", family, seed=7, **(window if family in ("gemma3", "mistral") else {}))
    plain = make_core(tmp_path / "target", dtype="float32", max_model_len=128)
    expected = [result.tokens for result in run(plain, PROMPTS, greedy(20))]
    plain.close()
    speculative = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
    core = make_core(tmp_path / "target", dtype="float32", max_model_len=128, speculative_config=speculative)
    assert [result.tokens for result in run(core, PROMPTS, greedy(20))] == expected
    core.close()


def test_a_head_goes_on_where_its_own_positions_end(tmp_path: Path, target: Path) -> None:
    plain = make_core(target, dtype="float32")
    prompts = random_prompts([60], VOCAB_SIZE)
    expected = run(plain, prompts, greedy(60))[0].tokens
    plain.close()
    # Its config.json says 32.
    core = make_core(target, dtype="float32", speculative_config=options_for(tmp_path, "eagle3"))
    assert run(core, prompts, greedy(60))[0].tokens == expected
    core.close()


@pytest.mark.parametrize("form", ["speculators", "torch"])
def test_heads_come_in_other_forms_too(tmp_path: Path, target: Path, form: str) -> None:
    def drafts() -> list[list[int]]:
        core = make_core(target, dtype="float32", speculative_config=options, async_scheduling=False)
        seen: list[list[int]] = []
        take = core.scheduler.update_draft_token_ids
        core.scheduler.update_draft_token_ids = lambda found: (seen.extend(found.values()), take(found))[1]  # type: ignore[method-assign]
        run(core, PROMPTS, greedy(9))
        core.close()
        return seen

    options = options_for(tmp_path, "eagle3")
    edit_config(tmp_path / "eagle3", eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    expected = drafts()
    folder = tmp_path / "eagle3"
    weights = load_file(folder / "model.safetensors")
    if form == "torch":
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(
            {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()},
            folder / "model.safetensors",
        )
        config = json.loads((folder / "config.json").read_text())
        outer = {"draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [0, 2, 3], "target_hidden_size": None}
        content = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": config, **outer}
        (folder / "config.json").write_text(json.dumps(content))
    assert drafts() == expected
    assert len(expected) > 10


def _no_model(folder: Path) -> dict[str, Any]:
    return {"method": "eagle3"}


def _no_such_folder(folder: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(folder / "nowhere")}


def _other_vocabulary(folder: Path) -> dict[str, Any]:
    tiny_checkpoint(folder / "drafter", vocab_size=120)
    return {"method": "draft_model", "model": str(folder / "drafter")}


def _too_short(folder: Path) -> dict[str, Any]:
    tiny_checkpoint(folder / "drafter", max_position_embeddings=64)
    return {"method": "draft_model", "model": str(folder / "drafter")}


def _not_runnable(folder: Path) -> dict[str, Any]:
    tiny_checkpoint(folder / "drafter")
    edit_config(folder / "drafter", architectures=["xLSTMForCausalLM"])
    return {"method": "draft_model", "model": str(folder / "drafter")}


def _other_head(folder: Path) -> dict[str, Any]:
    options = options_for(folder, "eagle3")
    edit_config(folder / "eagle3", target_hidden_size=32)
    return options


def _no_mtp(folder: Path) -> dict[str, Any]:
    return {"method": "mtp"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_no_model, ConfigError, "'eagle3' and no model"),
        (_no_such_folder, ModelNotFound, "nowhere"),
        (_other_vocabulary, ModelError, "vocab_size=120, but .* has 97"),
        (_too_short, ConfigError, "64 positions .* max_model_len=64"),
        (_not_runnable, UnsupportedModel, r"\(xLSTMForCausalLM\) cannot run through Transformers .* recurrent state"),
        (_other_head, PenstockError, "fc.weight"),
        (
            _no_mtp,
            UnsupportedFeature,
            "LlamaForCausalLM has not. Supported: DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, MiMo",
        ),
    ],
)
def test_what_cannot_draft_is_refused(
    tmp_path: Path, target: Path, make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_core(target, speculative_config={**make(tmp_path), "num_speculative_tokens": 2})


def test_a_draft_model_of_transformers_is_not_split_over_workers(tmp_path: Path, target: Path) -> None:
    save_checkpoint(tiny_transformers_model("GPTNeoXForCausalLM"), tmp_path / "drafter")
    speculative = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedFeature, match=r"GPTNeoXForCausalLM.* tensor_parallel_size=1, or a draft model"):
        plan_engine(target, **SMALL, speculative_config=speculative, tensor_parallel_size=2)


def test_a_model_of_transformers_has_no_heads_but_draft_models(tmp_path: Path) -> None:
    save_for_fallback(tiny_transformers_model("GPTNeoXForCausalLM"), tmp_path / "target")
    write_head(tmp_path / "head", eagle3_weights(), draft_vocab_size=40)
    with pytest.raises(UnsupportedFeature, match="GPTNeoXForCausalLM of Transformers with .*eagle3.*hidden states"):
        make_core(
            tmp_path / "target",
            speculative_config={"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2},
        )


@pytest.mark.parametrize("drafter", ["native", "transformers"])
@pytest.mark.parametrize("target", ["native", "transformers"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_targets_and_draft_models_may_run_through_transformers(
    tmp_path: Path, target: str, drafter: str, async_scheduling: bool
) -> None:
    for name, implementation in (("target", target), ("drafter", drafter)):
        if implementation == "native":
            tiny_checkpoint(tmp_path / name)
        else:
            save_checkpoint(tiny_transformers_model("GPTNeoXForCausalLM"), tmp_path / name)
    options = {"dtype": "float32", "max_model_len": 100, "async_scheduling": async_scheduling}
    plain = make_core(tmp_path / "target", **options)
    expected = [result.tokens for result in run(plain, PROMPTS, greedy(8))]
    plain.close()
    speculative = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
    core = make_core(tmp_path / "target", speculative_config={**speculative, "adaptive": False}, **options)
    results = run(core, PROMPTS, greedy(8))
    core.close()
    assert [result.tokens for result in results] == expected


@pytest.mark.parametrize(("length", "expected"), [(64, 64), (256, 64), (257, 257)])
def test_a_head_keeps_the_length_that_its_rotary_scaling_stretches(tmp_path: Path, length: int, expected: int) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    config = tiny_checkpoint(tmp_path, max_position_embeddings=64, rope_parameters=rope)
    head = _head(config, "EagleLlamaForCausalLM", length, None)
    assert head.hf_config["max_position_embeddings"] == expected
    assert head.max_model_len == length


@pytest.mark.parametrize(
    ("field", "value"),
    [("transformer_layer_config", 5), ("max_position_embeddings", "x"), ("max_position_embeddings", [1])],
)
def test_a_heads_field_of_another_type_is_named(tmp_path: Path, field: str, value: Any) -> None:
    write_head(tmp_path, eagle_weights())
    config = edit_config(tmp_path, **{field: value})
    with pytest.raises(ModelError, match=rf"config\.json has {field}="):
        _head(config, "EagleLlamaForCausalLM", 128, None)


def test_a_drafter_whose_pages_have_another_size_has_a_pool_of_its_own(tmp_path: Path, target: Path) -> None:
    tiny_checkpoint(tmp_path / "drafter", head_dim=24)
    speculative = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
    prompts = random_prompts((5, 37, 1, 30), VOCAB_SIZE, seed=3)
    results = []
    for options in ({}, {"speculative_config": speculative}):
        core = make_core(target, dtype="float32", max_model_len=64, kv_cache_memory_bytes=160 << 10, **options)
        assert [group.spec.block_size for group in core.kv_cache_config.groups] == [16] * len(
            core.kv_cache_config.pools
        )
        results.append(run(core, prompts, greedy(20)))
        core.scheduler.kv_cache.check_integrity()
        num_pools = len(core.kv_cache_config.pools)
        core.close()
    assert num_pools == 2
    assert [result.tokens for result in results[0]] == [result.tokens for result in results[1]]
