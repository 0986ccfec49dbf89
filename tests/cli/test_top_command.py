"""`penstock top`, as a person types it, against a small server of `/live`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.cli import top as top_module
from penstock.cli.app import app
from penstock.cli.top_screen import History, sparkline
from penstock.engine.live.live_view import (
    Live,
    LiveCores,
    LiveCounters,
    LiveEncoderCache,
    LiveFigure,
    LiveKvCache,
    LiveRequests,
    LiveSeconds,
    LiveStep,
)

COMMAND_LINE = CliRunner(env={"COLUMNS": "100", "PENSTOCK_API_KEY": ""})


def live(time: float, **changes: Any) -> Live:
    """State of a busy server, which generates 100 tokens per second from time 0 on."""
    counters = LiveCounters(
        prompt_tokens=int(40 * time),
        cached_prompt_tokens=int(10 * time),
        generated_tokens=int(100 * time),
        draft_tokens=200,
        accepted_tokens=150,
        preemptions=3,
        finished_requests=9,
        refused_requests=0,
    )
    values: dict[str, Any] = {
        "time": time,
        "started_at": time - 3725,
        "version": "1.2",
        "model": "demo",
        "not_ready": None,
        "requests": LiveRequests(running=4, waiting=2, queued=1, unfinished=7, max_running=8),
        "kv_cache": LiveKvCache(num_blocks=100, used=30, cached=50),
        "encoder_cache": LiveEncoderCache(num_tokens=4000, used=200, cached=800, queries=8, hits=6),
        "counters": counters,
        "time_to_first_token": LiveSeconds(sum=0.25, count=1),
        "inter_token_latency": LiveSeconds(sum=0.5, count=100),
        "cores": LiveCores(all=1),
        "restarts": {"core": 0, "workers": 0},
        "steps": [LiveStep(core=0, ended_at=time, seconds=0.02, num_reqs=4, prefill=64, decode=3, draft=6)],
        **changes,
    }
    return Live(**values)


class Handler(BaseHTTPRequestHandler):
    """Answers `/live` with the next state, or with 401 without the key."""

    states: ClassVar[list[Live]] = []
    key = ""

    def do_GET(self) -> None:
        is_allowed = not self.key or self.headers["Authorization"] == f"Bearer {self.key}"
        is_known = self.path.startswith("/live?after=")
        self.send_response(200 if is_known and is_allowed else 401 if is_known else 404)
        self.end_headers()
        if is_known and is_allowed:
            self.wfile.write(msgspec.json.encode(self.states.pop(0)))

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(top_module, "_ONCE_S", 0.0)
    Handler.states, Handler.key = [live(10.0), live(12.0)], ""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def invoke(*arguments: str, exit_code: int = 0) -> str:
    """Output of the command."""
    result = COMMAND_LINE.invoke(app, ["top", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def row(output: str, label: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith(label)]
    return line


def test_a_frame_has_the_numbers_of_the_server(url: str) -> None:
    output = invoke("--url", url, "--once")
    assert "demo  ● ready" in output
    assert "up 1:02:05" in output
    assert row(output, "requests").endswith("4 of 8")
    assert row(output, "waiting").split()[-1] == "3"
    assert row(output, "generated tokens/s").split()[-1] == "100"
    assert row(output, "prompt tokens/s").split()[-1] == "40"
    assert row(output, "prefill tokens").endswith("max 64")
    assert row(output, "draft tokens").endswith("max 6")
    assert row(output, "ms of a step").endswith("max 20")
    assert row(output, "KV cache").endswith("30 %")
    assert "30 used, 50 cached, 20 free" in output
    assert row(output, "encoder cache").endswith("25 %")
    assert "200 used, 800 cached, 3000 free tokens; items found 75 %" in output
    assert "first token 250.0 ms   between tokens 5.0 ms   prefix hits 25 %   drafts accepted 75 %" in output
    assert "started again: nothing" in output


def test_texts_of_the_server_do_not_command_the_terminal(url: str) -> None:
    Handler.states = [live(10.0), live(12.0, model="de\x1b]0;mo\x07", restarts={"br\noker": 1})]
    output = invoke("--url", url, "--once")
    assert r"de\x1b]0;mo\x07  ● ready" in output
    assert r"started again: br\noker 1" in output


def test_a_figure_is_not_broken_in_a_narrow_terminal(url: str) -> None:
    result = COMMAND_LINE.invoke(app, ["top", "--url", url, "--once"], env={"COLUMNS": "60"})
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert "first token 250.0 ms   between tokens 5.0 ms" in lines
    assert "prefix hits 25 %   drafts accepted 75 %   preemptions 3" in lines


def test_bars_are_as_long_as_their_shares(url: str) -> None:
    bar = row(invoke("--url", url, "--once"), "KV cache")
    lengths = [bar.count(sign) for sign in "█▒░"]
    assert [round(10 * length / sum(lengths)) for length in lengths] == [3, 5, 2]


def test_a_model_of_text_has_no_encoder_cache(url: str) -> None:
    Handler.states = [live(1.0), live(2.0, encoder_cache=LiveEncoderCache())]
    assert "encoder cache" not in invoke("--url", url, "--once")


def test_figures_of_features_are_shown(url: str) -> None:
    figures = [
        LiveFigure("tier hits", 30.0, of=40.0),
        LiveFigure("loaded", 3.0 * (1 << 20), unit="bytes"),
        LiveFigure("failed loads", 1200.0),
    ]
    Handler.states = [live(1.0), live(2.0, figures=figures)]
    assert "tier hits 75 %   loaded 3.00 MiB   failed loads 1,200" in invoke("--url", url, "--once")


def test_recoveries_are_shown(url: str) -> None:
    lost = {"cores": LiveCores(all=2, recovering=1), "restarts": {"core": 1, "workers": 2}}
    Handler.states = [live(1.0), live(2.0, **lost)]
    output = invoke("--url", url, "--once")
    assert "● 1 of 2 cores recover from a lost process" in output
    assert "started again: core 1, workers 2" in output


def test_the_key_is_sent_and_a_missing_one_is_named(url: str) -> None:
    Handler.key = "secret"
    assert "needs its API key. Give --api-key" in invoke("--url", url, "--once", exit_code=2)
    assert "does not accept the API key" in invoke("--url", url, "--once", "--api-key", "other", exit_code=2)
    assert "demo" in invoke("--url", url, "--once", "--api-key", "secret")
    Handler.states = [live(10.0), live(12.0)]
    result = COMMAND_LINE.invoke(app, ["top", "--url", url, "--once"], env={"PENSTOCK_API_KEY": "secret"})
    assert "demo" in result.output


def test_a_url_without_a_server_or_without_the_route_is_refused(url: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "Connection refused" in invoke("--url", nowhere, "--once", exit_code=2)
    assert "has no route /live" in invoke("--url", f"{url}/other", "--once", exit_code=2)
    assert "--once" in invoke("--url", url, exit_code=2)
    assert "--interval 0.0" in invoke("--url", url, "--interval", "0", exit_code=2)


@pytest.mark.parametrize("answer", [b"[1]", b"{}", b"<html>", b'{"time": "now"}'])
def test_an_answer_that_is_no_live_view_is_refused(answer: bytes) -> None:
    with listening() as (listener, url):
        thread = threading.Thread(target=answer_once, args=(listener, b"HTTP/1.0 200 OK\r\n\r\n" + answer))
        thread.start()
        assert "answers at /live, but not with the live view of Penstock" in invoke("--url", url, "--once", exit_code=2)
        thread.join()


def test_a_server_of_another_protocol_is_refused() -> None:
    with listening() as (listener, url):
        thread = threading.Thread(target=answer_once, args=(listener, b"220 mail.example.org ready\r\n"))
        thread.start()
        assert "cannot be read" in invoke("--url", url, "--once", exit_code=2)
        thread.join()


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def answer_once(listener: socket.socket, data: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(data)


def test_a_rate_is_that_of_the_last_seconds() -> None:
    history = History()
    for second in range(20):
        history.add({"time": float(second), "count": 10.0 * second if second < 10 else 90.0, "steps": []})
    rates = history.rates(lambda sample: float(sample["count"]))
    assert rates[0] == 0.0
    assert rates[1:10] == [10.0] * 9
    assert rates[-1] == 0.0


def test_a_sparkline_shows_the_last_values() -> None:
    assert sparkline([8.0, 0.0, 4.0, 8.0], 3) == " ▅█"
    assert sparkline([1.0], 4) == "   █"
    assert sparkline([], 2) == "  "
