"""Every test of whole engines runs twice: as engines are by default, and with every step on the plain path.

Tests of one path alone say so, and why, by the marker `one_path`. What several tests are compared with, such as the
tokens of requests alone, is made once, on the fast paths: so both paths are compared with each other too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from penstock.config import EngineConfig

DEFAULT, PLAIN = "auto", "off"
# Fixtures that are being made for more than one test.
_shared: list[str] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("one_path")
    if marker is not None and not marker.kwargs.get("reason"):
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: one_path takes a reason")
    paths = [DEFAULT, PLAIN] if marker is None else [DEFAULT]
    metafunc.parametrize("fast_paths", paths, ids=["fast", "plain"][: len(paths)], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def fast_paths(request: pytest.FixtureRequest) -> Iterator[str]:
    """Default options of engines."""
    create = EngineConfig.create

    def create_on_path(model: str, **options: Any) -> EngineConfig:
        if _shared and "fast_paths" not in options:
            raise pytest.UsageError(f"{_shared[-1]} makes an engine for tests of both paths: pass fast_paths")
        return create(model, **{"fast_paths": request.param, **options})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineConfig, "create", create_on_path)
        yield request.param


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    _shared.append(fixturedef.argname)
    try:
        return (yield)
    finally:
        _shared.pop()
