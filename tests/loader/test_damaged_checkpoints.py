"""A damaged checkpoint is refused with the file and the tensor, never half loaded in silence."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError
from penstock.loader.loader import load_model
from penstock.loader.safetensors import check_safetensors, iterate_safetensors
from penstock.loader.weight_files import SAFETENSORS, WeightFiles, find_weight_files
from penstock.parallel import ParallelState
from support.checkpoints import save_checkpoint, tiny_model

INDEX = "model.safetensors.index.json"


def load(model_config: ModelConfig) -> None:
    load_model(model_config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)


@pytest.fixture
def single(tmp_path: Path) -> ModelConfig:
    return save_checkpoint(tiny_model("llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> ModelConfig:
    return save_checkpoint(tiny_model("llama"), tmp_path, max_shard_size="40KB")


def shards(config: ModelConfig) -> list[Path]:
    return sorted(config.folder.glob("model-*.safetensors"))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_index(config: ModelConfig, edit: Callable[[dict[str, str]], object]) -> None:
    path = config.folder / INDEX
    content = json.loads(path.read_text())
    edit(content["weight_map"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.5, 0.999])
def test_a_truncated_file(single: ModelConfig, kept: float) -> None:
    path = single.folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(single)


def test_a_file_with_bytes_appended(single: ModelConfig) -> None:
    with (single.folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 5)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(single)


def test_a_git_lfs_pointer_is_recognised(single: ModelConfig) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (single.folder / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        load(single)


@pytest.mark.parametrize("number", [0, -1])
def test_a_missing_shard_is_named(sharded: ModelConfig, number: int) -> None:
    lost = shards(sharded)[number]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {lost.name}, which {INDEX} names"):
        load(sharded)


def test_a_truncated_shard_is_named(sharded: ModelConfig) -> None:
    broken = shards(sharded)[2]
    broken.write_bytes(broken.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"{broken.name} is damaged"):
        load(sharded)


def state(config: ModelConfig) -> dict[str, bytes]:
    model = load_model(config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)
    return {
        name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in model.named_parameters()
    }


def test_a_tensor_that_the_index_puts_into_another_shard_is_loaded(sharded: ModelConfig) -> None:
    """As by Transformers: only one file holds it."""
    stored = state(sharded)
    held = next(names for path in shards(sharded) if len(names := list(load_file(path))) > 1)
    other = next(path.name for path in shards(sharded) if held[0] not in load_file(path))
    edit_index(sharded, lambda weight_map: weight_map.update({held[0]: other}))
    assert state(sharded) == stored


def test_a_copy_of_a_tensor_in_another_shard_changes_nothing(sharded: ModelConfig) -> None:
    stored = state(sharded)
    first, *_, last = shards(sharded)
    name, tensor = next(iter(load_file(first).items()))
    edit_tensors(last, lambda tensors: tensors.update({name: tensor}))
    assert state(sharded) == stored
    (sharded.folder / INDEX).unlink()
    assert state(sharded) == stored


@pytest.mark.parametrize("has_index", [True, False])
def test_a_different_tensor_of_the_same_name_in_another_shard(sharded: ModelConfig, has_index: bool) -> None:
    first, *_, last = shards(sharded)
    name, tensor = next(iter(load_file(first).items()))
    edit_tensors(last, lambda tensors: tensors.update({name: tensor + 1}))
    if not has_index:
        (sharded.folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"{last.name} and {first.name} both hold {name}.*different contents"):
        load(sharded)


def test_a_shard_without_a_tensor_of_the_index(sharded: ModelConfig) -> None:
    path = shards(sharded)[1]
    lost = next(iter(load_file(path)))
    edit_tensors(path, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=f"{path.name} lacks tensors .*, and so do the other files: {lost}"):
        load(sharded)


def test_a_shard_with_a_tensor_that_neither_the_index_nor_the_model_knows(sharded: ModelConfig) -> None:
    path = shards(sharded)[1]
    edit_tensors(path, lambda tensors: tensors.update({"stray": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="stray"):
        load(sharded)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "../config.json"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": ".."}}',
    ],
)
def test_a_damaged_index_is_named(sharded: ModelConfig, content: str) -> None:
    (sharded.folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=f"{INDEX} is damaged"):
        load(sharded)


def test_an_index_that_is_no_text(sharded: ModelConfig) -> None:
    (sharded.folder / INDEX).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=f"{INDEX} is damaged"):
        load(sharded)


def test_wrong_tensors_are_named_with_the_folder(single: ModelConfig) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(3)
        tensors["stray.weight"] = torch.zeros(3)
        del tensors["lm_head.weight"]

    edit_tensors(single.folder / "model.safetensors", spoil)
    with pytest.raises(CheckpointError) as raised:
        load(single)
    for words in (str(single.folder), "misshapen: model.norm.weight", "unexpected: stray", "missing: lm_head.weight"):
        assert words in str(raised.value)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model.safetensors"
    save_file({"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4).to(torch.bfloat16)}, path, {"format": "pt"})
    return path


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_of_the_header_never_changes_a_value_in_silence(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """It is refused, or shows in a name, dtype or shape, at which strict loading looks, or changes nothing."""
    content = bytearray(small_file.read_bytes())
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    position = data.draw(st.integers(0, header_end - 1), "byte")
    content[position] ^= 1 << data.draw(st.integers(0, 7), "bit")
    broken = tmp_path_factory.getbasetemp() / "broken.safetensors"
    broken.write_bytes(content)
    files = WeightFiles((broken,))
    try:
        check_safetensors(files)
        loaded = dict(iterate_safetensors(files))
    except CheckpointError:
        return
    for name, tensor in load_file(small_file).items():
        other = loaded.get(name)
        if other is not None and (other.dtype, other.shape) == (tensor.dtype, tensor.shape):
            assert torch.equal(other, tensor)


@pytest.mark.parametrize("position", [0, 3, 8, 9])
def test_damage_at_the_beginning_of_the_header_is_named(single: ModelConfig, position: int) -> None:
    path = single.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x81
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(single)


def write_bin(config: ModelConfig, content: object) -> Path:
    (config.folder / "model.safetensors").unlink(missing_ok=True)
    path = config.folder / "pytorch_model.bin"
    torch.save(content, path)
    return path


class Harmful:
    """A pickle of this would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused_and_not_run(single: ModelConfig, tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    write_bin(single, {"a": torch.zeros(1), "b": Harmful(harmed)})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds more than tensors.*safetensors"):
        load(single)
    assert not harmed.exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], torch.zeros(1)], ids=["list", "tensor"])
def test_a_pickle_that_is_no_mapping(single: ModelConfig, content: object) -> None:
    write_bin(single, content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds a (list|Tensor)"):
        load(single)


def test_a_pickle_with_other_things_than_tensors_names_them(single: ModelConfig) -> None:
    write_bin(single, {"state_dict": {"a": torch.zeros(1)}, "epoch": 3})
    with pytest.raises(CheckpointError, match=r"not tensors: epoch, state_dict"):
        load(single)


def test_a_pickle_of_the_old_format_is_refused(single: ModelConfig) -> None:
    path = write_bin(single, {})
    torch.save(tiny_model("llama").state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged: it is not a zip archive"):
        load(single)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_truncated_pickle(single: ModelConfig, kept: float) -> None:
    path = write_bin(single, tiny_model("llama").state_dict())
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
        load(single)


def test_a_zip_archive_that_is_no_checkpoint(single: ModelConfig) -> None:
    path = write_bin(single, {})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(single)


def test_a_tensor_in_two_bin_files(single: ModelConfig) -> None:
    (single.folder / "model.safetensors").unlink()
    for number in (1, 2):
        torch.save({"a": torch.full((1,), number)}, single.folder / f"pytorch_model-{number:05}-of-00002.bin")
    with pytest.raises(
        CheckpointError, match=r"-00002-of-00002\.bin and pytorch_model-00001-of-00002\.bin both hold a"
    ):
        load(single)


def test_a_bin_file_without_a_tensor_of_the_index(single: ModelConfig) -> None:
    write_bin(single, {}).rename(single.folder / "part.bin")
    index = {"weight_map": {"model.norm.weight": "part.bin"}}
    (single.folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"part\.bin lacks tensors .* model\.norm\.weight"):
        load(single)


def test_a_folder_without_weights_of_a_format_has_no_files(tmp_path: Path) -> None:
    assert find_weight_files(tmp_path, SAFETENSORS) is None
