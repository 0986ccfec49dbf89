"""Names, kinds and meanings of all metrics of a server, beside vLLM's names."""

from __future__ import annotations

from typing import Final, NamedTuple

SAME: Final = "same"


class Described(NamedTuple):
    """Description of a metric.

    kind: "counter", whose name ends in `_total` when it is scraped; "gauge", "histogram" or "info".
    vllm: name in vLLM after `vllm:`, SAME, or None if vLLM has none.
    """

    kind: str
    help: str
    vllm: str | None = SAME


# Further names of vLLM's, by Penstock's: those of older releases, and one that is equal where each sample counts as a
# request. They are scraped with metrics_prefix="vllm".
NAMES_OF_VLLM = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "request_generation_tokens": "request_max_num_generation_tokens",
}
# By name, without the prefix `penstock:`.
TABLE: dict[str, Described] = {
    "num_requests_running": Described("gauge", "Requests that run: they hold blocks of the KV cache."),
    "num_requests_waiting": Described("gauge", "Requests that a scheduler keeps waiting, new or preempted."),
    "num_requests": Described("gauge", "Unfinished requests in the broker, with those on their way to a core.", None),
    "num_queued_requests": Described("gauge", "Requests beyond max_num_requests_running; the queue's limit.", None),
    "num_queued_tokens": Described("gauge", "Prompt tokens of the requests without a token so far.", None),
    "max_num_requests_running": Described(
        "gauge", "Requests that all cores may run at once (max_num_seqs each).", None
    ),
    "kv_cache_usage_perc": Described(
        "gauge", "Share of the KV cache that requests hold, 0 to 1: of blocks or of states, whichever is larger."
    ),
    "encoder_cache_usage_perc": Described(
        "gauge", "Share of the encoder cache that has features of images, sounds and videos, 0 to 1.", None
    ),
    "num_encoder_cache_tokens": Described(
        "gauge", "Tokens of items for whose features the encoder caches of all cores have room.", None
    ),
    "num_kv_cache_blocks": Described("gauge", "Blocks of the KV cache, of all cores.", "cache_config_info"),
    "num_states": Described("gauge", "Recurrent states for which there is room, of all cores.", None),
    "num_state_snapshots": Described("gauge", "Recurrent states that are kept for requests to begin from.", None),
    "kv_cache_block_size": Described("gauge", "Tokens of a KV-cache block.", "cache_config_info"),
    "num_cores": Described("gauge", "Engine cores.", None),
    "num_cores_recovering": Described("gauge", "Engine cores that are being started again.", None),
    "core_stalled_seconds": Described("gauge", "Time since a core with requests has computed a token.", None),
    "broker_heartbeat_age_seconds": Described(
        "gauge", "Time since the broker's last heartbeat; the gauges' age.", None
    ),
    "alive": Described("gauge", "1 if /health answers with 200.", None),
    "ready": Described("gauge", "1 if /ready answers with 200.", None),
    "start_time_seconds": Described("gauge", "Start of the server, in Unix time.", "process_start_time_seconds"),
    "build": Described("info", "Version of Penstock, and the model.", None),
    "request_success": Described(
        "counter",
        "Requests that ended, by finished_reason: stop, length, abort (client or deadline), error, invalid (400).",
    ),
    "requests_refused": Described(
        "counter", "Requests that no core admitted, by reason: queue_full (429), invalid (400), error.", None
    ),
    "prompt_tokens": Described("counter", "Tokens of prompts that ran, cached ones too."),
    "generation_tokens": Described("counter", "Generated tokens."),
    "prefix_cache_queries": Described("counter", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": Described("counter", "Prompt tokens that were found in the prefix cache."),
    "mm_cache_queries": Described(
        "counter", "Images, sounds and videos of prompts that were looked up among processed ones."
    ),
    "mm_cache_hits": Described("counter", "Images, sounds and videos of prompts that were processed before."),
    "encoder_cache_queries": Described(
        "counter", "Images, sounds and videos whose features requests needed, from the current cores.", None
    ),
    "encoder_cache_hits": Described(
        "counter", "Images, sounds and videos whose features were in the encoder cache of the current cores.", None
    ),
    "weight_version": Described(
        "gauge", "Version of the weights, which rises with each update of a trainer or reload; 0 at the start.", None
    ),
    "state_snapshots_taken": Described(
        "counter", "Recurrent states kept for later requests, by the current cores.", None
    ),
    "state_snapshots_evicted": Described(
        "counter", "Kept recurrent states that made room for others, of the current cores.", None
    ),
    "num_preemptions": Described("counter", "Preemptions of running requests; the loss of a worker or core is one."),
    "spec_decode_num_drafts": Described("counter", "Verified drafts: one per request and step with draft tokens."),
    "spec_decode_num_draft_tokens": Described("counter", "Verified draft tokens."),
    "spec_decode_num_accepted_tokens": Described("counter", "Accepted draft tokens."),
    "spec_decode_num_accepted_tokens_per_pos": Described("counter", "Accepted draft tokens by position in the draft."),
    "expert_tokens": Described(
        "counter", "Tokens that experts computed, by layer, once for each expert of a token (--expert-stats).", None
    ),
    "expert_imbalance": Described(
        "gauge", "Tokens of a layer's busiest expert over the mean of its experts; 1 at best (--expert-stats).", None
    ),
    "process_restarts": Described(
        "counter", "Processes started again after a loss: broker, front-end, core, workers (of a core, together).", None
    ),
    "http_requests": Described(
        "counter",
        "HTTP requests that got a status, by method, status and handler: the route, or none.",
        "http_requests_total, without prefix",
    ),
    "time_to_first_token_seconds": Described("histogram", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": Described(
        "histogram", "Between two tokens of a request; 0 between tokens of one step (accepted drafts)."
    ),
    "request_time_per_output_token_seconds": Described(
        "histogram", "Mean time between the tokens of a request, when it ends."
    ),
    "e2e_request_latency_seconds": Described("histogram", "From a request's arrival to its end."),
    "request_queue_time_seconds": Described("histogram", "From a request's arrival until it first runs."),
    "request_prefill_time_seconds": Described("histogram", "From a request's first run to its first token."),
    "request_decode_time_seconds": Described("histogram", "From a request's first token to its last."),
    "request_inference_time_seconds": Described("histogram", "From a request's first run to its last token."),
    "request_prompt_tokens": Described("histogram", "Prompt tokens of a request, when it ends."),
    "request_generation_tokens": Described("histogram", "Generated tokens of a request, when it ends."),
    "request_params_max_tokens": Described("histogram", "max_tokens of a request, when it ends."),
    "step_duration_seconds": Described("histogram", "Time of an engine core's step.", None),
    "step_phase_seconds": Described(
        "histogram",
        "Time of an engine core's step by phase: schedule, execute, grammar, sample, wait, update, send.",
        None,
    ),
    "iteration_tokens_total": Described("histogram", "Tokens that an engine core's step computes."),
}
