"""Memory of a process whose engine sleeps, beside one that never started an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.fake_engine import byte_level_tokenizer, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.one_path(reason="both paths read the same memory")]

_PROGRAM = """
import gc, json, os, sys, threading
import transformers
from penstock import LLM, SamplingParams
import penstock.engine.core.engine_core, penstock.features.sleep.worker, penstock.worker.worker

def memory():
    lines = (line.split() for line in open("/proc/self/smaps_rollup") if line.startswith(("Rss:", "Pss:")))
    return {name: int(kib) / 1024 for name, kib, _ in lines}

def said():
    outputs = llm.generate([[5, 6, 7 + index] * 20 for index in range(8)], params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]

params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
before = memory()
llm = LLM(sys.argv[1], device="cpu", num_threads=1, kv_cache_memory_bytes="256MiB", quantization=None)
expected = said()
running = memory()
llm.sleep(level=int(sys.argv[2]))
asleep = memory()
llm.wake_up()
if sys.argv[2] == "2":
    llm.collective_rpc("reload_weights")
assert said() == expected
sizes, held = [], []
for _ in range(int(sys.argv[3])):
    llm.sleep()
    llm.wake_up()
    held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    sizes.append(memory()["Rss:"])
assert said() == expected if sizes else True
print(json.dumps([before, running, asleep, sizes, held]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 100 MiB of weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, hidden_size=512, intermediate_size=4096, num_hidden_layers=4, vocab_size=VOCAB_SIZE)
    write_tokenizer(folder, byte_level_tokenizer())
    return folder


def measured(folder: Path, level: int, num_cycles: int = 0) -> list[object]:
    command = [sys.executable, "-c", _PROGRAM, str(folder), str(level), str(num_cycles)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_holds_little_more_than_none(folder: Path, level: int) -> None:
    before, running, asleep, _, _ = measured(folder, level)
    assert isinstance(before, dict)
    assert isinstance(running, dict)
    assert isinstance(asleep, dict)
    for name in ("Rss:", "Pss:"):
        assert running[name] - before[name] > 110
        assert asleep[name] - before[name] < 60


def test_a_hundred_sleeps_leak_nothing(folder: Path) -> None:
    *_, sizes, held = measured(folder, 1, 100)
    assert isinstance(sizes, list)
    assert isinstance(held, list)
    assert held[-1] == held[9]
    assert max(sizes[50:]) - max(sizes[:50]) < 4
