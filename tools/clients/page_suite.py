"""Drives the page of `penstock serve` in headless Chromium.

    python -m tools.clients.page_suite [--screenshots FOLDER] [NAMES OF CHECKS]

The browser is the system's, of Debian's package `chromium`; CHROMIUM names another one. The exit status is 1 if a check
fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.server_process import ServerProcess, serve_command
from tools.clients.environment import client_python

_CHECKS = Path(__file__).with_name("page_checks.py")
_PACKAGES = ("playwright==1.65.2", "axe-playwright-python==0.1.8", "psutil==7.2.2")
# Two workers, of which one is killed, and a template that shows tools.
_ENGINE = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--tensor-parallel-size", "2", "--max-num-seqs", "8")
_TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_CHAT = ("--chat-template", _TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_KEY = "secret"


def main(arguments: Sequence[str]) -> int:
    python = client_python("page", _PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        command = serve_command("demo", *_ENGINE, *_CHAT, "--api-key", _KEY)
        with ServerProcess(command, Path(folder) / "server.log") as server:
            environment = os.environ | {"PENSTOCK_API_KEY": _KEY, "PENSTOCK_PID": str(server.pid)}
            return subprocess.run([python, _CHECKS, server.url, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
