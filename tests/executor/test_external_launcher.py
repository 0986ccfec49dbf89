"""Engines of processes that `torchrun` starts make the same steps, and give the tokens of one worker."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from penstock import LLM, EngineConfig, SamplingParams, StructuredOutputsParams
from penstock.errors import ConfigError
from penstock.executor import create_executor
from support.checkpoints import tiny_checkpoint
from support.torchrun import torchrun
from support.waiting import is_running, wait_until

# In bfloat16 arithmetic, which some processors have by default, ranks may give other tokens than one worker.
OPTIONS: dict[str, Any] = {
    "num_threads": 2,
    "cpu_arithmetic": "float32",
    "kv_cache_memory_bytes": "8MiB",
    "max_num_batched_tokens": 64,
}
PROMPTS = ["ROMEO:", "The cat", "What light through yonder window breaks?", "A"]
# Greedy, drawn without a seed, and with a form whose grammar is compiled first.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, max_tokens=12),
    SamplingParams(
        temperature=0.9, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,8} [0-9]+")
    ),
    SamplingParams(temperature=0.7, max_tokens=12, seed=3),
]
PROGRAM = """
import json, os, sys
import torch.distributed
from penstock import LLM
from test_external_launcher import OPTIONS, PARAMS, PROMPTS, tokens_of

def engine(size=2):
    return LLM("demo", tensor_parallel_size=size, distributed_executor_backend="external_launcher", **OPTIONS)

# Two at once, and one after another.
with engine() as first, engine() as second:
    found = [tokens_of(first), tokens_of(second)]
with engine() as third:
    found.append(tokens_of(third))
    third.collective_rpc("save_sharded_state", args=(os.path.join(sys.argv[1], "saved"),))
# Each process by itself; and beside the program's own process group.
with engine(1) as alone:
    found.append(tokens_of(alone))
torch.distributed.init_process_group("gloo")
with engine() as fourth:
    found.append(tokens_of(fourth))
torch.distributed.destroy_process_group()

with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
"""
WAITING = """
import os, sys, time
from penstock import LLM, SamplingParams
from test_external_launcher import OPTIONS, PROMPTS

llm = LLM("demo", tensor_parallel_size=2, distributed_executor_backend="external_launcher", step_timeout_s=5, **OPTIONS)
params = SamplingParams(temperature=0.0, max_tokens=4)
llm.generate(PROMPTS, params)
if os.environ["RANK"] == "1" and sys.argv[1] == "another":
    llm.generate(PROMPTS[:2], params)
elif os.environ["RANK"] == "1":
    os.kill(os.getpid(), int(sys.argv[1]))
else:
    llm.generate(PROMPTS, params)
"""


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
def test_each_rank_has_the_tokens_of_one_worker(tmp_path: Path) -> None:
    with torchrun(tmp_path, PROGRAM, tmp_path, beside=Path(__file__)) as processes:
        with LLM("demo", **OPTIONS) as llm:
            expected = tokens_of(llm)
        said, _ = processes.communicate(timeout=240)
    assert processes.returncode == 0, said
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[expected] * 5] * 2
    saved = sorted((tmp_path / "saved").glob("model-rank-*.safetensors"))
    # The ranks, each of an engine of its own, have one id.
    assert (len(saved), len({safe_open(path, "pt").metadata()["save_id"] for path in saved})) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another", r"RanksDisagree: Step \d+: rank \d runs step \d+ with"),
        (int(signal.SIGSTOP), r"Rank 0 waited 4 s in .*, step \d+ for rank 1"),
    ],
)
def test_a_rank_that_is_lost_ends_the_engine_of_the_other_with_its_name(
    what: object, said: str, tmp_path: Path
) -> None:
    with torchrun(tmp_path, WAITING, what, beside=Path(__file__)) as processes:
        begin = time.monotonic()
        ranks = children_of(processes.pid)
        out, _ = processes.communicate(timeout=200)
    assert time.monotonic() - begin < 150
    assert processes.returncode != 0
    assert re.search(said, out), out
    wait_until(lambda: not any(is_running(process.pid) for process in ranks), "the ranks end")


def children_of(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(found := psutil.Process(pid).children()) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("torchrun starts nothing")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    tiny_checkpoint(tmp_path)
    return configuration(tmp_path, tensor_parallel_size=2)


def configuration(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.create(str(folder), device="cpu", distributed_executor_backend="external_launcher", **options)


def test_without_a_launcher_its_variables_are_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set. Start"):
        create_executor(config)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="of which MASTER_PORT is not set"):
        create_executor(config)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="WORLD_SIZE=3 processes cannot be engines of tensor_parallel_size=2 ranks"):
        create_executor(config)
