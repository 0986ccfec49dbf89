"""`penstock bench serve`, as a person types it, against a small server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from support.completion_server import CompletionServer, ServedRequest, answer, serving_in_a_thread

COMMAND_LINE = CliRunner(env={"COLUMNS": "120", "OPENAI_API_KEY": ""})
SMALL = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "3")
# Fields of results of `vllm bench serve`.
VLLM_FIELDS = {
    *("date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")),
}
VLLM_DETAILS = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"}


def invoke(server: CompletionServer, *arguments: str, exit_code: int = 0) -> str:
    """Output of the command."""
    result = COMMAND_LINE.invoke(app, ["bench", "serve", "--base-url", server.url, *SMALL, *arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def bodies(server: CompletionServer) -> list[dict[str, Any]]:
    return [request.body for request in server.requests if request.method == "POST"]


def test_results_have_the_fields_of_vllm(tmp_path: Path) -> None:
    with serving_in_a_thread() as server:
        output = invoke(
            server,
            *("--model", "demo", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
            *("--goodput", "ttft:10000", "tpot:10000", "--metadata", "version=1", "other=2"),
        )
    results = json.loads((tmp_path / "r.json").read_text())
    assert set(results) >= VLLM_FIELDS
    assert not set(results) & VLLM_DETAILS
    assert (results["completed"], results["total_input_tokens"], results["total_output_tokens"]) == (4, 32, 12)
    assert results["request_goodput"] == results["request_throughput"]
    assert (results["request_rate"], results["version"], results["other"]) == ("inf", "1", "2")
    assert "Time to first token (ttft)" in output
    assert "within ttft:10000 tpot:10000" in output


def test_details_are_saved_when_asked_for(tmp_path: Path) -> None:
    with serving_in_a_thread() as server:
        invoke(server, "--save-detailed", "--result-dir", str(tmp_path / "new"), "--label", "first")
    (path,) = (tmp_path / "new").iterdir()
    results = json.loads(path.read_text())
    assert path.name.startswith("first-infqps-")
    assert set(results) >= VLLM_FIELDS | VLLM_DETAILS
    assert results["generated_texts"] == ["xxx"] * 4


def test_the_model_is_the_servers_first_one() -> None:
    with serving_in_a_thread() as server:
        assert "served, random, 4 requests" in invoke(server)
    assert {body["model"] for body in bodies(server)} == {"served"}


def test_prompts_of_completions_are_token_ids_and_requests_ask_for_usage() -> None:
    with serving_in_a_thread() as server:
        invoke(server, "--model=demo", "--served-model-name=other", "--ignore-eos")
    for body in bodies(server):
        assert len(body.pop("prompt")) == 8
        assert body == {
            "model": "other",
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "ignore_eos": True,
        }
    assert {request.path for request in server.requests} == {"/v1/completions"}


def test_chats_are_asked_with_text() -> None:
    with serving_in_a_thread() as server:
        invoke(server, "--model=demo", "--backend=openai-chat", "--top_k=5")
    assert {request.path for request in server.requests} == {"/v1/chat/completions"}
    for body in bodies(server):
        assert body["messages"][0]["role"] == "user"
        assert isinstance(body["messages"][0]["content"], str)
        assert (body["max_completion_tokens"], body["top_k"]) == (3, 5)


def test_a_response_may_be_whole() -> None:
    with serving_in_a_thread() as server:
        output = invoke(server, "--model=demo", "--extra-body", '{"stream": false}')
    assert all("stream_options" not in body for body in bodies(server))
    assert "| Time to first token (ttft) | - |" in " ".join(output.replace("│", "|").replace("┃", "|").split())


def test_warm_up_requests_are_not_measured() -> None:
    with serving_in_a_thread() as server:
        output = invoke(server, "--model=demo", "--num-warmups=3")
    assert len(server.requests) == 7
    assert len({tuple(body["prompt"]) for body in bodies(server)}) == 7
    assert "tok/s of 12" in output


def test_a_server_that_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is asked for again, and requests are measured after one was completed."""
    from penstock.bench.serving import run

    monkeypatch.setattr(run, "_RETRY_INTERVAL_S", 0.01)
    early = iter([503, 503, 503])

    async def starting(request: ServedRequest) -> None:
        if (status := next(early, None)) is not None:
            await request.whole(status, {"error": {"message": "loading"}})
        else:
            await answer(request)

    with serving_in_a_thread(starting) as server:
        output = invoke(server, "--ready-check-timeout-sec=60")
        assert [request.method for request in server.requests] == ["GET"] * 4 + ["POST"] * 5
        assert "tok/s of 12" in output

    async def broken(request: ServedRequest) -> None:
        await request.whole(500, {"error": {"message": "no memory"}})

    monkeypatch.undo()
    with serving_in_a_thread(broken) as server:
        output = invoke(server, "--model=demo", "--ready-check-timeout-sec=0.01", exit_code=1)
    assert "within --ready-check-timeout-sec. The last one failed because of HTTP 500" in " ".join(output.split())


def test_the_server_profiles_the_measured_requests_only() -> None:
    async def profiling(request: ServedRequest) -> None:
        await (request.whole(200, {}) if "profile" in request.path else answer(request))

    with serving_in_a_thread(profiling) as server:
        invoke(server, "--model=demo", "--profile", "--num-warmups=2")
    paths = [request.path for request in server.requests]
    assert paths == ["/v1/completions"] * 2 + ["/start_profile"] + ["/v1/completions"] * 4 + ["/stop_profile"]

    async def without(request: ServedRequest) -> None:
        await request.whole(404, {"error": "not found"})

    with serving_in_a_thread(without) as server:
        output = invoke(server, "--model=demo", "--profile", exit_code=2)
    assert "--profile: /start_profile of the server answers with HTTP 404" in output
    assert not any(body for body in bodies(server))


def test_requests_carry_fields_and_ids(tmp_path: Path) -> None:
    penalties = ("--frequency-penalty=0.5", "--presence-penalty=0.25", "--repetition-penalty=1.5")
    with serving_in_a_thread() as server:
        invoke(
            server,
            *("--model=demo", *penalties, "--logprobs=2", "--request-id-prefix=run-"),
            *("--append-result", "--result-dir", str(tmp_path), "--result-filename=r.jsonl", "--trust-remote-code"),
        )
        invoke(server, "--model=demo", "--backend=openai-chat", "--logprobs=2", "--tokenizer-mode=auto")
        invoke(server, "--model=demo", "--append-result", f"--result-dir={tmp_path}", "--result-filename=r.jsonl")
    sent = bodies(server)
    assert {request.headers["x-request-id"] for request in server.requests[:4]} == {f"run-{n}" for n in range(4)}
    assert (sent[0]["frequency_penalty"], sent[0]["presence_penalty"], sent[0]["repetition_penalty"]) == (
        0.5,
        0.25,
        1.5,
    )
    assert (sent[0]["logprobs"], sent[4]["logprobs"], sent[4]["top_logprobs"]) == (2, True, 2)
    assert [json.loads(line)["completed"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == [4, 4]


def test_headers_are_sent_and_come_before_the_key_of_the_environment() -> None:
    with serving_in_a_thread() as server:
        arguments = ["bench", "serve", "--base-url", server.url, *SMALL, "--model=demo"]
        COMMAND_LINE.invoke(app, [*arguments, "--header", "X-One=1", "X-Two=a=b"], env={"OPENAI_API_KEY": "secret"})
        COMMAND_LINE.invoke(app, [*arguments, "--header", "authorization=mine"], env={"OPENAI_API_KEY": "secret"})
    first, last = server.requests[0].headers, server.requests[-1].headers
    assert (first["authorization"], first["x-one"], first["x-two"]) == ("Bearer secret", "1", "a=b")
    assert last["authorization"] == "mine"


def test_some_failures_are_in_the_table_and_all_failures_are_an_exit_code() -> None:
    async def reject(request: ServedRequest) -> None:
        if request.headers.get("x-some") and request.number % 2:
            await answer(request)
        else:
            await request.whole(429, {"error": {"message": "the queue is full"}}, "Retry-After: 9")

    with serving_in_a_thread(reject) as server:
        some = invoke(server, "--model=demo", "--header", "X-Some=1")
        every = invoke(server, "--model=demo", exit_code=1)
    for output, number in ((some, 2), (every, 4)):
        assert " ".join(f"rejected (429) {number}".split()) in " ".join(output.replace("│", " ").split())
        assert "the queue is full" in output
        assert "longest Retry-After: 9 s" in output


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    result = COMMAND_LINE.invoke(app, ["bench", "serve", "--port", port])
    assert result.exit_code == 1
    assert "ServerUnreachable: /v1/models gives no model" in result.stderr
    result = COMMAND_LINE.invoke(app, ["bench", "serve", "--port", port, "--model=demo", *SMALL])
    assert result.exit_code == 1
    assert "connection refused" in result.stdout


def test_clients_that_disconnect_are_no_failures() -> None:
    with serving_in_a_thread() as server:
        output = invoke(server, "--model=demo", "--disconnect-fraction=1")
    assert "disconnected" in output
    assert "failed because of" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "grpc"], "--backend grpc is not valid"),
        (["--header", "X"], "--header X is not valid"),
        (["--extra-body", "[]"], "--extra-body '[]' is not valid"),
        (["--metric-percentiles", "fifty"], "--metric-percentiles fifty"),
        (["--metric-percentiles", "101"], "--metric-percentiles 101"),
        (["--percentile-metrics", "speed"], "--percentile-metrics speed"),
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--num-warmups", "-1"], "--num-warmups -1"),
        (["--model", "/no/such/folder"], "--tokenizer"),
        (["--ready-check-timeout-sec", "-1"], "--ready-check-timeout-sec -1"),
        (["--ramp-up-strategy", "cubic"], "--ramp-up-strategy cubic is not valid. Allowed: linear, exponential"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"], "--ramp-up-end-rps None is not valid"),
        (["--use-beam-search"], "asks for benchmarks on datasets"),
        (["--no-oversample"], "give --num-prompts of its size"),
        (["--hf-split", "train"], "--hf-split asks for benchmarks on datasets"),
        (["--plot-timeline"], "`penstock bench serve --plot FILE.svg` draws the latencies"),
        (["--zebra"], "No such option: --zebra"),
        (["--tokenizer-mode", "mistral"], "asks for other tokenizers"),
    ],
)
def test_invalid_options_are_named(arguments: list[str], message: str) -> None:
    result = COMMAND_LINE.invoke(
        app, ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model=demo", *arguments]
    )
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_command_is_light() -> None:
    """It shares the machine with the server: neither torch nor Transformers is imported."""
    import subprocess
    import sys

    with serving_in_a_thread() as server:
        arguments = ["bench", "serve", "--base-url", server.url, "--model=demo", *SMALL]
        code = (
            "import sys\nfrom penstock.cli.app import app\n"
            f"app({arguments!r}, standalone_mode=False)\n"
            "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_plot_is_drawn_and_another_format_is_refused_before_the_run(tmp_path: Path) -> None:
    with serving_in_a_thread() as server:
        output = invoke(server, "--model", "demo", "--plot", str(tmp_path / "run.pdf"), exit_code=2)
        assert "Allowed: a name that ends in .svg" in output
        assert not bodies(server)
        invoke(server, "--model", "demo", "--plot", str(tmp_path / "run.svg"))
    svg = (tmp_path / "run.svg").read_text()
    assert "Time to first token, ms" in svg
    assert "4 requests, all at once" in svg
