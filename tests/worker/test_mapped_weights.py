"""Weights that stay in a file of the weight cache have the bits of those in memory, and take no memory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import LoadConfig
from penstock.contract.rpc import RpcCall
from penstock.device import cpu
from penstock.device.backup import FileBackup
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ConfigError, OutOfMemory, UnsupportedArgument, UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.layers.tensors_of import tensors_of
from penstock.worker import memory_planning, weight_cache
from penstock.worker.worker import Worker
from support.checkpoints import tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.sleepers import call, put_to_sleep
from support.transformers_models import save_for_fallback, tiny_transformers_model

pytestmark = pytest.mark.skipif(NATIVE is None, reason="torch's products need weights in memory")
# Matrices of more than a page.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 200}
PROMPTS = random_prompts([5, 17, 40], 200)
WITHOUT = {"quantization_calibration": "none"}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 arithmetic": {"dtype": "bfloat16", "cpu_arithmetic": "bfloat16"},
    "int8": {"quantization": "int8", **WITHOUT},
    "int4": {"quantization": "int4", **WITHOUT},
    "calibrated int4": {"quantization": "int4"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "model", **SIZES)
    return tmp_path / "model"


def start(folder: Path, **options: Any) -> EngineCore:
    return make_core(folder, weight_cache_dir=str(folder.parent / "cache"), **options)


def tokens_of(core: EngineCore) -> list[list[int]]:
    return [result.tokens for result in run(core, PROMPTS, greedy(8))]


def weights_of(core: EngineCore) -> list[tuple[str, torch.Tensor]]:
    (found,) = core.collective_rpc(RpcCall(copies_of))
    return found  # type: ignore[no-any-return]


def copies_of(worker: Worker) -> list[tuple[str, torch.Tensor]]:
    return [(one.path, one.tensor.detach().clone()) for one in tensors_of(worker.weights.model)]


def mapped_bytes(core: EngineCore) -> int:
    (found,) = core.collective_rpc(RpcCall(lambda worker: worker.weights.mapped_bytes))
    return found  # type: ignore[no-any-return]


def same(one: list[tuple[str, torch.Tensor]], other: list[tuple[str, torch.Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_in_a_file_have_the_bits_of_those_in_memory(family: str, name: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", family, **SIZES)
    folder = tmp_path / "model"
    with closing(make_core(folder, **FORMATS[name])) as core:
        expected, weights = tokens_of(core), weights_of(core)
    for _ in range(2):  # the second start reads the entry of the first
        with closing(start(folder, cpu_offload_gb=1, **FORMATS[name])) as core:
            assert same(weights_of(core), weights)
            assert tokens_of(core) == expected
            assert mapped_bytes(core) > sum(tensor.nbytes for _, tensor in weights) / 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_part_of_the_weights_stays_in_the_file(folder: Path) -> None:
    with closing(make_core(folder)) as core:
        expected = tokens_of(core)
    with closing(start(folder, cpu_offload_gb=120_000 / 2**30)) as core:
        assert 100_000 < mapped_bytes(core) <= 120_000
        assert tokens_of(core) == expected
        core.collective_rpc(RpcCall(assert_embedding_is_mapped))


def assert_embedding_is_mapped(worker: Worker) -> None:
    """Steps read a few rows of it."""
    embedding: Any = worker.weights.model.get_submodule("model.embed_tokens")
    assert worker.weights.is_mapped(embedding.weight)


def test_weights_that_exceed_the_memory_stay_in_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(make_core(folder)) as core:
        expected = tokens_of(core)
    for module in (weight_cache, memory_planning):
        monkeypatch.setattr(module, "most_for_weights", lambda *_: 200_000)
    with caplog.at_level(logging.WARNING, logger="penstock"), closing(start(folder)) as core:
        assert tokens_of(core) == expected
        size = mapped_bytes(core)
    assert size > 100_000
    assert "stay in a file of weight_cache_dir=" in caplog.text
    memory = plan_engine(folder, device="cpu", weight_cache_dir=str(folder.parent / "cache")).memory
    assert memory["weights"] == 100_000
    assert memory["mapped_weights"] == pytest.approx(size, rel=0.2)
    assert memory.without_kv_cache == sum(term.size_bytes for term in memory.terms) - memory["mapped_weights"]


def test_weights_that_fit_are_in_memory(folder: Path) -> None:
    with closing(start(folder, quantization="int8")) as core:
        assert mapped_bytes(core) == 0
    plan = plan_engine(folder, device="cpu", quantization="int8", weight_cache_dir=str(folder.parent / "cache"))
    assert plan.memory["mapped_weights"] == 0


def test_the_plan_counts_what_is_asked_for(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "weight_cache_dir": "cache"}
    plain, mapped = plan_engine(folder, **options), plan_engine(folder, **options, cpu_offload_gb=200_000 / 2**30)
    assert plain.weights == mapped.weights == mapped.memory["weights"] + 200_000
    assert "(weights that stay in a file)" in mapped.table()
    assert plain.engine_bytes - mapped.engine_bytes == 200_000


def pages_of(folder: Path) -> int:
    """Bytes of the files of a folder that this process has mapped pages of."""
    found, is_one = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name:
            is_one = str(folder) in line
        elif name == "Rss" and is_one:
            found += 1024 * int(value.split()[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="Linux says which pages a process has")
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_writes_no_copy_of_them_and_wakes_with_the_same_bits(
    folder: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backups: list[FileBackup] = []

    def noted(*args: Any) -> FileBackup:
        backups.append(FileBackup(*args))
        return backups[-1]

    monkeypatch.setattr(cpu, "FileBackup", noted)
    with closing(start(folder, cpu_offload_gb=1)) as core:
        expected, size = tokens_of(core), mapped_bytes(core)
        assert pages_of(folder.parent / "cache") > size
        put_to_sleep(core, level)
        assert sum(backup.num_bytes for backup in backups) < size / 4
        assert pages_of(folder.parent / "cache") < size / 2
        call(core, "wake_up")
        if level == 2:
            call(core, "reload_weights")
        assert tokens_of(core) == expected
        assert mapped_bytes(core) == size


def test_a_reload_maps_the_new_weights_and_tensors_of_a_caller_are_refused(folder: Path, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "other", seed=1, **SIZES)
    with closing(make_core(tmp_path / "other")) as core:
        others = weights_of(core)
    with closing(start(folder, cpu_offload_gb=1)) as core:
        before, size = weights_of(core), mapped_bytes(core)
        with pytest.raises(UnsupportedFeature, match="stay in a file of weight_cache_dir, and tensors of a caller"):
            core.collective_rpc(RpcCall("load_weights", ([("model.norm.weight", torch.ones(128))],)))
        assert same(weights_of(core), before)
        core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / "other"),)))
        assert same(weights_of(core), others)
        assert mapped_bytes(core) == size


def test_a_saved_state_has_the_weights_of_the_file(folder: Path, tmp_path: Path) -> None:
    with closing(start(folder, cpu_offload_gb=1)) as core:
        expected = tokens_of(core)
        core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "state"),)))
        assert mapped_bytes(core) > 0
    with closing(make_core(tmp_path / "state", load_format="sharded_state")) as core:
        assert tokens_of(core) == expected


def test_a_damaged_entry_is_made_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(start(folder, cpu_offload_gb=1)) as core:
        expected = tokens_of(core)
    (path,) = (folder.parent / "cache").iterdir()
    written = path.read_bytes()
    path.write_bytes(written[:-100] + bytes(100))
    with caplog.at_level(logging.WARNING, logger="penstock"), closing(start(folder, cpu_offload_gb=1)) as core:
        assert tokens_of(core) == expected
    assert "is not used, and written anew" in caplog.text
    assert path.read_bytes() == written


def test_without_room_on_the_disk_the_start_is_refused_and_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match=r"cannot be written: .*No space left.* Name a folder with more room"):
        start(folder, cpu_offload_gb=1)
    assert list((folder.parent / "cache").iterdir()) == []


def test_what_cannot_be_is_refused_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (-1, True, "4", float("nan")):
        with pytest.raises(ConfigError, match="cpu_offload_gb=.* Allowed: a number of GiB from 0 to 1,048,576"):
            LoadConfig(weight_cache_dir="cache", cpu_offload_gb=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cpu_offload_gb=4 keeps weights in a file of weight_cache_dir, which is not"):
        LoadConfig(cpu_offload_gb=4)
    with pytest.raises(ConfigError, match="cpu_offload_gb=4 is not valid with load_format='dummy'"):
        LoadConfig(cpu_offload_gb=4, weight_cache_dir="cache", load_format="dummy")
    save_for_fallback(tiny_transformers_model("Starcoder2ForCausalLM"), tmp_path / "fallback")
    with pytest.raises(UnsupportedArgument, match="are those of Transformers, which need their weights in memory"):
        plan_engine(tmp_path / "fallback", device="cpu", weight_cache_dir="cache", cpu_offload_gb=1)
    monkeypatch.setattr(weight_cache, "has_native_kernels", lambda: False)
    with pytest.raises(UnsupportedArgument, match=r"the C\+\+ kernels are off"):
        start(folder, cpu_offload_gb=1)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group of the present one whose processes may use 420 MiB, page cache included."""
    root, entries = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text().splitlines()
    groups = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in entries)}
    name, file = f"penstock-{os.getpid()}", "memory.limit_in_bytes"
    if "memory" in groups:
        group = root / "memory" / groups["memory"] / name
    else:
        group, file = root / groups.get("", "") / name, "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        (group / file).write_text(str(420 << 20))
        yield group
    except OSError as error:
        pytest.skip(f"memory of a control group cannot be limited: {error}")
    finally:
        group.rmdir()


PROGRAM = """
import json, os, sys
group, folder, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if group:
    open(os.path.join(group, "cgroup.procs"), "w").write(str(os.getpid()))
from penstock import LLM, SamplingParams
with LLM(folder, device="cpu", max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    print(json.dumps(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0].token_ids))
"""


@pytest.mark.slow
def test_weights_larger_than_the_memory_run_where_others_are_killed(tmp_path: Path, control_group: Path) -> None:
    """The first start, which makes the file, and a second one."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 512}
    tiny_checkpoint(tmp_path / "model", **sizes)
    write_tokenizer(tmp_path / "model", byte_level_tokenizer())
    plain: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": "16MiB", "num_threads": 1}
    on_demand = {**plain, "weight_cache_dir": str(tmp_path / "cache")}

    def said(group: Path | str, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(group), str(tmp_path / "model"), json.dumps(options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    expected = said("", plain)
    assert expected.returncode == 0, expected.stderr
    assert said(control_group, plain).returncode == -9
    for _ in range(2):
        found = said(control_group, on_demand)
        assert found.returncode == 0, found.stderr
        assert found.stdout == expected.stdout
        assert "stay in a file of weight_cache_dir" in found.stderr
