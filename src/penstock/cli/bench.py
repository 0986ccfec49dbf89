"""`penstock bench`: benchmarks of an engine on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.failures import check_writable, file_named
from penstock.cli.plots import check_plot, write_plot
from penstock.cli.process import begin_collection
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.long_context import StepBytes
    from penstock.bench.workloads import Settings
    from penstock.config import EngineConfig

_NAMES = "latency, throughput, prefill, prefix, startup, long-context"


@options.engine_command(without=("revision", "block_size"))
def bench(
    workload: Annotated[str, typer.Argument(help=_NAMES, metavar="WORKLOAD")],
    input_len: Annotated[
        str | None, typer.Option("--input-len", "--random-input-len", help="Prompt length in tokens")
    ] = None,
    output_len: Annotated[
        str | None, typer.Option("--output-len", "--random-output-len", help="Output length in tokens")
    ] = None,
    prefix_len: Annotated[
        str | None,
        typer.Option("--prefix-len", "--random-prefix-len", help="Length of the shared prefix in tokens (prefix)"),
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Batch size (latency, long-context)")] = None,
    num_prompts: Annotated[str | None, typer.Option(help="Number of prompts (other workloads)")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Outputs per prompt  [default: 1]")] = None,
    num_iters: Annotated[int | None, typer.Option(help="Measured iterations")] = None,
    num_iters_warmup: Annotated[
        int | None, typer.Option("--num-iters-warmup", "--num-warmups", help="Warm-up iterations")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts")] = 0,
    output_json: Annotated[Path | None, typer.Option("--output-json", "-o", help="Write all figures here")] = None,
    expert_stats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tokens per expert and layer, .svg or .json")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figures, .svg or .png")] = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Measure how fast a model runs: random token ids in, a fixed number of tokens out.

    One size may have several values (--batch-size 1,4,16). For servers: `penstock bench serve`.
    """
    from penstock.bench.workloads import make_sweep
    from penstock.config import EngineConfig

    sweep = make_sweep(
        workload,
        seed,
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        batch_size=batch_size,
        num_prompts=num_prompts,
        n=n,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
    )
    config = EngineConfig.create(model, **engine)
    _check_expert_stats(expert_stats, workload)
    for name, path in (("--output-json", output_json), ("--expert-stats", expert_stats)):
        if path is not None:
            check_writable(name, path)
    check_plot(plot)
    results, tokens_per_expert = _measure(sweep, model, engine, config, counts_experts=expert_stats is not None)
    _show(sweep, results, tokens_per_expert)
    if expert_stats is not None:
        _write_expert_stats(expert_stats, f"{Path(model).name}, {workload}", tokens_per_expert)
    if output_json is not None:
        _write(output_json, sweep, model, engine, results)
    if plot is not None:
        from penstock.bench.plot import as_svg

        write_plot(plot, as_svg(model, sweep, results))


def _measure(
    sweep: Sequence[Settings], model: str, engine: dict[str, Any], config: EngineConfig, *, counts_experts: bool
) -> tuple[list[Any], dict[int, list[int]]]:
    """Results of each run of the workload, and the tokens per expert by layer, if they are counted."""
    from penstock.bench import long_context, offline, startup
    from penstock.bench.runs import Prompts
    from penstock.observability.progress_bar import progress_bar

    workload = sweep[0].workload
    prompts = Prompts(config.model.vocab_size, sweep[0].seed)
    num_runs = len(sweep) * (sweep[0].num_iters_warmup + sweep[0].num_iters)
    if workload == "startup":
        with progress_bar(num_runs) as bar:
            return [startup.measure(model, engine, prompts, settings, bar.update) for settings in sweep], {}
    from penstock.contract import RpcCall
    from penstock.engine.session import Session
    from penstock.engine.statistics.expert_load import sum_of_workers

    step_bytes = _step_bytes(model, engine) if workload == "long-context" else None
    with closing(Session(config)) as session:
        begin_collection()
        if counts_experts:
            session.collective_rpc(RpcCall("start_expert_stats"))
        if workload == "long-context":
            num_runs *= len(long_context.cases(sweep[0], session.max_model_len))
        with progress_bar(num_runs) as bar:
            if workload == "long-context":
                results: list[Any] = [
                    long_context.measure(session, prompts, settings, step_bytes, bar.update) for settings in sweep
                ]
            else:
                results = [offline.measure(session, prompts, settings, bar.update) for settings in sweep]
        answers = session.collective_rpc(RpcCall("get_expert_stats")) if counts_experts else []
        return results, sum_of_workers(answers)


def _step_bytes(model: str, engine: dict[str, Any]) -> StepBytes:
    """Bytes that a decode step reads, from the plan."""
    from penstock.bench.long_context import StepBytes
    from penstock.engine.planning.plan import plan_engine

    planned = plan_engine(model, **engine)
    return StepBytes(weights=planned.weights - planned.lookup_bytes, kv_per_token=planned.kv_bytes_per_token)


def _show(sweep: Sequence[Settings], results: Sequence[Any], tokens_per_expert: dict[int, list[int]]) -> None:
    from penstock.bench import expert_stats
    from penstock.bench.report import tables
    from penstock.cli.output import show

    parts = [table for each in zip(sweep, results, strict=True) for table in tables(*each)]
    show(*parts, *([expert_stats.table(tokens_per_expert)] if tokens_per_expert else ()))


def _check_expert_stats(path: Path | None, workload: str) -> None:
    from penstock.bench.expert_stats import check_suffix

    if path is None:
        return
    check_suffix(path)
    if workload == "startup":
        raise ConfigError("--expert-stats is not valid with startup, which ends after the first token. Leave it out.")


def _write_expert_stats(path: Path, title: str, tokens_per_expert: dict[int, list[int]]) -> None:
    from penstock.bench.expert_stats import as_text

    with file_named("--expert-stats", path):
        path.write_text(as_text(path, title, tokens_per_expert), encoding="utf-8")


def _write(path: Path, sweep: Sequence[Settings], model: str, engine: dict[str, Any], results: Sequence[Any]) -> None:
    """Write the figures; several runs are a list, each with its settings."""
    import dataclasses

    from penstock.cli.env import collect

    runs = [
        {
            "settings": {name: value for name, value in dataclasses.asdict(settings).items() if value is not None},
            "results": its_results,
        }
        for settings, its_results in zip(sweep, results, strict=True)
    ]
    report = {
        "workload": sweep[0].workload,
        "model": model,
        **(runs[0] if len(runs) == 1 else {"runs": runs}),
        "engine": {name: value for name, value in engine.items() if value is not None},
        "environment": collect(),
    }
    with file_named("--output-json", path):
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
