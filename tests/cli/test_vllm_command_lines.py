"""Command lines of vLLM's documentation, with another first word and model: taken as they are, or refused with why."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import EngineConfig
from penstock.server.options import ServerOptions
from penstock.server.processes import launcher

# Each with what the server gets: options of the API by name, and of the engine.
SERVE: dict[str, dict[str, Any]] = {
    "vllm serve demo": {"served_model_name": ("demo",)},
    "vllm serve demo --tensor-parallel-size 2 --pipeline-parallel-size 1": {"tensor_parallel_size": 2},
    "vllm serve demo --dtype auto --api-key token-abc123": {"api_keys": ("token-abc123",)},
    "vllm serve demo --api-key one two --served-model-name a b --port 8001": {
        "api_keys": ("one", "two"),
        "served_model_name": ("a", "b"),
    },
    "vllm serve --model demo --served-model-name a b": {"served_model_name": ("a", "b")},
    "vllm serve --served-model-name a demo": {"served_model_name": ("a",), "model": "demo"},
    "vllm serve demo --enable-lora --lora-modules sql=ADAPTER plays=ADAPTER --max-loras 4 --max-lora-rank 64": {
        "lora_modules": ("sql=ADAPTER", "plays=ADAPTER"),
        "max_loras": 4,
    },
    """vllm serve demo --enable-lora --lora-modules '{"name": "sql", "path": "ADAPTER"}'""": {
        "lora_modules": ('{"name": "sql", "path": "ADAPTER"}',)
    },
    "vllm serve demo --enable-auto-tool-choice --tool-call-parser llama3_json": {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "llama3_json",
    },
    "vllm serve demo --enable-reasoning --reasoning-parser deepseek_r1": {"reasoning_parser": "deepseek_r1"},
    """vllm serve demo --rope-scaling '{"rope_type":"yarn","factor":4.0}' --max-model-len 2048""": {
        "hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "max_model_len": 2048,
    },
    """vllm serve demo --hf-overrides '{"rope_theta": 5e5}'""": {"hf_overrides": {"rope_theta": 5e5}},
    "vllm serve demo --gpu-memory-utilization 0.95 --max-num-seqs 128 --enforce-eager --trust-remote-code": {
        "memory_fraction": 0.95,
        "max_num_seqs": 128,
    },
    """vllm serve demo -O3 -cc.mode=3 --compilation-config '{"cudagraph_mode": "FULL"}'""": {},
    """vllm serve demo --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'""": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 5}
    },
    """vllm serve demo --runner pooling --convert embed --pooler-config '{"pooling_type": "MEAN"}'""": {
        "runner": "pooling",
        "convert": "embed",
    },
    "vllm serve demo --task embed": {"convert": "embed"},
    """vllm serve demo --host 0.0.0.0 --port 8080 --uvicorn-log-level debug --allowed-origins '["*"]'""": {
        "allowed_origins": ("*",)
    },
    "vllm serve demo --enable-prefix-caching --enable-chunked-prefill --max-num-batched-tokens 1024": {
        "max_num_batched_tokens": 1024
    },
    """vllm serve demo --generation-config vllm --override-generation-config '{"temperature": 0.5}'""": {
        "override_generation_config": {"temperature": 0.5}
    },
    "vllm serve demo --chat-template-content-format openai": {"chat_template_content_format": "openai"},
    "vllm serve demo --enable-prompt-tokens-details --enable-request-id-headers --enable-log-requests"
    " --enable-log-outputs --disable-log-stats": {"enable_log_outputs": True, "disable_log_stats": True},
    "vllm serve demo --ignore-patterns a b --cudagraph-capture-sizes 1 2 4 --max-num-seqs 4": {
        "cudagraph_capture_sizes": [1, 2, 4],
        "max_num_seqs": 4,
    },
    "vllm serve demo --enable-lora --lora-target-modules q_proj v_proj": {"lora_target_modules": ["q_proj", "v_proj"]},
    "vllm serve demo --config CONFIG": {"max_model_len": 512, "served_model_name": ("a", "b")},
    "vllm serve demo --api-server-count 2 --data-parallel-size 2": {"data_parallel_size": 2},
    """vllm serve demo --limit-mm-per-prompt '{"image": 0}' --no-enable-expert-parallel""": {
        "limit_mm_per_prompt": {"image": 0}
    },
    "vllm serve demo --allowed-media-domains a.org b.org --port 80": {"allowed_media_domains": ["a.org", "b.org"]},
    """vllm serve demo --allowed-local-media-path /tmp --media-io-kwargs '{"video": {"num_frames": 8}}'""": {
        "allowed_local_media_path": "/tmp",
        "media_io_kwargs": {"video": {"num_frames": 8}},
    },
    "vllm serve demo --enable-server-load-tracking --disable-uvicorn-access-log --swap-space 4": {},
    "vllm serve demo --enable-sleep-mode": {},
    """vllm serve demo --kv-events-config '{"enable_kv_cache_events": true, "topic": "kv-events"}'""": {
        "kv_events_config": {"enable_kv_cache_events": True, "topic": "kv-events"}
    },
}

REFUSED = {
    "vllm serve demo --enable-nccl-comm-suspend": "what a sleeping engine keeps",
    "vllm serve demo --data-parallel-size 4 --data-parallel-address 10.0.0.1": "several nodes",
    "vllm serve demo --quantization bitsandbytes": "other quantization methods",
    "vllm serve demo --enable-expert-parallel": "expert parallelism",
    "vllm serve demo --tokenizer-mode mistral": "other tokenizers",
    "vllm serve demo --middleware first.module second.module": "further options of vLLM's server",
    "vllm serve demo --port 80 81": "unexpected extra argument",
    "vllm serve demo --headless": "further options of vLLM's server",
    "vllm serve demo --chat-template-content-format zebra": "Allowed: auto, string, openai",
    "vllm bench throughput --model demo --dataset-name sonnet --dataset-path sonnet.txt": "benchmarks on datasets",
    "vllm bench serve --backend vllm --model demo --dataset-name hf": "Allowed: random, sharegpt, custom",
    "vllm bench latency --model demo --profile": "`penstock profile` traces the steps of a model",
    "vllm bench sweep serve": "There is no workload 'sweep'",
    "vllm serve demo -O5": "Allowed: 0, 1, 2, 3",
    "vllm serve demo -Ox": "Allowed: 0, 1, 2, 3",
    "vllm serve --lora-modules a=x b=y": "Write --lora-modules b=y for it",
    "vllm generate x --lora-modules a=x b=y": "--lora-modules takes one value, and b=y behind it is another.",
    "vllm generate x --lora-modules=a=x --option c=1 d=2": "Write --option d=2 for it",
    "vllm chat --url http://localhost:8000/v1": "the HTTP server, outside of `penstock serve`",
}

# What `penstock bench serve` says without a server: its options are taken.
BENCH = [
    "vllm bench serve --backend vllm --model demo --endpoint /v1/completions --dataset-name random --num-prompts 2"
    " --random-input-len 8 --random-output-len 4 --port 9",
    "vllm bench serve --backend openai-chat --model demo --endpoint /v1/chat/completions --num-prompts 2"
    " --request-rate inf --max-concurrency 2 --percentile-metrics ttft,tpot,itl --goodput ttft:200 tpot:50 --port 9",
    "vllm bench serve --port 9 --model demo --dataset-name random --num-prompts 2 --ready-check-timeout-sec 0"
    " --custom-skip-chat-template --trust-remote-code --temperature=0.3 --top-p=0.75 --request-id-prefix bench-"
    " --ramp-up-strategy linear --ramp-up-start-rps 50 --ramp-up-end-rps 100",
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a server would be started with."""
    given: dict[str, Any] = {}

    class Recorder:
        def __init__(self, config: EngineConfig, options: ServerOptions, *others: Any, **times: Any) -> None:
            given["engine_reasoning_parser"] = config.structured.reasoning_parser
            given.update({"model": config.model.model, **config.options(), **vars(options)})

        def run(self) -> None:
            given["runs"] = True

    monkeypatch.setattr(launcher, "Launcher", Recorder)
    return given


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """An adapter's folder, and a file of flags."""
    adapter, config = tmp_path / "adapter", tmp_path / "config.yaml"
    adapter.mkdir()
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    config.write_text("max-model-len: 512\nserved-model-name: [a, b]\nuvicorn-log-level: info\n")
    return {"ADAPTER": str(adapter), "CONFIG": str(config)}


def placed(value: Any, files: dict[str, str]) -> Any:
    text = json.dumps(value)
    for name, path in files.items():
        text = text.replace(name, path)
    return json.loads(text)


@pytest.mark.parametrize("line", SERVE)
def test_a_command_line_of_a_server_is_taken(line: str, server: dict[str, Any], files: dict[str, str]) -> None:
    result = CliRunner().invoke(app, shlex.split(placed(line, files))[1:])
    assert result.exit_code == 0, result.output
    assert server["runs"]
    asked = placed(SERVE[line], files)
    assert {name: json.loads(json.dumps(server[name])) for name in asked} == asked


def test_gpt_oss_has_the_parser_of_its_reasoning_unless_it_is_named(server: dict[str, Any]) -> None:
    line = ["serve", "demo", "--hf-overrides", '{"model_type": "gpt_oss"}']
    for more, parser in (([], "openai_gptoss"), (["--reasoning-parser", "qwen3"], "qwen3")):
        result = CliRunner().invoke(app, [*line, *more])
        assert result.exit_code == 0, result.output
        assert server["reasoning_parser"] == server["engine_reasoning_parser"] == parser


def test_answers_to_files_have_the_parser_of_gpt_oss_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, parsers = tmp_path / "in.jsonl", list[Any]()
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who?"}]}
    given.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}))

    def note(work: Any, model: str, engine: dict[str, Any], *others: Any, **more: Any) -> None:
        parsers.append(engine["reasoning_parser"])

    monkeypatch.setattr("penstock.cli.generate.run_requests", note)
    more = ["-i", str(given), "-o", str(tmp_path / "out.jsonl"), "--hf-overrides", '{"model_type": "gpt_oss"}']
    for command in ("run-batch", "generate"):
        result = CliRunner().invoke(app, [command, *more])
        assert result.exit_code == 0, result.output
    assert parsers == ["openai_gptoss", "openai_gptoss"]


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_line_is_refused_with_why(line: str, server: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 2
    assert REFUSED[line] in " ".join(result.stderr.split())
    assert not server


@pytest.mark.parametrize("line", BENCH)
def test_a_command_line_of_a_benchmark_is_taken(line: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 1
    assert "connection refused" in result.output
