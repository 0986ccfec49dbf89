"""Errors of adapter checkpoints: nothing of an adapter is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import LoRAConfig
from penstock.errors import CheckpointError, ConfigError, InvalidParameter
from penstock.features.lora.checkpoint import read_adapter
from penstock.features.lora.request import LoRARequest
from penstock.features.lora.tables import AdapterTables, adapter_bytes
from support.checkpoints import VOCAB_SIZE, save_checkpoint, tiny_model
from support.transformers_models import load

CONFIG = {"r": 4, "lora_alpha": 8}
Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> AdapterTables:
    folder = tmp_path_factory.mktemp("model")
    model = load(save_checkpoint(tiny_model("llama"), folder))
    return AdapterTables(model, LoRAConfig(enable_lora=True), torch.device("cpu"), torch.float32)


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """Matrices of one projection; changes: by name, None leaves one out."""
    found: dict[str, Any] = {f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(64, 4)}
    found.update(changes)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def read(given: dict[str, Tensor], max_rank: int = 16, **config: Any) -> Any:
    return read_adapter(LoRARequest("a", 1, tensors=given, peft_config={**CONFIG, **config}), max_rank)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "rank-above-the-limit": (lambda: read(tensors(), max_rank=2), "rank 4 .*max_lora_rank=4"),
    "rank-of-another-configuration": (lambda: read(tensors(), r=8), "do not have the rank 8"),
    "incomplete": (lambda: read(tensors(**{f"{Q}.lora_B.weight": None})), "only A of the matrices"),
    "unknown": (lambda: read(tensors(**{f"{Q}.lora_magnitude_vector": torch.ones(2, 2)})), "lora_magnitude_vector"),
    "integers": (lambda: read(tensors(**{f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)})), "torch.int8"),
    "twice": (
        lambda: read(tensors(**{f"{Q}.lora_A.weight".removeprefix("base_model.model."): torch.zeros(4, 64)})),
        "has model.layers.1.self_attn.q_proj.lora_A.weight twice",
    ),
    "alpha-beyond-a-double": (lambda: read(tensors(), lora_alpha=10**400), "Allowed: positive numbers"),
    "rank-beyond-a-double": (lambda: read(tensors(), r=10**400), "Allowed: positive numbers"),
    "empty": (lambda: read({}), "no tensors"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_does_not_fit_is_an_error_that_names_it(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message):
        make()


INFINITE: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "scaling": ({}, {"lora_alpha": 1e300}),
    "scaled": ({f"{Q}.lora_B.weight": torch.full((64, 4), 1e30)}, {"lora_alpha": 1e20}),
    "inf": ({f"{Q}.lora_A.weight": torch.full((4, 64), float("inf"))}, {}),
    "nan": ({f"{Q}.lora_B.weight": torch.full((64, 4), float("nan"))}, {}),
}


@pytest.mark.parametrize("case", INFINITE)
def test_weights_that_are_not_finite_once_scaled_are_refused(case: str, tables: AdapterTables) -> None:
    changes, config = INFINITE[case]
    with pytest.raises(CheckpointError, match="'a' has matrices of model.layers.1.self_attn.q_proj with values up to"):
        tables.pack("a", read(tensors(**changes), **config))


def test_weights_are_finite_in_the_dtype_in_which_they_are_kept(tmp_path: Path) -> None:
    model = load(save_checkpoint(tiny_model("llama"), tmp_path))
    config = LoRAConfig(enable_lora=True, lora_dtype="float16")
    half = AdapterTables(model, config, torch.device("cpu"), torch.float32)
    with pytest.raises(CheckpointError, match=r"up to 100000 .*torch.float16"):
        half.pack("a", read(tensors(**{f"{Q}.lora_A.weight": torch.full((4, 64), 1e5)})))


@pytest.mark.parametrize("path", ["x" * 100_000, "~nobody-of-this-name/adapter", "adapter\0"])
def test_a_path_that_cannot_be_is_an_error_that_names_it(path: str) -> None:
    with pytest.raises(CheckpointError, match="The adapter 'a' ") as refused:
        read_adapter(LoRARequest("a", 1, path), 16)
    assert len(str(refused.value)) < 1000


def test_a_module_that_the_model_lacks_is_an_error_that_names_it(tables: AdapterTables) -> None:
    other = {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors().items()}
    with pytest.raises(CheckpointError, match=r"1 modules .*model.layers.7.self_attn.q_proj"):
        tables.pack("a", read({**tensors(), **other}))


def test_a_norm_cannot_have_an_adapter(tables: AdapterTables) -> None:
    other = {name.replace("layers.1.self_attn.q_proj", "norm"): tensor for name, tensor in tensors().items()}
    with pytest.raises(CheckpointError, match="model.norm"):
        tables.pack("a", read(other))


def test_matrices_of_another_shape_are_an_error(tables: AdapterTables) -> None:
    with pytest.raises(CheckpointError, match=r"\[64, 32\], but it has \[64, 64\]"):
        tables.pack("a", read(tensors(**{f"{Q}.lora_A.weight": torch.ones(4, 32)})))


def test_another_base_weight_than_the_models_is_an_error(tables: AdapterTables) -> None:
    head = Q.replace("model.layers.1.self_attn.q_proj", "lm_head")
    given = {name.replace(Q, head): tensor for name, tensor in tensors().items()}
    given[f"{head}.lora_B.weight"] = torch.ones(VOCAB_SIZE, 4)
    given[f"{head}.base_layer.weight"] = torch.ones(VOCAB_SIZE, 64)
    with pytest.raises(CheckpointError, match="another lm_head.base_layer.weight"):
        tables.pack("a", read(given))


def test_modules_outside_of_the_targets_have_no_tables(tmp_path: Path) -> None:
    model = load(save_checkpoint(tiny_model("llama"), tmp_path))

    def tables(*targets: str) -> AdapterTables:
        config = LoRAConfig(enable_lora=True, lora_target_modules=targets)
        return AdapterTables(model, config, torch.device("cpu"), torch.float32)

    sizes = [
        adapter_bytes(SimpleNamespace(lora=LoRAConfig(True, lora_target_modules=one)), model, "cpu", torch.float32)  # type: ignore[arg-type]
        for one in (None, ("q_proj",))
    ]
    assert 0 < 5 * sizes[1] < sizes[0]
    tables("self_attn.q_proj", "v_proj").pack("a", read(tensors()))
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj. Allowed: those of lora_target_modules=\['v_proj'\]"):
        tables("v_proj").pack("a", read(tensors()))
    with pytest.raises(ConfigError, match="names no module"):
        tables("proj")
    assert LoRAConfig(lora_target_modules="q_proj,lm_head").lora_target_modules == ("q_proj", "lm_head")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lora_target_modules=3"):
        LoRAConfig(lora_target_modules=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "", "lora_int_id": 1, "lora_path": "x"},
        {"lora_name": "a", "lora_int_id": 0, "lora_path": "x"},
        {"lora_name": "a", "lora_int_id": 1, "lora_path": "x", "tensors": {}, "peft_config": {}},
        {"lora_name": "a", "lora_int_id": 1, "tensors": {}},
    ],
)
def test_an_adapter_needs_a_name_a_number_and_one_source(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="lora"):
        LoRARequest(**fields)
