"""`penstock bench serve`: a benchmark of a running server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.bench.serving.settings import DatasetSettings, LoadSettings
from penstock.cli import options
from penstock.cli.api_key import authorization
from penstock.cli.failures import EXIT_FAILURE, check_writable, file_named
from penstock.cli.plots import check_plot, write_plot
from penstock.config import vllm
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.serving.run import ServeResult, ServeSettings


@dataclass(frozen=True)
class _ServerOptions:
    """Server that is measured.

    base_url: URL of the server  [default: http://HOST:PORT]
    host: host, without --base-url
    port: port, without --base-url
    backend: API: openai (completions), openai-chat
    endpoint: path of the API  [default: the backend's]
    model: model  [default: the server's first]
    served_model_name: model name in requests  [default: --model]
    tokenizer: folder or hub id  [default: the model's]
    header: headers; OPENAI_API_KEY is sent without any
    insecure: do not check certificates
    num_warmups: requests before the measured ones
    ready_check_timeout_sec: seconds to wait until the server completes a request; 0: no check
    profile: the server traces the measured requests; it needs --profiler-dir
    request_id_prefix: begin of the header X-Request-Id
    """

    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = field(default=None, metadata={"aliases": ("-m",)})
    served_model_name: str | None = None
    tokenizer: str | None = None
    header: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME=VALUE ..."})
    insecure: bool = field(default=False, metadata={"flag": "--insecure"})
    num_warmups: int = 0
    ready_check_timeout_sec: float = 0.0
    profile: bool = field(default=False, metadata={"flag": "--profile"})
    request_id_prefix: str | None = None

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"

    def headers(self) -> dict[str, str]:
        """Headers of every request: those that are given, and the API key of the environment."""
        from penstock.system import env

        headers = _pairs("--header", self.header)
        if "authorization" not in map(str.lower, headers):
            headers |= authorization(env.openai_api_key())
        return headers


@dataclass(frozen=True)
class _RequestOptions:
    """Fields of every request beside those of its prompt.

    ignore_eos: generate the whole output length
    temperature: 0 is greedy  [default: 0.0]
    top_p: nucleus sampling  [default: 1.0]
    top_k: top-k sampling; 0: all  [default: 0]
    min_p: min-p sampling  [default: 0.0]
    frequency_penalty: frequency penalty  [default: 0.0]
    presence_penalty: presence penalty  [default: 0.0]
    repetition_penalty: repetition penalty  [default: 1.0]
    logprobs: log-probabilities per token
    extra_body: more fields of requests, such as {"stream": false}
    """

    ignore_eos: bool = field(default=False, metadata={"flag": "--ignore-eos"})
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, backend: str) -> dict[str, Any]:
        """Sampling parameters that are given, and `--extra-body` over them."""
        if not isinstance(self.extra_body, dict):
            raise ConfigError(f"--extra-body {json.dumps(self.extra_body)!r} is not valid. Allowed: a JSON object.")
        given = {name: value for name, value in vars(self).items() if value is not None and name != "extra_body"}
        if "logprobs" in given and backend == "openai-chat":
            given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
        return {**{name: value for name, value in given.items() if value is not False}, **self.extra_body}


@dataclass(frozen=True)
class _OptionsOfVllm:
    """Options of `vllm bench serve` that have no effect here, at least with some values."""

    trust_remote_code: bool = field(default=False, metadata={"flag": "--trust-remote-code", "hidden": True})
    skip_chat_template: bool = field(
        default=False,
        metadata={"flag": "--skip-chat-template", "aliases": ("--custom-skip-chat-template",), "hidden": True},
    )
    no_stream: bool = field(default=False, metadata={"flag": "--no-stream", "hidden": True})
    tokenizer_mode: str | None = field(default=None, metadata={"hidden": True})

    def check(self) -> None:
        """Log options without an effect. Raises UnsupportedArgument for features that Penstock does not have."""
        vllm.options_as_ours({name: value for name, value in vars(self).items() if value}, known=())


@dataclass(frozen=True)
class _FigureOptions:
    """Figures of the measurement.

    goodput: targets: ttft, tpot, e2el
    percentile_metrics: of ttft, tpot, itl, e2el
    metric_percentiles: percentiles of the metrics
    """

    goodput: tuple[str, ...] = field(default=(), metadata={"metavar": "METRIC:MS ..."})
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    metric_percentiles: str = "50,90,99"


@dataclass(frozen=True)
class _OutputOptions:
    """Files of the results.

    save_result: write the figures as JSON
    save_detailed: with the values of each request
    append_result: add a line to the file instead of replacing it
    result_dir: folder of results
    result_filename: [default: of label, load, model and time]
    label: name of the run in results  [default: the backend]
    metadata: more fields of the results
    plot: draw the latencies, .svg or .png
    """

    save_result: bool = field(default=False, metadata={"flag": "--save-result"})
    save_detailed: bool = field(default=False, metadata={"flag": "--save-detailed"})
    append_result: bool = field(default=False, metadata={"flag": "--append-result"})
    result_dir: Path = Path()
    result_filename: str | None = None
    label: str | None = None
    metadata: tuple[str, ...] = field(default=(), metadata={"metavar": "NAME=VALUE ..."})
    plot: Path | None = field(default=None, metadata={"metavar": "FILE"})

    def fields(self, backend: str) -> dict[str, str]:
        """Fields of the JSON file beside settings and figures."""
        return {"label": self.label or backend, **_pairs("--metadata", self.metadata)}

    def json_path(self, settings: ServeSettings, label: str) -> Path | None:
        """JSON file, checked to be writable before the measurement; None for none."""
        if not (self.save_result or self.save_detailed or self.append_result):
            return None
        name = self.result_filename
        if name is None:
            concurrency = settings.load.max_concurrency
            most = "" if concurrency is None else f"-concurrency{concurrency}"
            model = (settings.served_model_name or settings.model or "model").rstrip("/").rpartition("/")[2]
            stamp = time.strftime("%Y%m%d-%H%M%S")
            name = f"{label}-{settings.load.request_rate}qps{most}-{model}-{stamp}.json"
        path = self.result_dir / name
        with file_named("--result-dir", self.result_dir):
            self.result_dir.mkdir(parents=True, exist_ok=True)
        check_writable("--result-filename", path)
        return path


@options.command_with_sections
def bench_serve(
    server: _ServerOptions,
    dataset: DatasetSettings,
    load: Annotated[dict[str, Any], LoadSettings],
    request: _RequestOptions,
    figures: _FigureOptions,
    output: _OutputOptions,
    of_vllm: _OptionsOfVllm,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar")] = False,
) -> None:
    """Measure a running server of OpenAI's API: Penstock, vLLM, or another one.

    Options and fields of results have the names of `vllm bench serve`. The exit code is 1 if no request was completed.
    """
    of_vllm.check()
    settings = _settings(server, dataset, LoadSettings(**load, seed=dataset.seed), request, figures)
    fields = output.fields(server.backend)
    path = output.json_path(settings, fields["label"])
    check_plot(output.plot)
    result = _run(settings, with_bar=not disable_tqdm)
    if path is not None:
        results = {**fields, **result.as_json(settings, is_detailed=output.save_detailed)}
        _write(path, results, is_appended=output.append_result)
    if output.plot is not None:
        _draw(output.plot, settings, result)
    from penstock.bench.serving.report import report
    from penstock.cli.output import show

    show(report(settings, result))
    if not result.figures["completed"] and not result.figures["disconnected"]:
        sys.exit(EXIT_FAILURE)


def _settings(
    server: _ServerOptions,
    dataset: DatasetSettings,
    load: LoadSettings,
    request: _RequestOptions,
    figures: _FigureOptions,
) -> ServeSettings:
    from penstock.bench.serving.results import parse_goodput
    from penstock.bench.serving.run import ServeSettings

    return ServeSettings(
        base_url=server.url,
        dataset=dataset,
        load=load,
        backend=server.backend,
        endpoint=server.endpoint,
        model=server.model,
        served_model_name=server.served_model_name,
        tokenizer=server.tokenizer,
        headers=server.headers(),
        verify=not server.insecure,
        extra_body=request.fields(server.backend),
        request_id_prefix=server.request_id_prefix,
        num_warmups=server.num_warmups,
        ready_check_timeout_s=server.ready_check_timeout_sec,
        profile=server.profile,
        percentile_metrics=figures.percentile_metrics.split(","),
        metric_percentiles=_numbers("--metric-percentiles", figures.metric_percentiles),
        goodput=parse_goodput(figures.goodput),
    )


def _write(path: Path, fields: dict[str, Any], *, is_appended: bool) -> None:
    """Write the results as a JSON file, or append them as a line of JSON."""
    with file_named("--result-filename", path), path.open("a" if is_appended else "w", encoding="utf-8") as file:
        text = json.dumps({"date": time.strftime("%Y%m%d-%H%M%S"), **fields}, indent=None if is_appended else 2)
        file.write(text + "\n")


def _run(settings: ServeSettings, *, with_bar: bool) -> ServeResult:
    import asyncio

    from penstock.bench.serving.run import run
    from penstock.observability.progress_bar import progress_bar

    bars = []

    def make_bar(total: int) -> Any:
        bars.append(progress_bar(total, "Requests", is_wanted=with_bar))
        return bars[0]

    try:
        return asyncio.run(run(settings, make_bar))
    finally:
        for bar in bars:
            bar.close()


def _draw(path: Path, settings: ServeSettings, result: ServeResult) -> None:
    from penstock.bench.serving.plot import as_svg

    load, figures = settings.load, result.figures
    most = "" if load.max_concurrency is None else f", at most {load.max_concurrency} at once"
    title = f"{result.model.id}: {figures['output_throughput']:,.0f} output tokens per second"
    subtitle = f"{figures['completed']} requests, {load.rate}{most}, from {settings.base_url}"
    write_plot(path, as_svg(title, subtitle, result.outcomes, settings.percentile_metrics))


def _pairs(flag: str, given: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for pair in given or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{flag} {pair} is not valid. Allowed: NAME=VALUE.")
        pairs[name] = value
    return pairs


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text} is not valid. Allowed: numbers, such as 50,90,99.") from error
