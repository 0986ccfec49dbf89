"""Weights that are rounded for texts, through the engine."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.layers.linear import LinearLayer
from penstock.layers.quantization.method import QuantizedMethod
from penstock.worker import calibration, calibration_texts

DEMO = EngineConfig.create("demo").model.folder
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24}
INT4: dict[str, Any] = {**OPTIONS, "quantization": "int4"}


@pytest.fixture(scope="module")
def few_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "few.jsonl"
    lines = (DEMO / "calibration.jsonl").read_text().splitlines()[:60]
    path.write_text("\n".join([*lines, json.dumps({"text": "ROMEO:\nWhat, ho!"})]))
    return path


@pytest.fixture
def bare_demo(tmp_path: Path) -> Path:
    """The shipped model without texts of its own."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder)
    (folder / "calibration.jsonl").unlink()
    return folder


def log_likelihood(llm: LLM) -> float:
    """Log-likelihood of conversations outside the calibration data."""
    lines = (DEMO / "calibration.jsonl").read_text().splitlines()[100:130]
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(
        logprobs[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token, logprobs in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    )


def layer_weights(llm: LLM) -> dict[str, torch.Tensor]:
    def find(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: module.method.unpack(module.method.packed_OI, module.output_size)
            for name, module in model.named_modules()
            if isinstance(module, LinearLayer) and isinstance(module.method, QuantizedMethod)
        }

    (found,) = llm.apply_model(find)
    return found


def test_a_model_rounded_for_texts_is_closer_to_what_it_was(
    few_texts: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.calibration._PROGRESS_S", 0.0)
    with LLM("demo", **OPTIONS) as llm:
        exact = log_likelihood(llm)
    with LLM("demo", **INT4, quantization_calibration="none") as llm:
        nearest, rounded_alone = log_likelihood(llm), layer_weights(llm)
    with caplog.at_level(logging.INFO), LLM("demo", **INT4, quantization_calibration=str(few_texts)) as llm:
        calibrated, rounded = log_likelihood(llm), layer_weights(llm)
    assert abs(calibrated - exact) < abs(nearest - exact)
    assert rounded.keys() == rounded_alone.keys()
    changed = {name for name in rounded if not torch.equal(rounded[name], rounded_alone[name])}
    assert changed == set(rounded)
    assert any("int4 calibrated on" in message and "few.jsonl" in message for message in caplog.messages)
    for progress in ("calibrating int4, which takes a while", " calibration texts read", "layers rounded"):
        assert any(progress in message for message in caplog.messages)
    assert any("GPTQ in one pass, inputs of 18 layers smoothed" in message for message in caplog.messages)


def test_texts_are_read_within_the_context_that_the_engine_serves(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "What, ho! " * 30}))
    with LLM("demo", **INT4, quantization_calibration=str(path), max_model_len=20) as llm:
        assert all(weight.isfinite().all() for weight in layer_weights(llm).values())


@pytest.mark.slow
def test_texts_in_the_models_folder_are_taken_unless_none_are_wanted(bare_demo: Path, few_texts: Path) -> None:
    with LLM(str(bare_demo), **INT4) as llm:
        general = layer_weights(llm)
    shutil.copyfile(few_texts, bare_demo / "calibration.jsonl")
    with LLM(str(bare_demo), **INT4) as llm:
        taken = layer_weights(llm)
        llm.collective_rpc("reload_weights")
        again = layer_weights(llm)
    with LLM(str(bare_demo), **INT4, quantization_calibration="none") as llm:
        refused = layer_weights(llm)
    assert all(torch.equal(taken[name], again[name]) for name in taken)
    for other in (general, refused):
        assert any(not torch.equal(other[name], taken[name]) for name in taken)
    assert EngineConfig.create(str(bare_demo), quantization="int8").model.calibration_file is None


def test_inputs_are_smoothed_for_a_general_text_by_default(bare_demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(bare_demo), **OPTIONS, quantization="int8", quantization_calibration="none") as llm:
        nearest = layer_weights(llm)
    with caplog.at_level(logging.INFO), LLM(str(bare_demo), **OPTIONS, quantization="int8") as llm:
        smoothed = layer_weights(llm)
        assert "inputs smoothed" in llm.get_model_inspection()
    assert any("tokens of the general text" in message for message in caplog.messages)
    changed = {name.rpartition(".")[2] for name in smoothed if not torch.equal(smoothed[name], nearest[name])}
    assert changed == {"qkv_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("missing", ["tokenizer.json", "memory"])
def test_without_what_the_general_text_needs_weights_are_rounded_to_nearest(
    missing: str, bare_demo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {**OPTIONS, "quantization": "int8"}
    if missing == "memory":
        monkeypatch.setattr(calibration_texts, "_FREE_MEMORY", 1 << 30)
    else:
        options["tokenizer"] = "demo"
        (bare_demo / "tokenizer.json").unlink()
        monkeypatch.setattr(calibration_texts, "_TOKENIZER_FILE", "nowhere.json")
    with caplog.at_level(logging.INFO), LLM(str(bare_demo), **options) as llm:
        assert "inputs smoothed" not in llm.get_model_inspection()
    assert any("not calibrated, since" in message for message in caplog.messages)


@pytest.mark.slow
def test_a_model_of_transformers_and_layers_that_are_observed_in_turns(
    few_texts: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = few_texts.with_name("fewer.jsonl")
    few.write_text("\n".join(few_texts.read_text().splitlines()[:5]))
    monkeypatch.setattr(calibration, "_SHARE_OF_FREE", 1 << 40)
    options = {**INT4, "model_impl": "transformers", "quantization_calibration": str(few)}
    with caplog.at_level(logging.INFO), LLM("demo", **options) as llm:
        rounded = layer_weights(llm)
        (output,) = llm.generate(["ROMEO:"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert any(f"{len(rounded)} passes of" in message for message in caplog.messages)


def test_texts_without_a_use_or_a_file_are_refused(few_texts: Path, tmp_path: Path) -> None:
    no_use = r"quantization_calibration='.*few\.jsonl' has no meaning for quantization="
    for quantization in (None, "int8"):
        with pytest.raises(ConfigError, match=no_use):
            EngineConfig.create("demo", quantization=quantization, quantization_calibration=str(few_texts))
    with pytest.raises(
        ConfigError, match=r"is not a file\. Allowed: a JSONL file of calibration data, 'auto' or 'none'"
    ):
        EngineConfig.create("demo", quantization="int4", quantization_calibration=str(tmp_path / "nowhere.jsonl"))
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("{")
    with pytest.raises(ConfigError, match=r"damaged\.jsonl', line 1 is not JSON"):
        LLM("demo", **INT4, quantization_calibration=str(damaged))


def test_tokens_that_the_model_does_not_have_are_refused(bare_demo: Path, few_texts: Path) -> None:
    path = bare_demo / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(
        {"id": 1536, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": False}
    )
    path.write_text(json.dumps(content))
    texts = bare_demo / "texts.jsonl"
    texts.write_text('{"text": "a <new> one"}')
    with pytest.raises(
        ConfigError, match=r"has the token 1536 with the tokenizer in .*, but the model has 1536 tokens"
    ):
        LLM(str(bare_demo), **INT4, quantization_calibration=str(texts))


@pytest.mark.slow
def test_ranks_read_texts_together(few_texts: Path) -> None:
    with LLM("demo", **OPTIONS) as llm:
        exact = log_likelihood(llm)
    with LLM("demo", **INT4, quantization_calibration="none") as llm:
        nearest = log_likelihood(llm)
    options = {**INT4, "num_threads": 2, "tensor_parallel_size": 2}
    with LLM("demo", **options, quantization_calibration=str(few_texts)) as llm:
        assert abs(log_likelihood(llm) - exact) < abs(nearest - exact)
