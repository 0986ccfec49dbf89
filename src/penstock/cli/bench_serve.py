"""`penstock bench serve`: a benchmark of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.cli import options
from penstock.cli.api_key import authorization
from penstock.cli.failures import EXIT_FAILURE, check_writable, file_named, readable_errors
from penstock.cli.option_groups import with_option_groups
from penstock.cli.plots import check_plot, write_plot
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.serving.datasets import DatasetSettings
    from penstock.bench.serving.load import LoadSettings
    from penstock.bench.serving.run import ServeResult, ServeSettings

_DATASETS = "random, sharegpt, custom, prefix_repetition"


class ManyValuesCommand(TyperCommand):
    """Command whose repeatable options take several values at once: `--goodput ttft:200 tpot:50`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        normalize = ctx.token_normalize_func or str
        many = {flag for parameter in self.params if getattr(parameter, "multiple", False) for flag in parameter.opts}
        repeated: list[str] = []
        flag, has_value = None, False
        for arg in args:
            if arg.startswith("-"):
                flag = normalize(arg) if normalize(arg) in many else None
                has_value = False
            elif flag is not None and has_value:
                repeated.append(flag)
            else:
                has_value = True
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


@dataclass(frozen=True)
class _ServerOptions:
    """Server that is measured."""

    base_url: Annotated[
        str | None, typer.Option(help="URL of the server  [default: http://HOST:PORT]", show_default=False)
    ] = None
    host: Annotated[str, typer.Option(help="Host, without --base-url")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port, without --base-url")] = 8000
    backend: Annotated[str, typer.Option(help="API: openai (completions), openai-chat")] = "openai"
    endpoint: Annotated[str | None, typer.Option(help="Path of the API  [default: the backend's]")] = None
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model  [default: the server's first]")] = None
    served_model_name: Annotated[str | None, typer.Option(help="Model name in requests  [default: --model]")] = None
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id  [default: the model's]")] = None
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE ...", help="Headers; OPENAI_API_KEY is sent without any")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check certificates")] = False

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
class _DatasetOptions:
    """Prompts, and how many tokens to generate for each."""

    dataset_name: Annotated[str, typer.Option(help=_DATASETS)] = "random"
    dataset_path: Annotated[Path | None, typer.Option(help="File of sharegpt (JSON), custom (JSON Lines)")] = None
    disable_shuffle: Annotated[bool, typer.Option("--disable-shuffle", help="Keep the order of the file")] = False
    num_prompts: Annotated[int, typer.Option(help="Number of requests")] = 1000
    num_warmups: Annotated[int, typer.Option(help="Requests before the measured ones")] = 0
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths, arrivals and disconnects")] = 0
    random_input_len: Annotated[int, typer.Option("--random-input-len", "--input-len", help="Prompt tokens")] = 1024
    random_output_len: Annotated[int, typer.Option("--random-output-len", "--output-len", help="Output tokens")] = 128
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by this share")] = 0.0
    random_prefix_len: Annotated[int, typer.Option(help="Tokens of a prefix that all prompts share")] = 0
    sharegpt_output_len: Annotated[int | None, typer.Option(help="Output tokens  [default: the file's]")] = None
    custom_output_len: Annotated[
        int | None, typer.Option(help="Output tokens  [default, and -1: the file's output_tokens, else 256]")
    ] = None
    prefix_repetition_prefix_len: Annotated[int, typer.Option(help="Tokens of each shared prefix")] = 256
    prefix_repetition_suffix_len: Annotated[int, typer.Option(help="Tokens after the prefix")] = 256
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(help="Number of prefixes")] = 10
    prefix_repetition_output_len: Annotated[int, typer.Option(help="Output tokens")] = 128

    def settings(self) -> DatasetSettings:
        from penstock.bench.serving.datasets import DatasetSettings

        return DatasetSettings(
            name=self.dataset_name,
            path=self.dataset_path,
            num_prompts=self.num_prompts,
            seed=self.seed,
            is_shuffled=not self.disable_shuffle,
            random_input_len=self.random_input_len,
            random_output_len=self.random_output_len,
            random_range_ratio=self.random_range_ratio,
            random_prefix_len=self.random_prefix_len,
            prefix_repetition_prefix_len=self.prefix_repetition_prefix_len,
            prefix_repetition_suffix_len=self.prefix_repetition_suffix_len,
            prefix_repetition_num_prefixes=self.prefix_repetition_num_prefixes,
            prefix_repetition_output_len=self.prefix_repetition_output_len,
            sharegpt_output_len=self.sharegpt_output_len,
            custom_output_len=None if self.custom_output_len == -1 else self.custom_output_len,
        )


@dataclass(frozen=True)
class _LoadOptions:
    """Arrivals of requests, and how many are open at once."""

    request_rate: Annotated[float, typer.Option(help="Mean requests per second; inf: all at once")] = float("inf")
    burstiness: Annotated[float, typer.Option(help="1: Poisson arrivals; less is burstier, more is evener")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(help="Open requests at most")] = None
    request_timeout: Annotated[float, typer.Option(help="Seconds for a request")] = 21600.0
    disconnect_fraction: Annotated[float, typer.Option(help="Share of clients that leave while tokens come")] = 0.0

    def settings(self, seed: int) -> LoadSettings:
        from penstock.bench.serving.load import LoadSettings

        return LoadSettings(
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            max_concurrency=self.max_concurrency,
            request_timeout_s=self.request_timeout,
            disconnect_fraction=self.disconnect_fraction,
            seed=seed,
        )


@dataclass(frozen=True)
class _RequestOptions:
    """Fields of every request beside those of its prompt."""

    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate the whole output length")] = False
    temperature: Annotated[float | None, typer.Option(help="0 is greedy  [default: 0.0]")] = None
    top_p: options.TopP = None
    top_k: options.TopK = None
    min_p: options.MinP = None
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help='More fields of requests, such as {"stream": false}')
    ] = None

    def fields(self) -> dict[str, Any]:
        """Sampling parameters that are given, and `--extra-body` over them."""
        text = self.extra_body
        extra: Any = {} if text is None else options.parse_json("--extra-body", text)
        if not isinstance(extra, dict):
            raise ConfigError(f"--extra-body {text!r} is not valid. Allowed: a JSON object.")
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        given = {name: value for name, value in sampling.items() if value is not None}
        return {**given, **({"ignore_eos": True} if self.ignore_eos else {}), **extra}


@dataclass(frozen=True)
class _FigureOptions:
    """Figures of the measurement."""

    goodput: Annotated[list[str] | None, typer.Option(metavar="METRIC:MS ...", help="Targets: ttft, tpot, e2el")] = None
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft, tpot, itl, e2el")] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of the metrics")] = "50,90,99"


@dataclass(frozen=True)
class _OutputOptions:
    """Files of the results."""

    save_result: Annotated[bool, typer.Option("--save-result", help="Write the figures as JSON")] = False
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With the values of each request")] = False
    result_dir: Annotated[Path, typer.Option(help="Folder of results")] = Path()
    result_filename: Annotated[str | None, typer.Option(help="[default: of label, load, model and time]")] = None
    label: Annotated[str | None, typer.Option(help="Name of the run in results  [default: the backend]")] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE ...", help="More fields of the results"),
    ] = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the latencies, .svg or .png")] = None

    def fields(self, backend: str) -> dict[str, str]:
        """Fields of the JSON file beside settings and figures."""
        return {"label": self.label or backend, **_pairs("--metadata", self.metadata)}

    def json_path(self, settings: ServeSettings, label: str) -> Path | None:
        """JSON file, checked to be writable before the measurement; None for none."""
        if not (self.save_result or self.save_detailed):
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


@with_option_groups
def bench_serve(
    server: _ServerOptions,
    dataset: _DatasetOptions,
    load: _LoadOptions,
    request: _RequestOptions,
    figures: _FigureOptions,
    output: _OutputOptions,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks")] = False,
) -> None:
    """Measure a running server of OpenAI's API: Penstock, vLLM, or another one.

    Options and fields of results have the names of `vllm bench serve`. The exit code is 1 if no request was completed.
    """
    with readable_errors(debug=debug):
        settings = _settings(server, dataset, load, request, figures)
        fields = output.fields(server.backend)
        path = output.json_path(settings, fields["label"])
        check_plot(output.plot)
        result = _run(settings, with_bar=not disable_tqdm)
        if path is not None:
            _write(path, {**fields, **result.as_json(settings, is_detailed=output.save_detailed)})
        if output.plot is not None:
            _draw(output.plot, settings, result)
        _show(settings, result)
        if not result.figures["completed"] and not result.figures["disconnected"]:
            raise typer.Exit(EXIT_FAILURE)


def _settings(
    server: _ServerOptions,
    dataset: _DatasetOptions,
    load: _LoadOptions,
    request: _RequestOptions,
    figures: _FigureOptions,
) -> ServeSettings:
    from penstock.bench.serving.results import parse_goodput
    from penstock.bench.serving.run import ServeSettings

    return ServeSettings(
        base_url=server.url,
        dataset=dataset.settings(),
        load=load.settings(dataset.seed),
        backend=server.backend,
        endpoint=server.endpoint,
        model=server.model,
        served_model_name=server.served_model_name,
        tokenizer=server.tokenizer,
        headers=server.headers(),
        verify=not server.insecure,
        extra_body=request.fields(),
        num_warmups=dataset.num_warmups,
        percentile_metrics=figures.percentile_metrics.split(","),
        metric_percentiles=_numbers("--metric-percentiles", figures.metric_percentiles),
        goodput=parse_goodput(figures.goodput or []),
    )


def _write(path: Path, fields: dict[str, Any]) -> None:
    with file_named("--result-filename", path):
        text = json.dumps({"date": time.strftime("%Y%m%d-%H%M%S"), **fields}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")


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


def _show(settings: ServeSettings, result: ServeResult) -> None:
    from rich.console import Console

    from penstock.bench.serving.report import report
    from penstock.cli.output import standard_output, write

    out = standard_output(as_json=False)
    console = Console(file=out, highlight=False)
    with console.capture() as capture:
        console.print(report(settings, result))
    write(out, capture.get())


def _draw(path: Path, settings: ServeSettings, result: ServeResult) -> None:
    from penstock.bench.serving.plot import as_svg

    load, figures = settings.load, result.figures
    most = "" if load.max_concurrency is None else f", at most {load.max_concurrency} at once"
    how = "all at once" if load.request_rate == float("inf") else f"{load.request_rate:g} requests/s"
    title = f"{result.model.id}: {figures['output_throughput']:,.0f} output tokens per second"
    subtitle = f"{figures['completed']} requests, {how}{most}, from {settings.base_url}"
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
