"""pytest plugin for the test suite of OpenAI's client: deselects tests by name, and drops parameters that are refused.

It runs in the suite's environment, without Penstock. The file of the variable OPENAI_SUITE has both lists, and the
file of OPENAI_SUITE_RESULTS gets the results as JSON: a list per test of its name, its outcome, and the reason of its
deselection or the parameters that were refused.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import tomllib
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai._base_client import AsyncAPIClient, SyncAPIClient

_LISTS = tomllib.loads(Path(os.environ["OPENAI_SUITE"]).read_text())
_results: dict[str, tuple[str, str]] = {}
_refused: list[str] = []


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/api_resources/")


def _without(options: Any, params: Collection[str]) -> Any:
    """Options of a request without these parameters."""
    if not isinstance(options.json_data, dict):
        return options
    kept = {name: value for name, value in options.json_data.items() if name not in params}
    return options.model_copy(update={"json_data": kept})


def _without_refused(options: Any, error: openai.APIStatusError) -> Any:
    """Options of a request without the parameter of the error, which is raised unless that parameter is listed."""
    param = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    if param not in _LISTS["refused"] or param not in options.json_data:
        raise error
    _refused.append(param)
    return _without(options, [param])


def _retrying(request: Callable[..., Any]) -> Callable[..., Any]:
    def send(client: SyncAPIClient, cast_to: Any, options: Any, **more: Any) -> Any:
        options = _without(options, _LISTS["omitted"])
        while True:
            try:
                return request(client, cast_to, options, **more)
            except (openai.BadRequestError, openai.NotFoundError) as error:
                options = _without_refused(options, error)

    return send


def _retrying_async(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def send(client: AsyncAPIClient, cast_to: Any, options: Any, **more: Any) -> Any:
        options = _without(options, _LISTS["omitted"])
        while True:
            try:
                return await request(client, cast_to, options, **more)
            except (openai.BadRequestError, openai.NotFoundError) as error:
                options = _without_refused(options, error)

    return send


SyncAPIClient.request = _retrying(SyncAPIClient.request)  # type: ignore[method-assign]
AsyncAPIClient.request = _retrying_async(AsyncAPIClient.request)  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unused = {pattern for group in _LISTS["deselected"] for pattern in group["tests"]}
    kept, deselected = [], []
    for item in items:
        name = _name(item.nodeid).partition("[")[0]
        for group in _LISTS["deselected"]:
            matching = {pattern for pattern in group["tests"] if fnmatch.fnmatch(name, pattern)}
            if matching:
                unused -= matching
                _results[_name(item.nodeid)] = ("deselected", group["reason"])
                deselected.append(item)
                break
        else:
            kept.append(item)
    if unused and not config.option.keyword:
        raise pytest.UsageError(f"No test matches the deselected names {sorted(unused)}.")
    items[:] = kept
    config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if call.when == "setup":
        _refused.clear()
    if report.failed or (call.when == "call" and report.passed):
        outcome = "failed" if report.failed else "refused" if _refused else "passed"
        _results[_name(item.nodeid)] = (outcome, ", ".join(sorted(_refused)))
    elif report.skipped:
        _results[_name(item.nodeid)] = ("skipped", "by the suite")
    return report


def pytest_sessionfinish() -> None:
    rows = [[name, *result] for name, result in _results.items()]
    Path(os.environ["OPENAI_SUITE_RESULTS"]).write_text(json.dumps(rows))
