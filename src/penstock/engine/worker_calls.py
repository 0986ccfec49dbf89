"""What a caller may ask of the workers beside generating, by the names that users of vLLM know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config.vllm import also_from_vllm
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.session import Session
    from penstock.models.interface import LanguageModel

_Result = TypeVar("_Result")


class WorkerCalls:
    """Methods of an offline engine that run on every worker, between two steps. Each returns an answer per worker.

    All raise LifecycleError after `close`.
    """

    _session: Session

    def collective_rpc(
        self,
        method: str | Callable[..., _Result],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[_Result]:
        """Call a method of the workers, or of their extension class, by its name; or a function of the worker.

        method: a name, or a function whose first argument is the worker; one that runs in another process is pickled.
        timeout: seconds to wait for workers in other processes; one in this process cannot be interrupted.
        unique_reply_rank: the only worker whose answer is wanted. All run the call, so that they stay alike.

        Raises ConfigError when there is no such method, UnsupportedFeature for one that is not built yet, WorkerError
        with the method's name, the rank and the cause when it fails. Penstock's own errors come through as they are.
        """
        check_timeout(timeout)
        return self._session.collective_rpc(method, timeout, args, kwargs, unique_reply_rank)

    def apply_model(self, func: Callable[[LanguageModel], _Result]) -> list[_Result]:
        """Call a function with each worker's model."""
        return self.collective_rpc("apply_model", args=(func,))

    @also_from_vllm
    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record what every step does; `profiler_dir` must be set.

        profile_prefix: begins the names of the traces. Raises ConfigError without `profiler_dir`, LifecycleError when
        a profile runs already.
        """
        self.collective_rpc("profile", kwargs={"is_start": True, "profile_prefix": profile_prefix})

    def stop_profile(self) -> list[str]:
        """End the profile. Returns the path of each worker's trace, for https://ui.perfetto.dev.

        Raises LifecycleError when none runs.
        """
        return self.collective_rpc("profile", kwargs={"is_start": False})

    def get_model_inspection(self) -> str:
        """The first worker's model as a tree of text: modules with sizes, dtypes and how each computes."""
        answers: list[str] = self.collective_rpc("get_model_inspection", unique_reply_rank=0)
        return answers[0]


def check_timeout(timeout: float | None) -> None:
    """Raise ConfigError for one that is no time."""
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout={timeout!r} is not valid. Allowed: a positive number of seconds, or None.")
