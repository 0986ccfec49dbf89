"""Interface between the front end and an engine core, in this process or others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from penstock.contract import RpcCall
from penstock.engine.messages import BrokerStatus, EngineRequest
from penstock.engine.statistics.step_log import StepRecord
from penstock.errors import PenstockError
from penstock.scheduler.outputs import EngineCoreOutput, SchedulerStats

# Timeouts of loading the model, and of a call or a step, recovery included.
START_TIMEOUT_S = 7200.0
CALL_TIMEOUT_S = 1800.0


class CoreClient(Protocol):
    """Client of engine cores: `EngineCore` for a core in this process, `CoreGroup` for cores in processes of their own.

    Requests and outputs are messages. One thread at a time may call it, except for `wait_for_work` and `wake`.

    max_model_len: longest context in tokens, prompt and output together. vocab_size: tokens of the model.

    All methods raise EngineDead once the core has failed for good, and WaitTimeout when it does not answer.
    """

    max_model_len: int
    vocab_size: int

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ContextTooLong when it can never fit, InvalidRequest when its id is in use.
        """

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Abort requests, waiting or running; unknown ids are ignored."""

    def has_unfinished_requests(self) -> bool:
        """Whether the next step has work: an output is due, or lost workers or cores are to be replaced."""

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Set the callback for losses that make `has_unfinished_requests` true; it may run in any thread."""

    def on_admission(self, callback: Callable[[str, PenstockError | None], None]) -> None:
        """Make `add_request` return at once. callback: gets each request's id, and the error that refuses it or None.

        A core in another process answers between two steps, which may be long, and `step` calls the callback then.
        A core in this process calls it from `add_request`, which raises refusals.
        """

    def step(self) -> list[EngineCoreOutput]:
        """Outputs of one step, run by this call or, for a core in another process, received by it."""

    def wait_for_work(self) -> None:
        """Wait briefly if the last step had nothing to run. Other threads may call methods meanwhile."""

    def wake(self) -> None:
        """End `wait_for_work` at once; any thread may call it at any time."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache; False, and nothing is done, while requests hold blocks."""

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        """Call every worker between two steps; one result per rank, or that of `unique_reply_rank` only."""

    def stats(self) -> SchedulerStats:
        """Current numbers of requests and KV-cache blocks, summed over all cores."""

    def watch_steps(self, seconds: float) -> None:
        """Record the steps of the next seconds for a live view (`StepLog`), without a wait for the cores."""

    def take_recent_steps(self) -> list[list[StepRecord]]:
        """Return the recorded steps since the last call, by core. Called after each step while a view may watch."""

    def status(self) -> BrokerStatus:
        """State of the cores as far as it is known, without a wait; any thread may call it at any time."""

    def check_health(self) -> None:
        """Return if the core can serve; raise the error that keeps it from serving otherwise."""

    def close(self) -> None:
        """Shut down the cores and free their memory; a second call does nothing."""
