"""Cores of a data-parallel engine that are killed before, in and after updates: none serves older weights silently."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import penstock
from penstock import LLM, SamplingParams
from penstock.engine.processes.core_group import CoreGroup
from penstock.errors import LifecycleError, ProcessLost, WeightTransferFailed
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.one_path(reason="both paths read the same memory")]
DEMO = Path(penstock.__file__).parent / "assets" / "demo"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
# As many as go to both cores.
PROMPTS = [{"prompt_token_ids": [5 + index, 6, 7, 8, 9]} for index in range(6)]
Items = list[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(made):
        tiny_checkpoint(folder, seed=seed)
        for file in DEMO.glob("tokenizer*.json"):
            shutil.copy(file, folder)
    return made[0], made[1]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 20, max_model_len=64, **options)


def said(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[list[int]]]:
    made = []
    for folder in folders:
        llm = engine(folder)
        made.append(said(llm))
        llm.close()
    return made


@pytest.fixture(params=[False, True], ids=["undefined", "keep"])
def is_kept(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def llm(folders: tuple[Path, Path], tmp_path: Path, is_kept: bool) -> Iterator[LLM]:
    kept = {"backend": "files", **({"recovery": "keep", "recovery_dir": str(tmp_path)} if is_kept else {})}
    made = engine(folders[0], data_parallel_size=2, weight_transfer_config=kept)
    yield made
    made.close()


def group_of(llm: LLM) -> CoreGroup:
    core = llm._session._core
    assert isinstance(core, CoreGroup)
    return core


def kill(llm: LLM, number: int) -> None:
    """Kill a core, and wait for the one that replaces it."""
    pid = group_of(llm).process_ids[number]
    os.kill(pid, signal.SIGKILL)
    while group_of(llm).process_ids[number] == pid:
        with suppress(ProcessLost):
            llm.get_weight_version()


def killed_meanwhile(llm: LLM, number: int, call: Callable[[], object]) -> None:
    """Make a call that one core never answers, and kill that once the other has done its part."""
    pid = group_of(llm).process_ids[number]
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(2.0, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises((ProcessLost, WeightTransferFailed)):
        call()
    killer.join()


def items_of(folder: Path) -> Items:
    return list(load_file(folder / "model.safetensors").items())


@pytest.mark.parametrize("number", [0, 1])
def test_in_the_last_call_of_load_weights(
    llm: LLM, folders: tuple[Path, Path], expected: list[list[list[int]]], is_kept: bool, number: int
) -> None:
    items = items_of(folders[1])
    llm.load_weights(items[:-1])
    killed_meanwhile(llm, number, lambda: llm.load_weights(items[-1:]))
    if not is_kept:
        # The other core has the new weights, and this one none.
        with pytest.raises(LifecycleError, match="weights of version 1 with it"):
            said(llm)
        llm.load_weights(items)
    assert said(llm) == expected[1]
    assert llm.get_weight_version() == (1 if is_kept else 2)


def test_in_a_call_before_the_last_one(
    llm: LLM, folders: tuple[Path, Path], expected: list[list[list[int]]], is_kept: bool
) -> None:
    items = items_of(folders[1])
    llm.load_weights(items[:3])
    killed_meanwhile(llm, 1, lambda: llm.load_weights(items[3:5]))
    with pytest.raises(LifecycleError, match="weights are undefined"):
        said(llm)
    llm.load_weights(items)
    assert said(llm) == expected[1]


def test_between_two_calls_and_after_the_last_one(
    llm: LLM, folders: tuple[Path, Path], expected: list[list[list[int]]], is_kept: bool
) -> None:
    kill(llm, 0)
    assert said(llm) == expected[0]
    items = items_of(folders[1])
    llm.load_weights(items[:3])
    kill(llm, 1)
    with pytest.raises(WeightTransferFailed, match="Send all tensors again"):
        llm.load_weights(items[3:])
    llm.load_weights(items)
    assert said(llm) == expected[1]
    kill(llm, 0)
    if not is_kept:
        with pytest.raises(LifecycleError, match="weights of version 1 with it"):
            said(llm)
        llm.load_weights(items)
    assert said(llm) == expected[1]


def test_in_updates_that_a_trainer_begins_and_ends(
    llm: LLM, folders: tuple[Path, Path], expected: list[list[list[int]]]
) -> None:
    info = {"update_info": {"path": str(folders[1])}}
    llm.start_weight_update()
    kill(llm, 1)
    with pytest.raises(WeightTransferFailed, match="Send all tensors again"):
        llm.update_weights(info)
    llm.start_weight_update()
    llm.update_weights(info)
    killed_meanwhile(llm, 1, llm.finish_weight_update)
    with pytest.raises(
        LifecycleError, match=r"weights are undefined: a weight update failed after .* abandoned\. Send all"
    ):
        said(llm)
    llm.start_weight_update()
    llm.update_weights(info)
    llm.finish_weight_update()
    assert said(llm) == expected[1]


class DiesAfterLoading(Worker):
    """Ends its process once all weights have come, before it answers, while a file is there."""

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        found = super().load_weights(*args, **kwargs)
        mark = Path(os.environ["PENSTOCK_TEST_DIES"])
        if mark.exists() and not self.updates.status()["is_updating"]:
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.mark.parametrize("is_done", [False, True], ids=["before it", "after it"])
def test_the_only_core_in_the_last_call(
    folders: tuple[Path, Path],
    expected: list[list[list[int]]],
    is_kept: bool,
    is_done: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = tmp_path / "dies"
    monkeypatch.setenv("PENSTOCK_TEST_DIES", str(mark))
    kept = {"backend": "files", **({"recovery": "keep", "recovery_dir": str(tmp_path / "kept")} if is_kept else {})}
    dying = {"worker_cls": f"{__name__}.DiesAfterLoading"} if is_done else {}
    llm = engine(folders[0], enable_multiprocessing=True, weight_transfer_config=kept, **dying)
    old, new = map(items_of, folders)

    def lose(items: Items) -> None:
        llm.load_weights(items[:-1])
        if is_done:
            mark.touch()
            with pytest.raises((ProcessLost, WeightTransferFailed)):
                llm.load_weights(items[-1:])
        else:
            killed_meanwhile(llm, 0, lambda: llm.load_weights(items[-1:]))

    # No update was answered: the weights are those before it.
    lose(new)
    assert said(llm) == expected[0]
    assert llm.get_weight_version() == 0
    llm.load_weights(new)
    assert said(llm) == expected[1]
    lose(old)
    if is_kept:
        # Those that were kept before the core was lost are the newest ones.
        assert said(llm) == expected[0 if is_done else 1]
        assert llm.get_weight_version() == (2 if is_done else 1)
    else:
        with pytest.raises(LifecycleError, match="a worker was lost, and the weights of version 1 with it"):
            said(llm)
    llm.load_weights(old)
    assert said(llm) == expected[0]
    llm.close()
