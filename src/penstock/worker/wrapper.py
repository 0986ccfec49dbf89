"""Worker wrapper: exists before the worker, sets its environment and rank, then constructs it."""

from __future__ import annotations

import importlib
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from penstock.config import EngineConfig
from penstock.contract.feature import why_no_method
from penstock.errors import ConfigError, LifecycleError, PenstockError, WaitTimeout, WorkerError
from penstock.parallel import ParallelState
from penstock.worker.capabilities import require
from penstock.worker.changes_model import CHANGES_MODEL
from penstock.worker.plugins import load_plugins

logger = logging.getLogger(__name__)


class WorkerWrapperBase:
    """Wrapper of the worker of one process. rpc_rank: rank among the executor's workers.

    Executors call its own methods and `execute_method` only.
    """

    def __init__(self, rpc_rank: int = 0) -> None:
        self.rpc_rank = rpc_rank
        self._worker: Any = None
        # Methods that exist, checked once; and those of them that do not change model or weights.
        self._known_methods: set[str] = set()
        self._keeping_methods: set[str | bytes | Callable[..., Any]] = set()
        # The failure that lost the device's context; nothing may touch the device afterwards.
        self.device_lost_by: str | None = None

    @property
    def worker(self) -> Any:
        """The worker. Raises LifecycleError before `init_worker` and after `shutdown`."""
        if self._worker is None:
            raise LifecycleError(
                f"Rank {self.rpc_rank} has no worker: init_worker must come first (or it was shut down)."
            )
        return self._worker

    def init_worker(self, config: EngineConfig, parallel: ParallelState | None = None) -> None:
        """Load plugins and construct the worker of `worker_cls`, with its extension.

        Raises ConfigError when a class does not exist, is not a worker, or clashes with its extension.
        """
        load_plugins()
        worker_class = resolve_class(config.parallel.worker_cls, "worker_cls")
        extension = config.parallel.worker_extension_cls
        if extension is not None:
            worker_class = extend_worker(worker_class, resolve_class(extension, "worker_extension_cls"))
        parallel = parallel or ParallelState(world_size=config.parallel.world_size)
        # By keywords: classes of extensions may take no others.
        self._worker = worker_class(config=config, parallel=replace(parallel, rank=self.rpc_rank))

    def execute_method(self, method: str | bytes | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a worker's method by name, or a function (pickled or not) with the worker as its first argument.

        Raises UnsupportedFeature for a method that is not implemented yet, Penstock's errors as they are, and others as
        WorkerError with rank, method and cause.
        """
        try:
            return self._bind(method)(*args, **kwargs)
        except Exception as error:
            self.report(_name_of(method), error)
        finally:
            if method not in self._keeping_methods and self._worker is not None:
                self._worker.forget_programs()

    def report(self, name: str, error: Exception) -> NoReturn:
        """Raise an exception of a call, as WorkerError with rank, method and cause if it is not Penstock's own."""
        if loses_device(error):
            self.device_lost_by = f"{type(error).__name__} in {name}: {error}"
        if isinstance(error, PenstockError):
            logger.debug("Rank %d: %s raised %s", self.rpc_rank, name, type(error).__name__)
            raise error
        logger.error("Rank %d: %s failed", self.rpc_rank, name, exc_info=error)
        raise WorkerError(
            f"Rank {self.rpc_rank} failed in {name}: {type(error).__name__}: {error}",
            method=name,
            rank=self.rpc_rank,
            cause_type=type(error).__name__,
        ) from error

    def check_device(self) -> None:
        """Raise WorkerError if the device's context is lost."""
        if self.device_lost_by is not None:
            raise WorkerError(
                f"Rank {self.rpc_rank} has lost its device: {self.device_lost_by}",
                method="check_health",
                rank=self.rpc_rank,
                cause_type="DeviceLost",
            )

    def shutdown(self) -> None:
        """Shut the worker down, unless its device is lost; idempotent."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self.device_lost_by is None:
            worker.shutdown()
        else:
            logger.error("Rank %d: its device memory is freed at the end of this process only", self.rpc_rank)

    def _bind(self, method: str | bytes | Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(method, str):
            if method not in self._known_methods:
                self._check(method)
            return self._found(method)
        function = pickle.loads(method) if isinstance(method, bytes) else method
        return lambda *args, **kwargs: function(self.worker, *args, **kwargs)

    def _found(self, method: str) -> Callable[..., Any]:
        """The worker's method of this name. Raises ConfigError without one."""
        found: Callable[..., Any] | None = self.worker.rpc_method(method)
        if found is None:
            why = why_no_method(method) or f"{type(self.worker).__name__} has no method {method!r}."
            raise ConfigError(why)
        return found

    def _check(self, method: str) -> None:
        require(method)
        found = self._found(method)
        self._known_methods.add(method)
        if not may_change_model(type(getattr(found, "__self__", self.worker)), method):
            self._keeping_methods.add(method)


def may_change_model(worker_class: type, method: str) -> bool:
    """Whether a method may change the model or its weights, which invalidates recorded programs.

    Methods of Penstock's workers are marked with `changes_model`; others may, unless marked with `keeps_model`.
    """
    found = [(base, vars(base)[method]) for base in worker_class.__mro__ if method in vars(base)]
    own = [function for base, function in found if base.__module__.partition(".")[0] == "penstock"]
    if own:
        return any(getattr(function, CHANGES_MODEL, False) for function in own)
    return not found or any(getattr(function, CHANGES_MODEL, True) for _, function in found)


def loses_device(error: BaseException | None) -> bool:
    """Whether an error means a lost device context: a CUDA error of torch, or a device timeout."""
    while error is not None:
        is_torchs = type(error).__name__ == "AcceleratorError" or (
            isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
        )
        if is_torchs or isinstance(error, WaitTimeout):
            return True
        error = error.__cause__
    return False


def resolve_class(qualified_name: str, option: str) -> type:
    """Import the class that an option names, such as "package.module.Class".

    Raises ConfigError naming the option.
    """
    module_name, _, class_name = qualified_name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option}={qualified_name!r} cannot be found: {error}.") from error
    if not isinstance(found, type):
        raise ConfigError(f"{option}={qualified_name!r} is a {type(found).__name__}, not a class.")
    return found


def extend_worker(worker_class: type, extension: type) -> type:
    """Return a new class with the methods of both.

    Raises ConfigError for names that both have.
    """
    clashes = sorted(
        name
        for base in extension.__mro__[:-1]
        for name in vars(base)
        if not name.startswith("__") and _has_attribute(worker_class, name)
    )
    if clashes:
        raise ConfigError(
            f"worker_extension_cls={extension.__qualname__} and {worker_class.__qualname__} both have "
            f"{', '.join(clashes)}. Rename them in the extension."
        )
    return type(f"{worker_class.__name__}With{extension.__name__}", (worker_class, extension), {})


def _has_attribute(worker_class: type, name: str) -> bool:
    return any(name in vars(base) for base in worker_class.__mro__)


def _name_of(method: str | bytes | Callable[..., Any]) -> str:
    if isinstance(method, str):
        return method
    return "a pickled function" if isinstance(method, bytes) else getattr(method, "__name__", repr(method))
