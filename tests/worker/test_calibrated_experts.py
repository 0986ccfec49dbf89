"""Calibration of mixtures whose tokens leave experts out."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penstock import LLM, EngineConfig
from penstock.cli.app import app
from support.checkpoints import save_checkpoint
from support.constraints import VOCAB_SIZE
from support.uneven_mixtures import ALL, FIRST, IDLE, SECOND, uneven_mixture

DEMO = EngineConfig.create("demo").model.folder
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 1 << 24,
}
LAYER = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with the demo model's tokenizer, and a calibration text for it."""
    path = tmp_path_factory.mktemp("mixture")
    save_checkpoint(uneven_mixture("glm4_moe", vocab_size=VOCAB_SIZE, max_position_embeddings=512), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, path / name)
    lines = (DEMO / "calibration.jsonl").read_text().splitlines()[:40]
    texts = [" ".join(message["content"] for message in json.loads(line)["messages"]) for line in lines]
    (path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (path / "text.txt").write_text("\n".join(texts))
    return path


def of_experts(llm: LLM) -> dict[int, tuple[bool, torch.Tensor]]:
    """Whether each expert's inputs were smoothed, and its quantised gate and up projection."""

    def find(model: Any) -> dict[int, tuple[bool, torch.Tensor]]:
        experts = model.model.layers[LAYER].mlp.experts
        return {
            number: (
                expert.down_proj.has_smoothed_inputs,
                expert.gate_up_proj.method.unpack(
                    expert.gate_up_proj.method.packed_OI, expert.gate_up_proj.output_size
                ),
            )
            for number, expert in enumerate(experts)
        }

    (found,) = llm.apply_model(find)
    return found


def test_experts_that_no_text_reaches_are_neither_smoothed_nor_quantised_by_gptq(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "quantization": "int4"}
    with LLM(str(folder), **options, quantization_calibration="none") as llm:
        nearest = of_experts(llm)
    texts = str(folder / "texts.jsonl")
    with caplog.at_level(logging.INFO), LLM(str(folder), **options, quantization_calibration=texts) as llm:
        calibrated = of_experts(llm)
    for expert in (IDLE, SECOND):
        assert not calibrated[expert][0]
        assert torch.equal(calibrated[expert][1], nearest[expert][1])
    for expert in (ALL, FIRST):
        assert calibrated[expert][0]
        assert not torch.equal(calibrated[expert][1], nearest[expert][1])
    assert any("layers with fewer rows than features to nearest" in message for message in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["auto", "none"])
def test_rounded_experts_are_evaluated(folder: Path, calibration: str) -> None:
    command = ["eval", str(folder), f"--text={folder / 'text.txt'}", "--quantization=int8,int4", "--window=64"]
    options = ["--max-tokens=256", "--json", "--kv-cache-memory-bytes=16MiB", "--threads=1", "--device=cpu"]
    result = CliRunner().invoke(app, [*command, *options, f"--quantization-calibration={calibration}"])
    assert result.exit_code == 0, result.output
    exact, int8, int4 = json.loads(result.stdout)["formats"]
    assert 0 < int8["mean_change"] < int4["mean_change"] < 1
    assert exact["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"]
    assert int8["loss"] == pytest.approx(exact["loss"], rel=0.02)
