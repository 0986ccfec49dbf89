"""`penstock eval`, as a person types it, with the model that ships and Transformers as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import transformers
from typer.testing import CliRunner

from penstock import EngineConfig
from penstock.cli.app import app

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
