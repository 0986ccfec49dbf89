"""Compilation of Triton kernels for a GPU that is not there: launches on CPU tensors compile and do not run."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

H100 = GPUTarget("cuda", 90, 32)
# Shared memory of a program, in bytes: of an H100, and the least of GPUs with bfloat16 (capability 8.6, 8.9, 12.0).
H100_SHARED, LEAST_SHARED = 227 << 10, 99 << 10


def compile_only(
    monkeypatch: pytest.MonkeyPatch, target: GPUTarget = H100, most_shared: int = H100_SHARED
) -> dict[str, int]:
    """Let launches of all kernels compile for a target, and not run. TRITON_INTERPRET must not be 1.

    Returns the number of different compilations by kernel, which launches after this call add to. Launches fail that
    need more than `most_shared` bytes of shared memory.
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
            source = ASTSource(self, signature, constants, attributes)
            shared = compile(source, target=target, options=options.__dict__).metadata.shared
            assert shared <= most_shared, f"{name} needs {shared} bytes of shared memory, of {most_shared}: {kwargs}"

    monkeypatch.setattr(JITFunction, "run", run)
    return counts
