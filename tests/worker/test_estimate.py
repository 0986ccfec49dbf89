"""What is derived from a model's shape is what its tensors take, as torch's allocator counts them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from penstock.config import EngineConfig, SamplingConfig
from penstock.contract import SamplingParams
from penstock.device.base import PeakMemory
from penstock.device.cpu import CpuDevice
from penstock.models.shape import read_shape
from penstock.parallel import ParallelContext
from penstock.runner.sampling.stage import LogitsRows
from penstock.worker.estimate import estimate_step, layer_traits, sampling_bytes
from penstock.worker.memory_plan import StepMemory
from penstock.worker.profile import measure_step_memory
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint
from support.plain_sampling import HandDriven

NUM_TOKENS, NUM_ROWS = 600, 40
# Small tensors of a step that no sum here lists: positions, rotations, slots, statistics of norms.
TOLERANCE = 0.1


class CountingDevice(CpuDevice):
    """Counts tensors instead of resident memory, and runs every step at its full size."""

    max_profile_tokens = max_profile_rows = 1 << 30

    @contextmanager
    def measure_peak(self) -> Iterator[PeakMemory]:
        peak = PeakMemory()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            yield peak
        peak.bytes_above_start = _peak_bytes(recorded)


def _peak_bytes(recorded: profile) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    return max(itertools.accumulate(change["args"]["Bytes"] for change in changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"intermediate_size": 600}),
        ("mistral", {"intermediate_size": 600, "sliding_window": 700}),
        ("qwen2", {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 32}),
        ("qwen3", {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 32}),
        ("qwen3", {"intermediate_size": 900, "head_dim": 16}),
    ],
)
def test_activations(tmp_path: Path, family: str, changes: dict[str, Any], dtype: str) -> None:
    """Models in which the feed-forward network takes the most, or the attention."""
    estimated, measured = estimate_and_measure(tmp_path, family, changes, NUM_TOKENS, NUM_ROWS, dtype=dtype)
    assert estimated.activations == pytest.approx(measured.activations, rel=TOLERANCE)


@pytest.mark.parametrize("max_logprobs", [20, -1])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(100, 200), (NUM_TOKENS, NUM_ROWS)], ids=["sampling", "prompt"])
def test_logits(tmp_path: Path, num_tokens: int, num_rows: int, max_logprobs: int) -> None:
    """Where sampling takes the most, or the log-probabilities of a prompt."""
    estimated, measured = estimate_and_measure(
        tmp_path, "llama", {}, num_tokens, num_rows, max_logprobs=max_logprobs, dtype="float32"
    )
    assert estimated.sampling == pytest.approx(measured.sampling, rel=TOLERANCE)


def estimate_and_measure(
    folder: Path, family: str, changes: dict[str, Any], num_tokens: int, num_rows: int, **options: Any
) -> tuple[StepMemory, StepMemory]:
    """The tensors of a full step, as derived and as torch counts them."""
    config = tiny_checkpoint(folder, family, hidden_size=128, vocab_size=3000, max_position_embeddings=1024, **changes)
    options |= {"max_num_seqs": num_rows, "max_num_batched_tokens": num_tokens, "max_model_len": num_tokens + 1}
    engine = EngineConfig.create(str(folder), device="cpu", **options)
    worker = Worker(engine, ParallelContext())
    worker.init_device()
    worker.load_model()
    with torch.no_grad():
        measured = measure_step_memory(
            CountingDevice(num_threads=1),
            worker.language_model,
            worker._layers,
            worker.get_kv_cache_spec(),
            worker._limits(num_tokens + 1),
            None,
            engine.sampling,
        )
    dtype = worker.dtype.name
    worker.shutdown()
    estimated = estimate_step(
        read_shape(config),
        layer_traits(config.architecture),
        num_tokens=num_tokens,
        num_rows=num_rows,
        dtype=dtype,
        device="cpu",
        sampling=engine.sampling,
    )
    return estimated, measured


@pytest.mark.parametrize("num_logprobs", [20, -1])
def test_a_batch_that_is_sampled_in_parts_takes_what_a_part_does_and_what_waits(num_logprobs: int) -> None:
    vocab_size, num_rows, max_rows = 3000, 200, 30
    driver = HandDriven(vocab_size, num_rows)
    driver.sampler.max_rows = max_rows
    params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, seed=0, logprobs=num_logprobs)
    for slot in range(num_rows):
        driver.add(slot, params, [5])
    slots = np.arange(num_rows)
    rows = LogitsRows(torch.from_numpy(slots), slots, torch.from_numpy(slots))
    with CountingDevice(num_threads=1).measure_peak() as peak:
        driver.sampler.sample(torch.zeros(num_rows, vocab_size), rows)
    config = SamplingConfig(max_logprobs=num_logprobs)
    estimated = sampling_bytes(vocab_size, num_rows, max_rows, config, "cpu")
    assert estimated == pytest.approx(peak.bytes_above_start, rel=TOLERANCE)
    assert estimated < 0.7 * sampling_bytes(vocab_size, num_rows, num_rows, config, "cpu")
