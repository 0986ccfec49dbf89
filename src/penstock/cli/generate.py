"""`penstock generate`: text for one prompt, or for a file of them."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.collector import begin_collection
from penstock.cli.failures import EXIT_FAILURE
from penstock.cli.sampling import with_defaults
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.requests import Work
    from penstock.engine.session import Session


@options.engine_command(without=("revision", "block_size"))
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input")] = None,
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="JSONL, a request per line; - reads standard input")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSONL here")] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSONL instead of text")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most  [default: 128]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token  [default: 1.0]")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Likeliest tokens of this total probability  [default: 1.0]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="This many likeliest; 0: all  [default: 0]")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Tokens this likely, next to the likeliest  [default: 0.0]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every request")] = None,
    n: Annotated[int, typer.Option("--n", help="Outputs per prompt; several imply --json")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; repeatable")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Likeliest tokens to report; implies --json")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token")] = False,
    model: options.Model = "demo",
    *,
    engine: dict[str, Any],
) -> None:
    """Generate text that continues a prompt.

    One prompt is answered with text as it comes. A JSONL file has a request per line: "prompt" or
    "prompt_token_ids", and perhaps sampling parameters and an "id"; results are JSONL in the same order.
    Defaults of sampling are the model's, where it has its own (generation_config.json).
    """
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "n": n,
        "stop": tuple(stop or ()),
        "logprobs": logprobs,
        "ignore_eos": ignore_eos,
    }
    sampling = with_defaults(sampling, model, engine, max_tokens=128)
    work = _read_work(prompt, input, output, sampling)
    as_json = json or input is not None or output is not None or logprobs is not None or n > 1
    _run(work, model, engine, output, as_json=as_json)


def _read_work(prompt: str | None, input: Path | None, output: Path | None, sampling: dict[str, Any]) -> list[Work]:
    from penstock.cli.output_file import refuse_same_file
    from penstock.cli.requests import STANDARD_INPUT, Work, read_jsonl, read_prompt
    from penstock.contract import SamplingParams

    params = SamplingParams(**sampling)
    if input is None:
        return [Work(read_prompt(prompt), params)]
    if prompt is not None:
        raise ConfigError(f"There are a prompt ({prompt!r}) and --input {input}. Give one of them.")
    if output is not None:
        refuse_same_file(input, output, is_standard_input=str(input) == STANDARD_INPUT)
    return read_jsonl(input, params)


def _run(work: list[Work], model: str, engine: dict[str, Any], output: Path | None, *, as_json: bool) -> None:
    """Everything that can be wrong with the input is found before the model loads, or before the first token."""
    from penstock.cli.output import open_output, stream_text
    from penstock.config import EngineConfig

    config = EngineConfig.create(model, **engine)
    with ExitStack() as stack:
        out = stack.enter_context(open_output(output, as_json=as_json))
        if not work:
            return
        from penstock.engine.session import Session

        session = stack.enter_context(closing(Session(config)))
        begin_collection()
        if as_json:
            failure = _write_results(session, work, out)
        else:
            request = session.accept(work[0].prompt, work[0].sampling_params)
            with closing(session.run([request])) as steps:
                failure = stream_text(steps, out).error
    if failure is not None:
        print(f"penstock: {failure}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


def _write_results(session: Session, work: list[Work], out: Any) -> str | None:
    """Returns what to say about the requests that failed, if any did."""
    from penstock.cli.output import ResultWriter
    from penstock.engine.progress_bar import progress_bar

    requests = [session.accept(item.prompt, item.sampling_params, item.where) for item in work]
    index_of = {accepted.request.req_id: index for index, accepted in enumerate(requests)}
    writer = ResultWriter(out, [item.id for item in work])
    with progress_bar(len(work), is_wanted=out is not sys.stdout) as bar, closing(session.run(requests)) as steps:
        for progress in steps:
            if progress.finished:
                writer.add(index_of[progress.req_id], progress.output())
                bar.update()
    if not writer.num_failed:
        return None
    return f"{writer.num_failed} of {len(work)} requests failed; their lines say why (error)."
