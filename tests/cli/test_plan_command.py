"""`penstock plan`, as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import tiny_checkpoint


def run(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "penstock.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.processor
def test_the_table_is_for_people() -> None:
    result = run("demo", "--device", "cpu", "--max-num-seqs", "8", "--kv-cache-dtype", "float32")
    assert result.returncode == 0
    assert result.stderr == ""
    for line in ("demo: LlamaForCausalLM, 2.7 million", "  = left for the KV cache", "  full-length requests"):
        assert line in result.stdout
    # 2 heads of 32 in 6 layers, keys and values, in float32.
    assert "3.00 KiB  2 x 2 heads x 32 x 6 layers in float32" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.processor
def test_json_is_for_programs(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    result = run(
        str(tmp_path), "--json", "--device=cpu", "--kv-cache-memory-bytes=4194304", "--block-size=8", "--dtype=bfloat16"
    )
    data = json.loads(result.stdout)
    assert (data["dtype"], data["weights_dtype"]) in [("float32", "bfloat16"), ("bfloat16", "bfloat16")]
    # The processor decides: its instructions for bfloat16 arithmetic, or whether the C++ kernels were built.
    value = {"float32": 4, "bfloat16": 2}[data["kv_cache"]["dtype"]]
    assert data["kv_cache"]["bytes_per_token"] == 2 * 2 * 16 * 2 * value
    assert data["kv_cache"]["num_blocks"] == (4 << 20) // (8 * data["kv_cache"]["bytes_per_token"])


def test_names_of_other_engines_and_any_other_option_are_taken() -> None:
    result = run("demo", "--json", "--device=cpu", "--gpu-memory-utilization", "0.25", "--option", "seed=3")
    assert json.loads(result.stdout)["memory"]["fraction"] == 0.25


def test_an_option_that_has_a_name_of_its_own_is_taken_too() -> None:
    result = run("demo", "--json", "--device=cpu", "--block-size", "8", "--option", "memory_fraction=0.125")
    assert json.loads(result.stdout)["memory"]["fraction"] == 0.125


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--memory-fraction", "0.0001"], 1, "= left for the KV cache"),
        (["demo", "--kv-cache-memory-bytes", "200000"], 1, "Any of these fits: --max-model-len"),
        (["/nowhere"], 2, "there is no such folder"),
        (["demo", "--block-size", "0"], 2, "--block-size 0 is not valid"),
        (["demo", "--dtype", "int8"], 2, "--dtype int8 is not valid"),
        (["demo", "--max-model-len", "99999"], 2, "more than the 1024 positions"),
        (["demo", "--option", "x=1"], 2, "There is no option x"),
    ],
)
@pytest.mark.one_case_quick
def test_what_does_not_work_out_or_is_wrong_says_so(arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments, "--device", "cpu") if arguments else run()
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["plan demo --device cpu", "env"])
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    command = f"{sys.executable} -m penstock.cli {command} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(("columns", "num_lines"), [(100, 32), (80, 42)])
def test_help_fits_a_screen(columns: int, num_lines: int) -> None:
    out = run("--help", columns=columns).stdout
    assert len(out.splitlines()) <= num_lines
    assert max(map(len, out.splitlines())) <= columns
