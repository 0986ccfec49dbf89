"""Images of a hybrid model: answers are those of Transformers, in chunks and from snapshots after an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.media.processors.reading import read_processor
from support.checkpoints import save_checkpoint
from support.multimodal_models import (
    IMAGE,
    VISION_END,
    VISION_START,
    picture,
    save_tokenizer,
    tiny_multimodal_model,
    write_processor,
)
from support.qwen_mtp import qwen_mtp_weights

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128}
_IMAGE = [VISION_START, IMAGE, VISION_END]
# Tokens, since Transformers reads the tokenizer of this model type in its own way.
PROMPT = [5, 6, *_IMAGE, 7, 8, *_IMAGE, 9]
IMAGES = [picture(40, 24, 1), picture(16, 48, 2)]
NUM_TOKENS = 6


def write_model(folder: Path) -> Any:
    """A saved model with its processor; returns the oracle."""
    model = tiny_multimodal_model("qwen3.5")
    save_checkpoint(model, folder)
    save_tokenizer(folder)
    write_processor(folder, "qwen3-vl")
    return model


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}], ids=str)
@pytest.mark.one_case_quick
def test_answers_equal_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path)
    prompt: Any = {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": IMAGES}}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=1, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS, **options) as llm:
        # The second time from a snapshot.
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2)]
    inputs = read_processor(tmp_path, "qwen3_5").image_processor(images=IMAGES, return_tensors="pt")
    for output in outputs:
        token_ids, answer = list(output.prompt_token_ids or ()), output.outputs[0]
        for token_id, found in zip(answer.token_ids, answer.logprobs or (), strict=True):
            ids = torch.tensor([token_ids])
            with torch.no_grad():
                logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **inputs).logits[0, -1]
            assert int(logits.argmax()) == token_id
            assert abs(float(logits.log_softmax(-1)[token_id]) - found[token_id].logprob) < 1e-4
            token_ids.append(token_id)
        assert len(answer.token_ids) == NUM_TOKENS
    assert (outputs[1].num_cached_tokens or 0) > 0


def write_mtp_layer(folder: Path, size: int) -> None:
    """Add an MTP layer, whose block is the model's last one of full attention, to the model in a folder."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    last = max(name for name in weights if name.endswith("self_attn.q_proj.weight")).removesuffix(
        "self_attn.q_proj.weight"
    )
    block = {name.replace(last, "mtp.layers.0."): weights[name].clone() for name in weights if name.startswith(last)}
    save_file(weights | block | qwen_mtp_weights(size), path, {"format": "pt"})


@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
@pytest.mark.slow
def test_drafts_of_an_mtp_layer_after_images_change_no_bit(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    write_mtp_layer(tmp_path, model.config.text_config.hidden_size)
    prompts: list[Any] = [
        {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": IMAGES}},
        {"prompt_token_ids": [5, 6, 7, 8, 9]},
        {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": IMAGES[::-1]}},
    ]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    with LLM(str(tmp_path), **OPTIONS, fast_paths="off", enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    drafts = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    with LLM(str(tmp_path), **OPTIONS, max_num_batched_tokens=9, speculative_config=drafts) as llm:
        for _ in range(2):
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            assert [output.logprobs for output in outputs] == [output.logprobs for output in alone]
        drafted: Any = next(metric for metric in llm.get_metrics() if "num_draft_tokens" in metric.name)
    assert drafted.value > 0
