"""Blocks of requests with LoRA adapters in a folder: found by the adapter's matrices, whatever its name and number."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.features.lora.request import LoRARequest
from support.adapters import make_adapter, parts_of
from support.checkpoints import save_checkpoint, tiny_model
from support.engines import Result, add, finish, greedy, make_core, random_prompts

(PROMPT,) = random_prompts([70], vocab_size=97)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model, of an adapter, and of another one with other weights."""
    root = tmp_path_factory.mktemp("adapters")
    model = tiny_model("llama")
    save_checkpoint(model, root / "model")
    for seed, name in enumerate(("adapter", "other")):
        make_adapter(model, root / name, seed=seed, r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    return root


@contextlib.contextmanager
def engine(root: Path, folder: Path | None, **options: Any) -> Iterator[EngineCore]:
    core = make_core(root / "model", kv_offload_dir=folder and str(folder), enable_lora=True, **options)
    try:
        yield core
    finally:
        core.close()


def answer(core: EngineCore, adapter: LoRARequest | None) -> Result:
    results: dict[str, Result] = {}
    add(core, "r", PROMPT, greedy(8, logprobs=2), parts=parts_of(adapter))
    finish(core, results)
    return results["r"]


def same(one: Result, other: Result) -> bool:
    return (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def in_memory(folder: Path, **fields: Any) -> LoRARequest:
    config = json.loads((folder / "adapter_config.json").read_text())
    return LoRARequest("in memory", 9, tensors=load_file(folder / WEIGHTS), peft_config=config, **fields)


def test_an_adapter_is_found_again_under_another_name_and_number(root: Path, folder: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("plays", 1, str(root / "adapter"))
    with engine(root, None) as core:
        expected = answer(core, adapter)
        plain = answer(core, None)
    assert not same(expected, plain)
    with engine(root, folder) as core:
        assert same(answer(core, adapter), expected)
    shutil.copytree(root / "adapter", tmp_path / "copy")
    with engine(root, folder) as core:
        found = answer(core, LoRARequest("poems", 7, str(tmp_path / "copy")))
        assert same(found, expected)
        assert found.num_cached_tokens == 64
        # Requests without an adapter, and with others, find nothing.
        assert answer(core, None).num_cached_tokens == 0
        assert answer(core, LoRARequest("other", 8, str(root / "other"))).num_cached_tokens == 0


def test_an_adapter_in_memory_is_one_in_a_folder(root: Path, folder: Path) -> None:
    with engine(root, folder) as core:
        expected = answer(core, LoRARequest("plays", 1, str(root / "adapter")))
    with engine(root, folder) as core:
        adapter = in_memory(root / "adapter")
        core.collective_rpc(RpcCall("add_lora", (adapter,)))
        found = answer(core, adapter.reference)
        assert same(found, expected)
        assert found.num_cached_tokens == 64
        # Other weights in its place are another adapter.
        core.collective_rpc(RpcCall("add_lora", (in_memory(root / "other", load_inplace=True),)))
        replaced = answer(core, adapter.reference)
        assert replaced.num_cached_tokens == 0
    with engine(root, None) as core:
        assert same(answer(core, LoRARequest("other", 1, str(root / "other"))), replaced)


@pytest.mark.parametrize("change", ["weights", "scaling"])
def test_a_changed_adapter_of_the_same_name_finds_nothing(
    root: Path, folder: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(root / "adapter", tmp_path / "adapter")
    adapter = LoRARequest("plays", 1, str(tmp_path / "adapter"))
    with engine(root, folder) as core:
        before = answer(core, adapter)
    if change == "weights":
        tensors = load_file(tmp_path / "adapter" / WEIGHTS)
        name = min(name for name in tensors if ".lora_B." in name)
        tensors[name][0, 0] += 1.0
        save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    else:
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 16}))
    with engine(root, None) as core:
        expected = answer(core, adapter)
    assert not same(before, expected)
    with engine(root, folder) as core:
        found = answer(core, adapter)
        assert same(found, expected)
        assert found.num_cached_tokens == 0


def test_adapters_that_make_room_for_each_other(root: Path, folder: Path) -> None:
    adapters = [LoRARequest(name, number, str(root / name)) for number, name in ((1, "adapter"), (2, "other"))]
    with engine(root, None, max_loras=1) as core:
        expected = [answer(core, adapter) for adapter in adapters]
    for _ in range(2):
        with engine(root, folder, max_loras=1, max_cpu_loras=1) as core:
            for _ in range(2):
                found = [answer(core, adapter) for adapter in adapters]
                assert all(same(one, other) for one, other in zip(found, expected, strict=True))
            assert [one.num_cached_tokens for one in found] == [64, 64]
