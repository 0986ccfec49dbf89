"""Images of a hybrid model: answers are those of Transformers, in chunks and from snapshots after an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128}
_IMAGE = [VISION_START, IMAGE, VISION_END]
# Tokens, since Transformers reads the tokenizer of this model type in its own way.
PROMPT = [5, 6, *_IMAGE, 7, 8, *_IMAGE, 9]
IMAGES = [picture(40, 24, 1), picture(16, 48, 2)]
NUM_TOKENS = 6


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}], ids=str)
@pytest.mark.one_case_quick
def test_answers_equal_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_multimodal_model("qwen3.5")
    save_checkpoint(model, tmp_path)
    save_tokenizer(tmp_path)
    write_processor(tmp_path, "qwen3-vl")
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
