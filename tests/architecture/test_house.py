"""Structure of the source in numbers (`tools/house.py`), which changes may lower and not raise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.kernels.native import NATIVE

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))

import house  # noqa: E402
from state_of_modules import state_of_modules  # noqa: E402

# Most that each count may be; what it should be is in `tools/house.py`.
BOUNDS = {
    "files in knots of imports around `runner/` and `step/`, types included": 0,
    "files in knots of imports in all of `src`": 0,
    "files of `runner/`, `step/` and features that a repeated decode step calls": 10,
    "files that it calls from `EngineCore.step` to the token and back": 21,
    "places that decide whether a step repeats, keeps its frame or takes a fast path": 6,
    "registries of LoRA's state": 3,
    "files that name LoRA or adapters outside of its folders": 28,
    "files with types of the tracer outside of native kernels and executions": 0,
    "members of the interface of executions": 5,
    "`isinstance` of an execution": 0,
    "signatures of the attention entry": 1,
    "definitions of `collective_rpc`'s parameters": 1,
    "switches over names of worker methods": 1,
    "state of modules and ambient values": 12,
    "features of more than 1,500 lines": 1,
}

OF_A_STEP = {name for name in BOUNDS if name.startswith("files") and " calls" in name}


@pytest.fixture(scope="module")
def counts() -> dict[str, house.Count]:
    """Counts by name. The tool runs in a process of its own, without a garbage collector that visits all nodes."""
    command = [sys.executable, str(TOOLS / "house.py"), "--json"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
    return {count["name"]: house.Count(**count) for count in json.loads(printed)}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_count_does_not_rise(name: str, counts: dict[str, house.Count]) -> None:
    if name in OF_A_STEP and NATIVE is None:
        pytest.skip("steps without C++ kernels are run layer by layer")
    places = "\n".join(counts[name].places)
    assert counts[name].value <= BOUNDS[name], f"{name}:\n{places}"


def test_no_module_keeps_hidden_state(counts: dict[str, house.Count]) -> None:
    """What modules keep, and what is set around calls, is what the page on the architecture lists with reasons."""
    (found,) = (count.places for name, count in counts.items() if name.startswith("state of modules"))
    page = (TOOLS.parent / "docs" / "internals" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\S+\.py: [^`]+)` \| .+ \|$", page, re.MULTILINE)
    assert sorted(place.partition(" (")[0] for place in found) == sorted(listed)


def test_a_knot_is_the_files_that_import_each_other_round_about() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert sorted(map(sorted, house.knots(imports))) == [["a", "b", "c"], ["f", "g"]]


def _house_of(folder: Path, files: Mapping[str, str]) -> house.House:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return house.House(folder)


def test_imports_for_types_and_in_functions_are_seen(tmp_path: Path) -> None:
    package = tmp_path / "package"
    found = _house_of(
        package,
        {
            "__init__.py": "",
            "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.b import B\n",
            "b.py": "def f():\n    from package import c\n",
            "c.py": "import package.a\n",
            # A module of a package is none of the names that the package itself has.
            "inner/__init__.py": "from package.inner.d import D\n",
            "inner/d.py": "from package.inner import e, NAME\n",
            "inner/e.py": "from package.inner import f\n",
            "inner/f.py": "",
        },
    )
    assert found.imports["a.py"] == {"b.py"}
    assert found.imports["inner/d.py"] == {"inner/e.py", "inner/__init__.py"}
    assert found.imports["inner/e.py"] == {"inner/f.py"}
    knots = sorted(map(sorted, house.knots(found.imports)))
    assert knots == [["a.py", "b.py", "c.py"], ["inner/__init__.py", "inner/d.py"]]


def test_hidden_state_is_seen_in_each_form(tmp_path: Path) -> None:
    files = {
        "constants.py": "TABLE = {1: 2}\nNAMES = ['a']\n\ndef f(TABLE):\n    TABLE[1] = 3\n\ndef g():\n    NAMES = []\n"
        "    NAMES.append(1)\n",
        "registry.py": "import itertools\nknown: dict = {}\nnumbers = itertools.count()\nother = set()\n\n"
        "def add(name):\n    known[name] = next(numbers)\n",
        "elsewhere.py": "from package.registry import other\n\ndef f():\n    other.add(1)\n",
        "locals.py": "import threading\nfrom contextvars import ContextVar\n\nhere = threading.local()\n"
        "now = ContextVar('now')\n\nclass Place(threading.local):\n    pass\n",
        "rebound.py": "x = 1\n\ndef f():\n    global x\n    x = 2\n",
        "classes.py": "class A:\n    made = []\n\n    @classmethod\n    def make(cls):\n        cls.made.append(1)\n",
        "ambient.py": "from contextlib import contextmanager\n\n@contextmanager\ndef using(self, value):\n"
        "    self.now = value\n    try:\n        yield\n    finally:\n        self.now = None\n",
    }
    assert sorted(state_of_modules(_house_of(tmp_path / "package", files))) == [
        "ambient.py: using, self.now",
        "classes.py: made",
        "locals.py: ContextVar('now')",
        "locals.py: Place",
        "locals.py: threading.local()",
        "rebound.py: x",
        "registry.py: known",
        "registry.py: numbers",
        "registry.py: other",
    ]


def test_a_condition_that_joins_the_repetition_with_something_else_decides(tmp_path: Path) -> None:
    files = {
        "runner/follows.py": "def f(frame, message):\n    if frame.is_repeated:\n        return 1\n"
        "    return 2 if message.repeats_step_id is None else 3\n"
        "def g(self, step):\n    if self._can_be_repeated(step):\n        return 1\n    return 2\n"
        "def is_all_decodes(self):\n    return self.a == self.b\n",
        "runner/decides.py": "def f(frame, is_on):\n    if frame.is_repeated and is_on:\n        return 1\n"
        "def g(step, is_on):\n    return 1 if is_on and step.awaiting_req_ids else 2\n"
        "def may_repeat(self):\n    return self.a or self.b\n"
        "def h(self, step):\n    while step.id == self.repeats_step_id:\n        pass\n"
        "def k(self, step):\n    if self.a and self._can_be_repeated(step):\n        pass\n"
        "def m(self, step):\n    if self.a and step.is_all_decodes:\n        pass\n",
        "loader/other.py": "def f(repeats, is_on):\n    return 1 if repeats and is_on else 2\n",
    }
    (found,) = house.count_decisions(_house_of(tmp_path / "package", files))
    assert [place.rpartition(" ")[2] for place in found.places] == ["f", "g", "may_repeat", "h", "k", "m"]
    assert all(place.startswith("runner/decides.py") for place in found.places)


def test_switches_over_methods_are_comparisons_and_tables_of_names(tmp_path: Path) -> None:
    files = {
        "contract/rpc.py": "EFFECTS = {'add': 1}\n",
        "worker/worker.py": "class Worker:\n    def reload(self): ...\n    def check(self): ...\n",
        "core.py": "def f(method):\n    if method in ('reload', 'other'):\n        return 1\n    if method == 'else':\n"
        "        return 2\n    return {'check': 1, 'reload': 2}[method], {'check': 1, 'x': 2}\n",
        "named.py": "_LOADS = ('reload',)\n\ndef f(method):\n    return method in _LOADS\n",
    }
    *_, switches = house.count_calls(_house_of(tmp_path / "package", files))
    assert switches.places == ["core.py:2 reload", "core.py:6 check, reload", "named.py:4 reload"]
