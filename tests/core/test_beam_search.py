"""Beam search, against Transformers and against its definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock import LLM, BeamSearchOutput, BeamSearchParams
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest
from support.checkpoints import VOCAB_SIZE, oracle_logits, save_checkpoint, tiny_model
from support.engines import SMALL, random_prompts
from support.fake_engine import byte_level_tokenizer, write_tokenizer

# The model's end token is 2, the tokenizer's 1.
END_TOKENS = (1, 2)
PROMPTS = random_prompts((5, 20, 33), VOCAB_SIZE, seed=4)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


@pytest.fixture(scope="module")
def llm(oracle: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory, fast_paths: str) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(oracle, folder)
    write_tokenizer(folder, byte_level_tokenizer())
    with LLM(str(folder), fast_paths=fast_paths, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("beam_width", [1, 2, 4, 8])
def test_without_an_end_token_it_finds_what_transformers_finds(
    llm: LLM, oracle: PreTrainedModel, beam_width: int
) -> None:
    params = BeamSearchParams(beam_width=beam_width, max_tokens=10, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, llm.beam_search(prompts, params), strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]),
            num_beams=beam_width,
            num_return_sequences=beam_width,
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [sequence.tokens for sequence in output.sequences] == expected.sequences.tolist()
        if beam_width > 1:
            sums = [sequence.cum_logprob / 10 for sequence in output.sequences]
            assert sums == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def plain_beam_search(
    oracle: PreTrainedModel, prompt: list[int], params: BeamSearchParams, temperature: float = 1.0
) -> list[tuple[list[int], float]]:
    """By definition, one sequence after the other: tokens and log-probability of the best, best first."""
    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    ended: list[tuple[list[int], float, int]] = []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            logprobs = torch.log_softmax(oracle_logits(oracle, tokens)[-1] / temperature, dim=-1)
            values, ids = logprobs.topk(2 * params.beam_width)
            for value, token_id in zip(values.tolist(), ids.tolist(), strict=True):
                if token_id in END_TOKENS and not params.ignore_eos:
                    ended.append((tokens, total + value, len(tokens)))
                else:
                    grown.append(([*tokens, token_id], total + value))
        beams = sorted(grown, key=lambda beam: -beam[1])[: params.beam_width]
    everything = ended + [(tokens, total, len(tokens)) for tokens, total in beams]
    everything.sort(key=lambda entry: -entry[1] / entry[2] ** params.length_penalty)
    return [(tokens, total) for tokens, total, _ in everything[: params.beam_width]]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -2.0])
@pytest.mark.one_case_quick
def test_sequences_that_end_are_ranked_with_those_that_go_on(
    llm: LLM, oracle: PreTrainedModel, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width=6, max_tokens=12, length_penalty=length_penalty)
    ended = 0
    prompts = random_prompts((3, 7, 12, 30), VOCAB_SIZE, seed=8)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = plain_beam_search(oracle, prompt, params)
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
        found = [sequence.cum_logprob for sequence in output.sequences]
        assert found == pytest.approx([total for _, total in expected], abs=1e-3)
        reasons = {(len(sequence.tokens) < len(prompt) + 12, sequence.finish_reason) for sequence in output.sequences}
        assert reasons <= {(True, "stop"), (False, "stop"), (False, "length")}
        ended += sum(sequence.finish_reason == "stop" for sequence in output.sequences)
    assert ended > 0 or length_penalty > 0, "no sequence of this model ended, so the test shows nothing"


@pytest.mark.parametrize("temperature", [0.005, 0.7, 1.0, 3.0])
def test_sequences_are_compared_by_the_models_own_logprobs_at_any_temperature(llm: LLM, temperature: float) -> None:
    greedy = _search(llm, beam_width=5, max_tokens=8)
    drawn = _search(llm, beam_width=5, max_tokens=8, temperature=temperature)
    assert [sequence.tokens for sequence in drawn.sequences] == [sequence.tokens for sequence in greedy.sequences]
    assert [one.cum_logprob for one in drawn.sequences] == pytest.approx([one.cum_logprob for one in greedy.sequences])


def test_processed_logprobs_are_those_at_the_temperature(llm: LLM, oracle: PreTrainedModel, tmp_path: Path) -> None:
    save_checkpoint(oracle, tmp_path)
    write_tokenizer(tmp_path, byte_level_tokenizer())
    params = BeamSearchParams(beam_width=4, max_tokens=8, temperature=2.5, length_penalty=0.0, ignore_eos=True)
    with LLM(str(tmp_path), **SMALL, logprobs_mode="processed_logprobs") as processed:
        (output,) = processed.beam_search([{"prompt_token_ids": PROMPTS[1]}], params)
    expected = plain_beam_search(oracle, PROMPTS[1], params, temperature=2.5)
    assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
    found = [sequence.cum_logprob for sequence in output.sequences]
    assert found == pytest.approx([total for _, total in expected], abs=1e-3)
    (raw,) = llm.beam_search([{"prompt_token_ids": PROMPTS[1]}], params)
    assert raw.sequences[0].cum_logprob > found[0] + 1


def _search(llm: LLM, **params: Any) -> BeamSearchOutput:
    (output,) = llm.beam_search({"prompt_token_ids": PROMPTS[0]}, BeamSearchParams(**params))
    return output


def test_the_logprobs_of_a_sequence_add_up(llm: LLM) -> None:
    output = _search(llm, beam_width=3, max_tokens=6, ignore_eos=True)
    for sequence in output.sequences:
        generated = sequence.tokens[len(PROMPTS[0]) :]
        values = [row[token_id].logprob for token_id, row in zip(generated, sequence.logprobs, strict=True)]
        assert sum(values) == pytest.approx(sequence.cum_logprob)
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)


def test_the_end_token_is_kept_when_asked(llm: LLM) -> None:
    kept = _search(llm, beam_width=8, max_tokens=12, length_penalty=0.0, include_stop_str_in_output=True)
    cut = _search(llm, beam_width=8, max_tokens=12, length_penalty=0.0)
    assert any(sequence.finish_reason == "stop" for sequence in kept.sequences)
    for one, other in zip(kept.sequences, cut.sequences, strict=True):
        if one.finish_reason == "stop":
            assert one.tokens[-1] in END_TOKENS
            assert one.tokens[:-1] == other.tokens
        else:
            assert one.tokens == other.tokens


def test_the_search_ends_where_the_context_ends(llm: LLM) -> None:
    prompt = [5] * 124
    (output,) = llm.beam_search(
        {"prompt_token_ids": prompt}, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    )
    assert [len(sequence.tokens) for sequence in output.sequences] == [128, 128]
    with pytest.raises(ContextTooLong):
        llm.beam_search({"prompt_token_ids": [5] * 129}, BeamSearchParams(beam_width=2, max_tokens=1))


def test_nothing_is_left_of_a_search(llm: LLM) -> None:
    _search(llm, beam_width=4, max_tokens=5)
    assert not llm._session._core.has_unfinished_requests()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1.*0 to 10000"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
    ],
)
def test_bad_parameters_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})


def test_bad_requests_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="beam_width=11 needs twice as many logprobs.*logprobs=22.* at most 20"):
        _search(llm, beam_width=11, max_tokens=2)
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: The prompt is empty"):
        llm.beam_search([[5], []], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(InvalidParameter, match="params=None.*BeamSearchParams"):
        llm.beam_search("x", None)  # type: ignore[arg-type]
