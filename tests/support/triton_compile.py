"""Compilation of Triton kernels for a GPU that is not there: launches on CPU tensors compile and do not run."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

H100 = GPUTarget("cuda", 90, 32)


def compile_only(monkeypatch: pytest.MonkeyPatch, target: GPUTarget = H100) -> dict[str, int]:
    """Let launches of all kernels compile for a target, and not run. TRITON_INTERPRET must not be 1.

    Returns the number of different compilations by kernel, which launches after this call add to.
    """
    backend = make_backend(target)
    seen: dict[str, set[str]] = {}
    counts: dict[str, int] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        name, key = self.__name__, str((specialization, options))
        if key not in seen.setdefault(name, set()):
            seen[name].add(key)
            counts[name] = len(seen[name])
            options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
            compile(ASTSource(self, signature, constants, attributes), target=target, options=options.__dict__)

    monkeypatch.setattr(JITFunction, "run", run)
    return counts
