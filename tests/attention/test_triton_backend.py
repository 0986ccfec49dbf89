"""The backend `triton_paged` against the reference backend, and through a whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.attention import (
    AttentionBackend,
    AttentionStep,
    Heads,
    LastRows,
    LayerAttention,
    Projection,
    StepGeometry,
)
from penstock.attention.reference import ReferenceBackend
from penstock.attention.triton_paged import TritonInvariantBackend, TritonPagedBackend
from penstock.contract import FullAttentionSpec
from penstock.device.stand_in import standing_for
from penstock.device.tensor_memory import TensorMemory
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.rotary import TableRotation, gather_rotation_reference, rotary_table
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run, run_layer_by_layer
from support.triton_device import DEVICE, needs_triton

pytest.importorskip("triton", reason="Triton is not installed")

from support.triton_interpreter import products_by_row

BLOCK_SIZE = 16
LAYER = LayerAttention("layer", 4, 2, 16, 0.25)
# (positions before the step, positions in it)
MIXED = [(0, 1), (40, 1), (4, 2), (0, 6), (31, 33)]
DECODES = [(0, 1), (40, 1), (99, 1)]


class Norm:
    """A norm of each head; `is_plain` says that it is no more than that."""

    def __init__(self, *, is_plain: bool, follows_rotation: bool = False) -> None:
        self.is_plain, self.follows_rotation = is_plain, follows_rotation
        self.weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(8)).to(DEVICE)

    @property
    def rms_of_each_head(self) -> tuple[Tensor, float] | None:
        return (self.weight, 1e-5) if self.is_plain else None

    def __call__(self, query_key_THD: Tensor) -> Tensor:
        return rms_norm_reference(query_key_THD, self.weight, 1e-5)


def make_geometry(parts: Sequence[tuple[int, int]], num_padding_rows: int = 0, num_padding: int = 0) -> StepGeometry:
    """Blocks are dealt out in falling order. Padding tokens follow the last request."""
    counts = [count for _, count in parts] + [0] * num_padding_rows
    lengths = [before + count for before, count in parts] + [0] * num_padding_rows
    table = torch.zeros(len(counts), 8, dtype=torch.int32)
    free = list(range(1, 40))
    slots = []
    for row, (before, count) in enumerate(parts):
        blocks = [free.pop() for _ in range(-(-(before + count) // BLOCK_SIZE))]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(before, before + count)]
    starts = np.concatenate([[0], np.cumsum(counts)])
    return StepGeometry(
        query_start_loc=torch.from_numpy(starts).int().to(DEVICE),
        query_start_loc_np=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=torch.tensor(slots + [-1] * num_padding).to(DEVICE),
        num_actual_tokens=sum(counts),
        num_actual_reqs=len(parts),
        max_query_len=max(counts),
        max_seq_len_upper_bound=max(lengths),
        block_size=BLOCK_SIZE,
    )


def positions_of(parts: Sequence[tuple[int, int]], num_padding: int) -> Tensor:
    positions = [p for before, count in parts for p in range(before, before + count)] + [0] * num_padding
    return torch.tensor(positions).to(DEVICE)


def new_cache(backend: AttentionBackend) -> Tensor:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype="float32")
    cache = backend.view_pages(torch.zeros(40, spec.page_size_bytes, dtype=torch.uint8, device=DEVICE), spec)
    return cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))


@needs_triton
@pytest.mark.parametrize("parts", [MIXED, DECODES])
@pytest.mark.parametrize(
    "norm", [None, Norm(is_plain=True), Norm(is_plain=False), Norm(is_plain=True, follows_rotation=True)]
)
@pytest.mark.parametrize(("num_padding_rows", "num_padding"), [(0, 0), (1, 3), (4, 4), (3, 1)])
@pytest.mark.parametrize("window", [{}, {"sliding_window": 9}, {"chunk_size": 9}], ids=str)
def test_a_step_from_the_projection_equals_the_reference(
    parts: list[tuple[int, int]], norm: Norm | None, num_padding_rows: int, num_padding: int, window: dict[str, int]
) -> None:
    layer = replace(LAYER, **window)
    geometry = make_geometry(parts, num_padding_rows, num_padding)
    positions = positions_of(parts, num_padding)
    table = rotary_table(1.0 / 100 ** torch.linspace(0, 1, 8), 200, 1.0).to(DEVICE)
    rotations = gather_rotation_reference(table, positions, torch.float32), TableRotation(table, positions)
    qkv = torch.randn(len(positions), 8 * 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    num_tokens, num_reqs = geometry.num_actual_tokens, geometry.num_actual_reqs
    rows = geometry.query_start_loc[1 : num_reqs + 1].long() - 1
    results = []
    for backend, rotation in zip((ReferenceBackend(layer), TritonPagedBackend(layer)), rotations, strict=True):
        cache = new_cache(backend)
        projection = Projection(qkv.clone(), norm, rotation)
        step = AttentionStep(layer, projection, cache, backend.make_metadata(geometry))
        every = backend.run(step)
        written = cache.clone()
        cache.copy_(new_cache(backend))
        narrowing = LastRows(rows, backend.make_metadata(geometry.of_last_tokens(rows)))
        last = backend.run(step._replace(rows=projection._replace(qkv_TX=qkv.clone()), last=narrowing))
        assert torch.isfinite(every).all()
        results.append((every[:num_tokens], last, written, cache))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@needs_triton
@pytest.mark.parametrize("window", [{}, {"sliding_window": 9}], ids=str)
@pytest.mark.parametrize("parts", [[(0, 1), (40, 1), (4, 2), (0, 6), (31, 33)], [(0, 5), (40, 7)], [(0, 100)]], ids=str)
@pytest.mark.parametrize("backend_class", [TritonPagedBackend, TritonInvariantBackend])
def test_tokens_that_see_later_ones(
    backend_class: type[AttentionBackend], parts: list[tuple[int, int]], window: dict[str, int]
) -> None:
    """Runs of 20 positions, of which a request's last one may be shorter, see one another."""
    layer, geometry = replace(LAYER, **window), make_geometry(parts, 1, 3)
    positions = positions_of(parts, 3)
    lengths = torch.tensor([before + count for before, count in parts for _ in range(count)] + [0] * 3).to(DEVICE)
    ends = torch.minimum(positions // 20 * 20 + 20, lengths).int()
    heads = Heads(*(torch.randn(len(positions), heads, 16).to(DEVICE) for heads in (4, 2, 2)))
    outputs = []
    for backend in (ReferenceBackend(layer), backend_class(layer)):
        step = AttentionStep(layer, heads, new_cache(backend), backend.make_metadata(geometry), visible_ends=ends)
        outputs.append(backend.run(step)[: geometry.num_actual_tokens])
    torch.testing.assert_close(*outputs, rtol=2e-5, atol=2e-5)


@needs_triton
def test_a_decode_serves_fewer_requests_than_its_geometry_says() -> None:
    """A CUDA graph replays the launches of its capture, whose geometry had other numbers of requests and tokens."""
    backend = TritonPagedBackend(LAYER)
    geometry = make_geometry(DECODES, num_padding_rows=2, num_padding=2)
    captured = replace(geometry, num_actual_tokens=5, num_actual_reqs=5)
    heads = Heads(*(torch.randn(5, heads, 16).to(DEVICE) for heads in (4, 2, 2)))
    outputs = [backend.run(AttentionStep(LAYER, heads, new_cache(backend), one)) for one in (geometry, captured)]
    assert torch.equal(*outputs)
    assert (outputs[1][3:] == 0).all()


def test_a_memory_plan_counts_queries_outputs_and_partial_results() -> None:
    with standing_for("cuda"):
        backend = TritonPagedBackend(LAYER)
        cache = torch.empty(2, 600, BLOCK_SIZE, 2, 16)
        table = torch.zeros(2, 512, dtype=torch.int32)
        starts = np.arange(3)
        lengths = torch.zeros(2, dtype=torch.int32)
        geometry = StepGeometry(
            query_start_loc=torch.zeros(3, dtype=torch.int32),
            query_start_loc_np=starts,
            seq_lens=lengths,
            block_table=table,
            slot_mapping=torch.zeros(2, dtype=torch.int64),
            num_actual_tokens=2,
            num_actual_reqs=2,
            max_query_len=1,
            max_seq_len_upper_bound=8192,
            block_size=BLOCK_SIZE,
        )
        qkv = torch.empty(2, 8 * 16)
        rotation = gather_rotation_reference(torch.empty(100, 16), torch.zeros(2, dtype=torch.int64), torch.float32)
        with TensorMemory() as memory:
            output = backend.run(AttentionStep(LAYER, Projection(qkv, None, rotation), cache, geometry))
    assert output.shape == (2, 64)
    num_splits = 32
    assert memory.peak_bytes == 2 * 4 * (16 + 16 + num_splits * (16 + 1)) * 4


def test_what_it_cannot_run_is_refused() -> None:
    gpu = torch.device("cuda")
    why_not = TritonPagedBackend.why_not
    assert why_not(LAYER, torch.bfloat16, gpu, 16) is None
    assert why_not(LAYER, torch.bfloat16, torch.device("mps"), 16) == "it runs on CUDA only"
    assert "int8" in str(why_not(LAYER, torch.int8, gpu, 16))
    assert "block_size" in str(why_not(LAYER, torch.bfloat16, gpu, 48))
    assert "block_size" in str(why_not(LAYER, torch.bfloat16, gpu, 8))
    assert "512" in str(why_not(replace(LAYER, head_size=512), torch.bfloat16, gpu, 16))


@needs_triton
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_engine_gives_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_layer_by_layer(monkeypatch)
    oracle = tiny_model(family)
    save_checkpoint(oracle, tmp_path)
    options = {"device": DEVICE, "dtype": "float32", "attention_backend": "triton_paged"}
    # A small budget cuts the longer prompt into chunks, which run beside the other's decodes.
    core = make_core(tmp_path, **options, block_size=16, max_num_batched_tokens=20)
    prompts = random_prompts((5, 37), VOCAB_SIZE)
    for prompt, result in zip(prompts, run(core, prompts, greedy(8)), strict=True):
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@needs_triton
def test_batch_invariant_attention_gives_a_request_the_same_bits_alone_and_in_a_batch_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_layer_by_layer(monkeypatch)
    if DEVICE == "cpu":
        products_by_row(monkeypatch)
    oracle = tiny_model("llama", num_hidden_layers=2)
    save_checkpoint(oracle, tmp_path)
    attention = {} if DEVICE == "cuda" else {"attention_backend": "triton_invariant"}
    options = {"device": DEVICE, "dtype": "float32", "batch_invariant": True, "block_size": 16, **attention}
    prompts, params = random_prompts((5, 37), VOCAB_SIZE), greedy(4, logprobs=2)
    found = []
    for together, budget in ((True, 20), (False, 64)):
        core = make_core(tmp_path, **options, max_num_batched_tokens=budget)
        results = run(core, prompts, params) if together else [run(core, [one], params)[0] for one in prompts]
        found.append([(result.tokens, result.logprobs) for result in results])
        core.close()
    assert found[0] == found[1]
    for prompt, result in zip(prompts, results, strict=True):
        assert_greedy_continuation(oracle, prompt, result)
