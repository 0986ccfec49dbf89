"""Modules that only vLLM has: imports of public scripts work with the package's name alone replaced."""

from __future__ import annotations

import argparse
import importlib
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import penstock
from penstock.config import vllm
from penstock.engine.arg_utils import EngineArgs, FlexibleArgumentParser
from penstock.errors import UnsupportedFeature
from support.imports_of_vllm import IMPORTS, REFUSED

TABLE = vllm.table()


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_of_a_public_script_works(line: str) -> None:
    names: dict[str, Any] = {}
    exec(line.replace("vllm", "penstock", 1), names)
    assert all(value is not None for value in names.values())


@pytest.mark.parametrize("line", REFUSED)
def test_an_import_of_a_missing_feature_is_refused_by_its_name(line: str) -> None:
    with pytest.raises(ImportError, match=REFUSED[line]) as raised:
        exec(line.replace("vllm", "penstock", 1))
    assert isinstance(raised.value, UnsupportedFeature)


def test_every_module_of_the_table_has_its_names_and_hides_none_of_ours() -> None:
    for path, names in TABLE.modules.items():
        module = importlib.import_module(f"penstock.{path}")
        assert all(hasattr(module, name) for name in names)
        assert path == "config" or not hasattr(module, "__file__")
    used = {name for names in TABLE.modules.values() for name in names}
    assert used >= set(TABLE.homes)


def test_a_name_is_the_same_object_everywhere() -> None:
    module = importlib.import_module("penstock.sampling_params")
    assert module.SamplingParams is penstock.SamplingParams
    assert importlib.import_module("penstock.v1.engine.async_llm").AsyncLLM is penstock.AsyncEngine


def test_variables_have_the_values_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = importlib.import_module("penstock.envs")
    monkeypatch.setenv("PENSTOCK_LOG_LEVEL", "debug")
    monkeypatch.setenv("PENSTOCK_API_KEY", "one,two")
    monkeypatch.setenv("PENSTOCK_CACHE", "/cache")
    assert (envs.VLLM_LOGGING_LEVEL, envs.VLLM_API_KEY, envs.VLLM_CACHE_ROOT) == ("DEBUG", "one", "/cache")
    assert (envs.VLLM_USE_V1, envs.VLLM_USE_MODELSCOPE, envs.VLLM_PORT, envs.VLLM_HOST_IP) == (True, False, None, "")


def test_a_logger_writes_a_repeated_line_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = importlib.import_module("penstock.logger").init_logger("script")
    for _ in range(2):
        logger.warning_once("at %s", "once")
        logger.warning("again")
    assert [record.getMessage() for record in caplog.records] == ["at once", "again", "again"]


def test_an_open_port_can_be_listened_on_at_this_machines_address() -> None:
    helpers = importlib.import_module("penstock.utils")
    with socket.socket() as listener:
        listener.bind((helpers.get_ip(), helpers.get_open_port()))


def test_a_name_that_a_module_does_not_have_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'zebra' from 'penstock.utils'"):
        exec("from penstock.utils import zebra")


def test_an_unknown_module_says_where_public_names_are() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"(?s)from penstock import SamplingParams.*LoRARequest"):
        importlib.import_module("penstock.zebra")


def test_a_module_can_be_a_program() -> None:
    arguments = [sys.executable, "-m", "penstock.entrypoints.openai.api_server", "--lora-modules", "x"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "lora_modules" in result.stderr.replace("-", "_")


# Arguments of scripts.


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def test_engine_arguments_come_from_flags(parser: argparse.ArgumentParser) -> None:
    given = ["--max_model_len=64", "--kv-cache-memory-bytes", "1MiB", "--no-enable-prefix-caching", "--enforce-eager"]
    config = EngineArgs.from_cli_args(parser.parse_args(given))
    assert (config.model.model, config.model.max_model_len) == ("demo", 64)
    assert not config.cache.enable_prefix_caching


def test_flags_are_arguments_of_an_engine(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model="demo", dtype="half")
    options = vars(parser.parse_args(["--gpu-memory-utilization", "0.5"]))
    assert EngineArgs(**options) == EngineArgs("demo", dtype="float16", memory_fraction=0.5)


def test_a_script_has_flags_of_its_own() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--host", default="here")
    group: Any = EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    group.add_argument("--max_tokens", type=int)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args(["--max-tokens", "4"])
    assert (args.host, args.max_tokens, args.seed) == ("here", 4, 3)
    assert EngineArgs.from_cli_args(args).model.seed == 3


def test_an_option_of_a_missing_feature_is_refused_by_its_name(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(UnsupportedFeature, match="expert parallelism"):
        EngineArgs.from_cli_args(parser.parse_args(["--enable-expert-parallel"]))


def test_a_tokenizer_is_that_of_a_model() -> None:
    helpers: ModuleType = importlib.import_module("penstock.tokenizers")
    assert helpers.get_tokenizer("demo", trust_remote_code=True).encode("Hello")
