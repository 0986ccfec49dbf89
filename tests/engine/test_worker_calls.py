"""Worker calls of the offline API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ConfigError, LifecycleError, UnsupportedFeature, WorkerError
from penstock.kernels.native import NATIVE
from penstock.layers.linear import weights_size_bytes
from penstock.models.interface import LanguageModel
from penstock.worker.worker import Worker

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 256}


class Extension:
    """Worker extension of a user."""

    def weight_sum(self, name: str, *, factor: float = 1.0) -> float:
        return factor * float(self.get_model().get_parameter(name).sum())  # type: ignore[attr-defined]

    def fail(self) -> None:
        raise ZeroDivisionError("over the edge")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", cpu_arithmetic="float32", worker_extension_cls=f"{__name__}.Extension", **OPTIONS) as llm:
        yield llm


def test_a_method_of_the_extension_is_called_by_name(llm: LLM) -> None:
    (total,) = llm.collective_rpc("weight_sum", args=("model.norm.weight",), kwargs={"factor": 2.0})
    (expected,) = llm.apply_model(lambda model: float(model.get_parameter("model.norm.weight").sum()))
    assert total == 2 * expected


def test_a_function_gets_the_worker(llm: LLM) -> None:
    def rank_and(worker: Worker, left: int, right: int) -> int:
        return worker.rank + left + right

    assert llm.collective_rpc(rank_and, timeout=5.0, args=(1,), kwargs={"right": 2}) == [3]


def test_a_failure_names_method_rank_and_cause_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(WorkerError, match="Rank 0 failed in fail: ZeroDivisionError: over the edge") as caught:
        llm.collective_rpc("fail")
    assert (caught.value.method, caught.value.rank, caught.value.cause_type) == ("fail", 0, "ZeroDivisionError")
    with pytest.raises(WorkerError, match=r"Rank 0 failed in weight_sum: TypeError"):
        llm.collective_rpc("weight_sum", kwargs={"wrong": 1})
    assert llm.generate("ROMEO:", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


def test_a_method_that_is_not_there_or_not_built_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no method 'wieght_sum'"):
        llm.collective_rpc("wieght_sum")
    with pytest.raises(UnsupportedFeature, match="elastic expert parallelism is not supported yet"):
        llm.collective_rpc("elastic_ep_execute")


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_that_is_none_is_refused(llm: LLM, timeout: float) -> None:
    with pytest.raises(ConfigError, match=f"timeout={timeout} is not valid"):
        llm.collective_rpc("check_health", timeout=timeout)


def test_apply_model_returns_what_the_function_returns(llm: LLM) -> None:
    def num_layers(model: LanguageModel) -> int:
        return len(model.model.layers)  # type: ignore[attr-defined]

    assert llm.apply_model(num_layers) == [6]


def test_the_weights_of_the_worker_are_those_of_the_plan(llm: LLM) -> None:
    assert llm.apply_model(weights_size_bytes) == [plan_engine("demo", **OPTIONS).memory["weights"]]  # type: ignore[arg-type]


def test_calls_wait_for_the_step_that_runs(llm: LLM) -> None:
    """Calls run between the steps of another thread's `generate`."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = llm.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0].token_ids
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate("ROMEO:", params, use_tqdm=False)))
    thread.start()
    while thread.is_alive():
        assert llm.collective_rpc("check_health") == [None]
    thread.join()
    assert outputs[0].outputs[0].token_ids == expected


@pytest.mark.processor
def test_the_inspection_is_a_tree_with_sizes_dtypes_and_methods(llm: LLM) -> None:
    lines = llm.get_model_inspection().splitlines()
    assert lines[0].startswith("LlamaForCausalLM  ")
    assert "  model: DecoderModel" in lines[1]
    (embedding,) = [line for line in lines if "embed_tokens" in line]
    (head,) = [line for line in lines if line.startswith("  lm_head: ")]
    weight = "weight [1536, 192] float32 (tied)  1.12 MiB"
    if NATIVE is not None:
        # The packed weight is the only one there is.
        assert embedding.strip() == "embed_tokens: VocabEmbedding  reads the weight of lm_head (tied)"
        packed = "packed [1536, 192] bfloat16 (tied: the embedding reads it too)  576.00 KiB"
        assert head.strip() == f"lm_head: LMHead  192 -> 1536, NativeMethod, {packed}"
    else:
        assert embedding.strip() == f"embed_tokens: VocabEmbedding  {weight}"
        packed = "packed [1536, 192] float32, weight [1536, 192] float32 (tied)"
        assert head.strip().startswith(f"lm_head: LMHead  192 -> 1536, OneDnnMethod, {packed}")
    (norm,) = [line for line in lines if line.startswith("    norm: ")]
    assert norm.strip() == "norm: RMSNorm  weight [192] float32  768 bytes"
    # Six layers of one form are shown once.
    assert len([line for line in lines if "DecoderLayer" in line]) == 1
    assert "0-5 (6 alike): DecoderLayer" in "\n".join(lines)


def test_profiles_and_state_through_the_offline_api(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM("demo", profiler_dir=tmp_path / "traces", **OPTIONS) as llm:
        llm.start_profile("first")
        expected = llm.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0].text
        (trace,) = llm.stop_profile()
        assert Path(trace).name.startswith("first_pp0_tp0_rank0.")
        (files,) = llm.collective_rpc(
            "save_sharded_state", args=(str(tmp_path / "state"),), kwargs={"max_size": 1 << 20}
        )
        assert len(files) > 3
        llm.collective_rpc("reload_weights")
        assert llm.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0].text == expected
    with LLM(str(tmp_path / "state"), load_format="sharded_state", **OPTIONS) as again:
        assert again.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0].text == expected


def test_calls_after_close_raise_lifecycle_errors() -> None:
    llm = LLM("demo", **OPTIONS)
    llm.close()
    for call in (llm.start_profile, llm.stop_profile, llm.get_model_inspection):
        with pytest.raises(LifecycleError, match="closed"):
            call()
