"""Modules that only vLLM has, such as `penstock.sampling_params`: their names here, by the table in config/vllm.toml.

No file has these modules. The finder in `penstock/__init__.py` asks for them when every other finder has found nothing,
so that they never hide a module of Penstock's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from penstock.config import vllm


def find_module(name: str, public_names: Iterable[str]) -> ModuleSpec:
    """Spec of a module of the table.

    Raises UnsupportedName for one of a feature that Penstock does not have, and ModuleNotFoundError, which says where
    public names are, for any other.
    """
    path = name.partition(".")[2]
    known = {*vllm.table().modules, *vllm.table().programs}
    is_package = any(one.startswith(f"{path}.") for one in known)
    if path in known or is_package:
        return ModuleSpec(name, _Loader(path), is_package=is_package)
    vllm.check_module(path)
    names = ", ".join(one for one in public_names if not one.startswith("_"))
    hint = f"Public names are in penstock itself, as in `from penstock import SamplingParams`: {names}."
    raise ModuleNotFoundError(f"No module named {name!r}. {hint}", name=name)


class _Loader(Loader):
    """Loader of one module of the table. path: without the package's name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        module.__all__ = vllm.table().modules.get(self._path, [])  # type: ignore[attr-defined]
        module.__getattr__ = functools.partial(vllm.attribute, module.__name__)  # type: ignore[method-assign]

    def get_code(self, _: str) -> CodeType:
        """Code of `python -m` with the module."""
        words = vllm.table().programs.get(self._path, "").split()
        source = f"import sys; from penstock.cli.main import main; sys.argv[1:1] = {words!r}; main()"
        return compile(source, f"<penstock.{self._path}>", "exec")
