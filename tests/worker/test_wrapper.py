"""The worker's shell: construction by name, extensions, plugins, errors."""

from __future__ import annotations

import contextlib
import logging
import pickle
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, LifecycleError, UnsupportedFeature, WorkerError
from penstock.parallel import ParallelState
from penstock.worker import WorkerWrapperBase
from penstock.worker.plugins import load_plugins
from penstock.worker.worker import Worker


class RecordingWorker(Worker):
    def add(self, left: int, right: int) -> int:
        return left + right

    def fail(self) -> None:
        raise ZeroDivisionError("over the edge")


class Extension:
    def report_rank(self) -> int:
        return self.rank  # type: ignore[attr-defined, no-any-return]


class ClashingExtension(Extension):
    def load_model(self) -> None:
        """Has the name of a worker's method."""


class ConstructedByKeywords:
    """Extension that sees what a worker is constructed with, as those of trainers do."""

    given: tuple[str, ...]

    def __new__(cls, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.given = tuple(kwargs)
        return made


def rank_of(worker: Worker, offset: int = 0) -> int:
    return worker.rank + offset


def _config(**options: Any) -> EngineConfig:
    return EngineConfig.create("demo", device="cpu", worker_cls=f"{__name__}.RecordingWorker", **options)


def _wrapper(rank: int = 0, **options: Any) -> WorkerWrapperBase:
    wrapper = WorkerWrapperBase(rpc_rank=rank)
    wrapper.init_worker(_config(**options))
    return wrapper


def test_the_worker_is_built_by_name_with_its_rank() -> None:
    wrapper = WorkerWrapperBase(rpc_rank=5)
    wrapper.init_worker(_config(), ParallelState(world_size=8))
    assert type(wrapper.worker) is RecordingWorker
    assert wrapper.worker.rank == 5
    assert wrapper.execute_method("add", 2, right=3) == 5


def test_a_worker_is_constructed_by_keywords() -> None:
    wrapper = _wrapper(worker_extension_cls=f"{__name__}.ConstructedByKeywords")
    assert wrapper.worker.given == ("config", "parallel")


def test_before_init_and_after_shutdown_it_says_what_is_missing() -> None:
    wrapper = WorkerWrapperBase()
    with pytest.raises(LifecycleError, match="init_worker must come first"):
        wrapper.execute_method("check_health")
    wrapper.init_worker(_config())
    wrapper.shutdown()
    wrapper.shutdown()
    with pytest.raises(LifecycleError, match="init_worker must come first"):
        wrapper.execute_method("check_health")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("penstock.nowhere.Worker", "cannot be found"),
        ("penstock.worker.worker.Missing", "cannot be found"),
        ("penstock.worker.worker.logger", "not a class"),
    ],
)
def test_a_wrong_class_name_is_refused_with_the_option(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"worker_cls='{name}'.*{message}"):
        WorkerWrapperBase().init_worker(EngineConfig.create("demo", worker_cls=name))


def test_an_extension_adds_its_methods_and_changes_no_class() -> None:
    bases, names = RecordingWorker.__bases__, set(vars(RecordingWorker))
    wrapper = _wrapper(worker_extension_cls=f"{__name__}.Extension")
    assert wrapper.execute_method("report_rank") == 0
    assert RecordingWorker.__bases__ == bases
    assert set(vars(RecordingWorker)) == names
    with pytest.raises(ConfigError, match="no method 'report_rank'"):
        _wrapper().execute_method("report_rank")


def test_a_clashing_extension_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="both have load_model"):
        _wrapper(worker_extension_cls=f"{__name__}.ClashingExtension")


def test_functions_and_pickled_functions_get_the_worker() -> None:
    wrapper = _wrapper()
    assert wrapper.execute_method(rank_of, 2) == 2
    assert wrapper.execute_method(pickle.dumps(rank_of), offset=7) == 7


class ForgettingWorker(RecordingWorker):
    num_forgotten = 0

    def forget_programs(self) -> None:
        self.num_forgotten += 1


@pytest.mark.parametrize(
    ("method", "forgets"),
    [
        # Its own say so.
        ("check_health", False),
        ("get_config", False),
        ("apply_model", True),
        ("get_model", True),
        # These say themselves whether weights have other memory.
        ("reload_weights", False),
        ("load_weights", False),
        # Of others nothing is known.
        ("add", True),
        (lambda worker: None, True),
    ],
)
def test_programs_are_forgotten_after_calls_that_may_have_changed_the_model(method: Any, forgets: bool) -> None:
    wrapper = WorkerWrapperBase()
    wrapper.init_worker(EngineConfig.create("demo", device="cpu", worker_cls=f"{__name__}.ForgettingWorker"))
    for number in range(2):
        with contextlib.suppress(WorkerError, LifecycleError):
            wrapper.execute_method(method)
        assert wrapper.worker.num_forgotten == (number + 1) * forgets


def test_a_failure_names_method_rank_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = _wrapper()
    with caplog.at_level(logging.ERROR, "penstock"), pytest.raises(WorkerError) as caught:
        wrapper.execute_method("fail")
    assert str(caught.value) == "Rank 0 failed in fail: ZeroDivisionError: over the edge"
    assert (caught.value.method, caught.value.rank, caught.value.cause_type) == ("fail", 0, "ZeroDivisionError")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "Rank 0: fail failed" in caplog.text


@pytest.mark.parametrize("method", ["elastic_ep_execute"])
def test_what_is_not_built_is_refused_by_the_features_name(method: str) -> None:
    wrapper = _wrapper()
    with pytest.raises(UnsupportedFeature, match=f"{method}: .* is not supported yet"):
        wrapper.execute_method(method)
    with pytest.raises(UnsupportedFeature, match=f"{method}: .* is not supported yet"):
        getattr(wrapper.worker, method)


def test_a_worker_of_several_needs_the_others() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 needs a worker in a group of 2 ranks"):
        _wrapper(pipeline_parallel_size=2)


class _EntryPoint:
    def __init__(self, name: str, function: Any) -> None:
        self.name, self.value, self._function = name, f"test:{name}", function

    def load(self) -> Any:
        return self._function


def test_plugins_are_called_and_a_failing_or_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def fail() -> None:
        raise RuntimeError("no")

    points = [_EntryPoint("good", lambda: called.append("good")), _EntryPoint("bad", fail)]
    monkeypatch.setattr("penstock.worker.plugins.entry_points", lambda group: points)
    monkeypatch.setenv("PENSTOCK_PLUGINS", "good")
    assert load_plugins() == ["good"]
    assert called == ["good"]
    monkeypatch.setenv("PENSTOCK_PLUGINS", "missing")
    with pytest.raises(ConfigError, match="'missing', which is not installed. Installed: bad, good"):
        load_plugins()
    monkeypatch.delenv("PENSTOCK_PLUGINS")
    with pytest.raises(ConfigError, match="Plugin 'bad' .* failed: RuntimeError: no"):
        load_plugins()
