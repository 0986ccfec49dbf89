"""Scheduler sides of features: they admit requests, add parts to the messages of steps, and read parts of results."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.contract import ModelRunnerOutput, Part, RpcCall, SchedulerOutput
from penstock.contract.parts import OutputPart
from penstock.scheduler.outputs import EngineCoreOutput

if TYPE_CHECKING:
    from penstock.scheduler.request import Request


class SchedulerFeature(ABC):  # noqa: B024 - a feature implements what it needs
    """Scheduler side of a feature. All methods are optional."""

    def request_added(self, request: Request) -> None:  # noqa: B027
        """Note a new waiting request; the feature may change its parts, and call `wait_for` on it."""

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        """Whether the feature's budget admits a waiting request to a step with these requests so far.

        A request that is not admitted waits, and so do those after it. Asked of all features before any `chunk`; the
        request may still wait, for a chunk or for blocks, so a feature notes a request only when it is in a step
        (`in_step`, `part_of_step`).
        """
        return True

    def chunk(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of a request's next tokens, which begin at position start, the step may compute.

        At most num_tokens; fewer end a chunk before an item that is not due, or may not be cut. 0 keeps a running
        request out of the step, and a waiting one in the queue, with those after it. Of waiting requests, asked for
        those alone that every feature `admits`.
        """
        return num_tokens

    def request_ending(self, request: Request) -> None:  # noqa: B027
        """Note that a request is about to end, while it still has its blocks, which the feature may hold on.

        Not called for one that the scheduler breaks off.
        """

    def request_ended(self, request: Request) -> None:  # noqa: B027
        """Note the end of a request, for whatever reason; its id may be used again."""

    def begin_admission(self, running: Sequence[Request]) -> None:  # noqa: B027
        """Note the running requests of a step, before waiting ones are admitted to it."""

    def skips(self, request: Request) -> str | None:
        """Reason for which a waiting request is skipped, until the feature calls `ready` with it; None admits it.

        Requests after it go on.
        """
        return None

    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        """Return the feature's part of a step's message before its launch; None without one."""
        return None

    def sampling_part(self, message: SchedulerOutput) -> Part | None:
        """Return the feature's part for the sampling of a launched step, made while its forward pass runs.

        Called for steps with `awaiting_req_ids`, which are requests whose `awaits_parts` a feature has set. All tokens
        of these requests before the step are known (`Request.all_token_ids`), and so are their draft tokens in it,
        except for -1. A request may have ended meanwhile, and the feature may end others: the step's results leave
        them out.
        """
        return None

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:  # noqa: B027
        """Take in the parts of a step's results, before its tokens. Not called for results without parts."""

    def parts_of_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Mapping[str, OutputPart]:
        """Return the feature's parts of a settled step's outputs, by request.

        Called after `take_results`, and where that is, unless the feature asks for more
        (`Scheduler.call_for_all_outputs`); after `request_ended` for
        those that end with the step.
        """
        return {}

    def before_call(self, call: RpcCall) -> None:  # noqa: B027
        """Note a call that all workers get between two steps, and what it implies (`call.effects`)."""

    def after_call(self, call: RpcCall, *, is_done: bool) -> None:  # noqa: B027
        """Note the end of a call of the workers that no feature answers. is_done: whether all have done it."""

    def before_caches_are_dropped(self) -> None:  # noqa: B027
        """Keep elsewhere what the KV cache has, as far as the feature does that: its memory is to be given back."""

    def caches_dropped(self) -> None:  # noqa: B027
        """Note that the workers drop the KV cache, and what encoders have computed. No step runs."""

    def before_reset(self) -> None:  # noqa: B027
        """Release blocks of the KV cache, and forget what is known of its content: the prefix cache is to be reset."""

    def reset_connector(self) -> bool:
        """Forget blocks that are kept outside of the KV cache, by a connector or in files; whether that is done."""
        return True

    def workers_replaced(self) -> None:  # noqa: B027
        """Note that workers are to be replaced: results of earlier steps and the KV cache are lost."""

    def workers_ready(self) -> None:  # noqa: B027
        """Bring back the state of replaced workers, before their first step."""

    def before_step(self) -> None:  # noqa: B027
        """Change requests before a step is scheduled; called for every turn of the core, between two steps."""

    def after_step(self) -> None:  # noqa: B027
        """Note the end of a turn of the core, when the results that it has read are taken in."""

    def resting(self) -> None:  # noqa: B027
        """Note a turn of a core that rests (`Scheduler.let_rest`) and has unfinished requests."""

    @property
    def is_polled(self) -> bool:
        """Whether `before_step` is to be called soon, though all requests wait."""
        return False

    def counts(self) -> Mapping[str, int]:
        """Counts of the feature, as fields of `SchedulerStats`."""
        return {}

    def counters(self) -> Mapping[str, int]:
        """Counts that only rise, by the names in `Feature.counters`."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """Values now, by the names in `Feature.gauges`; the metrics have the sums over all cores."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End threads; the core is closed. Idempotent."""

    def call(self, call: RpcCall) -> list[Any]:
        """Answer a call of the feature's deployment side, between two steps, by the method of its name."""
        answers: list[Any] = getattr(self, call.name)(*call.args, **call.kwargs)
        return answers


def methods_of(features: Sequence[SchedulerFeature], name: str) -> list[Callable[..., Any]]:
    """Methods of this name, of the features that have one of their own: others cost a step no call."""
    base = getattr(SchedulerFeature, name)
    methods = [getattr(feature, name) for feature in features]
    return [method for method in methods if getattr(method, "__func__", None) is not base]


class Chunks:
    """Lengths of chunks, as features that override `SchedulerFeature.chunk` allow them.

    are_limited: whether there is such a feature.
    """

    def __init__(self, features: Sequence[SchedulerFeature]) -> None:
        self._chunk_methods = methods_of(features, "chunk")
        self.are_limited = bool(self._chunk_methods)

    def length(self, request: Request, start: int, num_tokens: int) -> int:
        """As `SchedulerFeature.chunk`, of all features."""
        for chunk in self._chunk_methods:
            num_tokens = chunk(request, start, num_tokens)
        return num_tokens
