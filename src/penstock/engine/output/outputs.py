"""Outputs of requests, as callers get them."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.contract import ArrayBytes
from penstock.features.hidden_states.messages import HiddenStates, OutputHiddenStates
from penstock.features.kv_transfer import KVTransferResult
from penstock.features.lora.request import LoRARequest
from penstock.features.weight_transfer.messages import WeightVersion
from penstock.scheduler.acceptance import SpecDecodeMetrics


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position.

    rank: 1 for the most likely token of the vocabulary. decoded_token: the token as text.
    """

    logprob: float
    rank: int
    decoded_token: str


class CompletionOutput(msgspec.Struct, kw_only=True):
    """Generated sample of a prompt.

    index: number among the prompt's n outputs, from 0.
    text: without special tokens (unless skip_special_tokens=False), and without the stop token or stop string that
        ended it (unless include_stop_str_in_output); token_ids has all tokens. Empty with detokenize=False.
    cumulative_logprob: sum over the tokens; None unless log-probabilities were requested.
    logprobs: per token, the sampled token's and those of the most likely ones, by token id.
    finish_reason: "stop" (a stop token or stop string), "length", "abort", "error"; None while it is unfinished.
    stop_reason: the entry of `stop_token_ids` or `stop` that ended it; None for the model's end-of-sequence token.
    parts: results of features by name, of an output that has ended.
    schema_errors: with `StructuredOutputsParams.unenforced="check"`, at the end: what does not hold of the output by
        its JSON schema, each with its JSON pointer; empty if all does. None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parts: dict[str, Any] = {}
    schema_errors: list[str] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def hidden_states(self) -> HiddenStates | None:
        """Hidden states of its tokens; None unless they were requested and it has ended."""
        return self.parts.get(OutputHiddenStates.feature)

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """Parameters that the KV connector returns at its end; None without any."""
        return self.parts.get(KVTransferResult.feature)

    @property
    def weight_version(self) -> int:
        """Version of the weights at its end, which rises with every update of a trainer; 0 for those of the start."""
        version: int = self.parts.get(WeightVersion.feature, 0)
        return version


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of a request in monotonic seconds (`time.monotonic`), and its counts.

    For a request with several outputs: the earliest first times, the latest last ones, and sums over its outputs.
    decoding_s: from an output's first token to its last, summed over the outputs.
    spec_decode_metrics: draft tokens and acceptance; accepted tokens after a stop do not count.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_outputs: int = 1
    decoding_s: float = 0.0
    spec_decode_metrics: SpecDecodeMetrics = msgspec.field(default_factory=SpecDecodeMetrics)

    @property
    def time_in_queue_s(self) -> float | None:
        return _span(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token_s(self) -> float | None:
        return _span(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between tokens of one output, after its first."""
        num_intervals = self.num_generated_tokens - self.num_outputs
        return self.decoding_s / num_intervals if num_intervals > 0 else None

    @property
    def prefill_time_s(self) -> float | None:
        return _span(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time_s(self) -> float | None:
        return _span(self.first_token_time, self.last_token_time)

    @property
    def inference_time_s(self) -> float | None:
        """Prefill and decode time, with preemptions."""
        return _span(self.first_scheduled_time, self.last_token_time)

    @property
    def latency_s(self) -> float | None:
        return _span(self.arrival_time, self.finished_time)


class RequestOutput(msgspec.Struct, kw_only=True):
    """Output of a request.

    prompt: None when the prompt was given as token ids. prompt_token_ids: tokens of the prompt after truncation.
    outputs: one per sample, `SamplingParams.n` of them.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    prompt_logprobs: per token of the prompt its own log-probability and those of the most likely ones, by token id;
        None for the first token, and altogether unless requested.
    pooled_data: pooled hidden states of the prompt, from an engine that pools; the outputs have no tokens then.
    error: why the request failed, when an output's finish_reason is "error"; the output so far is kept.
    is_invalid: whether the request itself is the cause of its error, such as a JSON schema that nothing satisfies.
    lora_request: its adapter, without weights from memory; None for the model itself.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    is_invalid: bool = False
    pooled_data: ArrayBytes | None = None
    lora_request: LoRARequest | None = None

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """Parameters that the KV connector returns at the end of the request, of its first output that has some."""
        found = (output.kv_transfer_params for output in self.outputs)
        return next((params for params in found if params is not None), None)

    @property
    def pooled(self) -> list[Any] | None:
        """Pooled hidden states as numbers: of a text, or a list for each of its tokens."""
        return None if self.pooled_data is None else self.pooled_data.to_numpy().tolist()


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
