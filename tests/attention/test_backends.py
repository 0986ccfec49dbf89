"""Every backend against attention by definition, in float64, over paged caches of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.attention import AttentionBackend, AttentionStep, Heads, LayerAttention, StepGeometry
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.attention.cpu_paged import CpuPagedBackend
from penstock.attention.reference import ReferenceBackend
from penstock.attention.select import select_backend
from penstock.contract import FullAttentionSpec
from penstock.device.tensor_memory import TensorMemory
from penstock.errors import ConfigError, UnsupportedFeature
from penstock.kernels import paged_attention
from penstock.kernels.native import NATIVE
from penstock.kernels.paged_attention import prefill_attention_cpu
from penstock.kernels.step_state import compute_slot_mapping
from penstock.parallel.context_share import ContextShare
from support.ranks import SilentGroup


@dataclass
class Request:
    """`num_computed` positions in the cache before the step, `num_new` in it."""

    num_computed: int
    num_new: int

    def ends(self, run_length: int) -> list[int]:
        """End of the positions that each new token sees: runs of tokens see their last one, after a token of text."""
        length, ends = self.num_computed + self.num_new, []
        for position in range(self.num_computed, length):
            run = position // (1 + run_length) * (1 + run_length)
            ends.append(position + 1 if position == run else min(run + 1 + run_length, length))
        return ends


@dataclass(eq=False)
class Sinks:
    sinks: torch.Tensor


@dataclass(eq=False)
class Biases:
    biases: torch.Tensor


def _attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    window: int | None,
    soft_cap: float | None,
    sinks: Sequence[float] | None,
    slopes: Sequence[float] | None = None,
    biases: np.ndarray | None = None,
    ends: Sequence[int] | None = None,
) -> np.ndarray:
    """[Q, H, D] over [L, K, D], by definition. window: negative for chunks. ends: of what each query sees."""
    num_queries, num_heads, head_size = queries.shape
    length, num_kv_heads, _ = keys.shape
    output = np.zeros((num_queries, num_heads, head_size))
    for row in range(num_queries):
        position = length - num_queries + row
        end = position + 1 if ends is None else ends[row]
        first = 0 if window is None else max(0, position - window + 1)
        if window is not None and window < 0:
            first = next(other for other in range(position + 1) if other // -window == position // -window)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = keys[first:end, kv_head] @ queries[row, head] * head_size**-0.5
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores - slopes[head] * (position - np.arange(first, end))
            if biases is not None:
                apart = position - np.arange(first, end)
                scores = scores + biases[head, np.minimum(apart, biases.shape[1] - 1)]
            largest = scores.max() if sinks is None else max(scores.max(), sinks[head])
            weights = np.exp(scores - largest)
            mass = weights.sum() if sinks is None else weights.sum() + np.exp(sinks[head] - largest)
            output[row, head] = weights @ values[first:end, kv_head] / mass
    return output


def _check(
    backend_class: type[AttentionBackend],
    requests: list[Request],
    *,
    block_size: int = 4,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Sequence[float] | None = None,
    slopes: Sequence[float] | None = None,
    biases: np.ndarray | None = None,
    run_length: int | None = None,
    num_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    tolerance: float = 1e-5,
    is_head_major: bool = False,
) -> None:
    rng = np.random.default_rng(0)
    num_heads = num_kv_heads * group_size
    layer = LayerAttention("layer", num_heads, num_kv_heads, head_size, head_size**-0.5, None, soft_cap)
    if window is not None:
        layer = replace(layer, **({"sliding_window": window} if window > 0 else {"chunk_size": -window}))
    if sinks is not None:
        layer = replace(layer, sinks=Sinks(torch.tensor(sinks, dtype=dtype)))
    if slopes is not None:
        layer = replace(layer, alibi_slopes=tuple(slopes))
    if biases is not None:
        layer = replace(layer, distance_biases=Biases(torch.from_numpy(biases).float()))
    requests = sorted(requests, key=lambda request: request.num_new)
    lengths = [request.num_computed + request.num_new for request in requests]
    blocks_needed = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(blocks_needed) + 3
    order = rng.permutation(np.arange(1, num_blocks))
    table = np.zeros((len(requests) + 1, max(blocks_needed)), dtype=np.int32)
    taken = 0
    for row, needed in enumerate(blocks_needed):
        table[row, :needed] = order[taken : taken + needed]
        taken += needed

    def round_trip(array: np.ndarray, to: torch.dtype = dtype) -> np.ndarray:
        return torch.from_numpy(array).to(to).double().numpy()

    keys = [round_trip(rng.standard_normal((length, num_kv_heads, head_size))) for length in lengths]
    values = [round_trip(rng.standard_normal((length, num_kv_heads, head_size))) for length in lengths]
    queries = [round_trip(rng.standard_normal((length, layer.num_heads, head_size))) for length in lengths]

    backend = backend_class(layer)
    kept = cache_dtype or dtype
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=str(kept).removeprefix("torch.")
    )
    # Whatever was in memory before must not matter; the torch backends need it to be finite.
    stale = float("nan") if backend_class is CpuNativeBackend else 7.0
    pages_NX = torch.full((num_blocks * spec.page_size_bytes // kept.itemsize,), stale, dtype=kept).view(torch.uint8)
    pages_NX = pages_NX.view(num_blocks, spec.page_size_bytes)
    kv_cache = backend.view_pages(pages_NX, spec)

    def run(
        parts: list[tuple[int, int, int]], with_padding: int = 0, ends: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A step that runs positions start..stop of each (request, start, stop)."""
        counts = [stop - start for _, start, stop in parts]
        num_tokens = sum(counts)
        padding_row = [len(requests)] * bool(with_padding)
        rows = torch.tensor([index for index, _, _ in parts] + padding_row)
        ids = [row for row, count in enumerate(counts) for _ in range(count)] + [len(parts)] * with_padding
        positions = [p for _, start, stop in parts for p in range(start, stop)] + [0] * with_padding
        starts = np.concatenate([[0], np.cumsum(counts + [0] * len(padding_row))])
        seq_lens = [stop for _, _, stop in parts] + [0] * len(padding_row)
        geometry = StepGeometry(
            query_start_loc=torch.from_numpy(starts).int(),
            query_start_loc_np=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.from_numpy(table)[rows],
            slot_mapping=compute_slot_mapping(
                torch.from_numpy(table), rows, torch.tensor(ids), torch.tensor(positions), block_size, num_tokens
            ),
            num_actual_tokens=num_tokens,
            num_actual_reqs=len(parts),
            max_query_len=max(counts),
            max_seq_len_upper_bound=max(seq_lens),
            block_size=block_size,
        )

        def stack(sequences: list[np.ndarray]) -> torch.Tensor:
            chunks = [sequences[index][start:stop] for index, start, stop in parts]
            filler = np.full((with_padding, *chunks[0].shape[1:]), 3.0)
            stacked = torch.from_numpy(np.concatenate([*chunks, filler])).to(dtype)
            return stacked.transpose(0, 1).contiguous().transpose(0, 1) if is_head_major else stacked

        heads = Heads(stack(queries), stack(keys), stack(values))
        step = AttentionStep(layer, heads, kv_cache, backend.make_metadata(geometry))
        if ends is not None:
            step = step._replace(visible_ends=torch.tensor([*ends, *[0] * with_padding], dtype=torch.int32))
        return backend.run(step)

    for index, request in enumerate(requests):
        if request.num_computed:
            run([(index, 0, request.num_computed)])

    before = pages_NX.clone()
    ends = None if run_length is None else [request.ends(run_length) for request in requests]
    all_ends = None if ends is None else [end for of_request in ends for end in of_request]
    output = run([(i, r.num_computed, lengths[i]) for i, r in enumerate(requests)], num_padding, all_ends)
    assert output.dtype == dtype
    assert torch.isfinite(output).all()
    row = 0
    for i, request in enumerate(requests):
        known = [round_trip(part[i], kept) for part in (keys, values)]
        seen = None if ends is None else ends[i]
        expected = _attend(queries[i][request.num_computed :], *known, window, soft_cap, sinks, slopes, biases, seen)
        actual = output[row : row + request.num_new].double().numpy()
        np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)
        row += request.num_new
    unused = [0, *order[taken:].tolist()]
    # Whole pages, as block copies and clears address them.
    assert torch.equal(pages_NX[unused], before[unused]), "a step wrote to a block that no request owns"


TORCH_BACKENDS = [CpuPagedBackend, ReferenceBackend]
native = pytest.param(
    CpuNativeBackend, marks=pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
)
BACKENDS = [native, *TORCH_BACKENDS]
MIXED = [Request(0, 1), Request(9, 1), Request(4, 1), Request(0, 6), Request(7, 5), Request(31, 13)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100, -1, -5, -8])
@pytest.mark.each_value_quick
def test_a_mixed_step_equals_the_definition(backend: type[AttentionBackend], window: int | None) -> None:
    _check(backend, list(MIXED), window=window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size"), [(1, 1, 8), (4, 1, 32), (1, 7, 80), (3, 2, 128)])
@pytest.mark.each_value_quick
def test_head_layouts(backend: type[AttentionBackend], num_kv_heads: int, group_size: int, head_size: int) -> None:
    _check(backend, list(MIXED), num_kv_heads=num_kv_heads, group_size=group_size, head_size=head_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_need_not_lie_side_by_side(backend: type[AttentionBackend]) -> None:
    _check(backend, MIXED, is_head_major=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend: type[AttentionBackend]) -> None:
    _check(backend, list(MIXED), dtype=torch.bfloat16, tolerance=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_bfloat16_cache_of_a_float32_model(backend: type[AttentionBackend], window: int | None) -> None:
    _check(backend, list(MIXED), cache_dtype=torch.bfloat16, tolerance=1e-5, window=window)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3)])
def test_half_precision(backend: type[AttentionBackend], dtype: torch.dtype, tolerance: float) -> None:
    _check(backend, list(MIXED), dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_inert(backend: type[AttentionBackend]) -> None:
    _check(backend, list(MIXED), num_padding=5)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.builds(Request, st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([None, 2, 5, 17, -6]),
    num_padding=st.integers(0, 3),
)
def test_any_step_equals_the_definition(
    backend: type[AttentionBackend], requests: list[Request], block_size: int, window: int | None, num_padding: int
) -> None:
    _check(backend, requests, block_size=block_size, window=window, num_padding=num_padding)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 3, 8, 100])
@pytest.mark.parametrize("run_length", [1, 4, 11])
@pytest.mark.each_value_quick
def test_runs_of_tokens_see_one_another(backend: type[AttentionBackend], window: int | None, run_length: int) -> None:
    options = {"window": window, "run_length": run_length}
    _check(backend, list(MIXED), **options, num_padding=2)
    _check(backend, list(MIXED), **options, soft_cap=3.0, cache_dtype=torch.bfloat16)
    _check(backend, [Request(90, 1), Request(0, 140), Request(70, 3)], **options, block_size=16)


@pytest.mark.parametrize("backend", [native, CpuPagedBackend])
@pytest.mark.parametrize("window", [None, 70, -70])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.each_value_quick
def test_long_prefill_is_tiled(backend: type[AttentionBackend], window: int | None, block_size: int) -> None:
    _check(
        backend, [Request(40, 1100)], block_size=block_size, num_kv_heads=1, group_size=1, head_size=8, window=window
    )
    _check(
        backend,
        [Request(40, 700)],
        block_size=block_size,
        num_kv_heads=1,
        group_size=1,
        head_size=8,
        window=window,
        run_length=256,
    )


# Scores of these layers lie within about five, so the larger cap bends some and the smaller bends most.
@pytest.mark.parametrize("soft_cap", [0.5, 3.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", [native, CpuPagedBackend, ReferenceBackend])
@pytest.mark.each_value_quick
def test_soft_caps(backend: type[AttentionBackend], soft_cap: float, window: int | None) -> None:
    _check(backend, list(MIXED), soft_cap=soft_cap, window=window, num_padding=2)


# Beside scores within about five: sinks with no weight, some, and all of it.
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.each_value_quick
def test_attention_sinks(backend: type[AttentionBackend], window: int | None) -> None:
    sinks = [-200.0, 0.25, 3.0, 200.0]
    _check(backend, list(MIXED), sinks=sinks, window=window, num_padding=2)
    _check(backend, [Request(900, 1), Request(0, 40), Request(500, 3)], sinks=sinks, window=window, block_size=16)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", [native, ReferenceBackend])
def test_alibi(backend: type[AttentionBackend], window: int | None) -> None:
    slopes = [0.5, 0.0, 0.01, 2.0]
    _check(backend, list(MIXED), slopes=slopes, window=window, num_padding=2)
    _check(backend, [Request(900, 1), Request(0, 40), Request(500, 3)], slopes=slopes, window=window, block_size=16)


def test_alibi_is_refused_by_backends_that_do_not_know_it() -> None:
    layer = LayerAttention("layer", 2, 1, 16, 0.25, alibi_slopes=(0.5, 0.25))
    where = {"dtype": torch.float32, "device": torch.device("cpu"), "block_size": 16}
    backend, refusals = select_backend(layer, **where, candidates=("torch_varlen", "cpu_paged", "reference"))
    assert backend is ReferenceBackend
    assert set(refusals.values()) == {"it does not support ALiBi"}
    shared = replace(layer, context=ContextShare(SilentGroup(0, 2), 1))
    with pytest.raises(UnsupportedFeature, match="ALiBi"):
        select_backend(shared, **where, candidates=("cpu_native",))


@pytest.mark.parametrize("num_distances", [1, 7, 300])
@pytest.mark.parametrize("backend", [native, ReferenceBackend])
def test_biases_by_distance(backend: type[AttentionBackend], num_distances: int) -> None:
    biases = np.random.default_rng(1).standard_normal((4, num_distances))
    _check(backend, list(MIXED), biases=biases, num_padding=2)
    _check(backend, [Request(900, 1), Request(0, 40), Request(500, 3)], biases=biases, block_size=16)


def test_biases_by_distance_are_refused_by_backends_that_do_not_know_them() -> None:
    layer = LayerAttention("layer", 2, 1, 16, 0.25, distance_biases=Biases(torch.zeros(2, 3)))
    where = {"dtype": torch.float32, "device": torch.device("cpu"), "block_size": 16}
    backend, refusals = select_backend(layer, **where, candidates=("cpu_paged", "reference"))
    assert backend is ReferenceBackend
    assert set(refusals.values()) == {"it does not support biases by distance"}


def test_sinks_are_refused_where_positions_are_shared() -> None:
    layer = LayerAttention(
        "layer", 2, 1, 16, 0.25, context=ContextShare(SilentGroup(0, 2), 1), sinks=Sinks(torch.ones(2))
    )
    with pytest.raises(UnsupportedFeature, match="attention sinks with decode_context_parallel_size=2"):
        select_backend(
            layer, dtype=torch.float32, device=torch.device("cpu"), block_size=16, candidates=("cpu_native",)
        )


@pytest.mark.parametrize("most_scores", [1, 100])
def test_capped_scores_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch, most_scores: int) -> None:
    monkeypatch.setattr(paged_attention, "_MAX_SCORES", most_scores)
    _check(CpuPagedBackend, list(MIXED), soft_cap=3.0, window=3)


@pytest.mark.slow
def test_memory_for_capped_scores_does_not_grow_with_the_square_of_a_prompt() -> None:
    query_QHD, key_LKD = torch.randn(3000, 4, 16), torch.randn(3000, 2, 16)
    with TensorMemory() as memory:
        prefill_attention_cpu(query_QHD, key_LKD, key_LKD, 0.25, None, soft_cap=30.0)
    assert memory.peak_bytes < 24 << 20  # all scores at once are 144 MB


def test_soft_caps_need_no_kernels_of_our_own() -> None:
    capped = LayerAttention("layer", 2, 2, 16, 0.25, soft_cap=50.0)
    backend, refusals = select_backend(
        capped,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=16,
        candidates=("torch_varlen", "cpu_paged", "reference"),
    )
    assert backend is CpuPagedBackend
    assert list(refusals) == ["torch_varlen"]


def test_the_backend_of_a_group_can_run_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LayerAttention(f"layer.{index}", 2, 2, 16, 0.25) for index in range(3)]
    layers[1] = replace(layers[1], soft_cap=50.0)
    asked: list[str] = []

    def no_soft_caps(layer: LayerAttention, *where: object) -> str | None:
        asked.append(layer.name)
        return None if layer.soft_cap is None else "no soft caps"

    monkeypatch.setattr(CpuPagedBackend, "why_not", no_soft_caps)
    backend, refusals = select_backend(
        *layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=16,
        candidates=("cpu_paged", "reference"),
    )
    assert backend is ReferenceBackend
    assert refusals == {"cpu_paged": "no soft caps"}
    assert len(asked) == 2, "layers that are alike are asked about once"


def test_many_decodes_are_read_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.attention.cpu_paged._MAX_BYTES_AT_ONCE", 5 * 4 * 2 * 16 * 4)
    _check(CpuPagedBackend, [Request(length, 1) for length in (3, 40, 1, 17, 8, 8, 9)])


def test_an_unknown_backend_and_one_that_cannot_run_are_refused_by_name() -> None:
    layer = LayerAttention("layer", 2, 2, 16, 0.25)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "block_size": 16, "candidates": ("cpu_paged",)}
    with pytest.raises(ConfigError, match="attention_backend='fast'.*cpu_paged"):
        select_backend(layer, requested="fast", **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature, match="torch_varlen: it runs on CUDA only"):
        select_backend(layer, requested="torch_varlen", **options)  # type: ignore[arg-type]
