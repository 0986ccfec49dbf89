"""What is derived from a model's shape is what its tensors take, as torch's allocator counts them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from penstock.config import EngineConfig
from penstock.device.base import PeakMemory
from penstock.device.cpu import CpuDevice
from penstock.loader.headers import read_headers
from penstock.models.shape import read_shape
from penstock.parallel import ParallelContext
from penstock.worker.estimate import LayerTraits, estimate_step
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint

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
def test_activations_and_sampling(tmp_path: Path, family: str, changes: dict[str, Any], dtype: str) -> None:
    """Models in which the feed-forward network takes the most, or the attention."""
    config = tiny_checkpoint(
        tmp_path, family, hidden_size=128, vocab_size=3000, max_position_embeddings=1024, **changes
    )
    options = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": NUM_TOKENS, "max_model_len": NUM_TOKENS + 1}
    worker = Worker(EngineConfig.create(str(tmp_path), device="cpu", dtype=dtype, **options), ParallelContext())
    worker.init_device()
    worker.load_model()
    worker._device = CountingDevice(num_threads=1)
    measured = worker.determine_available_memory()
    headers = read_headers(tmp_path)
    assert headers is not None
    shape, traits = read_shape(config), LayerTraits.read(headers)
    estimated, idle = (
        estimate_step(shape, traits, num_tokens=num_tokens, num_rows=NUM_ROWS, dtype=dtype, device="cpu")
        for num_tokens in (NUM_TOKENS, 0)
    )
    # What libraries take for themselves is no tensor.
    assert estimated.activations - idle.activations == pytest.approx(measured.activations, rel=TOLERANCE)
    assert estimated.sampling == pytest.approx(measured.sampling, rel=TOLERANCE)
