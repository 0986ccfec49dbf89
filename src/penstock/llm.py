"""Offline inference: the class `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.config import EngineConfig
from penstock.config.vllm import RefusesMethods, also_from_vllm
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from penstock.engine.inputs.conversation import Message, list_of_conversations, render_prompt
from penstock.engine.inputs.input_processor import located
from penstock.engine.inputs.pooling_prompts import refuse_generation
from penstock.engine.inputs.prompts import Prompts, list_of_params, list_of_priorities, list_of_prompts, with_parts
from penstock.engine.llm_engine import LLMEngine
from penstock.engine.offline_pooling import PoolingMethods, with_adapters
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.session import Session
from penstock.engine.statistics.expert_load import sum_of_workers
from penstock.engine.statistics.metrics import Metric
from penstock.engine.worker_calls import WorkerCalls
from penstock.errors import UnsupportedFeature
from penstock.features.hidden_states.messages import parts_of_hidden_states
from penstock.features.kv_files.methods import PrefixMethods
from penstock.features.lora.request import LoRARequest
from penstock.features.sleep.methods import SleepMethods
from penstock.features.weight_transfer.methods import WeightTransfers
from penstock.observability.logging import configure_logging

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from penstock.models.interface import LanguageModel

_Result = TypeVar("_Result")


class LLM(PoolingMethods, SleepMethods, WeightTransfers, PrefixMethods, WorkerCalls[list[Any]], RefusesMethods):
    """Offline engine: generates text with a model, or pools texts (embeddings, scores, classes).

    model: "demo" (shipped), a folder (also as a Path), or a hub id. tokenizer: likewise; None takes the model's own.
    dtype: "auto" (the checkpoint's, if the device supports it), "float32", "bfloat16" or "float16".
    quantization: None, "int8" or "int4": quantisation of linear weights while loading; "none" dequantises a GGUF file.
    quantization_calibration: JSONL file of calibration texts for "int4"; "auto" takes the one in the model's folder if
        there is one, else a general text that ships, for "int8" too; "none" rounds to nearest.
    device: "auto" (CUDA if available), "cpu" or "cuda".
    max_model_len: longest context in tokens, prompt and output together; None takes the model's own.
    max_num_seqs: most requests that run at once. max_num_batched_tokens: token budget of one step, over all requests;
        None takes 2048, or 512 with pipeline parallelism.
    block_size: tokens per block of the KV cache.
    kv_cache_memory_bytes: size of the KV cache, in bytes or as "1GiB"; None lets `memory_fraction` decide.
    memory_fraction: share of the device's memory for weights, activations and KV cache; None takes the free memory, and
        for the KV cache at most 0.9 of a GPU, or a quarter of a CPU machine, or up to half if one request needs it.
    enable_prefix_caching: reuse the KV cache of common prompt prefixes.
    async_scheduling: schedule a step before the previous one's tokens are known; None follows the device.
    seed: seed of the seeds of requests without one, so that equal runs of equal engines give equal tokens.
    load_format: "auto", "safetensors", "pt", "gguf", "sharded_state", or "dummy" for random weights.
    other_options: any other option of `EngineConfig.create`, and those of vLLM; one of a feature that Penstock does not
        have is refused by the feature's name; docs/options.md and docs/vllm.md list them.

    Use it in a `with` block, or call `close()`: both free all memory and threads.

    Raises ConfigError, ModelError or OutOfMemory (and their kinds) when the engine cannot be started.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        quantization_calibration: str = "auto",
        device: str = "auto",
        max_model_len: int | str | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_cache_memory_bytes: int | str | None = None,
        memory_fraction: float | None = None,
        enable_prefix_caching: bool = True,
        async_scheduling: bool | None = None,
        seed: int = 0,
        load_format: str = "auto",
        **other_options: Any,
    ) -> None:
        configure_logging()
        config = EngineConfig.create(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            quantization=quantization,
            quantization_calibration=quantization_calibration,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            memory_fraction=memory_fraction,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            seed=seed,
            load_format=load_format,
            **other_options,
        )
        if config.model.pools and config.model.pooling is None:
            raise UnsupportedFeature(
                f"output_head={config.model.output_head!r} pools, and LLM generates text. Use AsyncEngine, whose "
                "outputs have `pooled`, or leave it out."
            )
        self._config = config
        self._session = Session(config)

    @property
    def config(self) -> EngineConfig:
        """All options of this engine, with defaults; frozen."""
        return self._config

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, prompt and output together."""
        return self._session.max_model_len

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """This engine, step by step: its requests run beside those of other methods."""
        return LLMEngine(self._config, self._session)

    @also_from_vllm
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
        return_hidden_states: bool | str = False,
        hidden_states_layers: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate text for one prompt or many; the outputs are in the prompts' order.

        prompts: text, token ids, or a dictionary with `prompt` or `prompt_token_ids` and perhaps `cache_salt`; or a
            list of such. Token ids are a list, an array or a tensor; one of two dimensions has a prompt per row.
        sampling_params: one for all prompts, or one per prompt; None takes those of
            `get_default_sampling_params`.
        use_tqdm: show a progress bar, if standard error is a terminal.
        lora_request: adapter of all prompts, or one per prompt (None for none). Needs an engine with enable_lora=True.
        priority: one for all prompts, or one per prompt; lower runs first. Needs an engine with policy="priority".
        return_hidden_states: "last" (also True) or "all": tokens whose hidden states each output has
            (`CompletionOutput.hidden_states`). hidden_states_layers: their layers, from 0 for the embeddings on; None
            for the output of the final norm. docs/hidden_states.md has the rest.

        All prompts are checked before the first one runs. A request that fails while it runs does not stop the
        others: its output has finish_reason "error", and its `RequestOutput.error` says why.

        Raises InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter, CheckpointError or
        UnsupportedFeature for an adapter that cannot be loaded, LifecycleError after `close`. Whatever ends the call
        early, Ctrl-C included, aborts its requests, and the next call works.
        """
        refuse_generation(self._session.model_config)
        prompt_list = list_of_prompts(prompts)
        if sampling_params is None:
            sampling_params = self._session.default_sampling_params
        params_list = list_of_params("sampling_params", sampling_params, len(prompt_list))
        priorities = list_of_priorities(priority, len(prompt_list))
        adapters = list_of_params("lora_requests", lora_request, len(prompt_list))
        names = [f"prompts[{index}]" if len(prompt_list) > 1 else "" for index in range(len(prompt_list))]
        parts = parts_of_hidden_states(return_hidden_states, hidden_states_layers)
        with_all_parts = [with_parts(prompt, parts) for prompt in with_adapters(prompt_list, adapters)]
        each = zip(with_all_parts, params_list, names, priorities, strict=True)
        requests = [
            self._session.accept(prompt, params, name, priority=number) for prompt, params, name, number in each
        ]
        self._add_adapters(adapters)
        return self._session.finish(requests, shows_bar=use_tqdm)

    @also_from_vllm
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        return_hidden_states: bool | str = False,
        hidden_states_layers: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; the outputs are in the conversations' order.

        messages: dictionaries with `role` and `content`; or a list of such lists.
        chat_template: a Jinja template, instead of the model's own; or the path of a file with one, as a Path, or as
            text that ends with `.jinja`, `.jinja2` or `.j2`.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: let the model go on with the last message instead; needs add_generation_prompt=False.
        tools: descriptions of functions; a template without a variable for them gets them in a message.
        chat_template_kwargs: other variables of the template, such as `documents` or `enable_thinking`.
        chat_template_content_format: contents of messages for the template: "string", "openai" (lists of parts), or
            "auto", what it reads.
        mm_processor_kwargs: options of the model's processor of images, audio and video.

        Otherwise as `generate`; raises InvalidRequest also when there is no template or it refuses the messages.
        """
        refuse_generation(self._session.model_config)
        conversations = list_of_conversations(messages)
        prompts = []
        for index, conversation in enumerate(conversations):
            with located(f"conversations[{index}]" if len(conversations) > 1 else ""):
                prompt = render_prompt(
                    self._session.tokenizer,
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                    chat_template_content_format=chat_template_content_format,
                )
            if mm_processor_kwargs:
                prompt["mm_processor_kwargs"] = mm_processor_kwargs
            prompts.append(prompt)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm,
            lora_request=lora_request,
            priority=priority,
            return_hidden_states=return_hidden_states,
            hidden_states_layers=hidden_states_layers,
        )

    @also_from_vllm
    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt; the outputs are in the prompts' order.

        lora_request: as in `generate`, whose errors it raises.
        """
        refuse_generation(self._session.model_config)
        prompt_list = list_of_prompts(prompts)
        adapters = list_of_params("lora_requests", lora_request, len(prompt_list))
        prompt_list = with_adapters(prompt_list, adapters)
        return beam_search(self._session, prompt_list, params, lambda: self._add_adapters(adapters))

    @also_from_vllm
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache; False, and nothing is done, while requests hold blocks.

        reset_running_requests: preempt running requests first; their KV cache is recomputed.
        reset_connector: forget blocks that are kept elsewhere, too: those of a KV connector, and this engine's in
            kv_offload_dir; False if that fails.
        """
        return self._session.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Forget what was made of images, audio and videos of earlier prompts."""
        self._session.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Drop the encoders' outputs that the workers keep; running requests have theirs computed again."""
        if self._session.model_config.media_limits:
            self.collective_rpc("reset_encoder_cache")

    def _call_workers(self, call: RpcCall) -> list[Any]:
        return self._session.collective_rpc(call)

    def _run_prompt(self, prompt: Any, params: SamplingParams) -> list[int]:
        return self.generate([prompt], params, use_tqdm=False)[0].prompt_token_ids

    @property
    def _kv_folder(self) -> Path | None:
        return self._session.config.kv_tiers.folder

    def _let_rest(self, rests: Callable[[], bool]) -> None:
        self._session.let_rest(rests)

    def apply_model(self, func: Callable[[LanguageModel], _Result]) -> list[_Result]:
        """Call a function with each worker's model."""
        return self.collective_rpc("apply_model", args=(func,))

    @also_from_vllm
    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start profiling every step; `profiler_dir` must be set.

        profile_prefix: prefix of the traces' file names. Raises ConfigError without `profiler_dir`, LifecycleError when
        a profile runs already.
        """
        self.collective_rpc("profile", kwargs={"is_start": True, "profile_prefix": profile_prefix})

    def stop_profile(self) -> list[str]:
        """Stop profiling. Returns the path of each worker's trace, for https://ui.perfetto.dev.

        Raises LifecycleError when none runs.
        """
        paths: list[str | None] = self.collective_rpc("profile", kwargs={"is_start": False})
        return [path for path in paths if path is not None]

    def get_model_inspection(self) -> str:
        """The first worker's model as a tree of text: modules with sizes, dtypes and kernels."""
        answers: list[str] = self.collective_rpc("get_model_inspection", unique_reply_rank=0)
        return answers[0]

    def start_expert_stats(self) -> None:
        """Count the tokens of each expert, from zero on. Raises UnsupportedFeature for a model without native experts.

        Until it is called nothing is counted. A worker that replaces a lost one has to be started again. With the
        option `expert_stats` all workers count from their start on.
        """
        self.collective_rpc("start_expert_stats")

    def get_expert_stats(self) -> dict[int, list[int]]:
        """Tokens that each expert computed since `start_expert_stats`, by layer, summed over all replicas.

        The last layer computes only the tokens whose logits are wanted. Raises LifecycleError before a start.
        """
        return sum_of_workers(self.collective_rpc("get_expert_stats"))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as Transformers loads it: always the same object.

        The engine encodes and decodes with a tokenizer of its own, which gives the same tokens; padding or truncation
        set here do not affect it. `chat` uses the `chat_template` of this tokenizer. The first call imports
        Transformers.

        Raises TokenizerError when Transformers cannot load it.
        """
        return self._session.tokenizer.for_callers()

    def get_metrics(self) -> list[Metric]:
        """Metrics of this engine since its start, as `Counter`, `Gauge`, `Histogram` and `Vector` with name and labels.

        Their names are vLLM's, with `penstock:` in front; docs/requests.md lists them.
        """
        return self._session.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of requests without any, as a copy.

        They are the model's own, from its generation_config.json (or the options generation_config and
        override_generation_config), and the defaults of `SamplingParams` otherwise.
        """
        return self._session.default_sampling_params.clone()

    def close(self) -> None:
        """Free all memory and threads. A second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
