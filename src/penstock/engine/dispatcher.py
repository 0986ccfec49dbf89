"""Between callers and the core: requests in, outputs to whoever waits for them, and what follows from either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from penstock.config import EngineConfig
from penstock.engine.core_client import CoreClient
from penstock.engine.input_processor import InputProcessor
from penstock.engine.messages import EngineRequest
from penstock.engine.metrics import EngineMetrics, Metric
from penstock.engine.output_processor import FollowUp, Inbox, OutputProcessor, Progress
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import InvalidRequest
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.worker.capabilities import check_options


def start_core(config: EngineConfig, meanwhile: Callable[[], object] = lambda: None) -> CoreClient:
    """The engine core of this configuration, in this process, or a client of the processes that it asks for.

    meanwhile: what there is to do here while those start, or before the model is loaded into this one.

    Raises what loading the model raises, and what `meanwhile` does.
    """
    check_options(config)
    if config.parallel.has_core_process:
        from penstock.engine.core_group import CoreGroup

        return CoreGroup(config, meanwhile=meanwhile)
    meanwhile()
    from penstock.engine.core import EngineCore

    return EngineCore(config)


def output_processor_for(config: EngineConfig, tokenizer: Tokenizer) -> OutputProcessor:
    """Outputs of one prompt share its blocks if the prefix cache can hold one, with a token behind it to run."""
    can_share = config.cache.enable_prefix_caching
    return OutputProcessor(
        tokenizer,
        EngineMetrics(config.model.model, has_prefix_cache=can_share),
        shared_prompt_length=config.cache.block_size + 1 if can_share else None,
    )


def input_processor_for(config: EngineConfig, tokenizer: Tokenizer, core: CoreClient) -> InputProcessor:
    """Requests are checked against what the core turned out to have."""
    return InputProcessor(
        config.model,
        tokenizer,
        max_model_len=core.max_model_len,
        vocab_size=core.vocab_size,
        sampling=config.sampling,
        structured=config.structured,
        policy=config.scheduler.policy,
        engine=config.parallel.data_parallel_rank or 0,
    )


class Dispatcher:
    """Keeps a core, wherever it is, and the progress of its requests in step. One thread at a time may call it.

    lock: held while progress changes, for consumers in other threads; never during a step of the core.
    """

    def __init__(
        self, core: CoreClient, processor: OutputProcessor, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.core = core
        self._processor = processor
        self._lock = threading.RLock() if lock is None else lock

    def admit(self, request: EngineRequest, prompt: str | None, inbox: Inbox) -> Progress:
        """Give a request to the core, and follow it.

        Raises ContextTooLong or InvalidRequest when the core refuses it; nothing of it is left then.
        """
        with self._lock:
            progress, first = self._processor.add(request, prompt, inbox)
        try:
            for core_request in first:
                self.core.add_request(core_request)
        except BaseException:
            self.abandon([request.req_id])
            raise
        return progress

    def step(self) -> None:
        """One step of the core, whose outputs go to everyone's inboxes."""
        self._take(self.core.step())

    def abort(self, req_ids: Iterable[str]) -> None:
        """End requests; their consumers are told. Unknown ones are ignored."""
        core_ids = self._processor.core_ids(req_ids)
        outputs = {output.req_id: output for output in self.core.abort_requests(core_ids)}
        # Samples that wait for their prompt are unknown to the core.
        unknown = [EngineCoreOutput(req_id=core_id, finish_reason=FinishReason.ABORT) for core_id in core_ids]
        self._take([outputs.get(output.req_id, output) for output in unknown])

    def abandon(self, req_ids: Iterable[str]) -> None:
        """End requests that nobody waits for any more."""
        with self._lock:
            core_ids = self._processor.forget(req_ids)
        self.core.abort_requests(core_ids)

    def metrics(self) -> list[Metric]:
        """Metrics of the core and of its requests at present."""
        stats = self.core.stats()
        with self._lock:
            return self._processor.metrics(stats)

    def _take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        with self._lock:
            follow_up = self._processor.process(outputs)
        if follow_up is not None:
            self._follow(follow_up)

    def _follow(self, follow_up: FollowUp) -> None:
        if follow_up.req_ids_to_abort:
            self.core.abort_requests(follow_up.req_ids_to_abort)
        refused = []
        for request in follow_up.requests_to_add:
            try:
                self.core.add_request(request)
            except InvalidRequest as error:
                refused.append(
                    EngineCoreOutput(req_id=request.req_id, finish_reason=FinishReason.ERROR, error=str(error))
                )
        if refused:
            self._take(refused)
