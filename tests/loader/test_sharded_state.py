"""A model's own state, saved in parts and loaded again, bit for bit; parts that are missing or too many are named."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.loader.loader import load_model
from penstock.loader.packed_state import PackedState
from penstock.loader.sharded_state import _cut, copy_model_files, save_sharded_state
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import load_config, tiny_checkpoint
from support.plain_attention import sequence_logits

MAX_SIZE = 40_000
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(config: ModelConfig, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    return load_model(config, LoadConfig(**options), ParallelState(), torch.device("cpu"), dtype)


def load_state(folder: Path, **options: Any) -> CausalLM:
    return load(load_config(folder), load_format="sharded_state", **options)


def save(config: ModelConfig, folder: Path, max_size: int | None = MAX_SIZE, **options: Any) -> list[Path]:
    written = save_sharded_state(load(config), folder, ParallelState(), max_size=max_size, **options)
    copy_model_files(config.folder, folder)
    return written


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    written = save(tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "state")
    assert len(written) > 3
    return written


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"vocab_size": 5000, "attention_bias": True}),  # large enough to be packed
        ("qwen3", {"head_dim": 32}),
        ("llama", {"vocab_size": 5000, "tie_word_embeddings": True}),
    ],
)
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    config = tiny_checkpoint(tmp_path / "checkpoint", family, **changes)
    original = load(config)
    before = sequence_logits(original, [TOKENS])[0]
    written = save_sharded_state(original, tmp_path / "state", ParallelState(), max_size=MAX_SIZE)
    copy_model_files(config.folder, tmp_path / "state")
    # The model that was saved goes on as before.
    assert torch.equal(sequence_logits(original, [TOKENS])[0], before)
    assert [path.name for path in written] == [f"model-rank-0-part-{part}.safetensors" for part in range(len(written))]
    assert not list((tmp_path / "state").glob("*.tmp"))
    assert torch.equal(sequence_logits(load_state(tmp_path / "state"), [TOKENS])[0], before)


def test_a_part_may_be_filled_to_the_last_byte() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(6), "c": torch.zeros(1)}
    assert list(_cut(tensors, 40)) == [["a", "b"], ["c"]]


def test_no_part_is_larger_than_it_may_be_unless_one_tensor_is(parts: list[Path]) -> None:
    for path in parts:
        sizes = [tensor.numel() * tensor.element_size() for tensor in load_file(path).values()]
        assert sum(sizes) <= MAX_SIZE or len(sizes) == 1
    with safe_open(parts[0], framework="pt") as file:
        said = file.metadata()
    sizes = {"tensor_parallel_size", "pipeline_parallel_size", "world_size", "pipeline_layers"}
    assert said.keys() == {"format", "rank", *sizes, "num_parts", "crc32"}
    assert (said["rank"], said["world_size"], said["num_parts"]) == ("0", "1", str(len(parts)))


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    max_size=st.one_of(st.none(), st.integers(1, 200)),
)
@settings(max_examples=200, deadline=None)
def test_every_tensor_is_in_one_part_in_order(counts: list[int], max_size: int | None) -> None:
    tensors = {str(index): torch.zeros(count) for index, count in enumerate(counts)}
    cut = list(_cut(tensors, max_size))
    assert [name for names in cut for name in names] == list(tensors)
    sizes = [[4 * tensors[name].numel() for name in names] for names in cut]
    for part, following in itertools.zip_longest(sizes, sizes[1:]):
        assert max_size is None or len(part) == 1 or sum(part) <= max_size
        # A part ends only where the next tensor has no room.
        assert following is None or (max_size is not None and sum(part) + following[0] > max_size)


def test_without_a_size_there_is_one_part(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=True)
    (path,) = save(config, tmp_path / "state", max_size=None)
    names = set(load_file(path))
    assert "model.layers.0.self_attn.qkv_proj.weight" in names
    assert ("lm_head.weight" in names) != ("model.embed_tokens.weight" in names)


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    pattern = "part{part}of(rank){rank}.safetensors"
    config = tiny_checkpoint(tmp_path / "checkpoint")
    written = save(config, tmp_path / "state", pattern=pattern)
    assert written[1].name == "part1of(rank)0.safetensors"
    loaded = load_state(tmp_path / "state", model_loader_extra_config={"pattern": pattern})
    assert torch.equal(sequence_logits(loaded, [TOKENS])[0], sequence_logits(load(config), [TOKENS])[0])
    with pytest.raises(CheckpointError, match=r"There is no model-rank-0-part-0\.safetensors"):
        load_state(tmp_path / "state")


@pytest.mark.parametrize("part", [0, 2, -1])
def test_a_missing_part_is_named(parts: list[Path], part: int) -> None:
    parts[part].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {parts[part].name} of {len(parts)} parts"):
        load_state(parts[0].parent)


def test_a_part_of_another_state_is_named(parts: list[Path]) -> None:
    extra = parts[0].with_name(f"model-rank-0-part-{len(parts)}.safetensors")
    shutil.copyfile(parts[-1], extra)
    with pytest.raises(CheckpointError, match=f"{extra.name} is part {len(parts)} of a state of {len(parts)} parts"):
        load_state(parts[0].parent)


def test_a_part_that_is_there_twice_without_a_note_of_how_many_there_are(parts: list[Path]) -> None:
    for path in parts:
        save_file(load_file(path), path, {"format": "pt"})
    load_state(parts[0].parent)
    extra = parts[0].with_name(f"model-rank-0-part-{len(parts)}.safetensors")
    save_file({name: tensor + 1 for name, tensor in load_file(parts[1]).items()}, extra, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{extra.name} and {parts[1].name} both hold"):
        load_state(parts[0].parent)


def test_a_state_of_other_ranks_is_refused(parts: list[Path]) -> None:
    content = load_file(parts[0])
    save_file(content, parts[0], {"rank": "0", "world_size": "2", "num_parts": str(len(parts))})
    with pytest.raises(CheckpointError, match="says .* world_size='2', .*which is no arrangement of ranks"):
        load_state(parts[0].parent)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_states_of_mamba_with_the_names_of_an_older_version_are_refused(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    """Its `x_proj` was two layers, of the steps' features and of the keys'."""
    tiny_checkpoint(tmp_path / "model", family)
    config = ModelConfig.load(str(tmp_path / "model"), quantization=quantization)
    model = load(config)
    packed = None if quantization is None else PackedState.of(model, config, "cpu", ("float32", "float32"))
    (path,) = save_sharded_state(model, tmp_path / "state", ParallelState(), packed=packed)
    copy_model_files(config.folder, tmp_path / "state")
    with safe_open(path, framework="pt") as file:
        metadata = {key: text.replace("x_proj", "steps_proj") for key, text in file.metadata().items()}
    save_file({name.replace("x_proj", "steps_proj"): one for name, one in load_file(path).items()}, path, metadata)
    with pytest.raises(CheckpointError, match=r"layers\.\S*\.steps_proj") as error:
        load_state(tmp_path / "state")
    assert "another version of Penstock" in str(error.value)
    assert "load the checkpoint, and save its state anew (save_sharded_state)" in str(error.value)


def test_a_truncated_part_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=f"{parts[1].name} is damaged"):
        load_state(parts[0].parent)


def test_a_tensor_lost_from_a_part_is_named(parts: list[Path]) -> None:
    content = load_file(parts[0])
    lost = next(iter(content))
    del content[lost]
    with safe_open(parts[0], framework="pt") as file:
        metadata = file.metadata()
    save_file(content, parts[0], metadata)
    with pytest.raises(CheckpointError, match=f"1 missing: {lost}"):
        load_state(parts[0].parent)


def test_a_state_is_not_taken_for_a_checkpoint(parts: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"There is no model\.safetensors.*give load_format='sharded_state'"):
        load(load_config(parts[0].parent))


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/state cannot be made a folder: Not a directory"):
        save(tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "file" / "state")


def test_nothing_is_overwritten(parts: list[Path], tmp_path: Path) -> None:
    before = [path.read_bytes() for path in parts]
    with pytest.raises(ConfigError, match=r"holds model-rank-0-part-0\.safetensors already"):
        save(load_config(tmp_path / "checkpoint"), parts[0].parent)
    assert [path.read_bytes() for path in parts] == before


@pytest.mark.parametrize(
    "pattern",
    [
        "model.safetensors",
        "model-{part}.safetensors",
        "{rank}-{part}-{x}.safetensors",
        "a/{rank}{part}.safetensors",
        "{rank}-{part}.bin",
        "{rank}-{part}-{part}.safetensors",
        "{",
        "{}{}.safetensors",
    ],
)
def test_a_pattern_that_would_mix_files_up_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern=.* is not valid"):
        save(tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "state", pattern=pattern)
    with pytest.raises(ConfigError, match="pattern=.* is not valid"):
        LoadConfig(load_format="sharded_state", model_loader_extra_config={"pattern": pattern})


@pytest.mark.parametrize("max_size", [0, -1, 1.5, True, "1GB"])
def test_a_size_that_is_no_size_is_refused(tmp_path: Path, max_size: Any) -> None:
    with pytest.raises(ConfigError, match="max_size=.* is not valid. Allowed: a positive number of bytes"):
        save(tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "state", max_size=max_size)


def test_a_disk_that_is_full_leaves_no_half_file_and_a_working_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_checkpoint(tmp_path / "checkpoint", vocab_size=5000))
    before = sequence_logits(model, [TOKENS])[0]

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.loader.packed_files.os.fsync", fail)
    with pytest.raises(CheckpointError, match="cannot be written: .*No space left"):
        save_sharded_state(model, tmp_path / "state", ParallelState())
    assert list((tmp_path / "state").iterdir()) == []
    assert torch.equal(sequence_logits(model, [TOKENS])[0], before)
