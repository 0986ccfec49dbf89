"""Input of `penstock generate`, in this process and with a fake core."""

from __future__ import annotations

import base64
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from penstock.cli import requests
from penstock.cli.app import app
from penstock.contract import StructuredOutputsParams
from support.fake_engine import FakeCore, install_fake_core, write_model

Generate: TypeAlias = Callable[..., Any]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('not that role') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %} {{ tool.name }}{% endfor %}{% if mood %} {{ mood }}{% endif %}"
    "{% if add_generation_prompt %} ->{% endif %}"
)
COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})


class RememberedCore(FakeCore):
    """Tells the test which cores were made."""

    made: list[FakeCore]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made.append(self)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[FakeCore]:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core(RememberedCore)
    RememberedCore.made = []
    return RememberedCore.made


@pytest.fixture
def generate(tmp_path: Path, cores: list[FakeCore]) -> Generate:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = str(folder)
    return lambda *arguments, stdin=b"": COMMAND_LINE.invoke(
        app, ["generate", "--model", model, *arguments], input=stdin
    )


BAD_LINES = pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "This is no JSON"),
        (b'["a"]', "JSON list"),
        (b'{"max_tokens": 3}', "prompt is missing"),
        (b'{"prompt": "a", "temprature": 1}', "There is no field temprature (given: 1). Did you mean temperature?"),
        (b'{"prompt": "a", "temperature": -1}', "temperature=-1 is not valid. Allowed: 0 (greedy) to 10000."),
        (b'{"prompt": "a", "logprobs": 21}', "logprobs=21"),
        (b'{"prompt": "a", "watermarking": true}', "watermarking=True asks for watermarking"),
        (b'{"prompt": "a", "zebra": 1}', "There is no field zebra (given: 1). Allowed: prompt, prompt_token_ids,"),
        (b'{"prompt": 7}', "prompt=7 is a int"),
        (b'{"prompt_token_ids": [400]}', "token id 400"),
        (b'{"prompt_token_ids": [true]}', "True (bool) at position 0"),
        (b'{"prompt_token_ids": [%s9]}' % (b"9," * 63), "The prompt has 64 tokens"),
        (b'{"prompt": "\xff"}', "This is no JSON"),
        (b'{"prompt": "a", "messages": []}', "There are messages and a prompt"),
        (b'{"messages": []}', "has no messages"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "messages[0].content=7 is a int"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools={} is not valid. Allowed: a list"),
        (b'{"messages": [{"role": "forbidden", "content": "a"}]}', "not that role"),
        (b'{"prompt": "a", "tools": []}', "There is no field tools (given: [])"),
    ],
)


@BAD_LINES
def test_a_bad_line_is_answered_in_its_place(generate: Generate, line: bytes, message: str) -> None:
    named = line.replace(b"{", b'{"id": "x", ', 1) if line.startswith(b"{") else line
    result = generate(
        "--input", "-", "--max-tokens", "2", stdin=b'{"prompt": "a"}\n\n' + named + b'\n{"prompt": "b"}\n'
    )
    assert result.exit_code == 1
    first, bad, last = map(json.loads, result.stdout.splitlines())
    assert bad.keys() == first.keys()
    assert (bad["index"], bad["sample"], bad["finish_reason"], bad["token_ids"]) == (1, 0, "error", [])
    assert bad["error"].startswith("standard input, line 3: ")
    assert message in bad["error"]
    assert bad["id"] == (None if "no JSON" in message or "JSON list" in message else "x")
    assert [(line["prompt"], line["error"], len(line["token_ids"])) for line in (first, last)] == [
        ("a", None, 2),
        ("b", None, 2),
    ]
    assert "1 of 3 requests cannot be answered" in result.stderr
    assert result.stderr.endswith("penstock: 1 of 3 requests failed; their lines say why (error).\n")


def test_a_long_line_is_refused_before_it_is_decoded(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_LONGEST_LINE_BYTES", 40)
    result = generate("--input", "-", "--max-tokens", "2", stdin=b'{"prompt": "a"}\n{"prompt": "%s\n' % (b"a" * 40))
    _, bad = map(json.loads, result.stdout.splitlines())
    assert bad["error"] == "standard input, line 2: The line has 52 bytes. Allowed: at most 40."


@BAD_LINES
def test_strictly_a_bad_line_is_named_before_anything_runs(
    generate: Generate, cores: list[FakeCore], line: bytes, message: str
) -> None:
    result = generate("--input", "-", "--strict", stdin=b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}\n')
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "standard input, line 3: " in result.stderr
    assert message in result.stderr
    assert all(core.added == [] and core.num_closes == 1 for core in cores)


def test_strictly_all_bad_lines_are_named(generate: Generate, cores: list[FakeCore]) -> None:
    unreadable = b"no\n" * 25 + b'{"prompt": "a"}\n'
    result = generate("--input", "-", "--strict", stdin=unreadable)
    assert result.exit_code == 2
    assert result.stderr.startswith("penstock: InvalidRequest: 25 of 26 requests cannot be answered:\n")
    assert [f"standard input, line {number}: " in result.stderr for number in (1, 20, 21)] == [True, True, False]
    assert "and 5 more" in result.stderr
    assert cores == []
    result = generate(
        "--input", "-", "--strict", stdin=b'{"prompt": 7}\n{"prompt": "a"}\n{"prompt_token_ids": [400]}\n'
    )
    assert result.exit_code == 2
    assert "line 1: prompt=7" in result.stderr
    assert "line 3: The prompt has token id 400" in result.stderr


def test_where_every_line_is_bad_no_model_loads(generate: Generate, cores: list[FakeCore]) -> None:
    result = generate("--input", "-", stdin=b"one\ntwo\n")
    assert result.exit_code == 1
    assert [json.loads(line)["finish_reason"] for line in result.stdout.splitlines()] == ["error", "error"]
    assert cores == []


def test_what_only_the_core_can_refuse_is_answered_in_place(
    generate: Generate, cores: list[FakeCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_init = RememberedCore.__init__

    def refuse_two(core: RememberedCore, *arguments: Any) -> None:
        first_init(core, *arguments)
        core.refuses = lambda request: request.prompt_token_ids[0] in (9, 11)

    monkeypatch.setattr(RememberedCore, "__init__", refuse_two)
    lines = b"".join(b'{"prompt_token_ids": [%d]}\n' % token for token in (9, 10, 11, 12))
    result = generate("--input", "-", "--max-tokens", "2", stdin=lines)
    assert result.exit_code == 1
    written = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["error"] for line in written] == [
        "standard input, line 1: The cache is too small for this one.",
        None,
        "standard input, line 3: The cache is too small for this one.",
        None,
    ]
    assert [len(line["token_ids"]) for line in written] == [0, 2, 0, 2]


def test_messages_are_rendered_by_the_chat_template(generate: Generate, cores: list[FakeCore]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"messages": messages, "id": 7, "max_tokens": 3},
        {"messages": messages, "tools": [{"name": "f"}], "chat_template_kwargs": {"mood": "sad"}, "cache_salt": "s"},
        {"messages": messages, "chat_template": "{{ messages[0].content }}!", "add_generation_prompt": False},
    ]
    result = generate("--input", "-", "--max-tokens", "1", stdin="\n".join(map(json.dumps, lines)).encode())
    written = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in written] == ["[user] hi ->", "[user] hi f sad ->", "hi!"]
    assert [(line["id"], len(line["token_ids"])) for line in written] == [(7, 3), (None, 1), (None, 1)]
    assert [request.cache_salt for request in cores[0].added] == [None, "s", None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", "-1"], "InvalidParameter: --temperature -1.0"),
        (["x", "--temperature", "hot"], "--temperature"),
        (["x", "--logprobs", "21"], "InvalidParameter: --logprobs 21 is not valid. Allowed: at most 20."),
        (["x", "--max-num-seqs", "0"], "ConfigError: --max-num-seqs 0"),
        (["x", "--max-model-len", "many"], "ConfigError: --max-model-len many"),
        (["x", "--option", "block_size"], "ConfigError: --option 'block_size' is not valid. Allowed: NAME=VALUE"),
        (["x", "--option", "model=demo"], "--model"),
        (["x", "--option", "blok_size=3"], "UnknownOption: There is no option blok_size (given: 3). Did you mean"),
        (["x", "--input", "file"], "Give one of them"),
        (["--input", "/missing.jsonl"], "--input /missing.jsonl cannot be opened: No such file"),
        (["x", "--output", "/missing/out.jsonl"], "--output /missing/out.jsonl cannot be opened"),
        (["x", "--model", "/missing"], "ModelNotFound: --model /missing"),
        (["x", "--unknown"], "--unknown"),
        (["word " * 70], "ContextTooLong: The prompt has"),
    ],
)
def test_bad_input_is_one_readable_message(generate: Generate, arguments: list[str], message: str) -> None:
    result = generate(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_media_are_parts_of_a_message_before_its_text(
    generate: Generate, cores: list[FakeCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    told: list[Any] = []

    def render(_: Any, messages: Any, **options: Any) -> dict[str, Any]:
        told.extend(messages)
        return {"prompt": "What is it?"}

    monkeypatch.setattr("penstock.cli.work.render_prompt", render)
    media = ["--video", "https://a.example/v", "--image", str(tmp_path / "a.png"), "--image", "data:,x"]
    assert generate("What is it?", *media).exit_code == 0
    pixels = f"data:application/octet-stream;base64,{base64.b64encode(b'pixels').decode()}"
    (message,) = told
    assert message == {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": pixels}},
            {"type": "image_url", "image_url": {"url": "data:,x"}},
            {"type": "video_url", "video_url": {"url": "https://a.example/v"}},
            {"type": "text", "text": "What is it?"},
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "data:,x", "Hi"], "content[0] of type 'image_url' is an image, which this model does not take"),
        (["--image", "/missing.png", "Hi"], "--image /missing.png cannot be opened"),
        (["--audio", "data:,x", "--input", "-"], "--image, --audio and --video are of one prompt"),
    ],
)
def test_media_that_cannot_be_given_are_refused(generate: Generate, arguments: list[str], message: str) -> None:
    result = generate(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_afterwards_ctrl_c_is_handled_as_before(generate: Generate) -> None:
    before = signal.getsignal(signal.SIGINT)
    generate("x")
    generate("x", "--top-p", "7")
    assert signal.getsignal(signal.SIGINT) is before


def test_what_needs_no_model_is_checked_before_one_loads(generate: Generate, cores: list[FakeCore]) -> None:
    for arguments in (["x", "--temperature", "-1"], ["--input", "/missing"], ["x", "--output", "/missing/out"]):
        generate(*arguments)
    assert cores == []


def test_names_of_other_engines_are_accepted(generate: Generate, cores: list[FakeCore]) -> None:
    generate("x", "--gpu-memory-utilization", "0.5")
    assert cores[0].config is not None
    assert cores[0].config.cache.memory_fraction == 0.5
    assert "--memory-fraction 1.5" in generate("x", "--gpu-memory-utilization", "1.5").stderr


def test_options_reach_the_configuration(generate: Generate, cores: list[FakeCore]) -> None:
    options = {
        "--dtype": "float32",
        "--device": "cpu",
        "--load-format": "dummy",
        "--max-model-len": "32",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "77",
        "--kv-cache-memory-bytes": "1000000",
        "--engine-seed": "5",
        "--threads": "3",
    }
    generate("x", *(word for option in options.items() for word in option))
    config = cores[0].config
    assert config is not None
    assert (config.model.dtype, config.device.device, config.load.load_format) == ("float32", "cpu", "dummy")
    assert (config.model.max_model_len, config.model.seed) == (32, 5)
    assert config.device.num_threads == 3
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 77)
    assert config.cache.kv_cache_memory_bytes == 1_000_000


@pytest.mark.parametrize("value", ["enable_prefix_caching=false", "enable-prefix-caching=False"])
def test_any_engine_option_can_be_given(generate: Generate, cores: list[FakeCore], value: str) -> None:
    generate("x", "--option", value, "--option", "policy=priority", "--option", "block_size=32")
    assert cores[0].config is not None
    assert cores[0].config.cache.enable_prefix_caching is False
    assert cores[0].config.cache.block_size == 32
    assert cores[0].config.scheduler.policy == "priority"


def test_the_same_command_gives_the_same_text_and_another_seed_another(generate: Generate) -> None:
    def text(*arguments: str) -> str:
        return str(generate("the fox", *arguments).stdout)

    assert text() == text()
    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--engine-seed", "1") != text()


def test_sampling_options_reach_the_request(generate: Generate, cores: list[FakeCore]) -> None:
    options = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1", "--seed", "3"]
    generate("x", *options, "--max-tokens", "4", "--logprobs", "2", "--ignore-eos")
    params = cores[0].added[0].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.1, 3)
    assert (params.max_tokens, params.logprobs, params.ignore_eos) == (4, 2, True)


def test_a_lines_parameters_go_before_the_commands(generate: Generate, cores: list[FakeCore]) -> None:
    lines = [
        {"prompt": "a", "temperature": 0, "max_tokens": None, "stop_token_ids": [70, 71], "cache_salt": "s"},
        {"prompt": "b"},
    ]
    generate("--input", "-", "--temperature", "0.5", "--seed", "8", stdin="\n".join(map(json.dumps, lines)).encode())
    first, second = (request.sampling_params for request in cores[0].added)
    assert (first.temperature, first.max_tokens, first.stop_token_ids, first.seed) == (0, None, (70, 71), 8)
    assert (second.temperature, second.max_tokens, second.stop_token_ids, second.seed) == (0.5, 128, (), 8)
    assert [request.cache_salt for request in cores[0].added] == ["s", None]


def test_a_lines_priority_reaches_the_scheduler(generate: Generate, cores: list[FakeCore]) -> None:
    body = {"model": "m", "prompt": "b", "priority": -4}
    lines = [
        {"prompt": "a", "priority": 3},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": body},
        {"prompt": "c"},
        {"prompt": "d", "priority": "high"},
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    result = generate("--input", "-", "--option", "policy=priority", stdin=stdin)
    assert [request.priority for request in cores[0].added] == [3, -4, 0]
    assert "priority='high' is not valid. Allowed: integers" in json.loads(result.stdout.splitlines()[3])["error"]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(generate: Generate) -> None:
    result = generate("--input", "-", "--max-tokens", "1", stdin=b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["a", "b"]


def test_every_output_of_a_request_has_its_line(generate: Generate) -> None:
    lines = [{"prompt": "a", "n": 3, "max_tokens": 2, "id": "x"}, {"prompt": "b", "stop": ["zebra"], "max_tokens": 1}]
    result = generate("--input", "-", stdin="\n".join(map(json.dumps, lines)).encode())
    written = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["index"], line["sample"], line["id"]) for line in written] == [
        (0, 0, "x"),
        (0, 1, "x"),
        (0, 2, "x"),
        (1, 0, None),
    ]
    assert [len(line["token_ids"]) for line in written] == [2, 2, 2, 1]


def test_the_forms_of_outputs_reach_the_request(generate: Generate, cores: list[FakeCore], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "ü"')
    for arguments, expected in (
        (["--json-schema", str(schema)], {"json": '{"type":"integer"}', "unenforced": "refuse"}),
        (["--grammar", str(grammar)], {"grammar": 'start: "ü"'}),
        (["--regex", "[0-9]"], {"regex": "[0-9]"}),
        (["--choice", "a", "--choice", "b"], {"choice": ("a", "b")}),
    ):
        result = generate("a", *arguments)
        assert result.exit_code == 0, result.output
        (request,) = cores.pop().added
        assert request.sampling_params.structured_outputs == StructuredOutputsParams(**expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--regex", "a", "--choice", "b"], "structured_outputs has regex and choice"),
        (["--regex", "a(?=b)"], "lookahead"),
        (["--json-schema", "/no/schema"], "--json-schema /no/schema cannot be opened"),
    ],
)
def test_a_form_that_cannot_be_is_refused(generate: Generate, arguments: list[str], said: str) -> None:
    result = generate("a", *arguments)
    assert result.exit_code != 0
    assert said in result.stderr
