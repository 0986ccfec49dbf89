"""The offline API."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.input_processor import Prompt
from penstock.engine.outputs import RequestOutput
from penstock.engine.progress_bar import ProgressBar
from penstock.engine.session import Session
from penstock.engine.tokenizer import Tokenizer
from penstock.engine.worker_calls import WorkerCalls
from penstock.errors import InvalidRequest
from penstock.observability.logging import configure_logging


class LLM(WorkerCalls):
    """A model in this process that generates text.

    model: "demo" (shipped), a folder, or a hub id. tokenizer: the same; None takes the model's own.
    dtype: "auto" (what the checkpoint has and the device can), "float32", "bfloat16" or "float16".
    device: "auto" (CUDA where there is one), "cpu" or "cuda".
    max_model_len: longest context in tokens, prompt and output together; None takes the model's own.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step, over all requests.
    block_size: positions per block of the KV cache.
    kv_cache_memory_bytes: size of the KV cache; None lets `memory_fraction` decide.
    memory_fraction: share of the device's memory for weights, activations and KV cache; None lets the device choose.
    enable_prefix_caching: reuse the KV of prompts that begin alike.
    async_scheduling: schedule a step before the previous one's tokens are known; None follows the device.
    seed: from it come the seeds of requests that bring none, so equal runs of equal engines give equal tokens.
    load_format: "auto", "safetensors", "pt", "sharded_state", or "dummy" for random weights.
    other_options: any other option of `EngineConfig.create`; an unknown one is refused by name.

    Use it in a `with` block, or call `close()`: both give back all memory and threads.

    Raises ConfigError, ModelError or OutOfMemory (and their kinds) when the engine cannot be started.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | str | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
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
        self._session = Session(config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate text for one prompt or many; the outputs are in the prompts' order.

        prompts: text, a list of token ids, or a dictionary with `prompt` or `prompt_token_ids` and perhaps
            `cache_salt`; or a list of such.
        sampling_params: one for all prompts, or one per prompt; None takes the defaults.
        use_tqdm: show a progress bar, if standard error is a terminal.

        All prompts are checked before the first one runs. A request that fails while it runs does not stop the
        others: its output has finish_reason "error", and its `RequestOutput.error` says why.

        Raises InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter, LifecycleError after
        `close`. Whatever ends the call early, Ctrl-C included, aborts its requests, and the next call works.
        """
        prompt_list = _list_of_prompts(prompts)
        params_list = _list_of_params(sampling_params, len(prompt_list))
        names = [f"prompts[{index}]" if len(prompt_list) > 1 else "" for index in range(len(prompt_list))]
        requests = list(map(self._session.accept, prompt_list, params_list, names))
        outputs: dict[str, RequestOutput] = {}
        with ProgressBar(len(requests), is_wanted=use_tqdm) as bar, closing(self._session.run(requests)) as steps:
            for progress in steps:
                if progress.finished:
                    outputs[progress.req_id] = progress.output()
                    bar.update()
        return [outputs[accepted.request.req_id] for accepted in requests]

    def get_tokenizer(self) -> Tokenizer:
        return self._session.tokenizer

    def close(self) -> None:
        """Give back all memory and threads. A second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _list_of_prompts(prompts: Any) -> list[Any]:
    """A list of prompts; a list of integers is one prompt, of token ids."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequest(
            f"prompts is a {type(prompts).__name__}. Allowed: text, token ids, a dictionary, or a list of these."
        )
    is_one_prompt = bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [prompts] if is_one_prompt else list(prompts)


def _list_of_params(params: Any, num_prompts: int) -> list[Any]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, (list, tuple)):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"There are {num_prompts} prompts but {len(params)} sampling_params. Give one for all, or one per prompt."
        )
    return list(params)
