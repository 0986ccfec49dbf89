"""A device whose context is lost takes its process with it: nothing in there is retried, waited for, or given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.contract import RpcCall, SamplingInput, SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import EngineDead, WaitTimeout, WorkerError
from penstock.worker.worker import Worker
from penstock.worker.wrapper import loses_device
from support.checkpoints import tiny_checkpoint
from support.engines import add, finish, greedy, make_core, run


class AcceleratorError(RuntimeError):
    """As torch 2.8 and later name it."""


ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"


class LosingWorker(Worker):
    """Fails in one of its calls, always, and writes down who would touch the device."""

    failure: Exception
    fails_in: str
    num_starts: int
    touched: list[str]

    def init_device(self) -> None:
        type(self).num_starts += 1
        super().init_device()

    def execute_model(self, output: SchedulerOutput) -> None:
        self._fail_if_due("execute_model")
        super().execute_model(output)

    def sample_tokens(self, sampling: SamplingInput) -> Any:
        self._fail_if_due("sample_tokens")
        return self

    # A step's handle, too.
    step_id = 0

    def get_output(self, timeout_s: float) -> Any:
        raise self.failure

    def shutdown(self) -> None:
        self.touched.append("shutdown")
        super().shutdown()

    def check_health(self) -> None:
        self.touched.append("check_health")
        super().check_health()

    def _fail_if_due(self, method: str) -> None:
        if method == self.fails_in:
            raise self.failure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


def losing_core(folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, fails_in: str) -> EngineCore:
    values = {"failure": failure, "fails_in": fails_in, "num_starts": 0, "touched": []}
    for name, value in values.items():
        monkeypatch.setattr(LosingWorker, name, value, raising=False)
    return make_core(folder, worker_cls=f"{__name__}.LosingWorker")


@pytest.mark.parametrize("fails_in", ["execute_model", "sample_tokens", "get_output"])
@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError(ILLEGAL_ADDRESS),
        AcceleratorError("no kernel image"),
        WaitTimeout("Rank 0 waited 300 s in get_output"),
    ],
    ids=lambda failure: type(failure).__name__,
)
@pytest.mark.each_value_quick
def test_an_engine_ends_at_once_and_says_that_it_takes_a_new_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, fails_in: str
) -> None:
    core = losing_core(folder, monkeypatch, failure, fails_in)
    add(core, "a", [1, 2], greedy(4))
    with pytest.raises(EngineDead, match=f"{failure}.*context is lost.*Start a new process") as raised:
        finish(core, {})
    assert isinstance(raised.value.__cause__, WorkerError | WaitTimeout)
    assert LosingWorker.num_starts == 1
    core.close()
    assert LosingWorker.touched == []
    with pytest.raises(EngineDead, match="Start a new process"):
        core.check_health()


def test_a_lost_device_is_known_without_asking_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = losing_core(folder, monkeypatch, RuntimeError(ILLEGAL_ADDRESS), "none")
    core.check_health()
    assert LosingWorker.touched == ["check_health"]

    def break_device(worker: Worker) -> None:
        raise RuntimeError(ILLEGAL_ADDRESS)

    with pytest.raises(WorkerError, match="break_device"):
        core.collective_rpc(RpcCall(break_device))
    with pytest.raises(WorkerError, match="has lost its device: RuntimeError in break_device: CUDA error"):
        core.check_health()
    assert LosingWorker.touched == ["check_health"]
    core.close()
    assert LosingWorker.touched == ["check_health"]


def test_other_failures_are_mended_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = losing_core(folder, monkeypatch, RuntimeError("the shapes do not fit"), "execute_model")
    # The first is taken for the cause.
    add(core, "a", [1, 2], greedy(4))
    add(core, "b", [1, 2], greedy(4))
    with pytest.raises(EngineDead, match="failed 4 times in a row"):
        finish(core, {})
    assert LosingWorker.num_starts == 4
    assert LosingWorker.touched == ["shutdown"] * 4


def test_health_waits_for_no_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(folder)
    run(core, [[1, 2]], greedy(2))
    device_type = core.collective_rpc(RpcCall(lambda worker: type(worker.own_device)))[0]

    def hang(self: object) -> None:
        raise AssertionError("it would hang here")

    with monkeypatch.context() as patch:
        patch.setattr(device_type, "synchronize", hang)
        core.check_health()
    core.close()


def test_running_out_of_memory_loses_nothing() -> None:
    assert not loses_device(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not loses_device(ValueError(ILLEGAL_ADDRESS))
    wrapped = ValueError("while sampling")
    wrapped.__cause__ = RuntimeError(ILLEGAL_ADDRESS)
    assert loses_device(wrapped)
