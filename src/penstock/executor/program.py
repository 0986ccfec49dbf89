"""What the program that started an engine defines itself, and sends to the engine's processes."""

from __future__ import annotations

import io
import os
import pickle
import runpy
import sys
import threading
from types import FunctionType
from typing import Any

from penstock.errors import ConfigError, LifecycleError, PenstockError

# The program's `__name__` while a process looks for what it defines; runpy makes a module of it for as long.
_PROGRAM_ELSEWHERE = "__penstock_worker__"
_WITHOUT_PROGRAM = (
    "Or define that in a module, or let everything run in one process: enable_multiprocessing=False, and one worker."
)
# An attribute of the main module in an engine's process: the file of the program whose engine it is.
_OWNER = "__penstock_program__"


def main_path() -> str | None:
    """The file of the program that runs, or that started this process for its engine, if it can be run again."""
    main = sys.modules["__main__"]
    path = getattr(main, _OWNER, None) or getattr(main, "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None


def pickled(name: str, sent: Any) -> bytes:
    """For `Program.load` in another process. name: what errors call it.

    Raises ConfigError for what cannot be found there.
    """
    try:
        return pickle.dumps(sent)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name} cannot be sent to another process: {error}. Functions and classes must be defined at the top of a "
            "module, and arguments and answers must be plain data or tensors; or let everything run in one process: "
            "enable_multiprocessing=False, and one worker."
        ) from error


class Program:
    """What the program that started this process defines itself, found by running it under another name.

    What was found this process has too, and it tells of the program (`main_path`): processes that this one starts can
    be sent the same. It does not say that it runs it, since libraries run it again then, in processes of their own.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._names: dict[str, Any] | None = None
        setattr(sys.modules["__main__"], _OWNER, path)

    def load(self, data: bytes) -> Any:
        """What was pickled there. Raises ConfigError where the program has no file."""
        return _Unpickler(io.BytesIO(data), self).load()

    def find(self, name: str) -> Any:
        if self._path is None:
            raise ConfigError(f"{name} is defined in a program without a file: import it from a module instead.")
        if self._names is None:
            self._names = _run(self._path)
        return self._names[name]


def _run(path: str) -> dict[str, Any]:
    try:
        names = runpy.run_path(path, run_name=_PROGRAM_ELSEWHERE)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path} was run again in a process of the engine's, for what it defines and sent there, and failed with "
            f"{type(error).__name__}: {error}. {_WITHOUT_PROGRAM}"
        ) from error
    main = sys.modules["__main__"]
    main.__file__ = path
    for name, value in names.items():
        if isinstance(value, type | FunctionType) and value.__module__ == _PROGRAM_ELSEWHERE:
            value.__module__ = "__main__"
            setattr(main, name, value)
    return names


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, program: Program) -> None:
        super().__init__(data)
        self._program = program

    def find_class(self, module: str, name: str) -> Any:
        return self._program.find(name) if module == "__main__" else super().find_class(module, name)


def refuse_at_exit() -> None:
    """Raise LifecycleError in a program that is ending: no thread can start any more, nor be waited for."""
    # The main thread counts as ended when it runs the functions of `atexit`. Other threads may go on before that.
    main = threading.main_thread()
    if threading.current_thread() is main and not main.is_alive():
        raise LifecycleError(
            "No engine can start while the program ends, such as in a function that atexit calls. Make it before, and "
            "let that function use or close it."
        )


def refuse_in_program() -> None:
    """Raise LifecycleError where a process is only looking for what its program defines: no engine must start again."""
    if _PROGRAM_ELSEWHERE in sys.modules:
        raise LifecycleError(
            "A worker's process runs the program again for a function of it that was sent there, and the program "
            f'starts an engine. Let it do so under `if __name__ == "__main__":`. {_WITHOUT_PROGRAM}'
        )
