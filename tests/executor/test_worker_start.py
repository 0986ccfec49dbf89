"""Workers start in stages: each has its time, and what goes wrong says in which it was, on which rank, and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.core.startup import start_engine
from penstock.errors import ConfigError, ModelError, PenstockError, WaitTimeout, WorkerError
from penstock.executor import ranks
from penstock.executor.base import describe_phases
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL, make_core
from support.leftovers import nothing_left

pytestmark = pytest.mark.fresh_interpreters
PHASES = ["processes", "device", "model", "memory", "KV cache", "warm-up"]
TWO = {**SMALL, "tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 64}


class OddWorker(Worker):
    """Its second rank does what the environment says, in a method that it names too: `method what`."""

    def init_device(self) -> None:
        self._do("init_device")
        super().init_device()

    def load_model(self) -> None:
        self._do("load_model")
        super().load_model()

    def compile_or_warm_up_model(self) -> None:
        self._do("compile_or_warm_up_model")
        super().compile_or_warm_up_model()

    def _do(self, method: str) -> None:
        due, what = os.environ["PENSTOCK_TEST_START"].split()
        if due != method or self.rank != 1:
            return
        if what == "sleep":
            time.sleep(600)
        if what == "dawdle":
            time.sleep(0.5)
        if what == "raise":
            raise ModelError("layer 3 is missing: write the checkpoint again.")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(folder)
    return folder


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str, **options: object) -> EngineCore:
    monkeypatch.setenv("PENSTOCK_TEST_START", does)
    return make_core(folder, worker_cls=f"{__name__}.OddWorker", **{**TWO, **options})


@pytest.mark.slow
def test_every_stage_has_the_time_of_its_slowest_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "penstock"):
        core = start(folder, monkeypatch, "load_model dawdle")
    assert core._engine is not None
    times = core._engine.startup_times
    core.close()
    assert [time.phase for time in times] == PHASES
    (model,) = [time for time in times if time.phase == "model"]
    assert (model.rank, model.seconds >= 0.5) == (1, True)
    assert all(0 <= time.seconds < 60 and time.rank in (0, 1) for time in times)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Ready in")]
    assert describe_phases(times, 2) in line
    assert re.search(r"model \d\.\d s \(rank 1\)", line)
    whole, *parts = (float(number) for number in re.findall(r"(\d+\.\d) s", line))
    assert sum(parts) >= whole - 0.05 * (len(parts) + 1)


def test_the_parts_of_a_start_sum_to_the_whole(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "penstock"):
        start_engine(EngineConfig.create(str(folder), **SMALL)).executor.shutdown()
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Ready in")]
    whole, *parts = (float(number) for number in re.findall(r"(\d+\.\d) s", line))
    # Each number is rounded to a tenth.
    assert sum(parts) == pytest.approx(whole, abs=0.05 * (len(parts) + 1) + 0.001)


def test_one_worker_in_this_process_has_stages_too(folder: Path) -> None:
    engine = start_engine(EngineConfig.create(str(folder), **SMALL))
    engine.executor.shutdown()
    assert [time.phase for time in engine.startup_times] == PHASES[1:]
    assert "rank" not in describe_phases(engine.startup_times, 1)


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        (
            "load_model raise",
            ModelError,
            "^The start failed in phase 'model', on rank 1: layer 3 is missing: write the checkpoint again.$",
        ),
        pytest.param(
            "init_device kill",
            WorkerError,
            r"^The start failed in phase 'device', on rank 1: Rank 1, process \d+, was killed by signal 9 .*dmesg",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "init_device sleep",
            WaitTimeout,
            r"^The start failed in phase 'device', on rank 1: Process \d+ waits in init_device for rank 1 "
            r"\(process \d+, sleeping\) \(beside rank 0 .*\)\. Workers make no progress for 4 s\. Raise start_timeout",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "compile_or_warm_up_model raise",
            ModelError,
            "^The start failed in phase 'warm-up', on rank 1: layer 3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_fails_on_one_rank_ends_all_and_is_told_with_stage_rank_and_cause(
    does: str, kind: type[PenstockError], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long imports take on a machine that others use too.
    monkeypatch.setattr(ranks, "BUSY_FACTOR", 100)
    with nothing_left(), pytest.raises(kind, match=message):
        start(folder, monkeypatch, does, **({"start_timeout_s": 4.0} if does.endswith("sleep") else {}))


@pytest.mark.slow
def test_a_worker_whose_module_never_loads_is_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "never_loads.py").write_text("import time\n\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ranks, "BUSY_FACTOR", 100)
    message = (
        r"^The start failed in phase 'processes', on rank 0: Process \d+ waits in start for rank 0 \(process \d+, sleep"
    )
    with nothing_left(), pytest.raises(WaitTimeout, match=message):
        make_core(folder, **SMALL, distributed_executor_backend="mp", worker_cls="never_loads.No", start_timeout_s=4.0)


def test_the_limit_of_the_start_is_a_time() -> None:
    with pytest.raises(ConfigError, match="start_timeout_s=0 is not valid"):
        EngineConfig.create("demo", start_timeout_s=0)


@pytest.mark.slow
def test_the_command_says_so_and_its_exit_status_too() -> None:
    arguments = ["generate", "ROMEO:", "--tensor-parallel-size", "2", "--worker-cls", "no.Such"]
    result = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode not in (0, -signal.SIGKILL)
    assert "The start failed in phase 'processes', on rank " in result.stderr
    assert "no.Such" in result.stderr
