"""Headers tell what the files hold, as the libraries that read the weights see it, and read no weight."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import CheckpointError
from penstock.loader.headers import TensorHeader, read_headers, safetensors_header
from support.checkpoints import save_checkpoint, tiny_model

MODEL = tiny_model("qwen2")
EXPECTED = {name: tuple(tensor.shape) for name, tensor in MODEL.state_dict().items()}


def shapes(headers: dict[str, TensorHeader] | None) -> dict[str, tuple[int, ...]]:
    assert headers is not None
    return {name: header.shape for name, header in headers.items()}


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_safetensors(tmp_path: Path, max_shard_size: str) -> None:
    save_checkpoint(MODEL, tmp_path, dtype=torch.bfloat16, max_shard_size=max_shard_size)
    headers = read_headers(tmp_path)
    assert shapes(headers) == EXPECTED
    assert headers is not None
    assert {header.dtype for header in headers.values()} == {"BF16"}


@pytest.mark.parametrize("as_parameters", [False, True])
def test_pytorch_bin(tmp_path: Path, as_parameters: bool) -> None:
    state = {name: tensor.half() for name, tensor in MODEL.state_dict().items()}
    if as_parameters:
        state = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    headers = read_headers(tmp_path)
    assert shapes(headers) == EXPECTED
    assert headers is not None
    assert {header.dtype for header in headers.values()} == {"HalfStorage"}


def test_the_format_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    save_checkpoint(MODEL, tmp_path)
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    assert shapes(read_headers(tmp_path, "pt")) == {"a": (3,)}
    assert shapes(read_headers(tmp_path, "safetensors")) == EXPECTED
    assert read_headers(tmp_path / "nothing") is None


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe"])
def test_a_header_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        safetensors_header(path)


class Harmful:
    """A pickle of this would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    harmed = tmp_path / "harmed"
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": Harmful(harmed)}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged: it holds .*, which is no tensor"):
        read_headers(tmp_path)
    assert not harmed.exists()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_bin_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
        read_headers(tmp_path)


def test_a_bin_file_of_other_things_is_named(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than tensors by name"):
        read_headers(tmp_path)


def test_no_library_is_needed(tmp_path: Path) -> None:
    save_checkpoint(MODEL, tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom penstock.loader.headers import read_headers\n"
        f"assert read_headers(Path({str(tmp_path)!r}))\n"
        "sys.exit(repr([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == "[]"
