"""Pooled vectors of models that several workers share are those of one worker, whatever happens on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, PoolingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.session import Session
from penstock.errors import ConfigError
from penstock.executor import MultiprocessExecutor
from support.pooling_models import TINY_DECODER, TINY_ENCODER, TINY_MODERN_BERT, random_model, random_text, save

pytestmark = pytest.mark.slow

TEXTS = [random_text(num_words, seed=num_words) for num_words in (1, 17, 40, 100, 5)]
# Twice as many heads as ranks, keys and values too.
_DECODER = {**TINY_DECODER, "head_dim": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embed": ("Qwen3Model", "Qwen3Config", _DECODER),
    "embed_encoder": ("BertModel", "BertConfig", TINY_ENCODER),
    "embed_windows": ("ModernBertModel", "ModernBertConfig", TINY_MODERN_BERT),
    "classify": ("BertForSequenceClassification", "BertConfig", {**TINY_ENCODER, "num_labels": 3}),
    "token_classify": ("Qwen2ForTokenClassification", "Qwen2Config", {**TINY_DECODER, "num_labels": 3}),
    "rerank": ("LlamaForSequenceClassification", "LlamaConfig", {**TINY_DECODER, "num_labels": 1}),
    "token_embed": ("MistralModel", "MistralConfig", TINY_DECODER),
}


def write(folder: Path, kind: str) -> str:
    """Write a model, and return the task that is asked of it."""
    class_name, config_name, fields = MODELS[kind]
    save(random_model(class_name, config_name, **fields), folder, kind="bert" if "Bert" in class_name else "last")
    return {"embed_encoder": "embed", "embed_windows": "embed", "rerank": "classify"}.get(kind, kind)


def vectors(folder: Path, task: str, *batches: list[str], **options: Any) -> list[list[np.ndarray]]:
    params = PoolingParams(task=task, use_activation=False)
    with LLM(folder, kv_cache_memory_bytes="4MiB", **options) as llm:
        return [[one.outputs.data.numpy() for one in llm.encode(texts, params, use_tqdm=False)] for texts in batches]


@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_pool_what_one_worker_pools(kind: str, tmp_path: Path) -> None:
    task = write(tmp_path, kind)
    (expected,) = vectors(tmp_path, task, TEXTS)
    found, alone, *_ = vectors(tmp_path, task, TEXTS, TEXTS[2:3], tensor_parallel_size=2, num_threads=2)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    np.testing.assert_array_equal(alone[0], found[2])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_texts_are_pooled_whole_when_a_rank_is_killed(async_scheduling: bool, tmp_path: Path) -> None:
    task = write(tmp_path, "token_classify")
    params = PoolingParams(task=task, use_activation=False)
    options = {"tensor_parallel_size": 2, "num_threads": 2, "max_num_batched_tokens": 16}
    with LLM(tmp_path, kv_cache_memory_bytes="4MiB", async_scheduling=async_scheduling, **options) as llm:
        expected = [one.outputs.data.numpy() for one in llm.encode(TEXTS, params, use_tqdm=False)]
        session = llm._session
        requests = [session.accept(text, params) for text in TEXTS]
        found = {}
        for progress in session.run(requests):
            if not found:
                os.kill(process_ids(session)[1], signal.SIGKILL)
            found[progress.req_id] = progress.output()
    for accepted, rows in zip(requests, expected, strict=True):
        np.testing.assert_array_equal(found[accepted.request.req_id].pooled, rows)


def process_ids(session: Session) -> list[int]:
    core = session._core
    assert isinstance(core, EngineCore)
    executor = core._executor
    assert isinstance(executor, MultiprocessExecutor)
    return executor.process_ids


def test_pipeline_parallelism_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "embed_encoder")
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 with runner='pooling'.*tensor_parallel_size"):
        LLM(tmp_path, pipeline_parallel_size=2)
