"""Drafts and constraints of prompts with images, in one batch with texts: the bits of requests alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.plugins import assert_equal
from core.test_multimodal_engines import NAMES, OPTIONS, assert_nothing_is_left, run, texts
from penstock import SamplingParams
from penstock.contract import StructuredOutputsParams
from penstock.scheduler.outputs import FinishReason
from support.checkpoints import tiny_checkpoint
from support.draft_heads import eagle3_weights, eagle_weights, write_head
from support.engines import Result, add, finish, make_core
from support.multimodal_models import MediaPrompt, expanded, save_multimodal

END, FIRST_PIECE = 2, 40
# Tokens of JSON, in the place of words.
PIECES = ["{", "}", '"age"', '"tags"', ":", ",", "[", "]", *map(str, range(10)), '"a"', '"b"']
SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [1, 2, 3]}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["age", "tags"],
    "additionalProperties": False,
}


# Beside those of two kinds of positions: tokens of an image that see one another, and features for several layers.
OTHERS = ("gemma3", "qwen3-vl")


@pytest.fixture(scope="module", params=[*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_multimodal(folder, request.param, num_hidden_layers=5)
    write_head(folder / "eagle", eagle_weights())
    write_head(folder / "eagle3", eagle3_weights(), draft_vocab_size=40)
    tiny_checkpoint(folder / "draft_model")
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[MediaPrompt]:
    name = next(name for name in (*NAMES, *OTHERS) if folder.name.startswith(name))
    return expanded(folder, texts(name))


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[MediaPrompt]) -> list[Result]:
    core = make_core(folder, **OPTIONS, fast_paths="off", enable_prefix_caching=False)
    try:
        return [run(core, [prompt])[0] for prompt in prompts]
    finally:
        core.close()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}], ids=str)
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle", "eagle3"])
@pytest.mark.each_value_quick
def test_drafts_after_images_change_no_bit(
    folder: Path, prompts: list[MediaPrompt], alone: list[Result], method: str, options: dict[str, Any]
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    if (folder / method).exists():
        config["model"] = str(folder / method)
    core = make_core(folder, **{**OPTIONS, **options}, speculative_config=config)
    for _ in range(2):
        assert_equal(run(core, prompts), alone)
    assert core.scheduler.spec_decode_metrics.num_draft_tokens > 0
    assert_nothing_is_left(core)
    core.close()


@pytest.mark.parametrize("speculative_config", [None, {"method": "ngram", "num_speculative_tokens": 3}], ids=str)
@pytest.mark.each_value_quick
def test_answers_about_images_follow_their_schema(
    folder: Path, prompts: list[MediaPrompt], speculative_config: dict[str, Any] | None
) -> None:
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    pieces = {f"w{FIRST_PIECE + number}": piece for number, piece in enumerate(PIECES)}
    vocabulary = words["model"]["vocab"]
    words["model"]["vocab"] = {pieces.get(word, word): token_id for word, token_id in vocabulary.items()}
    words["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file.write_text(json.dumps(words))
    constraint = StructuredOutputsParams(json=SCHEMA)
    found = []
    for options in ({"fast_paths": "off", "enable_prefix_caching": False}, {"max_num_batched_tokens": 7}):
        core = make_core(folder, **{**OPTIONS, **options}, speculative_config=speculative_config)
        together = "max_num_batched_tokens" in options
        results: dict[str, Result] = {}
        for number, prompt in enumerate(prompts):
            # Some are texts, and every third is free.
            params = SamplingParams(
                temperature=0.0, seed=0, max_tokens=40, structured_outputs=None if number % 3 == 2 else constraint
            )
            add(core, f"r{number}", prompt.token_ids, params, parts=prompt.parts, eos_token_ids=frozenset({END}))
            if not together:
                finish(core, results)
        finish(core, results)
        assert_nothing_is_left(core)
        core.close()
        found.append([results[f"r{number}"] for number in range(len(prompts))])
    assert_equal(found[1], found[0])
    for number, result in enumerate(found[0]):
        if number % 3 != 2:
            assert result.finish_reason is FinishReason.STOP, result.error
            text = "".join(pieces.get(f"w{token}", "?") for token in result.tokens[:-1])
            answer = json.loads(text)
            assert answer["age"] in (1, 2, 3)
            assert set(answer["tags"]) <= {"a", "b"}
