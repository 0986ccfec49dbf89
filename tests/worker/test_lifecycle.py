"""A worker's life in order, and what each call out of order says."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.config import EngineConfig
from penstock.contract import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SamplingInput,
    SchedulerOutput,
)
from penstock.errors import ConfigError, LifecycleError, OutOfMemory
from penstock.parallel import ParallelState
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.kv_cache_plan import make_kv_cache_config
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


def _worker(folder: Path, **options: Any) -> Worker:
    options = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    return Worker(EngineConfig.create(str(folder), **options), ParallelState())


def _loaded(folder: Path, **options: Any) -> Worker:
    worker = _worker(folder, **options)
    worker.init_device()
    worker.load_model()
    return worker


def _kv_cache(worker: Worker, num_blocks: int = 16) -> KVCacheConfig:
    specs = worker.get_kv_cache_spec()
    spec = next(iter(specs.values()))
    assert isinstance(spec, FullAttentionSpec)
    return make_kv_cache_config((KVCacheGroupSpec(layer_names=tuple(specs), spec=spec),), [num_blocks])


def test_each_call_names_the_one_that_must_come_first(folder: Path) -> None:
    worker = _worker(folder)
    with pytest.raises(LifecycleError, match="init_device must come first"):
        worker.load_model()
    worker.init_device()
    with pytest.raises(LifecycleError, match="load_model must come first"):
        worker.get_kv_cache_spec()
    worker.load_model()
    for call in (
        lambda: worker.execute_model(SchedulerOutput(step_id=0)),
        lambda: worker.sample_tokens(SamplingInput(step_id=0)),
        worker.execute_dummy_batch,
        worker.compile_or_warm_up_model,
    ):
        with pytest.raises(LifecycleError, match="initialize_from_config must come first"):
            call()
    worker.initialize_from_config(_kv_cache(worker), 64)
    worker.compile_or_warm_up_model()
    worker.execute_dummy_batch()
    worker.check_health()
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        worker.check_health()


@pytest.mark.parametrize("compiles_kernels", [False, True])
def test_requests_warm_up_a_device_that_compiles_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiles_kernels: bool
) -> None:
    warmed_up: list[ModelRunner] = []
    monkeypatch.setattr("penstock.worker.worker.warm_up_requests", warmed_up.append)
    worker = _loaded(folder)
    worker.initialize_from_config(_kv_cache(worker), 64)
    monkeypatch.setattr(type(worker.own_device), "compiles_kernels", compiles_kernels)
    worker.compile_or_warm_up_model()
    assert warmed_up == [worker.runner] * compiles_kernels
    worker.shutdown()


def test_profiling_changes_nothing_that_serves(folder: Path) -> None:
    worker = _loaded(folder)
    state = torch.get_rng_state()
    worker.determine_available_memory()
    assert torch.equal(torch.get_rng_state(), state)
    assert worker._runner is None


def test_weights_are_counted_once_where_they_are_tied(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "tied", vocab_size=96, tie_word_embeddings=True)
    tiny_checkpoint(tmp_path / "untied", vocab_size=96, tie_word_embeddings=False)
    tied = _loaded(tmp_path / "tied").determine_available_memory()["weights"]
    untied = _loaded(tmp_path / "untied").determine_available_memory()["weights"]
    assert untied - tied == 96 * 64 * 4


def test_the_default_leaves_half_of_a_cpu_machine_or_a_tenth_of_what_is_free(folder: Path) -> None:
    plan = _loaded(folder).determine_available_memory()
    assert plan.kv_cache_bytes <= 0.5 * plan.total
    assert plan.without_kv_cache + plan.kv_cache_bytes <= 0.9 * (plan.free_at_start + plan["process"])
    assert plan.total <= psutil.virtual_memory().total


def test_logits_and_sampling_are_in_the_plan(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, vocab_size=60_000)
    plan = _loaded(tmp_path, max_num_seqs=64).determine_available_memory()
    # Raw and processed logits, the sorted copy with its indices, probabilities and their running sums.
    one_copy = 64 * 60_000 * 4
    assert 4 * one_copy <= plan["sampling"] <= 24 * one_copy


def test_shutdown_gives_the_memory_back(folder: Path) -> None:
    process = psutil.Process()

    def life() -> None:
        worker = _loaded(folder)
        config = _kv_cache(worker, num_blocks=8192)
        loaded = process.memory_info().rss
        worker.initialize_from_config(config, 64)
        worker.runner.kv_cache.touch()
        assert process.memory_info().rss - loaded > 0.8 * config.size_bytes
        worker.shutdown()

    life()
    gc.collect()
    before = process.memory_info().rss
    life()
    gc.collect()
    assert process.memory_info().rss - before < 4 * MIB
    assert not [thing for thing in gc.get_objects() if type(thing) is ModelRunner]


def test_impossible_memory_is_refused_with_the_arithmetic(folder: Path) -> None:
    with pytest.raises(OutOfMemory, match="left for the KV cache"):
        _loaded(folder, memory_fraction=0.0001).determine_available_memory()
    with pytest.raises(OutOfMemory, match="kv_cache_memory_bytes"):
        _loaded(folder, kv_cache_memory_bytes=1 << 50).determine_available_memory()


def test_a_dtype_that_is_unknown_or_unsupported_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 .*its group has 1"):
        _worker(folder, tensor_parallel_size=3)
    assert _loaded(folder, dtype="bfloat16").dtype.weights == "bfloat16"
