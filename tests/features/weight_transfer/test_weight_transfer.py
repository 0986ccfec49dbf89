"""A trainer sends weights to a running engine, which then is a fresh one with these weights."""

from __future__ import annotations

import random
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import penstock
from penstock import LLM, SamplingParams
from penstock.errors import ConfigError, LifecycleError
from penstock.weight_transfer import FileSender, GroupSender, SharedMemorySender
from support.checkpoints import tiny_checkpoint
from support.engines import random_prompts

DEMO = Path(penstock.__file__).parent / "assets" / "demo"
PROMPTS = [{"prompt_token_ids": ids} for ids in random_prompts([5, 21, 40], 96)]
SIZES = {"vocab_size": 96, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_memory_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(made):
        tiny_checkpoint(folder, seed=seed, **SIZES)
        for file in DEMO.glob("tokenizer*.json"):
            shutil.copy(file, folder)
    return made[0], made[1]


def engine(folder: Path, backend: str | None = None, **options: Any) -> LLM:
    transfer = (
        {} if backend is None else {"weight_transfer_config": {"backend": backend, **options.pop("transfer", {})}}
    )
    return LLM(str(folder), **{**OPTIONS, **transfer, **options})


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[list[int]]]:
    made = []
    for folder in folders:
        llm = engine(folder)
        made.append(tokens(llm))
        llm.close()
    return made


def stored(folder: Path, seed: int = 0) -> list[tuple[str, Tensor]]:
    items = list(load_file(folder / "model.safetensors").items())
    random.Random(seed).shuffle(items)
    return items


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def joined(llm: LLM, num_workers: int = 1) -> GroupSender:
    """A trainer that the workers have joined."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": num_workers + 1, "rank_offset": 1}
    found: list[GroupSender] = []
    thread = threading.Thread(target=lambda: found.append(GroupSender.join(info)))
    thread.start()
    llm.init_weight_transfer_engine({"init_info": info})
    thread.join(60)
    return found[0]


def send(llm: LLM, sender: GroupSender, items: list[tuple[str, Tensor]], num_calls: int = 2) -> None:
    for number in range(num_calls):
        part = items[number::num_calls]
        thread = threading.Thread(target=sender.send, args=(part,))
        thread.start()
        llm.update_weights({"update_info": sender.update_info(part)})
        thread.join(60)


def test_a_group_of_trainer_and_worker(folders: tuple[Path, Path], expected: list[list[list[int]]]) -> None:
    llm = engine(folders[0], "gloo")
    assert tokens(llm) == expected[0]
    sender = joined(llm)
    for number, folder in enumerate((folders[1], folders[0])):
        llm.start_weight_update()
        send(llm, sender, stored(folder, seed=number))
        llm.finish_weight_update()
        assert llm.get_weight_version() == number + 1
        assert tokens(llm) == expected[1 - number]
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    assert output.outputs[0].weight_version == 2
    sender.close()
    llm.close()


def test_generate_says_that_the_rest_of_an_update_is_missing(
    folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    llm = engine(folders[0])
    items = stored(folders[1])
    llm.load_weights(items[:3])
    with pytest.raises(LifecycleError, match=r"weights are undefined: a weight update has begun.*Send all weights"):
        tokens(llm)
    assert llm.engine_state().name == "weights undefined"
    llm.load_weights(items[3:])
    assert tokens(llm) == expected[1]
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    assert output.outputs[0].weight_version == 1
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "num_workers"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"data_parallel_size": 2}, 2),
    ],
    ids=["tp2-pp2", "dp2"],
)
def test_every_rank_takes_its_share(
    folders: tuple[Path, Path], expected: list[list[list[int]]], parallel: dict[str, int], num_workers: int
) -> None:
    llm = engine(folders[0], "gloo", **parallel)
    sender = joined(llm, num_workers)
    llm.start_weight_update()
    send(llm, sender, stored(folders[1]))
    llm.finish_weight_update(weight_version=12)
    assert tokens(llm) == expected[1]
    assert llm.get_weight_version() == 12
    sender.close()
    llm.close()


@pytest.mark.parametrize("backend", ["ipc", "files"])
def test_memory_and_files(
    folders: tuple[Path, Path], expected: list[list[list[int]]], backend: str, tmp_path: Path
) -> None:
    llm = engine(folders[0], backend)
    sender = (SharedMemorySender if backend == "ipc" else FileSender)(tmp_path / "weights")
    items = stored(folders[1])
    llm.start_weight_update()
    for part in (items[::2], items[1::2]):
        llm.update_weights({"update_info": sender.send(part)})
    llm.finish_weight_update()
    assert tokens(llm) == expected[1]
    llm.start_weight_update()
    if backend == "files":
        llm.update_weights({"update_info": {"path": str(folders[0])}})
    else:
        llm.update_weights({"update_info": sender.send(stored(folders[0]))})
    llm.finish_weight_update()
    assert tokens(llm) == expected[0]
    llm.close()


def test_what_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    llm = engine(folders[0], "gloo")
    for call, error, message in (
        (lambda: llm.update_weights({"update_info": {}}), LifecycleError, "have not joined"),
        (lambda: llm.finish_weight_update(), LifecycleError, "no weight update is going on"),
        (lambda: llm.update_weights({}), ConfigError, "has no update_info"),
        (lambda: llm.finish_weight_update("new"), ConfigError, "weight_version='new'"),
        (lambda: llm.init_weight_transfer_engine({"init_info": {"world_size": 2}}), ConfigError, "master_address"),
    ):
        with pytest.raises(error, match=message):
            call()
    llm.start_weight_update()
    with pytest.raises(LifecycleError, match="going on already"):
        llm.start_weight_update()
    llm.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "mpi"}, "backend of weight_transfer_config='mpi'"),
        ({"backend": "gloo", "colour": 1}, "has 'colour'"),
        ({"recovery": "keep"}, "recovery='keep' with recovery_dir"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ("{", "is not JSON"),
        (3, "is not valid"),
    ],
)
def test_options(folders: tuple[Path, Path], given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(folders[0]), weight_transfer_config=given)
