"""The offline API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.config import EngineConfig
from penstock.config.vllm import RefusesMethods, also_from_vllm
from penstock.contract import SamplingParams
from penstock.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from penstock.engine.conversation import Message, list_of_conversations, render_prompt
from penstock.engine.input_processor import located
from penstock.engine.metrics import Metric
from penstock.engine.outputs import RequestOutput
from penstock.engine.prompts import Prompts, as_list, list_of_prompts
from penstock.engine.session import Session
from penstock.engine.worker_calls import WorkerCalls
from penstock.errors import InvalidRequest, UnsupportedFeature
from penstock.observability.logging import configure_logging
from penstock.observability.progress_bar import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM(WorkerCalls, RefusesMethods):
    """A model in this process that generates text.

    model: "demo" (shipped), a folder (also as a Path), or a hub id. tokenizer: the same; None takes the model's own.
    dtype: "auto" (what the checkpoint has and the device can), "float32", "bfloat16" or "float16".
    quantization: None, "int8" or "int4": what the weights of linear layers are rounded to while loading.
    quantization_calibration: a JSONL file of texts to round to "int4" for; "auto" takes the one in the model's folder
        if there is one, "none" none.
    device: "auto" (CUDA where there is one), "cpu" or "cuda".
    max_model_len: longest context in tokens, prompt and output together; None takes the model's own.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step, over all requests;
        None takes 2048, or 512 with stages.
    block_size: positions per block of the KV cache.
    kv_cache_memory_bytes: size of the KV cache, in bytes or as "1GiB"; None lets `memory_fraction` decide.
    memory_fraction: share of the device's memory for weights, activations and KV cache; None takes what is free, and
        the KV cache no more than half of a CPU machine, or 0.9 of a GPU.
    enable_prefix_caching: reuse the KV of prompts that begin alike.
    async_scheduling: schedule a step before the previous one's tokens are known; None follows the device.
    seed: from it come the seeds of requests that bring none, so equal runs of equal engines give equal tokens.
    load_format: "auto", "safetensors", "pt", "sharded_state", or "dummy" for random weights.
    other_options: any other option of `EngineConfig.create`, and those of vLLM, of which what Penstock does not have is
        refused by the feature's name; docs/options.md and docs/vllm.md list them.

    Use it in a `with` block, or call `close()`: both give back all memory and threads.

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
        if config.model.pools:
            raise UnsupportedFeature(
                f"output_head={config.model.output_head!r} pools, and LLM generates text. Leave it out."
            )
        self._config = config
        self._session = Session(config)

    @property
    def config(self) -> EngineConfig:
        """Options of this engine, all of them, with defaults; frozen."""
        return self._config

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, prompt and output together."""
        return self._session.max_model_len

    @also_from_vllm
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | int | None = None,
    ) -> list[RequestOutput]:
        """Generate text for one prompt or many; the outputs are in the prompts' order.

        prompts: text, token ids, or a dictionary with `prompt` or `prompt_token_ids` and perhaps `cache_salt`; or a
            list of such. Token ids are a list, an array or a tensor; one of two dimensions has a prompt per row.
        sampling_params: one for all prompts, or one per prompt; None takes those of
            `get_default_sampling_params`.
        use_tqdm: show a progress bar, if standard error is a terminal.
        priority: one for all prompts, or one per prompt; lower runs first. Needs an engine with policy="priority".

        All prompts are checked before the first one runs. A request that fails while it runs does not stop the
        others: its output has finish_reason "error", and its `RequestOutput.error` says why.

        Raises InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter, LifecycleError after
        `close`. Whatever ends the call early, Ctrl-C included, aborts its requests, and the next call works.
        """
        prompt_list = list_of_prompts(prompts)
        if sampling_params is None:
            sampling_params = self._session.default_sampling_params
        params_list = _list_of_params(sampling_params, len(prompt_list))
        priorities = _list_of_priorities(priority, len(prompt_list))
        names = [f"prompts[{index}]" if len(prompt_list) > 1 else "" for index in range(len(prompt_list))]
        requests = [
            self._session.accept(prompt, params, name, priority=number)
            for prompt, params, name, number in zip(prompt_list, params_list, names, priorities, strict=True)
        ]
        outputs: dict[str, RequestOutput] = {}
        with progress_bar(len(requests), is_wanted=use_tqdm) as bar, closing(self._session.run(requests)) as steps:
            for progress in steps:
                if progress.finished:
                    outputs[progress.req_id] = progress.output()
                    bar.update()
        return [outputs[accepted.request.req_id] for accepted in requests]

    @also_from_vllm
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | int | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several; the outputs are in the conversations' order.

        messages: dictionaries with `role` and `content`; or a list of such lists.
        chat_template: a Jinja template, instead of the model's own; or the path of a file with one, as a Path, or as
            text that ends with `.jinja`, `.jinja2` or `.j2`.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: let the model go on with the last message instead; needs add_generation_prompt=False.
        tools: descriptions of functions; a template without a variable for them is refused.
        chat_template_kwargs: other variables of the template, such as `documents` or `enable_thinking`.

        Otherwise as `generate`; raises InvalidRequest also when there is no template or it refuses the messages.
        """
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
                )
            prompts.append(prompt)
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    @also_from_vllm
    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt; the outputs are in the prompts' order.

        Raises InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter.
        """
        return beam_search(self._session, list_of_prompts(prompts), params)

    @also_from_vllm
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while requests hold blocks.

        reset_running_requests: take the blocks from running requests, which compute theirs again.
        """
        return self._session.reset_prefix_cache(reset_running_requests)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as Transformers loads it: always the same object.

        The engine encodes and decodes with a tokenizer of its own, which gives the same tokens; padding or truncation
        set here do not reach it. Templates are this one's, so a `chat_template` that is set here is what `chat` uses.
        The first call imports Transformers.

        Raises TokenizerError when Transformers cannot load it.
        """
        return self._session.tokenizer.for_callers()

    def get_metrics(self) -> list[Metric]:
        """Metrics of this engine since its start, as `Counter`, `Gauge`, `Histogram` and `Vector` with name and labels.

        Their names are vLLM's, with `penstock:` in front; docs/requests.md lists them.
        """
        return self._session.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling parameters take, as a copy.

        The model's own defaults, where its generation_config.json (or the options generation_config and
        override_generation_config) names any, else those of `SamplingParams`.
        """
        return self._session.default_sampling_params.clone()

    def close(self) -> None:
        """Give back all memory and threads. A second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _list_of_params(params: Any, num_prompts: int) -> list[Any]:
    listed = as_list(params)
    if listed is None:
        return [params] * num_prompts
    if len(listed) != num_prompts:
        raise InvalidRequest(
            f"There are {num_prompts} prompts but {len(listed)} sampling_params. Give one for all, or one per prompt."
        )
    return listed


def _list_of_priorities(priority: Any, num_prompts: int) -> list[Any]:
    if priority is None or isinstance(priority, int):
        return [priority or 0] * num_prompts
    listed = as_list(priority)
    if listed is None or len(listed) != num_prompts:
        raise InvalidRequest(f"priority={priority!r} is not valid. Allowed: an integer, or a list of {num_prompts}.")
    return listed
