"""vLLM's names for Penstock: `vllm.x` is `penstock.x`, with vLLM's version. It is not vLLM."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

import penstock

from .version import __version__, __version_tuple__

__all__ = ["__version__", "__version_tuple__", *(name for name in penstock.__all__ if name != "__version__")]


def __getattr__(name: str) -> Any:
    return getattr(penstock, name)


class _Finder:
    """Finder of this package's modules among Penstock's."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        package, _, path = name.partition(".")
        if package != __name__ or not path:
            return None
        try:
            ours = find_spec(f"penstock.{path}")
        except ModuleNotFoundError:
            return None
        if ours is None:
            return None
        return ModuleSpec(name, _Loader(ours), is_package=ours.submodule_search_locations is not None)


class _Loader(InspectLoader):
    """Loader of a module whose names are those of a module of Penstock's."""

    def __init__(self, ours: ModuleSpec) -> None:
        self._ours = ours

    def exec_module(self, module: ModuleType) -> None:
        ours = importlib.import_module(self._ours.name)
        names = [name for name in vars(ours) if not name.startswith("_")]
        module.__all__ = getattr(ours, "__all__", names)  # type: ignore[attr-defined]
        module.__getattr__ = functools.partial(getattr, ours)  # type: ignore[method-assign]

    def get_code(self, fullname: str) -> CodeType | None:
        """Code of `python -m` with the module."""
        loader: Any = self._ours.loader
        code: CodeType | None = loader.get_code(self._ours.name)
        return code

    def get_source(self, fullname: str) -> None:
        return None


sys.meta_path.append(_Finder)
