"""Commands with the real model, as a person types them."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from penstock.cli.app import app
from support.real_model import MARKS

pytestmark = MARKS
_COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})
_SMALL = ("--model=smollm2", "--kv-cache-memory-bytes=128MiB", "--max-model-len=512", "--device=cpu")


def test_bench_measures_it(tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["bench", "latency", *_SMALL, "--num-iters=2", "--num-iters-warmup=1", f"--output-json={path}"]
    result = _COMMAND_LINE.invoke(app, [*arguments, "--batch-size=2", "--input-len=16", "--output-len=8"])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["results"]["output_tokens_per_run"] == 16
    assert report["results"]["output_tokens_per_s"]["median"] > 1


def test_generate_answers_with_it():
    result = _COMMAND_LINE.invoke(
        app, ["generate", "The capital of France is", *_SMALL, "--max-tokens=4", "--temperature=0"]
    )
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout
