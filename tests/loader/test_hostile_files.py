"""A model folder from an untrusted source: a refusal names file and field at once, whatever the files hold."""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file

from penstock.config import LoadConfig, ModelConfig
from penstock.engine.inputs.default_sampling import default_sampling_params
from penstock.errors import CheckpointError, ConfigError, ModelError, OutOfMemory, TokenizerError, UnsupportedModel
from penstock.loader.calibration_text import read_calibration_text
from penstock.loader.loader import load_model, materialise
from penstock.parallel import ParallelState
from penstock.text.tokenizer import load_tokenizer
from support.checkpoints import tiny_checkpoint
from support.fake_engine import byte_level_tokenizer, write_tokenizer

Edit: TypeAlias = Callable[[Path], object]

pytestmark = pytest.mark.timeout(30)
LIMIT_S = 5
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
PART = "model-rank-0-part-{}.safetensors"
JSON_FILES = {
    "config.json": ModelError,
    "generation_config.json": ModelError,
    "tokenizer_config.json": TokenizerError,
    "special_tokens_map.json": TokenizerError,
    "added_tokens.json": TokenizerError,
    INDEX: CheckpointError,
}
FILES = {**JSON_FILES, "tokenizer.json": TokenizerError, WEIGHTS: CheckpointError, BIN: CheckpointError}
DEEP = 100_000
HUGE = 10**9


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    write_tokenizer(folder, byte_level_tokenizer())
    tiny_checkpoint(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A model folder to spoil; what comes of it comes in time."""
    shutil.copytree(original, tmp_path / "model")
    start = time.monotonic()
    yield tmp_path / "model"
    assert time.monotonic() - start < LIMIT_S


def use(folder: Path, load_format: str = "auto", **options: Any) -> None:
    """Read all that an engine reads of a folder, in its order."""
    config = ModelConfig.load(folder, **options)
    load_tokenizer(config.tokenizer_folder)
    default_sampling_params(config)
    load_model(config, LoadConfig(load_format=load_format), ParallelState(), torch.device("cpu"), torch.float32)


def refused(folder: Path, error: type[Exception], *words: str, **options: Any) -> str:
    with pytest.raises(error) as raised:
        use(folder, **options)
    message = str(raised.value)
    for word in words:
        assert word in message
    assert len(message) < 2000
    return message


def place(folder: Path, name: str) -> Path:
    """Path of a file, after removing the one that it replaces."""
    if name in (INDEX, BIN):
        (folder / WEIGHTS).unlink()
    (folder / name).unlink(missing_ok=True)
    return folder / name


def fields(name: str, **changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **changes}))

    return edit


def test_the_folder_itself_is_good(folder: Path) -> None:
    use(folder)


SPECIAL_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "is a FIFO. It must be a regular file"),
    "folder": (Path.mkdir, "is a folder. It must be a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device. It must be a regular file"),
    "symlink loop": (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "dangling symlink": (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file"),
}


@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_named(folder: Path, name: str, kind: str) -> None:
    make, message = SPECIAL_FILES[kind]
    make(place(folder, name))
    refused(folder, FILES[name], f"{name} {message}")


@pytest.mark.parametrize(
    "name", ["vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/tool.jinja"]
)
def test_a_pipe_that_transformers_would_read_is_named(folder: Path, name: str) -> None:
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / name)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(TokenizerError, match=f"{Path(name).name} is a FIFO"):
        tokenizer.for_callers()


@pytest.mark.parametrize("name", [*JSON_FILES, "tokenizer.json"])
def test_a_file_larger_than_any_is_not_read(folder: Path, name: str) -> None:
    path = place(folder, name)
    path.touch()
    os.truncate(path, 2**40)
    refused(folder, FILES[name], f"{name} is larger than")


DAMAGED_TEXTS: dict[str, tuple[str, str]] = {
    "lists far too deep": ('{"some": ["a"], "deep": ' + "[" * DEEP + "]" * DEEP + "}", "deep is nested deeper than 64"),
    "objects far too deep": ('{"a":' * DEEP + "1" + "}" * DEEP, "a is nested deeper than 64 levels"),
    "a little too deep": ('{"b":' * 65 + "1" + "}" * 65, "b.b.b"),
    "huge integer": ('{"a": {"b": [1, ' + "9" * 5000 + "]}}", "a.b[1] is a number of 5,000 digits"),
    "half a surrogate pair": ('{"a": {"b": "\\ud800"}}', "a.b is '\\ud800', which holds half a surrogate pair"),
    "a name that is not text": ('{"a": {"\\ud800": 1}}', "a has the name '\\ud800', which is not text"),
    "a list": ("[]", "it holds a list, not an object"),
    "no JSON": ("\0", "is damaged"),
    "a byte order mark": ("\ufeff{}", "is damaged: Unexpected UTF-8 BOM"),
}


@pytest.mark.parametrize("kind", DAMAGED_TEXTS)
@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_cannot_be_used_is_named(folder: Path, name: str, kind: str) -> None:
    text, message = DAMAGED_TEXTS[kind]
    place(folder, name).write_text(text)
    refused(folder, JSON_FILES[name], f"{name} is damaged", message)


def test_the_length_that_transformers_writes_for_none_is_read(folder: Path) -> None:
    fields("tokenizer_config.json", model_max_length=int(1e30))(folder)
    use(folder)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("config.json", "model_type", ["llama"]),
        ("tokenizer_config.json", "tokenizer_class", 5),
        ("tokenizer_config.json", "tokenizer_class", ["T"]),
        ("tokenizer_config.json", "added_tokens_decoder", []),
        ("tokenizer_config.json", "added_tokens_decoder", [1]),
        ("tokenizer_config.json", "added_tokens_decoder", {"x": {"content": "a"}}),
        ("tokenizer_config.json", "added_tokens_decoder", {"9" * 5000: {"content": "a"}}),
        ("tokenizer_config.json", "added_tokens_decoder", {"5": []}),
        ("tokenizer_config.json", "extra_special_tokens", 5),
        ("tokenizer_config.json", "additional_special_tokens", True),
        ("tokenizer_config.json", "eos_token", 5),
        ("special_tokens_map.json", "additional_special_tokens", 1.5),
        ("special_tokens_map.json", "bos_token", ["a"]),
    ],
)
def test_a_tokenizers_field_of_another_type_is_named(folder: Path, name: str, field: str, value: Any) -> None:
    fields(name, **{field: value})(folder)
    with pytest.raises(TokenizerError, match=f"{name} has {field}"):
        load_tokenizer(folder)


@pytest.mark.parametrize("value", ["x", [[1]], {"a": 1}, True, 1.5, 2**31, 10**30, -2])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_tokens_that_are_no_token_ids_are_named(folder: Path, name: str, value: Any) -> None:
    fields("generation_config.json", eos_token_id=None)(folder)
    fields(name, eos_token_id=value)(folder)
    refused(folder, ModelError, f"{name} of", "has eos_token_id=")


def test_an_end_token_of_minus_one_is_none(folder: Path) -> None:
    fields("generation_config.json", eos_token_id=[-1, 7])(folder)
    assert ModelConfig.load(folder).eos_token_ids == {7}


SIZES = ["hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_attention_heads", "num_hidden_layers"]


@pytest.mark.parametrize("value", [HUGE, 10**18, 10**30, 1e12])
@pytest.mark.parametrize("field", [*SIZES, "num_key_value_heads", "text_config.n_layer", "num_experts"])
def test_a_size_that_no_model_has_is_named(folder: Path, field: str, value: float) -> None:
    outer, _, inner = field.rpartition(".")
    fields("config.json", **({outer: {inner: value}} if outer else {field: value}))(folder)
    refused(folder, ModelError, "config.json of", f"{field}={value}", "must be at most")


@pytest.mark.parametrize("value", [0, -1e-5, float("inf"), float("nan"), 1e300, 1e-60, "1e-5", True])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_float32_does_not_hold_is_named(folder: Path, field: str, value: Any) -> None:
    fields("config.json", **({"rope_parameters": {field: value}} if field == "rope_theta" else {field: value}))(folder)
    refused(folder, ModelError, f"{field}={value!r}. It must be a positive number")


@pytest.mark.parametrize("value", [HUGE, 10**30])
def test_a_context_that_no_model_has_is_named(folder: Path, value: int) -> None:
    fields("config.json", max_position_embeddings=value)(folder)
    refused(folder, ModelError, f"config.json of {folder} has max_position_embeddings={value}")


def test_a_context_that_no_scaling_makes_is_named(folder: Path) -> None:
    fields("config.json", rope_parameters={"rope_type": "linear", "factor": 1e12, "rope_theta": 1e4})(folder)
    refused(folder, ModelError, "config.json of", "max_position_embeddings=128", "'factor': 1000000000000.0")


def test_a_context_whose_rotary_table_has_no_room_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.layers.rotary.memory_limit", lambda: MemoryOf(10**9))
    fields("config.json", max_position_embeddings=10**8)(folder)
    refused(folder, OutOfMemory, "max_position_embeddings=100000000 in config.json", "smaller max_model_len")


class MemoryOf:
    """A machine with so much memory."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes


@pytest.mark.parametrize("field", [name for name in SIZES if name != "num_hidden_layers"])
def test_a_model_far_larger_than_its_weight_files_takes_no_memory(folder: Path, field: str) -> None:
    fields("config.json", **{field: 2**18})(folder)
    refused(folder, CheckpointError, f"{folder}/config.json describes a model of", f"{field}=262144", "weight files")


def test_more_layers_than_the_weight_files_can_hold_take_no_memory(folder: Path) -> None:
    fields("config.json", num_hidden_layers=300, intermediate_size=65536, tie_word_embeddings=False)(folder)
    refused(folder, CheckpointError, "config.json describes a model of", "num_hidden_layers=300")


@pytest.mark.parametrize("name", [BIN, "model-00001-of-00001.safetensors", PART.format(0)])
def test_every_format_is_measured(folder: Path, name: str) -> None:
    path = place(folder, name)
    (folder / WEIGHTS).unlink(missing_ok=True)
    if name == BIN:
        torch.save({"a": torch.zeros(1)}, path)
    else:
        save_file({"a": torch.zeros(1)}, path)
    load_format = "sharded_state" if "rank" in name else "auto"
    refused(folder, CheckpointError, "config.json describes a model of", "weight files", load_format=load_format)


def test_random_weights_of_a_model_larger_than_the_machine_are_refused(folder: Path) -> None:
    fields("config.json", hidden_size=2**24, vocab_size=2**24)(folder)
    refused(folder, OutOfMemory, "config.json describes a model of", "hidden_size=16777216", load_format="dummy")


def test_a_weight_for_which_there_is_no_memory_is_named() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2**30, 2**30, bias=False)
    with pytest.raises(OutOfMemory, match=r"no memory left on cpu .*\[1073741824, 1073741824\] \(4294967296\.00 GiB\)"):
        materialise(model, torch.device("cpu"), torch.float32)


def test_sizes_whose_product_no_tensor_has_are_named(folder: Path) -> None:
    fields("config.json", num_attention_heads=2**24, num_key_value_heads=2**24, head_dim=2**16, hidden_size=2**24)(
        folder
    )
    words = ("config.json describes a model", "head_dim=65536", "cannot be built: RuntimeError")
    refused(folder, ModelError, *words)


@pytest.mark.parametrize(
    "changes",
    [{"layer_types": [[1], {}]}, {"hidden_size": 2**24, "num_attention_heads": 2**23}, {"rope_parameters": 5}],
    ids=str,
)
def test_what_makes_transformers_fail_is_an_error_of_ours(folder: Path, changes: dict[str, Any]) -> None:
    fields("config.json", **changes)(folder)
    refused(folder, ModelError, str(folder), model_impl="transformers")


def test_buffers_of_a_wrapped_model_that_have_no_room_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.transformers_fallback.buffers.memory_limit", lambda: MemoryOf(10))
    refused(folder, UnsupportedModel, "its buffers take", model_impl="transformers")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "x" * 5000}, ["lacks xxx", "(5,000 characters)", INDEX]),
        ({"a": "x\0y"}, ["lacks x\0y"]),
        ({"a" * 5000: "../b"}, [INDEX, "weight_map names '../b' for aaa", "(5,000 characters)"]),
        ({f"t{index}": f"f{index}" for index in range(20_000)}, ["lacks f0, f1", "(20000 files in all)"]),
    ],
    ids=["long name", "null byte", "long tensor", "many files"],
)
def test_an_index_of_absurd_names_is_named(folder: Path, weight_map: dict[str, str], words: list[str]) -> None:
    place(folder, INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, CheckpointError, *words)


@pytest.mark.parametrize("value", ["9" * 5000, "-1", "", "x", "1e3", "٣", " 1", "1_0"])
def test_a_number_of_parts_that_is_none_is_named(folder: Path, value: str) -> None:
    save_file({"a": torch.zeros(1)}, folder / PART.format(0), {"num_parts": value})
    refused(folder, CheckpointError, PART.format(0), "num_parts=", load_format="sharded_state")


def test_parts_that_a_file_claims_are_not_listed(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / PART.format(0), {"num_parts": "1000000000000"})
    words = [PART.format(1), PART.format(8), "and others (999,999,999,999 in all) of 1000000000000 parts"]
    assert PART.format(9) not in refused(folder, CheckpointError, *words, load_format="sharded_state")


@pytest.mark.parametrize("number", ["99999999999999", "9" * 18])
def test_a_part_of_a_number_that_no_state_has_is_not_counted_up_to(folder: Path, number: str) -> None:
    save_file({"a": torch.zeros(1)}, folder / PART.format(number))
    refused(folder, CheckpointError, f"lacks {PART.format(0)}", "parts", load_format="sharded_state")


def test_a_part_of_a_number_that_is_too_long_is_no_part(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / PART.format("9" * 100))
    refused(folder, CheckpointError, f"There is no {PART.format(0)}", load_format="sharded_state")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.empty(4, device="meta"),
        torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "sparse by row", "meta", "quantized"],
)
def test_a_bin_file_with_a_tensor_that_is_not_all_there_is_named(folder: Path, tensor: torch.Tensor) -> None:
    torch.save({"good": torch.zeros(1), "odd.weight": tensor}, place(folder, BIN))
    refused(folder, CheckpointError, f"{BIN} holds entries that are no", "odd.weight (1 in all)")


def damaged_directory(path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, path)
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\1\2")
    content[at : at + 4] = b"XXXX"
    path.write_bytes(content)


def encrypted(path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, path)
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\1\2")
    content[at + 8] |= 1
    path.write_bytes(content)


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**26)


@pytest.mark.parametrize("write", [damaged_directory, encrypted, compressed])
def test_a_bin_file_that_is_no_archive_of_pytorch_is_named(folder: Path, write: Callable[[Path], None]) -> None:
    write(place(folder, BIN))
    refused(folder, CheckpointError, f"{BIN} is damaged")


@pytest.mark.parametrize("line", ["[" * DEEP, '{"text": ' + "9" * 5000 + "}"], ids=["deep", "huge"])
def test_a_calibration_line_that_cannot_be_read_is_named(folder: Path, line: str) -> None:
    path = folder / "texts.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"texts\.jsonl', line 1 is not JSON"):
        read_calibration_text(path, folder)
