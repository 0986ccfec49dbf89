"""`penstock bench`, as a person types it, with the model that ships."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.bench.workloads import WORKLOADS
from penstock.cli.app import app
from penstock.cli.bench import bench
from penstock.cli.command import ENGINE
from penstock.cli.generate import generate

COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})
QUICK = (
    *("--num-iters", "2", "--num-iters-warmup", "0"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--option", "num_threads=1"),
)


def run(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """Run the command in a process."""
    environment = {**os.environ, "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "penstock.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def figures(folder: Path, *arguments: str) -> tuple[Any, str]:
    """The results that were written, and the table."""
    path = folder / "bench.json"
    result = COMMAND_LINE.invoke(
        app, ["bench", arguments[0], *QUICK, "--device=cpu", f"--output-json={path}", *arguments[1:]]
    )
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), result.stdout


def test_latency_counts_every_token_of_every_run(tmp_path: Path) -> None:
    report, table = figures(tmp_path, "latency", "--batch-size", "3", "--input-len", "20", "--output-len", "5")
    results = report["results"]
    assert len(results["seconds"]) == 2
    assert results["output_tokens_per_run"] == 15
    assert results["input_tokens_per_run"] == 60
    seconds = sorted(results["seconds"])
    assert results["latency_s"]["min"] == seconds[0]
    assert results["output_tokens_per_s"]["max"] == pytest.approx(15 / seconds[0])
    assert 0 < results["time_to_first_token_s"]["median"] < seconds[1]
    assert report["settings"]["batch_size"] == 3
    assert "latency, 3 requests at once, 20 in, 5 out" in table


@pytest.mark.slow
def test_a_size_with_several_values_is_measured_once_per_value(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ("--batch-size=1,3", "--input-len=4", "--output-len=2", f"--plot={plot}")
    report, table = figures(tmp_path, "latency", *arguments)
    assert [run["settings"]["batch_size"] for run in report["runs"]] == [1, 3]
    assert [run["results"]["output_tokens_per_run"] for run in report["runs"]] == [2, 6]
    assert "latency, 1 requests at once" in table
    assert "latency, 3 requests at once" in table
    assert "latency by batch size" in plot.read_text()


def test_weights_may_be_random_and_prompts_have_several_outputs(tmp_path: Path) -> None:
    arguments = ("--load-format=dummy", "--num-prompts=2", "--output-len=2", "--n=3")
    report, table = figures(tmp_path, "throughput", *arguments)
    assert report["results"]["output_tokens_per_run"] == 2 * 3 * 2
    assert "2 requests at once, 128 in, 3 times 2 out" in table
    assert report["engine"]["load_format"] == "dummy"
    assert report["results"]["requests_per_s"]["median"] > 0


def test_a_known_prefix_is_found_in_the_cache_and_prompts_of_other_runs_are_not(tmp_path: Path) -> None:
    arguments = ("prefix", "--num-prompts=2", "--prefix-len=64", "--input-len=8", "--output-len=2", "--seed=3")
    report, table = figures(tmp_path, *arguments)
    assert report["results"]["known_prefix"]["cached_tokens_per_run"] == 2 * 64
    assert report["results"]["new_prefix"]["cached_tokens_per_run"] <= 64
    assert "prefix served before" in table


def test_prefill_has_no_time_per_output_token(tmp_path: Path) -> None:
    report, table = figures(tmp_path, "prefill", "--num-prompts=2", "--input-len=40")
    assert report["results"]["input_tokens_per_run"] == 80
    assert report["results"]["cached_tokens_per_run"] == 0
    assert "time per output token" not in table


@pytest.mark.slow
def test_startup_is_the_sum_of_its_phases(tmp_path: Path) -> None:
    report, table = figures(tmp_path, "startup", "--num-iters=1")
    results = report["results"]
    phases = [phase["median"] for phase in results["phases_s"].values()]
    assert all(seconds > 0 for seconds in phases)
    assert sum(phases) == pytest.approx(results["startup_s"]["median"])
    assert "process start to first token" in table


def test_long_contexts_decode_from_the_cache_beside_the_memorys_speed(tmp_path: Path) -> None:
    arguments = ("long-context", "--input-len=320", "--batch-size=2", "--output-len=4", "--num-iters=1")
    report, table = figures(tmp_path, *arguments)
    (row,) = report["results"]
    assert (row["context"], row["batch_size"]) == (320, 2)
    # A prompt's last block is computed again, to have logits.
    assert row["cached_share"] >= 304 / 320
    # 2 heads of 32 in 6 layers, keys and values in float32, beside 2.7 million weights.
    assert 0 < row["step_bytes"] - 2 * 320 * (2 * 2 * 32 * 6 * 4) < 4 * 3_000_000
    assert 0 < row["share_of_memory_speed"]["median"] < 1
    assert "320" in table


def test_long_contexts_are_as_long_as_the_model_takes_when_none_is_asked_for(tmp_path: Path) -> None:
    report, _ = figures(tmp_path, "long-context", "--output-len=4", "--num-iters=1", "--max-model-len=100")
    assert [(row["context"], row["batch_size"]) for row in report["results"]] == [(96, 1), (96, 8)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["quickness"], 2, "There is no workload 'quickness'. Allowed: latency, throughput"),
        (["throughput", "--batch-size", "4"], 2, "--batch-size 4 means nothing to throughput. It is an option of"),
        (["latency", "--num-iters", "0"], 2, "--num-iters 0 is not valid. Allowed: 1 or more."),
        (["latency", "--seed", "-1"], 2, "--seed -1 is not valid"),
        (["latency", "--output-json", "/nowhere/x.json"], 2, "--output-json /nowhere/x.json cannot be opened"),
        (["latency", "--option", "x=1"], 2, "There is no option x"),
        (["latency", "--model", "/nowhere"], 2, "there is no such folder"),
        (["latency", "--input-len", "1020", "--output-len", "9"], 2, "do not fit into a context of 1,024 tokens"),
        (["long-context", "--input-len", "1020"], 2, "do not fit into a context of 1,024 tokens"),
        (["startup", "--kv-cache-memory-bytes", "1000"], 1, "A fresh process generated no first token"),
        ([], 2, "Missing argument"),
    ],
)
def test_bad_input_says_what_is_allowed(arguments: list[str], code: int, message: str) -> None:
    result = COMMAND_LINE.invoke(app, ["bench", *arguments])
    assert result.exit_code == code, result.output
    assert message in result.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = f"startup {' '.join(QUICK)} --num-iters 1"
    command = f"{sys.executable} -m penstock.cli bench {arguments} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 141
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("columns", "num_lines"), [(100, 48), (80, 62)])
def test_help_fits_a_screen_and_names_every_workload(columns: int, num_lines: int) -> None:
    out = run("--help", columns=columns).stdout
    assert len(out.splitlines()) <= num_lines
    assert max(map(len, out.splitlines())) <= columns
    assert all(name in out for name in WORKLOADS)


def test_it_runs_as_a_command() -> None:
    result = run("prefill", *QUICK, "--num-prompts=1", "--input-len=8")
    assert result.returncode == 0, result.stderr
    assert "input" in result.stdout


def test_engine_options_are_those_of_generate() -> None:
    ours, theirs = (
        {name for name in inspect.signature(command).parameters if name.startswith(ENGINE)}
        for command in (bench, generate)
    )
    assert ours == theirs
    assert {f"{ENGINE}{name}" for name in ("quantization", "num_threads", "kv_cache_dtype", "option", "debug")} <= ours
