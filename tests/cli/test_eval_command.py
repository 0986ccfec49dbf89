"""`penstock eval`, as a person types it, with the model that ships and Transformers as the oracle."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import transformers
from rich.console import Console
from typer.testing import CliRunner

from penstock import EngineConfig
from penstock.bench.quality.formats import FORMATS, default_formats
from penstock.bench.quality.report import table
from penstock.bench.quality.run import Quality
from penstock.bench.quality.scores import Closeness
from penstock.cli.app import app
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf

COMMAND_LINE = CliRunner(env={"COLUMNS": "160"})
SMALL = ("--kv-cache-memory-bytes=16MiB", "--threads=1", "--device=cpu", "--quantization-calibration=none")
TEXT = "ROMEO:\nO, she doth teach the torches to burn bright!\n" * 8
WINDOW = 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text(TEXT)
    return path


def run(*arguments: str, code: int = 0) -> Any:
    result = COMMAND_LINE.invoke(app, ["eval", *arguments])
    assert result.exit_code == code, result.output
    return result


def losses_of_transformers() -> torch.Tensor:
    """Negative log-likelihood of each token of the text's windows, given those before it."""
    folder = EngineConfig.create("demo").model.folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, special = tokenizer.encode(TEXT, add_special_tokens=False), tokenizer.encode("")
    count = len(ids) // WINDOW
    windows = torch.tensor([[*special, *ids[i * WINDOW : (i + 1) * WINDOW]] for i in range(count)])
    with torch.inference_mode():
        logprobs = model(windows).logits.log_softmax(dim=-1)
    first = max(1, len(special))
    return -logprobs[:, first - 1 : -1].gather(2, windows[:, first:, None]).flatten()


def test_losses_are_those_of_transformers_and_formats_are_compared(text: Path, tmp_path: Path) -> None:
    plot = tmp_path / "quality.svg"
    result = run(
        "demo", f"--text={text}", "--quantization=int8,int4", f"--window={WINDOW}", "--json", f"--plot={plot}", *SMALL
    )
    report = json.loads(result.stdout)
    expected = losses_of_transformers()
    exact, int8, int4 = report["formats"]
    assert [row["format"] for row in report["formats"]] == ["float32", "int8", "int4"]
    assert report["num_tokens"] == len(expected)
    assert exact["loss"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert exact["mean_change"] == exact["kl"] == 0
    assert exact["same_top"] == 1
    assert 0 < int8["mean_change"] < int4["mean_change"]
    assert 0 < int8["kl"] < int4["kl"]
    assert exact["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"] > 0
    drawn = ElementTree.parse(plot).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}circle")) == 3


def test_another_model_may_be_the_reference(text: Path) -> None:
    folder = EngineConfig.create("demo").model.folder
    arguments = ("--quantization=float32", f"--against={folder}", f"--window={WINDOW}", "--max-tokens=64")
    table = run("demo", f"--text={text}", *arguments, *SMALL).stdout
    assert str(folder)[:20] in table
    assert "+0.00%" in table


@pytest.mark.parametrize("formats", [("float32", "stored", "none", "int8", "int4"), ("a/" * 40, *FORMATS)])
def test_the_table_has_all_its_figures_in_80_columns(formats: tuple[str, ...]) -> None:
    results = [
        Quality(name, 6.0751, Closeness(0.0012, 0.0123, 0.00123, 0.987), 12_345, 1_234.5, 127 << 20) for name in formats
    ]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(table("title", results))
    shown = capture.get()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for figure in ("6.0751", "434.89", "+0.12%", "0.0123", "0.00123", "98.7%", "12,345", "1,234.5", "127.00"):
        assert len(re.findall(rf" {re.escape(figure)}(?= |$)", shown, re.MULTILINE)) == len(formats), figure


def test_what_a_gguf_runs_with_is_compared_by_default(tmp_path: Path) -> None:
    assert default_formats(EngineConfig.create("demo")) == ["none", "int8", "int4"]
    path = write_gguf(tiny_model("llama"), "llama", tmp_path / "tiny.gguf")
    assert default_formats(EngineConfig.create(str(path))) == ["stored", "none", "int8", "int4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quantization=int8,int3",), "--quantization 'int8,int3' is not valid. Allowed: each of stored, float32,"),
        (("--plot=picture.pdf",), "--plot picture.pdf is not valid. Allowed: a name that ends in .svg"),
        (("--window=4000",), "and a window has 4,000. Give a longer text, or a smaller --window."),
    ],
)
def test_wrong_options_are_refused(text: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("demo", f"--text={text}", *arguments, *SMALL, code=2)
    assert message in result.stderr


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    result = run("demo", f"--text={tmp_path / 'none.txt'}", code=2)
    assert "--text" in result.stderr
    assert "cannot be opened" in result.stderr
