"""Sends requests that schemathesis derives from the server's OpenAPI document to `penstock serve`.

    python -m tools.clients.schemathesis_suite [SCHEMATHESIS'S OPTIONS]

The exit status is 1 after a status 5xx, or a status, content type or body that the document does not have.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.server_process import ServerProcess, serve_command
from tools.clients.environment import client_python

_PACKAGES = ("schemathesis==4.32.5", "hypothesis==6.170.17")
_ENGINE = ("--threads", "1", "--kv-cache-memory-bytes", "32MiB", "--max-model-len", "256")
# A template that takes every role, so that random messages reach the engine.
_TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_CHAT = ("--chat-template", _TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance"
)
_OPTIONS = (
    "--checks",
    _CHECKS,
    "--phases",
    "examples,coverage,fuzzing",
    "--max-time",
    "120",
    "--request-timeout",
    "30",
)
_REPRODUCIBLE = ("--seed", "1", "--generation-deterministic", "--continue-on-failure")


def main(arguments: Sequence[str]) -> int:
    python = client_python("schemathesis", _PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ServerProcess(serve_command("demo", *_ENGINE, *_CHAT), log) as server:
            command = [python, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
            status = subprocess.run([*command, *_OPTIONS, *_REPRODUCIBLE, *arguments], cwd=folder).returncode
        text = log.read_text(errors="replace")
        if "Traceback" in text:
            print(f"The server's log has a traceback:\n{text[-4000:]}")
            return 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
