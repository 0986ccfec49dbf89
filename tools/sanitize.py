"""Builds the C++ kernels with the address and undefined-behaviour sanitizers, and runs their tests: any finding is red.

    python tools/sanitize.py [PYTEST'S ARGUMENTS]

The build lies in build/sanitize and leaves the installation unchanged. Without arguments the tests of kernels,
attention and batch invariance run. Needs GCC.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_BUILD = _ROOT / "build" / "sanitize"
_LIBRARY = _BUILD / "lib" / "penstock" / "kernels" / "native" / "_kernels.abi3.so"
_RUNTIMES = ("libasan.so", "libubsan.so")
# Python's own flags have -fwrapv, with which no sum of integers overflows.
_SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-wrapv -fno-omit-frame-pointer -g1"
_TESTS = ("tests/kernels", "tests/attention", "tests/core/test_batch_invariance.py")


def build() -> None:
    """Build the instrumented library; exit with the compiler's error otherwise."""
    _LIBRARY.unlink(missing_ok=True)
    # GCC takes its own AVX-512 header for uninitialised once it is instrumented.
    flags = dict.fromkeys(("CFLAGS", "CXXFLAGS"), f"{_SANITIZED} -Wno-maybe-uninitialized")
    command = ["setup.py", "--quiet", "build", "--force", f"--build-base={_BUILD}", f"--build-lib={_BUILD / 'lib'}"]
    subprocess.run([sys.executable, *command], cwd=_ROOT, env=os.environ | flags, check=True)
    # A build that fails ends without an error, since the kernels are optional.
    if not _LIBRARY.exists():
        sys.exit("The kernels were not built.")
    missing = [name for name in (b"__asan_init", b"__ubsan_handle_add_overflow") if name not in _LIBRARY.read_bytes()]
    if missing:
        sys.exit(f"{_LIBRARY} is not instrumented: it lacks {missing}.")


def run_tests(arguments: Sequence[str]) -> int:
    compiler = os.environ.get("CC", "gcc")
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in _RUNTIMES
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "PYTHONPATH": str(_BUILD / "lib"),
        # Python and torch keep memory until they end. A test has allocations fail.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    # A finding ends the process, and with it what pytest has captured of descriptor 2.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environment).returncode


if __name__ == "__main__":
    build()
    sys.exit(run_tests(sys.argv[1:] or _TESTS))
