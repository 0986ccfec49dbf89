"""Files of `penstock bench --expert-stats`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from penstock.bench.expert_stats import as_json, as_svg
from penstock.cli.app import app
from support.checkpoints import tiny_checkpoint

TOKENS = {1: [4, 0, 8, 4], 2: [4, 4, 4, 4]}
COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})


def test_a_layers_imbalance_is_its_busiest_expert_over_the_mean() -> None:
    first, second = as_json(TOKENS)
    assert first == {"layer": 1, "imbalance": 2.0, "unused": 1, "tokens": [4, 0, 8, 4]}
    assert (second["imbalance"], second["unused"]) == (1.0, 0)
    (idle,) = as_json({0: [0, 0]})
    assert idle["imbalance"] == 1.0


def test_the_picture_has_a_cell_per_expert_and_a_line_per_layer() -> None:
    root = ElementTree.fromstring(as_svg("a <model>", TOKENS))
    paths = [element.get("d", "") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert [path.count("M") for path in paths] == [1, 0, 0, 0, 6, 1, 0, 0]
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <model>", "1", "2", "2.00 ×", "1.00 ×"} <= set(texts)


def test_the_command_writes_the_numbers_and_shows_them(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen3_moe")
    written = tmp_path / "experts.json"
    options = ["--num-prompts=2", "--input-len=12", "--output-len=3", "--num-iters=2", "--num-iters-warmup=0"]
    options += ["--device=cpu", "--load-format=dummy", "--tokenizer=demo", "--kv-cache-memory-bytes=1MiB"]
    command = ["bench", "throughput", f"--model={tmp_path}", *options, "--option=num_threads=1"]
    result = COMMAND_LINE.invoke(app, [*command, f"--expert-stats={written}"])
    assert result.exit_code == 0, result.output
    first, last = json.loads(written.read_text())
    # Two runs of two prompts, three experts per token; the last layer computes no prompt tokens but the last.
    assert sum(first["tokens"]) == 2 * 2 * 3 * (12 + 2)
    assert sum(last["tokens"]) == 2 * 2 * 3 * 3
    assert "tokens per expert" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--expert-stats=experts.png"], r"a name that ends with \.svg or \.json"),
        (["startup", "--expert-stats=experts.svg"], "--expert-stats is not valid with startup"),
    ],
)
def test_other_files_and_workloads_are_refused(arguments: list[str], message: str) -> None:
    result = COMMAND_LINE.invoke(app, ["bench", *arguments])
    assert result.exit_code != 0
    assert re.search(message, result.output.replace("\n", " ")), result.output
