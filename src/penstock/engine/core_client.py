"""What the front end asks of a core, wherever that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from penstock.engine.messages import EngineRequest
from penstock.errors import PenstockError
from penstock.scheduler.outputs import EngineCoreOutput, SchedulerStats

# How long a core may take to load its model, to answer a call or to bring a step's outputs, recovery included.
START_TIMEOUT_S = 7200.0
CALL_TIMEOUT_S = 1800.0
# Calls of workers that must not be left half done: what workers load next follows from them.
CHANGE_WEIGHTS = ("update_config", "reload_weights")


class CoreClient(Protocol):
    """A core in this process is its own client (`EngineCore`); `CoreGroup` that of cores in others.

    Requests and outputs are messages. One thread at a time may call it, but for `wait_for_work` and `wake`.

    max_model_len: longest context in tokens, prompt and output together. vocab_size: tokens of the model.

    All raise EngineDead once the core has ended by itself, and WaitTimeout where it does not answer.
    """

    max_model_len: int
    vocab_size: int

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ContextTooLong when it can never fit, InvalidRequest when its id is in use.
        """

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests, wherever they are; unknown ones are ignored."""

    def has_unfinished_requests(self) -> bool:
        """Whether the next step has anything to do: an output is still to come, or something lost is to be replaced."""

    def on_loss(self, tell: Callable[[], None]) -> None:
        """Let this be called, in any thread, when `has_unfinished_requests` gets true by itself. It must not wait."""

    def on_refused(self, tell: Callable[[str, PenstockError], None]) -> None:
        """Let `add_request` not wait for a core elsewhere from now on: this is called in `step`, with id and reason.

        Such a core refuses between two steps, which may be long, and others wait for theirs meanwhile.
        """

    def step(self) -> list[EngineCoreOutput]:
        """What one step brought: a step that is made now, or that of a core which makes its steps by itself."""

    def wait_for_work(self) -> None:
        """Between two steps: let some time pass if the last one had nothing to run. Others may call meanwhile."""

    def wake(self) -> None:
        """End the wait for something to do, at once; any thread may call it at any time."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while requests hold blocks."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps; one answer each, or that of `unique_reply_rank` alone."""

    def stats(self) -> SchedulerStats:
        """Requests and KV-cache blocks at present, between two steps; of all cores together."""

    def check_health(self) -> None:
        """Return if the core can serve; raise what is wrong if it cannot."""

    def close(self) -> None:
        """Give everything back; harmless when called twice."""
