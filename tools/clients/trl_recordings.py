"""Records what TRL's clients send to a server, as data of tests/server/test_trl_client.py.

    python -m tools.clients.trl_recordings

TRL runs in an environment of its own, with vLLM's names (integrations/vllm-names), against a server that answers all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.clients.environment import ROOT, trainer_python

RECORDINGS = ROOT / "tests" / "server" / "data" / "trl_client.json"
_CHOICE = {
    "prompt_token_ids": [1, 2],
    "token_ids": [3],
    "logprobs": {"tokens": ["token_id:3"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:3": -1.0}]},
}
_CONTENT = {"token": "token_id:3", "logprob": -1.0, "top_logprobs": []}
_ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "demo", "max_model_len": 64}]},
    "/server_info": {"vllm_config": {"weight_transfer_config": {"backend": "gloo"}, "model_config": {"dtype": "x"}}},
    "/get_world_size": {"world_size": 1},
    "/v1/chat/completions": {
        "prompt_token_ids": [1],
        "choices": [{"token_ids": [3], "logprobs": {"content": [_CONTENT]}}],
    },
}


class _Recorder(BaseHTTPRequestHandler):
    """Handler that notes requests. The path /NAME/... says which call sends them."""

    protocol_version = "HTTP/1.1"
    calls: list[dict[str, Any]]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = json.loads(body) if body else None
        call, _, path = self.path.removeprefix("/").partition("/")
        self.calls.append({"call": call, "method": self.command, "path": f"/{path}", "body": data})
        path = f"/{path.partition('?')[0]}"
        answer = _ANSWERS.get(path, {"success": True})
        if path == "/v1/completions":
            answer = {"choices": [_completion(prompt) for prompt in data["prompt"] for _ in range(data.get("n", 1))]}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def _completion(prompt: Any) -> dict[str, Any]:
    return {**_CHOICE, "prompt_logprobs": [None, *[{"5": {"rank": 1, "logprob": -1.0}}] * (len(prompt) - 1)]}


def main() -> int:
    calls: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (_Recorder,), {"calls": calls}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = Path(__file__).with_name("trl_calls.py")
    subprocess.run([trainer_python(), script, f"http://127.0.0.1:{server.server_port}"], check=True)
    server.shutdown()
    RECORDINGS.write_text(json.dumps(calls, indent=1) + "\n")
    print(f"{len(calls)} requests of {len({call['call'] for call in calls})} calls: {RECORDINGS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
