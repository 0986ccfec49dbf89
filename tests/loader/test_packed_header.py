"""A header of packed weights with one field missing or of another type is refused by name, whatever reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError
from penstock.loader import tensorized
from penstock.loader.loader import load_model, load_without_memory
from penstock.loader.packed_files import metadata_of, write_tensors
from penstock.loader.packed_header import HEADER, checked_header, decode_object
from penstock.loader.packed_state import PackedState
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.loader.tensorized import TensorizedState, open_tensorized, write_tensorized
from penstock.parallel import ParallelState
from support.checkpoints import tiny_checkpoint
from support.packed_headers import REMOVED, Place, at, changed, content_of, other_values, places_in
from support.weight_formats import load

SAVED = LoadConfig(load_format="sharded_state", use_tqdm_on_load=False)
CPU = torch.device("cpu")
# Entries of every kind: beside those of one form, its layers are alike.
FLOAT8 = {
    "method": "Float8Method",
    "is_smoothed": False,
    "tensors": ["packed_OI", "_scales_OC"],
    "dtype": "float32",
    "block_size": 32,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    """Folder, header and tensors of a tied int8 model in a packed sharded state."""
    source, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("state")
    tiny_checkpoint(source, "qwen2", tie_word_embeddings=True)
    config = ModelConfig.load(str(source), quantization="int8")
    model = load(config)
    packed = PackedState.of(model, config, "cpu", ("float32", "float32"))
    (path,) = save_sharded_state(model, folder, ParallelState(), packed=packed)
    copy_model_files(source, folder)
    return folder, *content_of(path)


def write(saved: tuple[Path, dict[str, Any], dict[str, torch.Tensor]], header: object) -> Path:
    folder, _, tensors = saved
    path = folder / "model-rank-0-part-0.safetensors"
    metadata = {"rank": "0", "num_parts": "1", HEADER: header if isinstance(header, str) else json.dumps(header)}
    write_tensors(path, tensors, metadata)
    return path


def layer_places(header: dict[str, Any]) -> list[Place]:
    """Places of all fields, of one layer's entry alone."""
    first = min(header["layers"])
    return [place for place in places_in(header) if place[0] != "layers" or place[1:2] in ((), (first,))]


def test_the_header_that_is_changed_is_one_that_is_loaded(saved: Any) -> None:
    folder, header, _ = saved
    write(saved, header)
    config = ModelConfig.load(str(folder))
    assert load_model(config, SAVED, ParallelState(), CPU, torch.float32).tied_weights()
    assert load_without_memory(config, SAVED, ParallelState(), "cpu", torch.float32)[1] > 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_wrong_field_is_named_whatever_reads_the_file(saved: Any, data: st.DataObject) -> None:
    folder, header, _ = saved
    place = data.draw(st.sampled_from(layer_places(header)), "place")
    value = data.draw(st.sampled_from(other_values(at(header, place))), "value")
    path = write(saved, changed(header, place, value))
    if place == ("quantization",) and value is None:
        return  # of weights in floats
    config = ModelConfig.load(str(folder))
    for read in (
        lambda: load_model(config, SAVED, ParallelState(), CPU, torch.float32),
        lambda: load_without_memory(config, SAVED, ParallelState(), "cpu", torch.float32),
    ):
        with pytest.raises(CheckpointError) as raised:
            read()
        message = str(raised.value)
        if len(place) == 2 and value is REMOVED and place[0] == "layers":
            assert f"1 linear layers differ, such as {place[1]}" in message
        else:
            assert str(path) in message
            assert ".".join(str(key) for key in place if isinstance(key, str)) in message
            assert value is REMOVED or isinstance(value, dict | list) or repr(value) in message
            assert "Save the weights again" in message


@pytest.mark.parametrize("entry", [{"method": "PlainMethod", "is_smoothed": False}, FLOAT8], ids=["plain", "float8"])
def test_every_wrong_field_of_a_header_is_named(saved: Any, entry: dict[str, Any]) -> None:
    header = {**saved[1], "layers": {"model.layer": entry}}
    checked_header("a file", header)
    for place in places_in(header):
        for value in other_values(at(header, place)):
            if (place, value) in ((("quantization",), None), (("layers", "model.layer"), REMOVED)):
                continue
            with pytest.raises(CheckpointError, match=r"a file is damaged: its penstock_packed_state ") as raised:
                checked_header("a file", changed(header, place, value))
            assert ".".join(key for key in place if isinstance(key, str)) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int8"}, "has dtype='int8', and needs one of float32, bfloat16, float16"),
        ({"version": 2}, "a file has packed weights of layout version 2"),
        ({"other": 1}, "has an unknown other"),
        ({"is_tied": None}, "has is_tied=None, and needs `bool`"),
        ({"kernels": {"device": "cpu", "floats": "x"}}, "lacks kernels.integers"),
        ({"layers": {"one": {**FLOAT8, "block_size": 0}}}, "has layers.one.block_size=0, and needs `int` >= 1"),
        ({"layers": {"one": {**FLOAT8, "tensors": ["packed_OI"]}}}, "lacks _scales_OC in layers.one.tensors"),
        ({"layers": {"one": {**FLOAT8, "method": "PlainMethod"}}}, "has an unknown layers.one.tensors"),
        ({"layers": {"one": {**FLOAT8, "method": "QuantizedMethod"}}}, "layers.one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_says_what_is_allowed(saved: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        checked_header("a file", {**saved[1], **change})
    assert words in str(raised.value)


@pytest.mark.parametrize("written", ["{", "[1]", "{}", "[" * 100_000, '{"layers": "\\ud800"}', "null"])
def test_text_that_is_no_header_is_refused(saved: Any, written: str) -> None:
    path = write(saved, written)
    with pytest.raises(CheckpointError, match=f"{path} is damaged: its {HEADER} (is no JSON|lacks version)"):
        load_model(ModelConfig.load(str(saved[0])), SAVED, ParallelState(), CPU, torch.float32)


def test_a_layer_with_other_tensors_than_its_method_is_named(saved: Any) -> None:
    _, header, _ = saved
    name = next(name for name, entry in header["layers"].items() if entry["method"] == "QuantizedMethod")
    other = {**header["layers"][name], "method": "Int4ResidualMethod"}
    write(saved, {**header, "layers": {**header["layers"], name: other}})
    with pytest.raises(CheckpointError, match=f"{name} with other tensors than its method"):
        load_model(ModelConfig.load(str(saved[0])), SAVED, ParallelState(), CPU, torch.float32)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, torch.Tensor]]:
    """Files of the package tensorizer, which need not be installed, by path."""
    files: dict[str, dict[str, torch.Tensor]] = {}

    class Serializer:
        def __init__(self, path: str) -> None:
            self._path = path

        def write_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
            files[self._path] = dict(tensors)

        def close(self) -> None:
            pass

    def read(path: str, is_wanted: Any) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in files[path].items() if is_wanted(name)}

    monkeypatch.setattr(tensorized, "_tensorizer", lambda: type("Package", (), {"TensorSerializer": Serializer}))
    monkeypatch.setattr(tensorized, "_read", read)
    return files


def test_every_wrong_field_of_a_tensorized_file_is_named(
    saved: Any, in_memory: dict[str, dict[str, torch.Tensor]]
) -> None:
    _, content, tensors = saved
    state = PackedState(checked_header("a file", content), tensors)
    write_tensorized(state, "model.tensors", ParallelState(), "a save")
    written = in_memory["model.tensors"].pop(HEADER)
    header = decode_object("a file", bytes(written.tolist()))
    of_files = {"rank", "tensor_parallel_size", "pipeline_parallel_size", "world_size", "pipeline_layers", "save_id"}
    places = [
        place
        for place in layer_places(header)
        if place[0] != "tensors" or place[1:2] in ((), (min(header["tensors"]),))
    ]
    for place in places:
        for value in other_values(at(header, place)):
            # Older files lack some fields, and a layer that is missing is found in the model.
            is_allowed = value is REMOVED and (place[0] in of_files or (place[0] == "layers" and len(place) == 2))
            if is_allowed or (place == ("quantization",) and value is None):
                continue
            text = json.dumps(changed(header, place, value)).encode()
            in_memory["model.tensors"][HEADER] = torch.tensor(list(text), dtype=torch.uint8)
            with pytest.raises(CheckpointError, match=r"model\.tensors ") as raised:
                TensorizedState.open("model.tensors", 0, tensorized.Arrangement(1, 1))[0].read()
            assert [key for key in place if isinstance(key, str)][-1] in str(raised.value)


def test_tensorized_files_of_different_saves_are_refused(
    saved: Any, in_memory: dict[str, dict[str, torch.Tensor]]
) -> None:
    state = PackedState(checked_header("a file", saved[1]), saved[2])
    ranks = tensorized.Arrangement(2, 1).ranks()
    for name in ("one", "other"):
        for parallel in ranks:
            write_tensorized(state, f"{name}-%d", parallel, name)
    for parallel in (ParallelState(), *ranks):
        open_tensorized("one-%d", parallel)
    in_memory["one-1"] = in_memory["other-1"]
    for parallel in (ParallelState(), ranks[1]):
        with pytest.raises(CheckpointError, match="one-1 is of another save than one-0: it has save_id='other'"):
            open_tensorized("one-%d", parallel)


def test_a_state_of_floats_has_no_header() -> None:
    assert metadata_of(PackedState(None, {})) == {}
