"""Package `vllm` of integrations/vllm-names: Penstock's names by vLLM's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.imports_of_vllm import IMPORTS, REFUSED

SOURCE = Path(__file__).parents[2] / "integrations" / "vllm-names" / "src"


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_refused_and_found_without_torch() -> None:
    code = f"""
import importlib, importlib.util, penstock, vllm, vllm.utils, vllm.version
for line, said in {REFUSED!r}.items():
    try:
        exec(line)
    except ImportError as error:
        assert said in str(error), (line, str(error))
    else:
        raise AssertionError(line)
assert vllm.__version__ == vllm.version.__version__ == "0.31.0+penstock"
assert vllm.__version_tuple__[:3] == (0, 31, 0) and penstock.__version__ != vllm.__version__
assert vllm.utils.get_ip is penstock.utils.get_ip
assert importlib.util.find_spec("vllm.zebra") is None
try:
    importlib.import_module("vllm.zebra")
except ModuleNotFoundError as error:
    assert error.name == "vllm.zebra"
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    run(code)


def test_a_module_can_be_a_program() -> None:
    code = "import runpy; runpy.run_module('vllm.entrypoints.cli.main', run_name='__main__')"
    assert "Usage: penstock serve" in run(code, "serve", "--help")


@pytest.mark.slow
def test_imports_of_public_scripts_work_under_vllms_name() -> None:
    code = """
import penstock, vllm, vllm.engine.arg_utils
from vllm.sampling_params import SamplingParams
assert vllm.LLM is penstock.LLM and SamplingParams is penstock.SamplingParams
assert vllm.engine.arg_utils.EngineArgs is penstock.EngineArgs
names = {}
exec("from vllm import *; from vllm.outputs import *", names)
assert names["RequestOutput"] is penstock.RequestOutput and names["LLM"] is penstock.LLM
"""
    run("\n".join([*IMPORTS, code]))
