"""Programs as they are written for vLLM, with another import: each runs, or is refused by the feature's name."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock import EngineConfig
from penstock.cli.app import app
from penstock.engine.session import Session
from penstock.errors import UnsupportedFeature
from support.vllm_programs import COMMANDS, REFUSED, RUNNING

pytestmark = pytest.mark.one_path(reason="what programs say is not a matter of how steps run")
REFUSALS = [(feature, number) for feature, programs in REFUSED.items() for number in range(len(programs))]


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[str, Session]]:
    sessions: dict[str, Session] = {}
    yield sessions
    for session in sessions.values():
        session.close()


@pytest.fixture(autouse=True)
def _shared_engines(sessions: dict[str, Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs whose options come to the same configuration share an engine, which spares seconds."""

    class SharedLLM(penstock.LLM):
        def __init__(self, model: str, **options: Any) -> None:
            config = EngineConfig.create(model, **options)
            self._config = config
            self._session = sessions.get(str(config)) or sessions.setdefault(str(config), Session(config))

        def close(self) -> None:
            pass

    SharedLLM.__name__ = "LLM"
    monkeypatch.setattr(penstock, "LLM", SharedLLM)


def run(code: str) -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    own = textwrap.dedent(code).replace("import vllm", "import penstock as vllm")
    exec(re.sub(r"from vllm\b", "from penstock", own), names)
    return names.get("result")


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.one_case_quick
def test_a_program_runs_with_another_import(name: str) -> None:
    assert run(RUNNING[name])


@pytest.mark.parametrize(("feature", "number"), REFUSALS)
def test_a_program_is_refused_by_feature(feature: str, number: int) -> None:
    with pytest.raises(UnsupportedFeature, match=feature):
        run(REFUSED[feature][number])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_or_is_refused_by_feature(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert COMMANDS[command] in result.output
    assert result.exit_code == (2 if "asks for" in result.output or "worker" in COMMANDS[command] else 0)


def test_there_are_forty_of_them() -> None:
    assert len(RUNNING) + len(REFUSALS) >= 40
