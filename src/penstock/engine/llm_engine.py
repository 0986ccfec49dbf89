"""Engine whose steps its caller runs: the class `LLMEngine`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from penstock.config import EngineConfig, ModelConfig
from penstock.config.vllm import RefusesMethods, also_from_vllm
from penstock.contract import PoolingParams, RequestOutputKind, RpcCall, SamplingParams
from penstock.contract.live_model import LiveModel
from penstock.engine.inputs.prompts import Prompt, with_parts
from penstock.engine.inputs.request_intake import checked_id
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.pooling_outputs import PoolingOutput, PoolingRequestOutput, as_pooling
from penstock.engine.output.progress import Progress
from penstock.engine.session import Session
from penstock.engine.statistics.metrics import Metric
from penstock.engine.worker_calls import WorkerCalls
from penstock.features.lora.methods import AdapterMethods
from penstock.features.lora.request import LoRARequest, parts_of_adapter
from penstock.features.sleep.methods import SleepMethods
from penstock.features.weight_transfer.methods import WeightTransfers
from penstock.observability.logging import configure_logging

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLMEngine(AdapterMethods, SleepMethods, WeightTransfers, WorkerCalls[list[Any]], RefusesMethods):
    """A model whose requests come and go between steps, which the caller runs one by one in its thread.

    config: of the engine. session: a running engine with this configuration; None starts one.

    Raises ConfigError, ModelError or OutOfMemory (and their kinds) when the engine cannot be started.
    """

    def __init__(self, config: EngineConfig, session: Session | None = None) -> None:
        configure_logging()
        self._config = config
        self._session = Session(config) if session is None else session
        self._inbox: deque[Progress] = deque()
        # By id: parameters of the unfinished requests.
        self._running: dict[str, SamplingParams | PoolingParams] = {}

    @classmethod
    @also_from_vllm
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Engine with this configuration, which `EngineArgs(...)` is."""
        return cls(engine_args)

    @also_from_vllm
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Add a request, which the next step may run. Returns its id.

        The arguments are those of `AsyncEngine.generate`; params of an engine that pools are `PoolingParams`. Raises
        InvalidRequest (InvalidParameter, ContextTooLong) for a bad prompt or parameter.
        """
        if lora_request is not None and (lora_request.tensors or lora_request.load_inplace):
            self._add_adapters([lora_request])
        accepted = self._session.accept(
            with_parts(prompt, parts_of_adapter(lora_request)),
            params,
            request_id=checked_id(request_id),
            priority=priority,
        )
        self._session.admit(accepted, self._inbox, set())
        self._running[request_id] = params
        return request_id

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Run one step; return the output of each request that it brought on, as its `output_kind` says.

        A request that fails has an output with `error`. Without unfinished requests it does nothing. Raises EngineDead
        when the engine died, LifecycleError after `close`.
        """
        if self._running and not self._inbox:
            self._session.step(self._inbox)
        news = dict.fromkeys(self._inbox)
        self._inbox.clear()
        outputs = (self._output(progress) for progress in news if progress.req_id in self._running)
        return [output for output in outputs if output is not None]

    @also_from_vllm
    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests without another output. Unknown ones are ignored."""
        given = [request_ids] if isinstance(request_ids, str) else request_ids
        self._session.abandon({req_id for req_id in given if self._running.pop(req_id, None) is not None})

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    @also_from_vllm
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return self._session.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """As `LLM.reset_mm_cache`."""
        self._session.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """As `LLM.reset_encoder_cache`."""
        if self._session.model_config.media_limits:
            self.collective_rpc("reset_encoder_cache")

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model, with the engine's context length."""
        return self._session.model_config

    @property
    def model_executor(self) -> SimpleNamespace:
        """Way to the model that trainers in this process take.

        They send weights by `model_executor.driver_worker.model_runner.model.load_weights`.
        """
        model = LiveModel(lambda weights: self._call_workers(RpcCall("load_weights", (weights,))))
        return SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.get_tokenizer()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """As `LLM.get_tokenizer`."""
        return self._session.tokenizer.for_callers()

    def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`."""
        return self._session.metrics()

    def close(self) -> None:
        """Free all memory and threads. A second call does nothing."""
        self._session.close()

    def _output(self, progress: Progress) -> RequestOutput | PoolingRequestOutput[PoolingOutput] | None:
        """Output of a request for the caller; None where it waits for more."""
        params = self._running[progress.req_id]
        if progress.finished:
            del self._running[progress.req_id]
        if isinstance(params, PoolingParams):
            output = progress.output()
            return None if not output.finished else output if output.error else as_pooling(output)
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not progress.finished:
            return None
        return progress.take_output() if params.output_kind is RequestOutputKind.DELTA else progress.output()

    def _call_workers(self, call: RpcCall) -> list[Any]:
        return self._session.collective_rpc(call)

    def _let_rest(self, rests: Callable[[], bool]) -> None:
        self._session.let_rest(rests)
