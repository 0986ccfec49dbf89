"""Build of the C++ kernels, with a compiler on every core. All else is in pyproject.toml."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class ParallelBuildExt(build_ext):
    """Compiles the sources of an extension module at the same time; setuptools takes one after the other."""

    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions:
            # A header that changes builds the extension anew; pyproject.toml takes no patterns.
            folders = {Path(source).parent for source in extension.sources}
            extension.depends = sorted(str(path) for folder in folders for path in folder.iterdir())

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_in_parallel(sources: Sequence[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                compiled = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in compiled for path in paths]

        self.compiler.compile = compile_in_parallel
        super().build_extensions()


setup(cmdclass={"build_ext": ParallelBuildExt})
