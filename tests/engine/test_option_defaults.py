"""The defaults in `LLM`'s signature and in `--help` equal those of the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, EngineConfig, SamplingParams
from penstock.cli.bench import bench
from penstock.cli.chat import chat
from penstock.cli.command import ENGINE
from penstock.cli.evaluate import evaluate
from penstock.cli.generate import generate
from penstock.cli.options import with_defaults
from penstock.cli.plan import plan
from penstock.cli.pool import embed
from penstock.cli.profile import profile
from penstock.cli.serve import serve
from penstock.config.engine import option_names
from support.fake_engine import write_model


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


@pytest.mark.parametrize("command", [bench, chat, embed, evaluate, generate, plan, profile, serve])
def test_commands_give_no_engine_option_by_themselves(command: Callable[..., Any]) -> None:
    defaults = [value for name, value in defaults_of(command).items() if name.startswith(ENGINE)]
    assert len(defaults) > 8
    assert set(defaults) == {None}


def test_engine_options_default_to_the_configurations_own(tmp_path: Path) -> None:
    model = str(write_model(tmp_path))
    given = {name: value for name, value in defaults_of(LLM.__init__).items() if name in option_names()}
    assert len(given) > 8
    assert EngineConfig.create(model, **given) == EngineConfig.create(model)


@pytest.mark.parametrize("model", ["of its own", "demo"])
def test_sampling_options_default_to_the_parameters_own_if_the_model_has_none(model: str, tmp_path: Path) -> None:
    if model != "demo":
        model = str(write_model(tmp_path))
    flags = {name: value for name, value in defaults_of(generate).items() if name in SamplingParams.__struct_fields__}
    assert len(flags) > 8
    # A command's answer is read by a person, who wants more than the interface's 16 tokens.
    expected = SamplingParams(max_tokens=128)
    assert SamplingParams(**with_defaults(flags, model, {}, max_tokens=128)) == expected
