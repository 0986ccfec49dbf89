"""Damaged and hostile GGUF files end in a named error; what llama.cpp reads in its own way is read so."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.checkpoints.gguf import container, tokenizer
from penstock.checkpoints.gguf.container import Header, TensorInfo, read_header
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.folder import check_model_fields, check_tokenizer
from penstock.checkpoints.gguf.model_fields import hf_config_of
from penstock.checkpoints.gguf.tokenizer import tokenizer_files_of
from penstock.config import ModelConfig
from penstock.errors import CheckpointError, ModelError, PenstockError, TokenizerError
from penstock.loader.gguf.blocks import check_layout
from penstock.loader.gguf.tensors import GgufWeights
from penstock.loader.loader import build_model
from penstock.parallel import ParallelState
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf

# Metadata of a decoder as llama.cpp's converter writes it, for an architecture that is put before the keys.
_FIELDS = {
    "context_length": 64,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    model = tiny_model("llama", vocab_size=16, intermediate_size=32)
    return write_gguf(model, "llama", folder / "tiny.gguf").read_bytes()


def _info(name: str, shape: tuple[int, ...], start: int = 0) -> TensorInfo:
    return TensorInfo(Path("test.gguf"), name, shape, 0, start, 0, 32)


def _metadata(architecture: str, *, shape: tuple[int, ...] = (100, 64), **changes: Any) -> Metadata:
    values = {f"{architecture}.{key}": value for key, value in (_FIELDS | changes).items()}
    header = Header({"general.architecture": architecture, **values}, (_info("token_embd.weight", shape),))
    return Metadata("test.gguf", header)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("key", ["rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor"])
def test_numbers_that_are_not_finite_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ModelError, match=rf"llama\.{key}=.*must be a finite number"):
        hf_config_of(_metadata("llama", **{key: value}))


@pytest.mark.parametrize("key", [key for key in _FIELDS if "epsilon" not in key])
@pytest.mark.parametrize("value", [0, -1, 2**40, 1.5, "x"])
def test_sizes_that_no_model_has_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"llama\.{key}="):
        hf_config_of(_metadata("llama", **{key: value}))


@pytest.mark.parametrize("shape", [(), (64,), (2, 100, 64)])
def test_an_embedding_that_is_no_matrix_is_refused_by_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has the shape \["):
        hf_config_of(_metadata("llama", shape=shape))


def test_a_number_of_layers_that_no_file_holds_is_not_counted_up_to() -> None:
    changes = dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"), 2)
    fields = hf_config_of(_metadata("qwen3moe", block_count=100_000_000, **changes))
    assert len(fields["mlp_only_layers"]) <= 2


@pytest.mark.parametrize("architecture", ["phi3", "starcoder2"])
def test_a_window_of_0_is_none(architecture: str) -> None:
    """So llama.cpp converts Phi-4, which has no window."""
    changes = {"attention.sliding_window": 0, "attention.layer_norm_epsilon": 1e-5}
    assert hf_config_of(_metadata(architecture, **changes))["sliding_window"] is None
    assert hf_config_of(_metadata(architecture, **{**changes, "attention.sliding_window": 8}))["sliding_window"] == 8


def test_a_scaling_factor_of_0_is_none() -> None:
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}
    assert hf_config_of(_metadata("llama", **changes))["rope_scaling"] is None


def _tokenizer(kind: str, tokens: list[str], **values: Any) -> dict[str, Any]:
    own = {"model": kind, "tokens": tokens, "token_type": [1] * len(tokens), "pre": "gpt-2"} | values
    header = Header({f"tokenizer.ggml.{key}": value for key, value in own.items()}, ())
    return tokenizer_files_of(Metadata("test.gguf", header))["tokenizer.json"]


def test_empty_tokens_have_the_names_that_llama_cpp_gives_them() -> None:
    files = _tokenizer("gpt2", ["a", "", "b", ""], token_type=[1, 3, 1, 3])
    assert files["model"]["vocab"] == {"a": 0, "[EMPTY_1]": 1, "b": 2, "[EMPTY_3]": 3}
    assert files["added_tokens"] == []


def test_long_tokens_of_a_sentence_piece_model_take_little_time() -> None:
    tokens = ["a", "b", "ab", "ab" * 1_000_000, "▁" * 500_000]
    files = _tokenizer("llama", tokens, scores=[0.0] * 5)
    assert files["model"]["merges"] == [["a", "b"]]


def test_tokens_whose_comparison_would_take_minutes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_MAX_COMPARED", 10**6)
    tokens = ["a" * length for length in range(1, 50)] + ["b" * 1_000_000]
    with pytest.raises(TokenizerError, match=r"too many lengths, up to 1,000,000 characters"):
        _tokenizer("llama", tokens, scores=[0.0] * len(tokens))


def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match=r"scores with elements that are not finite"):
        _tokenizer("llama", ["a", "b"], scores=[0.0, float("nan")])


@pytest.mark.parametrize("starts", [(0, 0), (0, 64), (0, 36), (32, 0), (0, 128), (4, 96)])
def test_tensors_that_do_not_lie_one_behind_another_are_refused(tmp_path: Path, starts: tuple[int, int]) -> None:
    path = tmp_path / "test.gguf"
    path.write_bytes(bytes(160))
    first, second = (TensorInfo(path, name, (size,), 0, 0, 0, 32) for name, size in (("first", 24), ("second", 8)))
    check_layout([first, replace(second, start=96)])
    with pytest.raises(CheckpointError, match=r"test\.gguf is damaged: the tensor (first|second) is at offset"):
        check_layout([replace(first, start=starts[0]), replace(second, start=starts[1])])


def _with_offset(data: bytes, name: str, change: Callable[[int], int]) -> bytes:
    at = data.index(name.encode()) + len(name)
    (num_dims,) = struct.unpack_from("<I", data, at)
    at += 4 + 8 * num_dims + 4
    return data[:at] + struct.pack("<Q", change(struct.unpack_from("<Q", data, at)[0])) + data[at + 8 :]


@pytest.mark.parametrize("change", [lambda offset: 0, lambda offset: offset + 4, lambda offset: offset - 32])
def test_a_changed_offset_is_refused_before_any_weight_is_read(good: bytes, tmp_path: Path, change) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(_with_offset(good, "blk.1.ffn_down.weight", change))
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight is at offset"):
        GgufWeights.find(tmp_path)


def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=16, intermediate_size=32)
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf", changes={"general.alignment": 48})
    with pytest.raises(CheckpointError, match=r"general\.alignment=48 is not a power of two"):
        read_header(path)


@pytest.mark.parametrize("count", [2**63, 2**40, 2**22 + 1])
def test_an_array_or_a_number_that_no_file_has_takes_no_memory(tmp_path: Path, count: int) -> None:
    path = tmp_path / "hostile.gguf"
    key = struct.pack("<Q", 1) + b"k"
    array = key + struct.pack("<IIQ", 9, 7, count)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(2**22 + 2))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"hostile\.gguf is damaged at offset \d+: an array has"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_header_larger_than_any_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "_MAX_HEADER_BYTES", 1000)
    path = tmp_path / "hostile.gguf"
    text = struct.pack("<Q", 2000) + bytes(2000)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    with pytest.raises(CheckpointError, match="the header is longer than"):
        read_header(path)


def test_experts_that_no_file_holds_are_not_counted_up_to(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "hostile.gguf", "qwen3moe")
    writer.add_tensor_info("blk.0.ffn_up_exps.weight", (2**40, 2**10, 32), np.dtype(np.float32), 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"hostile\.gguf is truncated: the tensor blk\.0\.ffn_up_exps\.weight"):
        GgufWeights.find(tmp_path)


_NUMBERS = [bytes(8), b"\xff" * 8, struct.pack("<q", 2**62), struct.pack("<f", float("nan")), struct.pack("<Q", 3)]


@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8) | st.sampled_from(_NUMBERS)),
        min_size=1,
        max_size=3,
    )
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
def test_a_changed_header_is_read_or_refused_by_name(
    good: bytes, tmp_path: Path, changes: list[tuple[float, bytes]]
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(good)
    length = read_header(path).tensors[0].start
    data = bytearray(good)
    for place, value in changes:
        at = int(place * (length - 1))
        data[at : at + len(value)] = value
    path.write_bytes(data[: len(good)])
    try:
        folder = ModelConfig.load(path).folder
        check_model_fields(folder)
        check_tokenizer(folder)
        build_model(ModelConfig.load(path), ParallelState())
        weights = GgufWeights.find(folder)
        assert weights is not None
        for _, tensor in weights.iterate():
            tensor.values()
    except PenstockError:
        pass
