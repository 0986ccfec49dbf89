"""`penstock profile`: a trace of an engine's steps; `penstock profile serve`: of a running server's."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.failures import check_writable, file_named, readable_errors
from penstock.cli.process import begin_collection
from penstock.cli.server_client import ServerClient
from penstock.errors import ConfigError
from penstock.observability.printable import one_line
from penstock.system.temporary_folder import TemporaryFolder

if TYPE_CHECKING:
    from penstock.config import EngineConfig

# Time for a call of the server; writing a long trace takes seconds.
_TIMEOUT_S = 120.0


@options.engine_command(without=("revision",))
def profile(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The trace; a name that ends with .gz is compressed")
    ] = Path("trace.json.gz"),
    input_len: Annotated[int, typer.Option(min=1, help="Prompt length in tokens")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output length in tokens")] = 32,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at once")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts")] = 0,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Write a trace of a model's steps, which https://ui.perfetto.dev shows: phases, executables and ranks.

    Random prompts run once to warm up, and once in the trace. `penstock profile serve` traces a running server.
    """
    from penstock.config import EngineConfig

    for name in ("profiler", "profiler_dir", "profiler_use_gzip"):
        if name in engine:
            raise ConfigError(f"{name}={engine[name]!r} is not an option of penstock profile. Give --output FILE.")
    check_writable("--output", output)
    with TemporaryFolder("penstock-profile-") as temporary:
        is_compressed = output.suffix == ".gz"
        traced = {"profiler": "steps", "profiler_dir": str(temporary.path), "profiler_use_gzip": is_compressed}
        config = EngineConfig.create(model, **engine, **traced)
        paths = _run(config, num_prompts, input_len, output_len, seed)
        copies = [output] if len(paths) == 1 else [output.with_name(f"{n}-{output.name}") for n in range(len(paths))]
        with file_named("--output", output):
            for trace, copied in zip(paths, copies, strict=True):
                shutil.copyfile(trace, copied)
    _print(f"Written: {', '.join(map(str, copies))}. Open it at https://ui.perfetto.dev.\n")


def profile_serve(
    url: Annotated[str, typer.Option(help="URL of the server")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[str | None, typer.Option(help="Its admin key (--enable-admin)")] = None,
    seconds: Annotated[float, typer.Option(help="Length of the profile")] = 5.0,
    prefix: Annotated[str | None, typer.Option(help="Begin of the file's name")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks")] = False,
) -> None:
    """Let a running server write a trace of its steps, into its --profiler-dir.

    Start it with --profiler steps --profiler-dir FOLDER --enable-admin --admin-api-key KEY. Ctrl-C ends the profile
    early.
    """
    with readable_errors(debug=debug):
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"--seconds {seconds} is not valid. Allowed: a number of seconds above 0.")
        server = ServerClient(
            url,
            None,
            key=admin_api_key,
            key_name="admin key",
            key_advice="--admin-api-key",
            start_advice="Start it with penstock serve.",
            route_advice="has no admin routes. Start penstock serve with --enable-admin and --admin-api-key KEY.",
        )
        server.call("/start_profile", {"profile_prefix": prefix}, timeout_s=_TIMEOUT_S)
        try:
            time.sleep(seconds)
        finally:
            answer = json.loads(server.call("/stop_profile", {}, timeout_s=_TIMEOUT_S))
            paths = answer["paths"] or ["no trace, as of profiler='cuda'"]
            _print("\n".join(["Written by the server:", *map(one_line, paths), ""]))


def _run(config: EngineConfig, num_prompts: int, input_len: int, output_len: int, seed: int) -> list[str]:
    """Run prompts to warm up, and others in a profile; returns the paths of the traces."""
    from penstock.bench.runs import Prompts, run
    from penstock.contract import RpcCall
    from penstock.engine.session import Session

    prompts = Prompts(config.model.vocab_size, seed)
    with closing(Session(config)) as session:
        begin_collection()
        run(session, prompts.many(num_prompts, input_len), output_len)
        session.collective_rpc(RpcCall("profile", kwargs={"is_start": True}))
        run(session, prompts.many(num_prompts, input_len), output_len)
        answers = session.collective_rpc(RpcCall("profile", kwargs={"is_start": False}))
    return [path for path in answers if path is not None]


def _print(text: str) -> None:
    from penstock.cli.output import standard_output, write

    write(standard_output(as_json=False), text)
