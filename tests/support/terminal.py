"""Command in a pseudo-terminal, for tests that type and read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time

CTRL_C, CTRL_D, UP, TAB = "\x03", "\x04", "\x1b[A", "\t"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class Terminal:
    """Runs a command in a pseudo-terminal. `screen` is all it has shown, without escape sequences."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._controller, terminal = pty.openpty()

        def take_the_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**environment, "TERM": "xterm", "COLUMNS": "100"},
            start_new_session=True,
            preexec_fn=take_the_terminal,
        )
        os.close(terminal)
        self._shown = b""

    @property
    def screen(self) -> str:
        return _ESCAPES.sub("", self._shown.decode("utf-8", "replace")).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def wait_for(self, text: str, *, after: int = 0, timeout_s: float = 60) -> int:
        """Read until the screen has `text` from `after` on; returns the position behind it."""
        deadline = time.monotonic() + timeout_s
        while (position := self.screen.find(text, after)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen[after:]!r}"
            assert self._read(0.2) or self.process.poll() is None, f"it ended without {text!r}: {self.screen!r}"
        return position + len(text)

    def press_until(self, key: str, text: str, *, after: int) -> int:
        """Press a key until the screen has `text`; returns the position behind it.

        A signal that comes just before Python's line editor waits for input is only seen with the next key.
        """
        for _ in range(20):
            self.type(key)
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline:
                self._read(0.2)
                position = self.screen.find(text, after)
                if position >= 0:
                    return position + len(text)
        raise AssertionError(f"no {text!r} in {self.screen[after:]!r}")

    def end(self, timeout_s: float = 60) -> int:
        """Read the remaining output, and return the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(0.2) or self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.screen!r}"
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._controller)

    def _read(self, timeout_s: float) -> bool:
        """Read available output; False if there is none."""
        if not select.select([self._controller], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self._shown += data
        return bool(data)
