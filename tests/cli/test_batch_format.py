"""`penstock generate` with OpenAI's batch format, in this process and over a core that makes up its tokens."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.batch_results import BatchFormat
from penstock.cli.requests import server_options
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.output.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from penstock.server.chat_model import ChatModel
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.completion import CompletionRequest
from penstock.text.tokenizer import load_tokenizer
from support.fake_engine import FakeCore, install_fake_core, scripted, write_model
from support.servers import serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ECHO = {"echo": True, "logprobs": None}


class RememberedCore(FakeCore):
    """Tells the test what it was asked. script: tokens of every answer, if any."""

    made: list[FakeCore]
    script: tuple[int, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)
        if self.script:
            self.tokens = scripted(*self.script)


Answer: TypeAlias = Callable[..., tuple[list[Any], Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model")
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% for tool in tools or [] %} tool{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[FakeCore]:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core(RememberedCore)
    RememberedCore.made = []
    return RememberedCore.made


@pytest.fixture
def answer(model: Path, cores: list[FakeCore]) -> Answer:
    """Runs the command; returns the lines that it wrote, and its result."""

    def run(*lines: Any, exit_code: int = 0) -> tuple[list[Any], Any]:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        arguments = ["generate", "--model", str(model), "--input", "-", "--max-tokens", "4"]
        result = COMMAND_LINE.invoke(app, arguments, input=text.encode())
        assert result.exit_code == exit_code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()], result

    return run


def batch(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_a_chat_is_answered_as_a_server_would(answer: Answer, cores: list[FakeCore], model: Path) -> None:
    (line,), result = answer(batch("one", messages=MESSAGES, max_tokens=3, seed=5, temperature=0.5))
    assert result.stderr == ""
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"]) == ("one", None)
    response = line["response"]
    assert response.keys() == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    body = response["body"]
    assert (body["object"], body["model"]) == ("chat.completion", str(model))
    (request,) = cores[0].added
    tokens = [request.prompt_token_ids, [cores[0].tokens(request, position) for position in range(3)]]
    prompt, text = (load_tokenizer(model).decode(ids, skip_special_tokens=True) for ids in tokens)
    assert prompt == "hi"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(request.prompt_token_ids),
        "completion_tokens": 3,
        "total_tokens": len(request.prompt_token_ids) + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert (request.sampling_params.seed, request.sampling_params.temperature) == (5, 0.5)


def test_a_completion_is_answered_as_a_server_would(answer: Answer, cores: list[FakeCore]) -> None:
    lines, _ = answer(
        batch("a", COMPLETION, prompt="the fox", n=2, seed=1),
        batch("b", COMPLETION, prompt=[9, 10]),
        batch("c", COMPLETION, prompt=["one"], max_tokens=1),
        batch("d", COMPLETION, prompt=[[11]]),
    )
    bodies = [line["response"]["body"] for line in lines]
    assert [line["custom_id"] for line in lines] == ["a", "b", "c", "d"]
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert [[choice["index"] for choice in body["choices"]] for body in bodies] == [[0, 1], [0], [0], [0]]
    first, second = bodies[0]["choices"]
    assert first["text"] != second["text"]
    assert bodies[0]["usage"]["completion_tokens"] == 8
    assert [body["usage"]["completion_tokens"] for body in bodies[1:]] == [4, 1, 4]
    by_first = {tuple(request.prompt_token_ids) for request in cores[0].added}
    assert {(9, 10), (11,)} < by_first
    assert len({line["id"] for line in lines}) == 4


def test_parameters_have_the_names_of_openai(answer: Answer, cores: list[FakeCore]) -> None:
    answer(
        batch("a", messages=MESSAGES, max_completion_tokens=2, stop="zebra", logit_bias={"70": -3}),
        batch("b", messages=MESSAGES, stop=["x", "y"], presence_penalty=1, frequency_penalty=0.5, top_p=0.9, user="u"),
        batch(
            "c", messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=None, stream=False, metadata={"a": "b"}
        ),
        batch("d", messages=MESSAGES, logprobs=True, response_format={"type": "text"}, top_k=7, cache_salt="s"),
        batch("e", messages=MESSAGES, logprobs=False, tools=[TOOL], tool_choice="none"),
        batch("f", COMPLETION, prompt="a", logprobs=2, echo=False),
    )
    a, b, c, d, e, f = (request.sampling_params for request in cores[0].added)
    assert (a.max_tokens, a.stop, a.logit_bias) == (2, ("zebra",), {70: -3.0})
    assert (b.stop, b.presence_penalty, b.frequency_penalty, b.top_p, b.max_tokens) == (("x", "y"), 1, 0.5, 0.9, 4)
    assert [one.logprobs for one in (a, b, c, d, e, f)] == [None, None, 3, 0, None, 2]
    assert (c.max_tokens, d.top_k) == (4, 7)
    assert [request.cache_salt for request in cores[0].added] == [None, None, None, "s", None, None]


def test_log_probabilities_are_those_of_the_tokens(answer: Answer, cores: list[FakeCore], model: Path) -> None:
    lines, _ = answer(
        batch("a", messages=MESSAGES, logprobs=True, top_logprobs=1, seed=3),
        batch("b", messages=MESSAGES, logprobs=True, seed=3),
        batch("c", COMPLETION, prompt="hi", logprobs=1, seed=3),
    )
    tokenizer = load_tokenizer(model)
    request = cores[0].added[0]
    ids = [cores[0].tokens(request, position) for position in range(4)]
    texts, above = ([tokenizer.decode([token + by], skip_special_tokens=False) for token in ids] for by in (0, 1))
    with_one, without, plain = (line["response"]["body"]["choices"][0]["logprobs"] for line in lines)
    # The fake core samples the second likeliest token, whose number is one less than the likeliest's.
    assert [entry["token"] for entry in with_one["content"]] == texts
    assert [entry["logprob"] for entry in with_one["content"]] == [-1.0] * 4
    assert [bytes(entry["bytes"]) for entry in with_one["content"]] == list(map(tokenizer.token_bytes, ids))
    assert [[(o["token"], o["logprob"]) for o in entry["top_logprobs"]] for entry in with_one["content"]] == [
        [(text, -0.5)] for text in above
    ]
    assert [entry["top_logprobs"] for entry in without["content"]] == [[]] * 4
    assert plain["tokens"] == texts
    assert plain["token_logprobs"] == [-1.0] * 4
    assert plain["top_logprobs"] == [
        {text: -1.0, likeliest: -0.5} for likeliest, text in zip(above, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("url", "more"), [(CHAT, {}), (COMPLETION, {}), (COMPLETION, {"echo": True, "logprobs": None})]
)
def test_choices_and_usage_are_those_of_a_server(
    answer: Answer,
    cores: list[FakeCore],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    more: dict[str, Any],
) -> None:
    token_ids = load_tokenizer(model).encode("a😀éb", add_special_tokens=False)
    monkeypatch.setattr(RememberedCore, "script", tuple(token_ids))
    asked = {"messages": MESSAGES, "logprobs": True} if url == CHAT else {"prompt": "hi", "logprobs": 0}
    body = {**asked, **more, "max_tokens": len(token_ids)}
    (line,), _ = answer(batch("a", url, **body))
    config = EngineConfig.create(str(model))
    core = FakeCore()
    core.tokens = scripted(*token_ids)
    with serving(AsyncEngine.from_config(config, load_core=lambda _: core)) as server:
        answered = server.post(url, {"model": "demo", **body}).json
    (own,) = line["response"]["body"]["choices"]
    assert [own] == answered["choices"]
    assert line["response"]["body"]["usage"] == answered["usage"]
    if url == CHAT:
        assert b"".join(bytes(entry["bytes"]) for entry in own["logprobs"]["content"]).decode() == "a😀éb"
    elif not more:
        assert own["logprobs"]["text_offset"][-1] == len("a😀é")


def test_a_token_that_cannot_come_has_a_finite_log_probability(model: Path) -> None:
    row = {3: Logprob(-0.1, 1, "a"), 4: Logprob(-math.inf, 2, "b")}
    completion = CompletionOutput(index=0, text="a", token_ids=[3], logprobs=[row], finish_reason="stop")
    output = RequestOutput(
        request_id="0",
        prompt="x",
        prompt_token_ids=[1],
        outputs=[completion],
        finished=True,
        num_cached_tokens=0,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    requests: tuple[ChatCompletionRequest | CompletionRequest, ...] = (
        ChatCompletionRequest.model_validate({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        CompletionRequest.model_validate({"prompt": "x", "logprobs": 2}),
    )
    tokenizer = load_tokenizer(model)
    served = ChatModel(tokenizer, server_options("demo", {}), SamplingParams())
    for request in requests:
        form = BatchFormat("x", CHAT, lambda _: served, request, SamplingParams(logprobs=2))
        (line,) = form.lines(0, output, request_hash=None, tokenizer=tokenizer)
        assert "Infinity" not in json.dumps(line)
        assert "-9999.0" in json.dumps(line)


def test_tools_are_in_the_prompt_and_restrict_the_answer(answer: Answer, cores: list[FakeCore]) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [TOOL]}
    lines, _ = answer(
        *(batch(choice, **asked, tool_choice=choice) for choice in ("none", "required")),
        batch("auto", **asked),
        batch("other", **{**asked, "tools": [{"type": "function"}]}),
        exit_code=1,
    )
    none, required = cores[0].added
    assert len(required.prompt_token_ids) > len(none.prompt_token_ids)
    assert (none.sampling_params.structured_outputs, required.sampling_params.structured_outputs is None) == (
        None,
        False,
    )
    # The template shows tools, and no form of calls that a parser reads.
    assert "--tool-call-parser" in lines[2]["error"]["message"]
    assert "tools[0].name=None" in lines[3]["error"]["message"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            batch("x", messages=MESSAGES, temprature=1),
            "There is no field temprature. Did you mean temperature?",
        ),
        (batch("x", messages=MESSAGES, temperature=-1), "temperature=-1.0 is not valid"),
        (batch("x", messages=MESSAGES, detokenize=False), "There is no field detokenize."),
        (batch("x", messages=MESSAGES, timeout=3), "timeout=3 is not available. Allowed: none."),
        (batch("x", messages=MESSAGES, add_special_tokens=True), "add_special_tokens=True is not available."),
        (batch("x", COMPLETION, prompt="a", messages=MESSAGES), "There is no field messages"),
        (batch("x", messages=MESSAGES, stream=True), "stream=True is not available. Allowed: False."),
        (batch("x", messages=MESSAGES, response_format={"type": "xml"}), "response_format="),
        (batch("x", messages=MESSAGES, logprobs=3), "logprobs=3 is not valid. Allowed: a valid boolean."),
        (batch("x", messages=MESSAGES, top_logprobs=3), "top_logprobs is allowed only with logprobs=true."),
        (batch("x", messages=MESSAGES, logprobs=True, top_logprobs=50), "logprobs=50 is not valid"),
        (batch("x", messages=[]), "messages=[] is not valid"),
        (batch("x", prompt="a"), "messages is missing"),
        (batch("x", messages=[{"role": "user", "content": "a " * 99}]), "The prompt has"),
        (batch("x", COMPLETION, prompt=["a", "b"]), "prompt has 2 prompts. Allowed: one prompt per line"),
        (batch("x", COMPLETION), "prompt is missing"),
        (batch("x", COMPLETION, prompt="a", logprobs=True), "logprobs=True is not valid"),
        (batch("x", COMPLETION, prompt=[400]), "token id 400"),
        (batch("x", "/v1/embeddings", input="a"), "url='/v1/embeddings' is not valid. Allowed: /v1/chat/completions,"),
        ({**batch("x", messages=MESSAGES), "method": "GET"}, "method='GET' is not valid"),
        ({**batch("x", messages=MESSAGES), "body": "a"}, "body='a' is not valid"),
        (
            {**batch("x", messages=MESSAGES), "extra": 1},
            "There is no field extra (given: 1). Allowed: custom_id, method, url, body.",
        ),
        (batch("good", messages=MESSAGES), "custom_id='good' is that of standard input, line 1 too"),
        ({"url": CHAT, "body": {"messages": MESSAGES}}, "custom_id=None is not valid"),
        ('{"custom_id": "x", ', "This is no JSON"),
    ],
)
def test_a_bad_line_is_answered_in_its_place(answer: Answer, line: Any, message: str) -> None:
    good = batch("good", messages=MESSAGES)
    lines, result = answer(good, line, batch("also good", messages=MESSAGES), exit_code=1)
    assert [line["response"]["status_code"] for line in lines] == [200, 400, 200]
    bad = lines[1]
    assert bad["custom_id"] == (line.get("custom_id") if isinstance(line, dict) else "x")
    assert bad["error"]["message"] == bad["response"]["body"]["error"]["message"]
    assert bad["error"]["message"].startswith("standard input, line 2: ")
    assert message in bad["error"]["message"]
    assert [lines[0]["error"], lines[2]["error"]] == [None, None]
    assert "1 of 3 requests failed" in result.stderr


def test_a_request_that_fails_while_it_runs_is_the_servers_failure(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_init = RememberedCore.__init__

    def fail(core: RememberedCore, *arguments: Any) -> None:
        first_init(core, *arguments)
        core.failing = {9}

    monkeypatch.setattr(RememberedCore, "__init__", fail)
    lines, _ = answer(batch("a", COMPLETION, prompt=[9]), batch("b", COMPLETION, prompt=[10]), exit_code=1)
    assert [line["response"]["status_code"] for line in lines] == [500, 200]
    assert lines[0]["error"] == {"code": "server_error", "message": "the logits are NaN"}


def test_both_kinds_of_line_may_be_in_a_file(answer: Answer) -> None:
    (own, theirs), _ = answer({"prompt": "a", "id": 1}, batch("b", messages=MESSAGES))
    assert (own["index"], own["id"], own["finish_reason"]) == (0, 1, "length")
    assert theirs["custom_id"] == "b"


def test_a_file_for_one_other_model_is_answered_with_a_warning(
    answer: Answer, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, _ = answer(*(batch(name, model="gpt-4o-mini", messages=MESSAGES) for name in "ab"))
    assert [line["response"]["body"]["model"] for line in lines] == [str(model)] * 2
    assert caplog.messages == [f"The requests are for the model 'gpt-4o-mini'; '{model}' answers them."]
    caplog.clear()
    answer(batch("a", model=str(model), messages=MESSAGES), batch("b", messages=MESSAGES))
    assert caplog.messages == []


def test_among_several_models_only_the_running_one_answers(answer: Answer, model: Path) -> None:
    names = ["gpt-4o-mini", str(model), "other", None]
    lines, _ = answer(
        *(batch(str(number), model=name, messages=MESSAGES) for number, name in enumerate(names)), exit_code=1
    )
    assert [line["response"]["status_code"] for line in lines] == [400, 200, 400, 200]
    assert "model='other' is not the one that runs. Allowed: " in lines[2]["error"]["message"]


def test_a_line_of_no_kind_is_answered_like_the_others_of_its_file(answer: Answer) -> None:
    lines, _ = answer(batch("a", COMPLETION, prompt="x"), {"custom_id": "b"}, {}, '"text"', exit_code=1)
    assert [line["custom_id"] for line in lines] == ["a", "b", None, None]
    assert [line["response"]["status_code"] for line in lines] == [200, 400, 400, 400]


def test_a_batch_of_lines_that_were_all_cut_off_is_answered_as_a_batch(answer: Answer) -> None:
    lines, _ = answer('{"custom_id": "a", "method": ', '{"custom_id": "b"', exit_code=1)
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert [line["error"]["code"] for line in lines] == ["invalid_request_error"] * 2
