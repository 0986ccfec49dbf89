"""Workers that have layers of their own give the tokens and log-probabilities of one that has all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.config import EngineConfig, engine
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import ConfigError
from penstock.executor import MultiprocessExecutor
from penstock.kernels import native
from penstock.parallel.connections import open_store
from penstock.worker import WorkerBase
from support import gloo_worker
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same, results_of, some_steps
from support.checkpoints import tiny_checkpoint
from support.engines import add, finish, greedy, make_core, run
from support.quantized_checkpoints import awq_layer, gptq_layer, write_quantized

# A block: keys and values of 16 positions and two heads, of a layer.
LAYER_BYTES = 2 * 16 * 2 * 16 * 4
LAYERS = 6
QUANTIZED = {
    "GPTQ": (
        gptq_layer(32, desc_act=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    ),
    "AWQ": (awq_layer(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
}


def make(folder: Path, stages: tuple[int, ...], ranks: int = 1, **options: Any) -> EngineCore:
    """With room for a few of the requests, so that others are preempted: 13 blocks on any stage."""
    room = 13 * LAYER_BYTES * max(stages) // ranks
    arrangement = {"pipeline_parallel_size": len(stages), "tensor_parallel_size": ranks}
    if len(stages) > 1:
        arrangement["pipeline_layers"] = stages  # type: ignore[assignment]
    return make_core(
        folder,
        **{
            **arrangement,
            "num_threads": len(stages) * ranks,
            "kv_cache_memory_bytes": room,
            "max_model_len": 128,
            "max_num_batched_tokens": 64,
            **options,
        },
    )


@pytest.mark.parametrize(
    ("family", "stages", "ranks", "options"),
    [
        ("llama", (3, 3), 1, {"async_scheduling": False}),
        ("llama", (1, 3, 2), 1, {"async_scheduling": True}),
        ("qwen3", (3, 3), 2, {}),
        ("gemma3", (2, 4), 1, {}),
    ],
)
@pytest.mark.one_case_quick
def test_stages_give_the_tokens_of_one_worker(
    family: str, stages: tuple[int, ...], ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    expected, found = (
        results_of(make(tmp_path, arrangement, size, **options), is_tight=family != "gemma3")
        for arrangement, size in (((LAYERS,), 1), (stages, ranks))
    )
    assert_same(found, expected)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}])
@pytest.mark.slow
def test_an_embedding_is_rounded_as_the_head_of_another_stage_that_is_tied_to_it(
    family: str, options: dict[str, str], tmp_path: Path
) -> None:
    layers = {} if family == "gpt2" else {"head_dim": 16, "num_hidden_layers": 2}
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **layers)
    found = []
    for stages in ((2,), (1, 1)):
        core = make(tmp_path, stages, quantization_calibration="none", kv_cache_memory_bytes="1MiB", **options)
        found.append([result.tokens for result in run(core, PROMPTS[:4], PARAMS[:4])])
        core.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_as_many_steps_are_under_way_as_there_are_stages(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    core = make(tmp_path, (2, 2, 2), kv_cache_memory_bytes="1MiB")
    most, steps = 0, []
    for index in range(7):
        add(core, f"r{index}", PROMPTS[0], greedy(12))
    while core.has_unfinished_requests():
        core.step()
        most = max(most, len(core._in_flight))
        steps += [output.num_scheduled_tokens.keys() for output, _ in list(core._in_flight)[-1:]]
    core.close()
    assert most == 3
    assert all(len(req_ids) <= 3 for req_ids in steps)


@pytest.mark.parametrize(
    ("stages", "max_num_seqs", "expected"), [(1, 64, 1), (1, 20000, 1), (3, 256, 3), (6, 256, 4), (4, 4096, 2)]
)
def test_no_more_steps_are_under_way_than_channels_hold(stages: int, max_num_seqs: int, expected: int) -> None:
    config = EngineConfig.create("demo", pipeline_parallel_size=stages, max_num_seqs=max_num_seqs)
    assert config.max_concurrent_batches == expected


def test_the_sizes_of_a_channel_are_those_of_the_source() -> None:
    source = Path(native.__file__).with_name("csrc").joinpath("collectives.cpp").read_text()
    assert f"constexpr uint32_t kChannelPieces = {engine._CHANNEL_PIECES};" in source
    assert f"constexpr int64_t kPieceBytes = {engine._PIECE_BYTES >> 10} << 10;" in source


@pytest.mark.parametrize(("drafts", "most"), [({}, 14336), ({"method": "ngram", "num_speculative_tokens": 8}, 4778)])
def test_no_more_requests_are_in_a_step_than_a_channel_holds(drafts: dict[str, Any], most: int) -> None:
    options = {"pipeline_parallel_size": 2, "speculative_config": drafts or None}
    EngineConfig.create("demo", **options, max_num_seqs=most)
    EngineConfig.create("demo", speculative_config=drafts or None, max_num_seqs=most + 1)
    with pytest.raises(ConfigError, match=rf"max_num_seqs={most + 1} is more than .* Allowed: up to {most}[,.]"):
        EngineConfig.create("demo", **options, max_num_seqs=most + 1)


def test_so_many_drafts_that_a_channel_holds_those_of_no_request_are_refused() -> None:
    drafts = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 70000}
    with pytest.raises(ConfigError, match="num_speculative_tokens=70000.* Allowed: up to 0, or a shorter draft length"):
        EngineConfig.create("demo", pipeline_parallel_size=2, speculative_config=drafts)


@pytest.mark.slow
def test_constrained_requests_and_others_go_through_the_stages_together(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    form = StructuredOutputsParams(regex="[a-f]{9,20}")
    with_form, without = (
        SamplingParams(temperature=0.9, seed=3, max_tokens=12, structured_outputs=given) for given in (form, None)
    )
    prompts = ["ROMEO:", "JULIET:", "All:", "Me:", "You:"]
    params = [without, with_form, without, with_form, with_form]
    texts = []
    for size in (1, 2):
        with LLM("demo", pipeline_parallel_size=size, num_threads=2, kv_cache_memory_bytes="16MiB") as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert all(set(text) <= set("abcdef") for text, given in zip(texts[0], params, strict=True) if given is with_form)


def noting_what_is_sent(worker: WorkerBase) -> None:
    """From now on, `sent` has the numbers of rows of hidden states that this worker sends to the next stage, and
    `gathered` those that it gathers."""
    pipeline, tensor = worker.parallel.pipeline, worker.parallel.tensor  # type: ignore[attr-defined]
    worker.sent, worker.gathered = [], []  # type: ignore[attr-defined]
    send, all_gather = pipeline.send, tensor.all_gather

    def noted_send(tensor_TD: Tensor, destination: int) -> None:
        if tensor_TD.is_floating_point():
            worker.sent.append(len(tensor_TD))  # type: ignore[attr-defined]
        send(tensor_TD, destination)

    def noted_gather(tensor_TD: Tensor, dim: int) -> Tensor:
        worker.gathered.append(len(tensor_TD))  # type: ignore[attr-defined]
        return all_gather(tensor_TD, dim)  # type: ignore[no-any-return]

    pipeline.send, tensor.all_gather = noted_send, noted_gather


def noted(worker: WorkerBase) -> tuple[list[int], list[int]]:
    return worker.sent, worker.gathered  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.slow
def test_ranks_of_a_stage_send_each_their_rows(
    is_scattered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered rows are sent as they are; replicated ones over gloo in shards, and gathered on arrival."""
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=2)
    prompts, params = PROMPTS[2:4], PARAMS[2:4]
    expected = run(make(tmp_path, (2,)), prompts, params)
    store = open_store(gloo_worker.HOST, 0, is_host=True)
    monkeypatch.setenv(gloo_worker.PORT, str(store.port))
    scattered = {"enable_sp": True, "sp_min_token_num": 8}
    core = make(
        tmp_path, (1, 1), 2, **(scattered if is_scattered else {"worker_cls": "support.gloo_worker.GlooWorker"})
    )
    try:
        core.collective_rpc(RpcCall(noting_what_is_sent))
        found = run(core, prompts, params)
        sent = core.collective_rpc(RpcCall(noted))
    finally:
        core.close()
    assert_same(found, expected)
    (first, gathered), *_ = sent
    # Half of a prompt's 40 tokens, then of 64 of the other one's.
    assert first[:2] == [20, 32]
    assert sent[1][0] == first
    # A layer gathers what its two parts take, and the stage behind it nothing more, or only what it was sent.
    assert gathered.count(32) == (2 * first.count(32) if is_scattered else 0)
    assert sent[2][1].count(32) == (2 if is_scattered else 1) * first.count(32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "bfloat16"},
        {"speculative_config": {"method": "suffix"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}},
    ],
    ids=str,
)
def test_stages_give_the_tokens_of_one_worker_with_everything(options: dict[str, Any], tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    expected, found = (tokens_of(make(tmp_path, stages, **options)) for stages in ((LAYERS,), (2, 4)))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("form", QUANTIZED)
def test_checkpoints_that_are_quantized_already_are_spread(form: str, tmp_path: Path) -> None:
    quantize, quantization_config = QUANTIZED[form]
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": LAYERS, "head_dim": 32, "intermediate_size": 128}
    folder = write_quantized(tmp_path, quantize, quantization_config, **sizes).config.folder
    expected, found = (tokens_of(make(folder, stages, kv_cache_memory_bytes="1MiB")) for stages in ((LAYERS,), (2, 4)))
    assert found == expected


@pytest.mark.slow
def test_requests_go_on_with_their_tokens_when_a_stage_is_lost(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS)
    core = make(tmp_path, (LAYERS,))
    undisturbed = run(core, PROMPTS, PARAMS)
    core.close()
    core = make(tmp_path, (3, 3))
    results = some_steps(core)
    executor = core._executor
    assert isinstance(executor, MultiprocessExecutor)
    os.kill(executor.process_ids[0], signal.SIGKILL)
    finish(core, results)
    core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)


@pytest.mark.slow
def test_stages_reload_weights_and_write_their_own(tmp_path: Path) -> None:
    for seed in (0, 5):
        tiny_checkpoint(tmp_path / f"{seed}", vocab_size=VOCAB_SIZE, head_dim=16, num_hidden_layers=LAYERS, seed=seed)
    found = []
    for stages in ((LAYERS,), (2, 4)):
        core, saved = make(tmp_path / "0", stages), tmp_path / f"saved{len(stages)}"
        core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / "5"),)))
        core.collective_rpc(RpcCall("save_sharded_state", (str(saved),)))
        found += [tokens_of(core), tokens_of(make(saved, stages, load_format="sharded_state"))]
    found += [tokens_of(make(tmp_path / "5", (LAYERS,)))]
    assert all(tokens == found[0] for tokens in found)


def tokens_of(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in results_of(core, is_tight=False)]
