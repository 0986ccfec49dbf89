"""Several workers that share every layer give the tokens and log-probabilities of one, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from penstock import LLM
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import CheckpointError, EngineDead, UnsupportedFeature, WaitTimeout
from penstock.executor import MultiprocessExecutor
from penstock.kernels.native import NATIVE
from penstock.runner.execute.programs import ProgramExecution
from penstock.runner.sampling import LogitsProcessor, LogitsRows
from penstock.worker import WorkerBase
from penstock.worker.worker import Worker
from support.arrangements import PARAMS, PROMPTS, VOCAB_SIZE, assert_same, results_of, sampled, some_steps
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import Result, add, finish, greedy, make_core, run
from support.waiting import wait_until

# A block of all ranks: keys and values of 16 positions and two heads in two layers.
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def make(folder: Path, size: int, **options: Any) -> EngineCore:
    """With room for a few of the requests, so that others are preempted."""
    room = {"kv_cache_memory_bytes": 13 * BLOCK_BYTES // min(size, 2), "max_model_len": 128}
    return make_core(folder, **{"tensor_parallel_size": size, "num_threads": size, **room, **options})


def process_ids(core: EngineCore) -> list[int]:
    executor = core._executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor.process_ids


@pytest.mark.parametrize(
    ("family", "size", "async_scheduling"),
    [("llama", 2, False), ("llama", 2, True), ("llama", 4, None), ("qwen3", 2, None), ("gemma3", 2, None)],
)
@pytest.mark.one_case_quick
def test_ranks_give_the_tokens_of_one_worker(
    family: str, size: int, async_scheduling: bool | None, tmp_path: Path
) -> None:
    tiny_checkpoint(tmp_path, family, vocab_size=VOCAB_SIZE, head_dim=16)
    expected, found = (results_of(make(tmp_path, ranks, async_scheduling=async_scheduling)) for ranks in (1, size))
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_nan_of_one_request_hurts_none_that_gets_its_blocks(arrangement: dict[str, int], tmp_path: Path) -> None:
    """On no rank, though one reads results, and with a backend that reads whole blocks."""
    bad = 77
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    save_checkpoint(model, tmp_path)
    core = make_core(tmp_path, **arrangement, attention_backend="cpu_paged", kv_cache_memory_bytes="64KiB")
    params = greedy(6, logit_bias={bad: -100.0})
    try:
        expected = run(core, [PROMPTS[0]], params)
        poisoned, again = run(core, [[5, bad, *range(6, 30)]] * 2, params), run(core, [PROMPTS[0]] * 16, params)
    finally:
        core.close()
    assert all(result.error is not None for result in poisoned)
    assert [result.tokens for result in again] == [expected[0].tokens] * 16


def num_programs(worker: WorkerBase) -> int:
    """Programs that the worker has recorded; 0 where its steps run layer by layer."""
    execution = worker.runner.execution  # type: ignore[attr-defined]
    if not isinstance(execution, ProgramExecution):
        return 0
    return sum(program is not None for program in execution.programs._recorded.values())


@pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
@pytest.mark.slow
def test_programs_of_ranks_give_the_bits_of_layers(folder: Path) -> None:
    results = []
    for fast_paths, expected in (("off", 0), ("auto", 2)):
        core = make(folder, 2, fast_paths=fast_paths)
        found = run(core, PROMPTS, PARAMS) + run(core, PROMPTS, greedy(12))
        # One to hidden states, and one to tokens.
        assert core.collective_rpc(RpcCall(num_programs)) == [expected] * 2
        core.close()
        results.append(found)
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[Result]:
    core = make(folder, 1)
    try:
        return run(core, PROMPTS, PARAMS)
    finally:
        core.close()


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def core(folder: Path, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    core = make(folder, 2, async_scheduling=request.param)
    yield core
    core.close()


def failing_in_next_step(worker: WorkerBase) -> None:
    if worker.rank == 1:
        worker.runner.model_state.inputs = lambda batch: 1 / 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["killed", "failing"])
@pytest.mark.one_case_quick
def test_requests_go_on_with_their_tokens_when_a_rank_is_lost(
    how: str, core: EngineCore, undisturbed: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    before = process_ids(core)
    results = some_steps(core)
    if how == "killed":
        os.kill(before[1], signal.SIGKILL)
    else:
        core.collective_rpc(RpcCall(failing_in_next_step))
    finish(core, results)
    assert not set(before) & set(process_ids(core))
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    cause = "was killed by signal 9" if how == "killed" else "failed in execute_model: ZeroDivisionError"
    assert any("Rank 1" in record.message and cause in record.message for record in caplog.records)


@pytest.mark.slow
def test_ranks_that_are_lost_again_and_again_end_the_engine(folder: Path) -> None:
    core = make(folder, 2, max_restarts=0)
    add(core, "a", PROMPTS[0], greedy(50))
    core.step()
    os.kill(process_ids(core)[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"Rank 0, process \d+, was killed"):
        finish(core, {})
    core.close()


@pytest.mark.slow
def test_one_worker_in_a_process_of_its_own_is_replaced_too(folder: Path, undisturbed: list[Result]) -> None:
    core = make(folder, 1, distributed_executor_backend="mp")
    add(core, "r0", PROMPTS[0], PARAMS[0])
    core.step()
    (process,) = process_ids(core)
    os.kill(process, signal.SIGKILL)
    results: dict[str, Result] = {}
    finish(core, results)
    core.close()
    assert results["r0"].tokens == undisturbed[0].tokens[-len(results["r0"].tokens) :]


@pytest.mark.slow
def test_what_workers_are_asked_for_works_with_several(folder: Path, tmp_path: Path) -> None:
    """Weights written by rank and read again, new weights, and a profile per rank."""
    other = tmp_path / "other"
    tiny_checkpoint(other, vocab_size=VOCAB_SIZE, seed=5)
    results = []
    for size in (1, 2):
        core = make(folder, size, profiler_dir=str(tmp_path / f"traces{size}"))
        core.collective_rpc(RpcCall("profile", kwargs={"is_start": True}))
        tokens = [result.tokens for result in run(core, PROMPTS[:2], greedy(8))]
        assert len(set(core.collective_rpc(RpcCall("profile", kwargs={"is_start": False})))) == size
        core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / f"saved{size}"),)))
        core.collective_rpc(RpcCall("reload_weights", (str(other),)))
        tokens += [result.tokens for result in run(core, PROMPTS[:2], greedy(8))]
        core.close()
        core = make(tmp_path / f"saved{size}", size, load_format="sharded_state")
        tokens += [result.tokens for result in run(core, PROMPTS[:2], greedy(8))]
        core.close()
        results.append(tokens)
    assert results[0] == results[1]
    assert results[0][:2] == results[0][4:] != results[0][2:4]


@pytest.mark.slow
def test_quantised_weights_are_saved_and_cached_by_rank(folder: Path, tmp_path: Path) -> None:
    options = {"quantization": "int4", "weight_cache_dir": str(tmp_path / "cache")}
    results = []
    for saved in (folder, folder, tmp_path / "saved"):
        loading = options if saved == folder else {"load_format": "sharded_state"}
        core = make(saved, 2, **loading)
        results.append([result.tokens for result in run(core, PROMPTS[:2], greedy(8))])
        if not (tmp_path / "saved").exists():
            core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "saved"),)))
            next(iter((tmp_path / "cache").glob("*-rank-1.safetensors"))).unlink()  # one rank finds none
        core.close()
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_saved_states_serve_other_arrangements(quantization: str | None, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    tiny_checkpoint(tmp_path / "model", "qwen2", vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **sizes)
    saving = make_core(tmp_path / "model", tensor_parallel_size=2, quantization=quantization)
    saving.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "saved"),)))
    saving.close()
    for arrangement in ({}, {"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
        results = [
            results_of(make_core(tmp_path / folder, **arrangement, **loading), is_tight=False)
            for folder, loading in (
                ("model", {"quantization": quantization}),
                ("saved", {"load_format": "sharded_state"}),
            )
        ]
        assert results[0] == results[1]


@pytest.mark.slow
def test_all_ranks_of_a_save_have_one_id_and_a_mix_of_two_is_refused(folder: Path, tmp_path: Path) -> None:
    arrangement = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    core, ids = make_core(folder, **arrangement), []
    for name in ("one", "other"):
        core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / name),)))
        files = sorted((tmp_path / name).glob("model-rank-*.safetensors"))
        assert len(files) == 4
        ids += [{safe_open(file, "pt").metadata()["save_id"] for file in files}]
    core.close()
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]
    results_of(make_core(tmp_path / "other", load_format="sharded_state", **arrangement), is_tight=False)
    shutil.copy(tmp_path / "one" / files[2].name, tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=f"is of another save .*{files[2].name}|{files[2].name} is of another save"
    ):
        make_core(tmp_path / "other", load_format="sharded_state", **arrangement)


class SlowToReload(Worker):
    """On its last rank, and until a file appears."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        if self.rank == 1:
            wait_until(Path(os.environ["PENSTOCK_TEST_GO_ON"]).exists, "the test continues")
        super().reload_weights(*args, **kwargs)


@pytest.mark.slow
def test_workers_that_are_late_with_new_weights_are_replaced_by_some_with_the_old(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, other = tmp_path / "go on", tmp_path / "other"
    monkeypatch.setenv("PENSTOCK_TEST_GO_ON", str(go_on))
    tiny_checkpoint(other, vocab_size=VOCAB_SIZE, seed=5)
    core = make(folder, 2, worker_cls=f"{__name__}.SlowToReload")
    before = [result.tokens for result in run(core, PROMPTS[:2], greedy(8))]
    with pytest.raises(WaitTimeout, match="in reload_weights for rank"):
        core.collective_rpc(RpcCall("reload_weights", (str(other),), timeout_s=0.5))
    go_on.touch()
    assert [result.tokens for result in run(core, PROMPTS[:2], greedy(8))] == before
    core.collective_rpc(RpcCall("reload_weights", (str(other),)))
    assert [result.tokens for result in run(core, PROMPTS[:2], greedy(8))] != before
    core.close()


class Nudge(LogitsProcessor):
    """Makes the token likelier that a request names, and fails where there is none."""

    name = "nudge"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.tokens: dict[int, int] = {}

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        self.tokens[slot] = (params.extra_args or {}).get(self.name, 0)
        return self.tokens[slot] != 0

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        for row, slot in enumerate(rows.slots_np.tolist()):
            if self.tokens[slot] < 0:
                raise ValueError("no such token")
            logits[row, self.tokens[slot]] += 8.0
        return logits


@pytest.mark.slow
def test_custom_logits_processors_do_the_same_on_every_rank(folder: Path) -> None:
    params = [sampled(4, extra_args={"nudge": 7}), sampled(5, extra_args={"nudge": -1}), sampled(6)]
    results = []
    for size in (1, 2):
        core = make(folder, size, logits_processors=[f"{__name__}:Nudge"])
        results.append(run(core, PROMPTS[:3], params))
        core.close()
    assert_same(results[1], results[0])
    assert 7 in results[1][0].tokens
    assert "Logits processor 'nudge' failed" in (results[1][1].error or "")


@pytest.mark.slow
def test_an_offline_engine_is_used_as_ever() -> None:
    texts, options = [], {"num_threads": 2, "kv_cache_memory_bytes": "16MiB"}
    for size in (1, 2):
        with LLM("demo", tensor_parallel_size=size, **options, cpu_arithmetic="float32") as llm:
            outputs = llm.generate(["ROMEO:", "The cat"], greedy(12))
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    with pytest.raises(UnsupportedFeature, match=r"tensor_parallel_size=3"):
        LLM("demo", tensor_parallel_size=3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_replaced(
    rank: int, folder: Path, undisturbed: list[Result], caplog: pytest.LogCaptureFixture
) -> None:
    core = make(folder, 2, step_timeout_s=1.5)
    before = process_ids(core)
    results = some_steps(core)
    os.kill(before[rank], signal.SIGSTOP)
    begin = time.monotonic()
    finish(core, results)
    assert time.monotonic() - begin < 60.0
    assert not set(before) & set(process_ids(core))
    core.close()
    assert_same([results[f"r{index}"] for index in range(len(PROMPTS))], undisturbed)
    named = f"rank {rank} (process {before[rank]}, stopped)", f"for rank {rank}, which hangs or is gone"
    assert any(name in record.message for record in caplog.records for name in named)
