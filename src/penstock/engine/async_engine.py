"""Asynchronous engine: streams the outputs of many concurrent requests to asyncio coroutines."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from penstock.config import EngineConfig, ModelConfig
from penstock.config.request_limits import RequestLimits
from penstock.config.vllm import RefusesMethods, also_from_vllm
from penstock.contract import PoolingParams, RequestOutputKind, RpcCall, SamplingParams
from penstock.contract.param_checks import check_member
from penstock.engine.core.core_client import CoreClient
from penstock.engine.core.core_place import with_core_process
from penstock.engine.core.core_thread import CoreThread
from penstock.engine.dispatcher import input_processor_for, output_processor_for, start_core
from penstock.engine.inputs.conversation import Message, render_prompt
from penstock.engine.inputs.default_sampling import default_sampling_params
from penstock.engine.inputs.field_limits import check_text
from penstock.engine.inputs.params_processor import check_is_params
from penstock.engine.inputs.pooling_prompts import check_is_pooling_params
from penstock.engine.inputs.prompts import DATA, Prompt, PromptDict, has_field, with_parts
from penstock.engine.inputs.request_intake import RequestIntake, checked_id
from penstock.engine.inputs.streaming_input import StreamingInput, generate_in_turns
from penstock.engine.output.output_stream import OutputStream, StreamLock
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, as_pooling
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.metrics import Metric
from penstock.engine.stream_dispatcher import AdmittedRequest, StreamDispatcher, abandon, admit, fail_all
from penstock.engine.worker_calls import WorkerCalls
from penstock.errors import PenstockError, UnsupportedParameter
from penstock.executor.processes import refuse_at_exit
from penstock.features.hidden_states.messages import parts_of_hidden_states
from penstock.features.lora.methods import AsyncAdapterMethods
from penstock.features.lora.request import LoRARequest, parts_of_adapter
from penstock.features.sleep.methods import AsyncSleepMethods
from penstock.features.weight_transfer.methods import AsyncWeightTransfers
from penstock.observability.logging import configure_logging
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.worker.capabilities import check_async_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AsyncEngine(
    AsyncAdapterMethods,
    AsyncSleepMethods,
    AsyncWeightTransfers,
    WorkerCalls[Coroutine[Any, Any, list[Any]]],
    RefusesMethods,
):
    """A model whose outputs are streamed to coroutines; no event loop waits for its steps.

    model: "demo" (shipped), a folder, or a hub id. options: those of `LLM`.

    Constructing it loads the model, which takes seconds, into a process of its own unless `enable_multiprocessing` is
    False. Use it in an `async with` block, or call `shutdown()`. Its methods may be called from any event loop, and
    from several.

    Raises ConfigError, ModelError or OutOfMemory (and their kinds) when the engine cannot be started.
    """

    def __init__(self, model: str | Path = "demo", **options: Any) -> None:
        configure_logging()
        self._set_up(EngineConfig.create(model, **options), None)

    @classmethod
    @also_from_vllm
    def from_config(
        cls,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], CoreClient] | None = None,
        *,
        front_end: int = 0,
    ) -> Self:
        """Engine with this configuration. load_core: returns its core or the client of one; None takes the default.

        front_end: number among the front ends of one broker, so that requests of two get different seeds.
        """
        engine = cls.__new__(cls)
        engine._set_up(config, load_core, front_end)
        return engine

    # vLLM's name; its `EngineArgs` are an `EngineConfig` here (`penstock.EngineArgs`).
    from_engine_args = from_config

    def _set_up(
        self, config: EngineConfig, load_core: Callable[[EngineConfig], CoreClient] | None, front_end: int = 0
    ) -> None:
        refuse_at_exit()
        check_async_engine(config)
        self.config = config
        self.has_adapters = config.lora.enable_lora
        self._default_sampling_params = default_sampling_params(config.model)
        # A damaged tokenizer is found before the weights are loaded, or while a process starts to load them.
        # A front end has no callers that ask for a tokenizer of Transformers.
        for_callers = load_core is None
        tokenizer = cache(lambda: _load_for_event_loops(config.model.tokenizer_folder, for_callers))
        begin = _start_default if load_core is None else _start_given(load_core)
        self._lock = StreamLock()
        # Streams with a reader.
        self._streams: set[OutputStream] = set()
        lock, streams = self._lock, self._streams

        def start() -> StreamDispatcher:
            core = begin(config, tokenizer)
            return StreamDispatcher(core, output_processor_for(config, tokenizer()), lock)

        self._thread = CoreThread(start=start, on_end=lambda end: fail_all(lock, streams, end))
        self._dispatcher = self._thread.dispatcher
        self._tokenizer = tokenizer()
        self._input_processor = input_processor_for(config, self._tokenizer, self._dispatcher.core, front_end)
        self._dispatcher.count_media(self._input_processor.media_intake.cache_counts)
        self._intake = RequestIntake(self._input_processor, self._thread.check_running)
        # An engine that is garbage-collected without a shutdown must free its memory.
        weakref.finalize(self, self._thread.stop).atexit = False

    @also_from_vllm
    async def generate(
        self,
        prompt: Prompt | AsyncIterable[StreamingInput],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        return_hidden_states: bool | str = False,
        hidden_states_layers: Sequence[int] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a prompt; the last one is `finished`.

        prompt: as one of `LLM.generate`; or a stream of its parts, each of which is answered before the next is read.
        sampling_params: None takes those of `get_default_sampling_params`.
        request_id: None makes one up; two requests that run at once cannot share one.
        lora_request: its adapter, which is loaded while other requests run. Needs an engine with enable_lora=True.
        priority: lower runs first, under the "priority" policy.
        output_kind: whether each output has everything so far or only what is new, or only the final one comes;
            None takes `SamplingParams.output_kind`. A reader that is slower than the engine gets the tokens of several
            steps in one output.
        return_hidden_states, hidden_states_layers: as of `LLM.generate`; the last output has them. A stream of parts
            has none.

        Cancelling the task, or closing the generator, aborts the request and frees its blocks.
        A request that fails while it runs ends with finish_reason "error", and `RequestOutput.error` says why.

        Raises InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter; EngineDead when the
        engine died, with the cause; WaitTimeout when a step of it hangs; LifecycleError after `shutdown`.
        """
        params = self._default_sampling_params if sampling_params is None else sampling_params
        check_is_params(params)
        if output_kind is not None:
            check_member("output_kind", output_kind, RequestOutputKind)
            params = params.with_fields(output_kind=output_kind)
        parts_of_request = parts_of_hidden_states(return_hidden_states, hidden_states_layers)
        if isinstance(prompt, AsyncIterable):
            if parts_of_request:
                raise UnsupportedParameter(
                    f"return_hidden_states={return_hidden_states!r} is not available for a prompt that comes in parts. "
                    "Leave it out, or give the whole prompt."
                )
            parts = self._generate_in_turns(prompt, params, request_id, priority, lora_request)
            async with aclosing(parts):
                async for output in parts:
                    yield output
            return
        stream = await self._open(with_parts(prompt, parts_of_request), params, request_id, priority, lora_request)
        try:
            while not stream.is_over:
                yield await stream.next()
        finally:
            self._close(stream)

    @also_from_vllm
    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        pooling_task: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool one text; yields its output once it is complete.

        pooling_params: None takes those of the model. pooling_task: None takes the parameters' task, or the model's
        first. Otherwise as `generate`. Raises RequestFailed, with the reason, if the request fails while it runs.
        """
        params = PoolingParams(task=pooling_task) if pooling_params is None else pooling_params
        check_is_pooling_params(params, pooling_task)
        async with await self.submit(
            prompt, params, request_id, lora_request=lora_request, priority=priority
        ) as request:
            async for output in request:
                if output.finished:
                    yield as_pooling(output)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        num_choices: int = 1,
    ) -> AdmittedRequest:
        """Submit a prompt, and wait until the core has admitted it; its outputs are read from the result.

        num_choices: outputs that the queue admits or refuses together with this prompt's first one, which it includes;
            0 for a prompt that was admitted with another one. The other arguments are those of `generate`.

        Raises what `generate` does before its first output; Overloaded when the queue is full.
        """
        params = self._default_sampling_params if sampling_params is None else sampling_params
        if not isinstance(params, PoolingParams):
            check_is_params(params)
        stream = await self._open(prompt, params, request_id, priority, lora_request, num_choices)
        try:
            await stream.admission()
        except BaseException:
            self._close(stream)
            raise
        return AdmittedRequest(stream, self._close)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        output_kind: RequestOutputKind | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to one conversation; the arguments are those of `LLM.chat` and `generate`.

        Raises what `generate` does; InvalidRequest also when there is no template or it refuses the messages.
        """
        prompt = await self._intake.in_thread(
            lambda: render_prompt(
                self._tokenizer,
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                chat_template_content_format=chat_template_content_format,
            )
        )
        if mm_processor_kwargs:
            prompt["mm_processor_kwargs"] = mm_processor_kwargs
        outputs = self.generate(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            priority=priority,
            output_kind=output_kind,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    @also_from_vllm
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams get a last output with finish_reason "abort". Unknown ones are ignored."""
        self._thread.owner.check()
        req_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if self._thread.is_running:
            # A cancelled caller does not cancel the abort itself.
            await asyncio.shield(self._thread.call("abort", lambda: self._dispatcher.abort(req_ids)))

    async def abort_all(self) -> None:
        """End all requests; their streams get a last output with finish_reason "abort"."""
        with self._lock:
            running = [stream.progress for stream in self._streams if stream.progress is not None]
        await self.abort([progress.req_id for progress in running])

    @also_from_vllm
    def get_num_unfinished_requests(self) -> int:
        """Number of requests with a reader."""
        return len(self._streams)

    @also_from_vllm
    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache; False, and nothing is done, while requests hold blocks.

        reset_running_requests: preempt running requests first; their KV cache is recomputed.
        reset_connector: forget blocks that are kept elsewhere, too: those of a KV connector, and this engine's in
            kv_offload_dir; False if that fails.
        """
        reset = self._dispatcher.core.reset_prefix_cache
        return await self._thread.call("reset_prefix_cache", lambda: reset(reset_running_requests, reset_connector))

    async def reset_mm_cache(self) -> None:
        """As `LLM.reset_mm_cache`, of this front end."""
        self._input_processor.reset_mm_cache()

    async def reset_encoder_cache(self) -> None:
        """As `LLM.reset_encoder_cache`."""
        if self.config.model.media_limits:
            await self.collective_rpc("reset_encoder_cache")

    async def _call_workers(self, call: RpcCall) -> list[Any]:
        core = self._dispatcher.core
        return await self._thread.call("collective_rpc", lambda: core.collective_rpc(call))

    async def get_metrics(self) -> list[Metric]:
        """Metrics of this engine since its start, read after the current step; see `LLM.get_metrics`."""
        return await self._thread.call("get_metrics", self._dispatcher.metrics)

    def request_totals(self) -> RequestTotals:
        """Counters and histograms of the requests since the start; it waits for no step."""
        return self._dispatcher.totals()

    def watch_steps(self, seconds: float) -> None:
        """Record the steps of the next seconds for a live view; it waits for no step.

        Raises EngineDead or LifecycleError when the engine does not run.
        """
        self._thread.submit(lambda: self._dispatcher.core.watch_steps(seconds))

    async def check_health(self) -> None:
        """Return if the engine serves; raise EngineDead, LifecycleError or WaitTimeout if it does not."""
        self._thread.check_running()
        self._thread.check_progress("check_health")

    @property
    def is_running(self) -> bool:
        return self._thread.is_running

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, prompt and output together."""
        return self._dispatcher.core.max_model_len

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model, with its pooling."""
        return self._input_processor.model

    @property
    def request_limits(self) -> RequestLimits:
        """Limits of the fields of requests."""
        return self._input_processor.limits

    async def tokenize(self, prompt: str | PromptDict, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, or of a prompt's text with its media.

        Raises InvalidRequest for one that is longer than a prompt may be, and for media that cannot be read.
        """
        text = prompt if isinstance(prompt, str) else str(prompt["prompt"])
        check_text(text, self.request_limits)
        if not isinstance(prompt, str) and has_field(prompt, DATA):
            return await self._intake.encode_media_prompt(prompt, add_special_tokens=add_special_tokens)
        if len(text) < self._tokenizer.quick_characters:
            return self._tokenizer.encode(text, add_special_tokens)
        return await self._intake.in_thread(lambda: self._tokenizer.encode(text, add_special_tokens))

    @property
    def own_tokenizer(self) -> Tokenizer:
        """The model's tokenizer as the engine uses it, for front ends; `get_tokenizer` is that of Transformers."""
        return self._tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.get_tokenizer()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as Transformers loads it; otherwise as `LLM.get_tokenizer`."""
        return self._tokenizer.for_callers()

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of requests without any; see `LLM.get_default_sampling_params`."""
        return self._default_sampling_params.clone()

    @also_from_vllm
    def shutdown(self) -> None:
        """Free all memory and threads after the current step. A second call does nothing.

        Readers of unfinished requests get a LifecycleError. Raises WaitTimeout when the current step does not end.
        """
        self._thread.stop()
        try:
            self._thread.join()
        finally:
            # After the join: a request that arrives meanwhile is refused with the engine's LifecycleError.
            self._intake.shutdown()
            self._tokenizer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _generate_in_turns(
        self,
        inputs: AsyncIterable[StreamingInput],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = checked_id(request_id)

        def encode_part(part: Prompt, is_first: bool) -> Awaitable[list[int]]:
            return self._intake.encode_part(part, params, is_first)

        def run_turn(prompt_token_ids: list[int], turn: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
            prompt: Prompt = {"prompt_token_ids": prompt_token_ids}
            return self.generate(
                prompt, turn, name, lora_request=lora_request, priority=priority, output_kind=params.output_kind
            )

        return generate_in_turns(inputs, params, encode_part, run_turn)

    async def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
        num_choices: int = 1,
    ) -> OutputStream:
        """Check the request and submit it to the core's thread."""
        self._thread.check_running()
        await self._add_given(lora_request)
        prompt = with_parts(prompt, parts_of_adapter(lora_request))
        accepted = await self._intake.process(prompt, params, request_id, priority)
        if num_choices != 1:
            together = replace(accepted.request, num_choices=max(1, num_choices), is_admitted=num_choices == 0)
            accepted = accepted._replace(request=together)
        kind = RequestOutputKind.FINAL_ONLY if isinstance(params, PoolingParams) else params.output_kind
        stream = OutputStream(kind, self._lock)
        with self._lock:
            self._streams.add(stream)
        try:
            self._thread.submit(lambda: admit(self._dispatcher, self._lock, stream, accepted))
        except BaseException:
            self._remove(stream)
            raise
        stream.watch(self._thread.turn_timeout_s, self._thread.check_progress)
        return stream

    def _close(self, stream: OutputStream) -> None:
        """Abort the request if its reader stopped before the last output."""
        if not self._thread.owner.is_here():
            return
        stream.end_watch()
        self._remove(stream)
        # An engine that has ended has no request left to end.
        with suppress(PenstockError):
            if not stream.is_over:
                self._thread.submit(lambda: abandon(self._dispatcher, stream))
        stream.is_over = True

    def _remove(self, stream: OutputStream) -> None:
        with self._lock:
            self._streams.discard(stream)


def _load_for_event_loops(folder: Path, for_callers: bool) -> Tokenizer:
    """Load a tokenizer, with everything slow that is otherwise created on first use."""
    tokenizer = load_tokenizer(folder)
    tokenizer.prepare(for_callers=for_callers)
    return tokenizer


def _start_default(config: EngineConfig, meanwhile: Callable[[], object]) -> CoreClient:
    return start_core(with_core_process(config), meanwhile)


def _start_given(
    load_core: Callable[[EngineConfig], CoreClient],
) -> Callable[[EngineConfig, Callable[[], object]], CoreClient]:
    def start(config: EngineConfig, before: Callable[[], object]) -> CoreClient:
        before()
        return load_core(config)

    return start
