"""Second passes over texts of speech: what they give and that nothing else changes, however work is cut into steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.plugins import assert_equal
from penstock.attention import NO_CONTEXT
from penstock.contract import Parts, RpcCall
from penstock.device.tensor_memory import TensorMemory
from penstock.engine.core.engine_core import EngineCore
from penstock.features.encoder_decoder.messages import AlignmentPart, SourcePart, SpeechPart, SpeechResult
from penstock.features.encoder_decoder.second_pass import SecondPass
from penstock.features.encoder_decoder.worker import SourceEncoder
from penstock.kernels.native import NATIVE
from support.checkpoints import save_checkpoint
from support.encoder_decoders import ASKED_OF_AUDIO, START, AskedOfAudio, tiny_encoder_decoder, write_encoder_decoder
from support.engines import Result, add, finish, greedy, make_core, owner_of

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4}
has_equal_bits = pytest.mark.skipif(NATIVE is None, reason="torch's own kernels do not promise it")
HEADS = [(0, 3), (1, 0), (2, 1), (2, 2)]
NO_SPEECH = 9
TEXT = [START, *range(10, 25)]
CIRCUMSTANCES: list[dict[str, Any]] = [
    {"async_scheduling": False},
    {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    {"num_blocks": 21, "max_model_len": 32},
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return tiny_encoder_decoder("whisper")


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    save_checkpoint(oracle, path)
    (path / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    return path


def alignment(**changes: Any) -> AlignmentPart:
    return AlignmentPart(**{"token_ids": TEXT, "begin": 3, "positions": 27, "heads": HEADS, **changes})


def run(core: EngineCore, *, has_second: bool = True) -> tuple[list[Result], list[SpeechResult | None]]:
    """Requests for the probability of a token, and one for the alignment of a text, with other requests."""
    parts: dict[str, SpeechResult] = {}
    for index, asked in enumerate(ASKED_OF_AUDIO):
        speech = SpeechPart(no_speech=NO_SPEECH if has_second else None, start=len(asked.decoder) // 2)
        add(core, f"r{index}", asked.decoder, greedy(12, logprobs=3), parts=Parts.of([asked.part(), speech]))
        second = [alignment()] if has_second else []
        add(core, f"a{index}", [START], greedy(1), parts=Parts.of([asked.part(), *second]))
    results: dict[str, Result] = {}
    for _ in range(5000):
        if not core.has_unfinished_requests():
            break
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
            for part in (output.parts or {}).values():
                assert isinstance(part, SpeechResult)
                parts[output.req_id] = part
        core.wait_for_work()
    names = [f"{kind}{index}" for index in range(len(ASKED_OF_AUDIO)) for kind in "ra"]
    return [results[name] for name in names], [parts.get(name) for name in names]


@pytest.fixture(scope="module")
def together(folder: Path) -> tuple[list[Result], list[SpeechResult | None]]:
    core = make_core(folder, **OPTIONS, fast_paths="off")
    found = run(core)
    core.close()
    return found


def attention_of(oracle: Any, asked: AskedOfAudio) -> np.ndarray:
    """Attention by Transformers' model: normalised over the tokens, and the median of seven positions."""
    with torch.no_grad():
        outputs = oracle(**asked.oracle_inputs(), decoder_input_ids=torch.tensor([TEXT]), output_attentions=True)
    weights = torch.stack([outputs.cross_attentions[layer][0, head] for layer, head in HEADS])[:, 3:, :27].numpy()
    weights = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    padded = np.pad(weights, ((0, 0), (0, 0), (3, 3)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=2), axis=-1).mean(0)  # type: ignore[no-any-return]


def assert_of_the_oracle(oracle: Any, found: list[SpeechResult | None]) -> None:
    for index, asked in enumerate(ASKED_OF_AUDIO):
        told, aligned = found[2 * index], found[2 * index + 1]
        assert told is not None
        assert aligned is not None
        assert aligned.attention is not None
        begin = torch.tensor([asked.decoder[: len(asked.decoder) // 2 + 1]])
        with torch.no_grad():
            logits = oracle(**asked.oracle_inputs(), decoder_input_ids=begin).logits[0, -1]
        assert told.no_speech_prob == pytest.approx(float(logits.softmax(-1)[NO_SPEECH]), rel=1e-4)
        np.testing.assert_allclose(aligned.attention.to_numpy(), attention_of(oracle, asked), atol=2e-4)


def test_results_are_those_of_transformers(
    oracle: Any, together: tuple[list[Result], list[SpeechResult | None]]
) -> None:
    assert_of_the_oracle(oracle, together[1])


@has_equal_bits
def test_second_passes_change_no_token(folder: Path, together: tuple[list[Result], list[SpeechResult | None]]) -> None:
    core = make_core(folder, **OPTIONS)
    results, parts = run(core, has_second=False)
    assert_equal(results, together[0])
    assert parts == [None] * len(parts)
    core.close()


@has_equal_bits
@pytest.mark.parametrize("options", CIRCUMSTANCES, ids=str)
def test_results_are_the_same_in_any_schedule(
    folder: Path, together: tuple[list[Result], list[SpeechResult | None]], options: dict[str, Any]
) -> None:
    core = make_core(folder, **OPTIONS, **options)
    results, parts = run(core)
    assert_equal(results, together[0])
    assert parts == together[1]
    assert (core.scheduler.num_preemptions > 0) is ("num_blocks" in options)
    encoder = owner_of(core, SourceEncoder)
    assert (encoder._second, encoder._pending, encoder._due) == ({}, {}, {})
    core.close()


@pytest.mark.parametrize(
    "wrong",
    [{"positions": 31}, {"begin": len(TEXT)}, {"heads": [(3, 0)]}, {"heads": []}, {"token_ids": [START] * 65}],
    ids=str,
)
def test_alignments_that_do_not_fit_end_their_own_request(folder: Path, wrong: dict[str, Any]) -> None:
    core = make_core(folder, **OPTIONS)
    for name, part in (("wrong", alignment(**wrong)), ("right", alignment())):
        add(core, name, [START], greedy(1), parts=Parts.of([ASKED_OF_AUDIO[0].part(), part]))
    results: dict[str, Result] = {}
    finish(core, results)
    assert "does not fit the model" in str(results["wrong"].error)
    assert results["right"].error is None
    core.close()


def test_models_of_text_have_no_second_pass(tmp_path: Path) -> None:
    core = make_core(write_encoder_decoder(tmp_path, "t5"), **OPTIONS)
    parts = [SourcePart(length=3, token_ids=[5, 6, 7]), alignment(positions=2)]
    add(core, "a", [START], greedy(1), parts=Parts.of(parts))
    results: dict[str, Result] = {}
    finish(core, results)
    assert "is no model of speech" in str(results["a"].error)
    core.close()


@pytest.mark.one_path(reason="it runs layer by layer in either case")
def test_the_plan_has_room_for_the_longest_text(tmp_path: Path) -> None:
    save_checkpoint(tiny_encoder_decoder("whisper", max_target_positions=448, max_source_positions=300), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    core = make_core(tmp_path, **OPTIONS, max_model_len=448)
    encoder, model = owner_of(core, SourceEncoder), owner_of(core, SourceEncoder)._model
    plan = core.collective_rpc(RpcCall("determine_available_memory"))[0]
    source = AskedOfAudio(torch.randn(20, 600)).part()
    second = SecondPass([START] * 448, alignment(token_ids=[START] * 448, positions=300), 0, 1, 7)
    with TensorMemory() as memory:
        encoded_SD = encoder._encode(source)
        second.run(model, encoder._device, lambda attention: attention.keys_and_values(encoded_SD, NO_CONTEXT))
    assert memory.peak_bytes <= plan["encoder_activations"] <= 4 * memory.peak_bytes
    core.close()


@pytest.mark.slow
def test_ranks_share_the_heads(folder: Path, oracle: Any) -> None:
    core = make_core(folder, **OPTIONS, tensor_parallel_size=2)
    assert_of_the_oracle(oracle, run(core)[1])
    core.close()
