"""Measurement of weight formats: the scores of a text, its speed and the bytes of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench.quality.formats import engine_options
from penstock.bench.quality.scores import Closeness, TokenScore, compare, loss
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.output.outputs import RequestOutput
from penstock.errors import ConfigError, PenstockError
from penstock.llm import LLM
from penstock.text.tokenizer import Tokenizer, load_tokenizer

# Most likely tokens of a position that are compared.
NUM_LIKELIEST = 64
# Tokens that one request generates for the speed, and the tokens of its prompt.
_OUTPUT_LEN, _PROMPT_LEN = 48, 16


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of a text, each read without those before it.

    windows: prompts, as token ids. num_special: tokens at the start of each that are not of the text.
    """

    windows: Sequence[list[int]]
    num_special: int

    @property
    def num_scored(self) -> int:
        """Tokens that have a log-probability: all of the text but those at the start of a prompt."""
        return sum(len(window) - max(1, self.num_special) for window in self.windows)


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores and costs of one weight format.

    prompt_tokens_per_s: while the text was scored. output_tokens_per_s: of one request. weight_bytes: over all ranks.
    """

    format: str
    scores: Sequence[TokenScore]
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Row of the result. closeness: to the reference."""

    format: str
    loss: float
    closeness: Closeness
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    weight_bytes: int


def split_text(text: str, tokenizer: Tokenizer, window: int, max_tokens: int) -> Text:
    """Tokenise the beginning of a text, and split it into windows of equal length; the rest of it is left out.

    window: tokens of the text per window. Raises ConfigError for a text that is shorter than one.
    """
    special = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    starts = range(0, len(ids) - window + 1, window)
    if not starts:
        raise ConfigError(
            f"--text has {len(ids):,} tokens, and a window has {window:,}. Give a longer text, or a smaller --window."
        )
    return Text([[*special, *ids[start : start + window]] for start in starts], len(special))


def evaluate(
    model: str,
    text: str,
    formats: Sequence[str],
    engine: Mapping[str, Any],
    *,
    against: str,
    reference_model: str | None = None,
    window: int,
    max_tokens: int,
    on_measured: Callable[[str], object],
) -> tuple[Text, list[Quality]]:
    """Measure every format on a text, the reference first.

    engine: options of all engines. against: format of the reference. reference_model: its model; None for the same.
    on_measured: called with the name of a format before it is measured.
    """
    config = EngineConfig.create(reference_model or model, **engine_options(against, engine))
    tokens = split_text(text, load_tokenizer(config.model.tokenizer_folder), window, max_tokens)
    wanted = [(against, reference_model or model, reference_model or against)]
    wanted += [(format, model, format) for format in formats if reference_model is not None or format != against]
    results: list[Quality] = []
    reference: Sequence[TokenScore] = ()
    for format, name, shown in wanted:
        on_measured(shown)
        found = _measure(name, tokens, format, shown, engine)
        reference = reference or found.scores
        results.append(
            Quality(
                shown,
                loss(found.scores),
                compare(found.scores, reference),
                found.prompt_tokens_per_s,
                found.output_tokens_per_s,
                found.weight_bytes,
            )
        )
    return tokens, results


def _measure(model: str, text: Text, format: str, shown: str, engine: Mapping[str, Any]) -> Measured:
    longest = max(max(map(len, text.windows)) + 1, _PROMPT_LEN + _OUTPUT_LEN)
    defaults = {"max_logprobs": NUM_LIKELIEST, "max_model_len": longest}
    given = {name: value for name, value in engine.items() if value is not None}
    with LLM(model, **engine_options(format, {**defaults, **given})) as llm:
        num_likeliest = min(NUM_LIKELIEST, llm.config.model.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=num_likeliest, detokenize=False)
        begin = time.perf_counter()
        outputs = _completed(llm.generate(text.windows, params, use_tqdm=False))
        seconds = time.perf_counter() - begin
        scores = [score for output in outputs for score in _scores(output, text.num_special)]
        return Measured(
            shown,
            scores,
            prompt_tokens_per_s=sum(map(len, text.windows)) / seconds,
            output_tokens_per_s=_output_tokens_per_s(llm, text.windows[0][:_PROMPT_LEN]),
            weight_bytes=sum(llm.collective_rpc(_weight_bytes)),
        )


def _weight_bytes(worker: Any) -> int:
    return int(worker.weights.size_bytes)


def _output_tokens_per_s(llm: LLM, prompt: list[int]) -> float:
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT_LEN, ignore_eos=True, detokenize=False)
    (output,) = _completed(llm.generate([prompt], params, use_tqdm=False))
    per_token = output.metrics.time_per_output_token_s
    assert per_token is not None, "several tokens"
    return 1 / per_token


def _completed(outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    for output in outputs:
        if output.error is not None:
            raise PenstockError(f"A request of the evaluation failed: {output.error}")
    return outputs


def _scores(output: RequestOutput, num_special: int) -> list[TokenScore]:
    """Scores of a window's tokens after the special ones, and after the first."""
    assert output.prompt_logprobs is not None, "asked for"
    found = []
    for token, row in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[max(1, num_special) :]:
        assert row is not None, "only the first token has none"
        ranked = sorted((one.rank, other, one.logprob) for other, one in row.items() if one.rank <= NUM_LIKELIEST)
        found.append(TokenScore(row[token].logprob, {other: logprob for _, other, logprob in ranked}))
    return found
