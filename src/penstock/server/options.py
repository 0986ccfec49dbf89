"""Options of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.checks import check_choice, check_seconds
from penstock.errors import ConfigError
from penstock.templates.content_format import AUTO, CONTENT_FORMATS

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.features.lora.request import LoRARequest

# Options that an engine has too: its constraints begin after the reasoning, which answers have apart.
REASONING_OPTIONS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP API, with vLLM's names where it has them.

    served_model_name: name that requests may give as `model`; the first one is in the responses. By default that of the
        model.
    lora_modules: LoRA adapter that requests may give as `model`, as name=path or JSON; needs enable_lora.
    api_keys: key of a client, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`; empty lets every client in.
    enable_admin: serve the routes that change the engine; needs admin_api_key.
    admin_api_key: key of these routes.
    rl_routes_without_key: let programs of this machine call the routes of trainers, such as TRL, without a key: pauses,
        weights, adapters and /server_info. The server must listen on loopback.
    allowed_origins: origins of CORS; without any the responses have no CORS headers.
    allowed_methods: methods of CORS. allowed_headers: request headers of CORS.
    allow_credentials: let browsers send cookies and keys (CORS).
    root_path: path prefix that a proxy strips.
    unknown_fields: fields that a route does not have: "refuse" gives the request status 400, but for harmless ones of
        other clients; "warn" ignores and logs each of them once; "ignore" ignores them.
    page: serve a page at `/`, with a playground and a live view.
    max_request_bytes: size limit of a request's body; larger ones get status 413.
    max_open_request_bytes: limit of the bodies, in the memory of each front end, of all requests that have not ended.
        Beyond it, new requests with more than 64 KiB get status 429.
    request_read_timeout_s: seconds that the headers of a request, and then its body, may take to arrive; later ones get
        status 408.
    response_write_timeout_s: seconds without anything taken after which the client of a response is disconnected, and
        its requests are aborted.
    max_unread_response_bytes: limit of the responses, in the memory of each front end, that clients have not taken.
        Beyond it, clients that take nothing are disconnected, as is one for which a quarter of it waits, and new
        requests get status 429.
    metrics_prefix: begin of the names of metrics, before a colon; with "vllm" they have further names of vLLM's too.
    keep_alive_interval_s: seconds without output after which a stream gets a comment; 0 sends none.
    otlp_traces_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) for a trace of each request, such as
        http://localhost:4318/v1/traces.
    disable_log_stats: do not log throughput, a line for every ten seconds of work.
    enable_log_requests: log a line per request. log_prompts: with it, log prompts and messages too.
    enable_log_outputs: with it, log the texts of outputs too, when they end.

    chat_template: template of chats instead of the model's own: Jinja text or a path.
    chat_template_content_format: contents of messages for the template: "string" is one text each, "openai" a list of
        parts, "auto" what the template reads.
    trust_request_chat_template: whether requests may bring a template of their own.
    default_chat_template_kwargs: template variables of requests that do not set them.
    response_role: role of the answers.
    enable_auto_tool_choice: let the model decide whether it calls tools; needs tool_call_parser.
    tool_call_parser: form of the model's tool calls; by default that which the chat template writes, if it is known.
    tool_parser_plugin: Python file that registers further parsers of tool calls.
    reasoning_parser: form of the model's reasoning, which the answers have apart from their content.
    reasoning_start_str, reasoning_end_str: markers of the reasoning parser "custom"; those of the engine.
    return_tokens_as_token_ids: tokens of log-probabilities are "token_id:17" rather than text.
    response_store_dir: folder of stored responses (`/v1/responses`), which outlive the server; by default a temporary
        one. All front ends share it.
    max_stored_responses: limit of stored responses, beyond which those unused for longest are dropped; 0 stores none.
    max_stored_response_bytes: limit of their size.
    batch_dir: folder of the files and batches of `/v1/files` and `/v1/batches`, which outlive the server; without one,
        these routes refuse. All front ends share it.
    max_batch_dir_bytes: limit of the size of files and answers, beyond which uploads get status 413.
    max_batch_requests: limit of the requests of a batch.
    prefill_url: URL of another server that computes the prompts of long requests first, such as http://10.0.0.5:8000;
        this engine copies their blocks (`kv_peers`), or finds them in a common `kv_offload_dir`.
    prefill_min_bytes: size of a request's body from which on it is sent there.

    Raises ConfigError.
    """

    served_model_name: tuple[str, ...]
    lora_modules: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME=PATH"})
    api_keys: tuple[str, ...] = field(default=(), metadata={"flag": "--api-key"})
    enable_admin: bool = False
    admin_api_key: str | None = None
    rl_routes_without_key: bool = False
    allowed_origins: tuple[str, ...] = field(default=(), metadata={"json_list": True})
    allowed_methods: tuple[str, ...] = field(default=("*",), metadata={"json_list": True})
    allowed_headers: tuple[str, ...] = field(default=("*",), metadata={"json_list": True})
    allow_credentials: bool = False
    root_path: str = ""
    unknown_fields: str = "refuse"
    page: bool = True
    max_request_bytes: int = 32 * 2**20
    max_open_request_bytes: int = 512 * 2**20
    request_read_timeout_s: float = 60.0
    response_write_timeout_s: float = 60.0
    max_unread_response_bytes: int = 256 * 2**20
    metrics_prefix: str = "penstock"
    keep_alive_interval_s: float = 15.0
    otlp_traces_endpoint: str | None = None
    disable_log_stats: bool = False
    enable_log_requests: bool = False
    log_prompts: bool = False
    enable_log_outputs: bool = False
    chat_template: str | None = None
    chat_template_content_format: str = AUTO
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    tool_parser_plugin: str | None = None
    reasoning_parser: str | None = None
    reasoning_start_str: str = "<think>"
    reasoning_end_str: str = "</think>"
    return_tokens_as_token_ids: bool = False
    response_store_dir: str | None = None
    max_stored_responses: int = 1000
    max_stored_response_bytes: int = 256 * 2**20
    batch_dir: str | None = None
    max_batch_dir_bytes: int = 4 * 2**30
    max_batch_requests: int = 50_000
    prefill_url: str | None = None
    prefill_min_bytes: int = 4096

    def serves_admin_path(self, path: str) -> bool:
        """Whether a route that changes the engine is there."""
        # Imports of the HTTP library, which `--help` must not wait for.
        from penstock.server.http.guards import RL_PATHS

        return self.enable_admin or (self.rl_routes_without_key and path in RL_PATHS)

    @property
    def adapters(self) -> list[LoRARequest]:
        """Adapters of `lora_modules`, numbered from 1 on."""
        if not self.lora_modules:
            return []
        from penstock.features.lora.modules import read_lora_modules

        return read_lora_modules(self.lora_modules)

    def check_folders(self) -> None:
        """Read the configurations of the adapters. Raises ModelError for one that is not there, or cannot be used."""
        from penstock.features.lora.peft_config import PeftConfig, read_fields

        for adapter in self.adapters:
            fields = read_fields(adapter.lora_name, Path(adapter.lora_path).expanduser())
            PeftConfig.read(adapter.lora_name, fields)

    def check_engine(self, config: EngineConfig) -> None:
        """Raise ConfigError for what an engine of this configuration does not take."""
        self.check_adapters(has_adapters=config.lora.enable_lora)

    def check_adapters(self, *, has_adapters: bool) -> None:
        """Raise ConfigError for adapters of an engine that takes none."""
        if self.lora_modules and not has_adapters:
            raise ConfigError("lora_modules needs an engine with adapters. Give enable_lora too.")

    def __post_init__(self) -> None:
        twice = {adapter.lora_name for adapter in self.adapters}.intersection(self.served_model_name)
        if twice:
            raise ConfigError(f"lora_modules has {twice.pop()!r}, which is the model's name. Give another name.")
        if not self.served_model_name or not all(self.served_model_name):
            raise ConfigError("served_model_name is empty. Give at least one name.")
        if not all(self.api_keys):
            raise ConfigError("api_keys has an empty key, which every client could send. Leave it out.")
        if self.enable_admin and not self.admin_api_key:
            raise ConfigError(
                "enable_admin needs admin_api_key, the key of those who may change the engine. Give one "
                "(--admin-api-key KEY)."
            )
        check_choice("unknown_fields", self.unknown_fields, ("ignore", "warn", "refuse"))
        for name in (
            "max_request_bytes",
            "max_open_request_bytes",
            "max_unread_response_bytes",
            "max_batch_dir_bytes",
            "max_batch_requests",
            "prefill_min_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not valid. Allowed: at least 1.")
        check_seconds("request_read_timeout_s", self.request_read_timeout_s)
        check_seconds("response_write_timeout_s", self.response_write_timeout_s)
        if self.keep_alive_interval_s < 0:
            raise ConfigError(f"keep_alive_interval_s={self.keep_alive_interval_s} is not valid. Allowed: 0 or more.")
        for name in ("max_stored_responses", "max_stored_response_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not valid. Allowed: 0 or more.")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", str(self.metrics_prefix)):
            raise ConfigError(
                f"metrics_prefix={self.metrics_prefix!r} is not valid. Allowed: letters, digits and _, such as 'vllm'."
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not str(endpoint).startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint={endpoint!r} is not valid. Allowed: the URL of OTLP over HTTP, "
                "such as http://localhost:4318/v1/traces."
            )
        url = self.prefill_url
        if url is not None and not re.match("https?://[^/]", str(url)):
            raise ConfigError(f"prefill_url={url!r} is not valid. Allowed: a URL, such as http://10.0.0.5:8000.")
        for name in ("log_prompts", "enable_log_outputs"):
            if getattr(self, name) and not self.enable_log_requests:
                raise ConfigError(f"{name} needs enable_log_requests.")
        check_choice("chat_template_content_format", self.chat_template_content_format, CONTENT_FORMATS)
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError("enable_auto_tool_choice needs tool_call_parser, the form of the model's tool calls.")
