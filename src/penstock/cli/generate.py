"""`penstock generate`: text for one prompt, or for a file of them."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.failures import EXIT_FAILURE, OutputClosed, discard_output
from penstock.cli.process import begin_collection
from penstock.errors import ConfigError, InvalidRequest
from penstock.observability import printable

if TYPE_CHECKING:
    from penstock.cli.results import ResultWriter
    from penstock.cli.work import Work
    from penstock.engine.inputs.input_processor import AcceptedRequest
    from penstock.engine.session import Session
    from penstock.features.lora.request import LoRARequest


@options.engine_command(without=("revision", "block_size"))
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; - or none reads standard input")
    ] = None,
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="JSONL, a request per line; - reads standard input")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write JSONL to this file")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip requests answered earlier")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write JSONL instead of text")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens to generate  [default: 128]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy  [default: 1.0]")] = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every request")] = None,
    n: Annotated[int, typer.Option("--n", help="Outputs per prompt; several imply --json")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities to report; implies --json")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Generate nothing if a line is invalid")] = False,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Constrain the output to JSON of this schema")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Constrain the output to this pattern")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="Constrain to one of these; repeatable")] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Constrain to this grammar: Lark or GBNF")
    ] = None,
    image: options.Images = None,
    audio: options.Audios = None,
    video: options.Videos = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="LoRA adapter of all requests; needs --enable-lora")
    ] = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Generate text that continues a prompt.

    With images, audio or video the prompt is a message of a chat. A JSONL line is a request in Penstock's or OpenAI's
    format. OUTPUT.partial has partial results.
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
        "structured_outputs": _structured_outputs(json_schema, regex, choice, grammar),
    }
    sampling = options.with_defaults(sampling, model, engine, max_tokens=128)
    engine = options.with_reasoning_parser(model, engine)
    parts = options.media_parts(image, audio, video)
    work = _read_work(prompt, input, output, parts, sampling, model, engine)
    as_json = json or input is not None or output is not None or logprobs is not None or n > 1
    if resume and output is None:
        raise ConfigError("--resume has no meaning without --output. Give the output file of the run to go on with.")
    adapter = _adapter_of(lora_modules or [])
    run_requests(
        work, model, engine, output, adapter, as_json=as_json, is_strict=input is None or strict, resumes=resume
    )


def _adapter_of(lora_modules: list[str]) -> LoRARequest | None:
    """The adapter of the command's requests."""
    from penstock.features.lora.modules import read_lora_modules

    adapters = read_lora_modules(lora_modules)
    if len(adapters) > 1:
        raise ConfigError(
            f"--lora-modules is given {len(adapters)} times, and the requests of a command have one adapter. Run the "
            "command for each."
        )
    return adapters[0] if adapters else None


def _structured_outputs(
    json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> dict[str, Any] | None:
    """Constraint of these options. Several are refused with the sampling parameters."""
    from penstock.cli.failures import read_text_file

    given: dict[str, Any] = {"regex": regex, "choice": choice or None}
    for name, option, path in (("json", "--json-schema", json_schema), ("grammar", "--grammar", grammar)):
        if path is not None:
            given[name] = read_text_file(option, path)
    return {name: value for name, value in given.items() if value is not None} or None


def _read_work(
    prompt: str | None,
    input: Path | None,
    output: Path | None,
    parts: list[dict[str, Any]],
    sampling: dict[str, Any],
    model: str,
    engine: dict[str, Any],
) -> list[Work]:
    from penstock.cli.media import with_media
    from penstock.cli.output_file import refuse_same_file
    from penstock.cli.requests import STANDARD_INPUT, read_jsonl, read_prompt, server_options
    from penstock.cli.work import Messages, Work
    from penstock.contract import SamplingParams

    params = SamplingParams(**sampling)
    if input is None:
        text = read_prompt(prompt)
        if not parts:
            return [Work(text, params)]
        return [Work(Messages([{"role": "user", "content": with_media(text, parts)}], {}), params)]
    if parts:
        raise ConfigError("--image, --audio and --video are of one prompt. Name them in the messages of --input.")
    if prompt is not None:
        raise ConfigError(
            f"There are a prompt ({prompt!r}) and --input {input}. Give one of them; a model as --model {prompt!r}."
        )
    if output is not None:
        refuse_same_file(input, output, is_standard_input=str(input) == STANDARD_INPUT)
    return read_jsonl(input, params, server_options(model, engine))


def run_requests(
    work: list[Work],
    model: str,
    engine: dict[str, Any],
    output: Path | None,
    adapter: LoRARequest | None,
    *,
    as_json: bool,
    is_strict: bool,
    resumes: bool,
) -> None:
    """Answer the requests. Invalid ones are found before the model loads, or before the first token.

    is_strict: generate nothing if one is invalid; else its error is its answer.
    """
    from penstock.cli.output import standard_output, stream_text
    from penstock.cli.output_file import PartialFile
    from penstock.cli.results import ResultWriter, open_results
    from penstock.cli.resume import request_hashes, take_answers
    from penstock.cli.work import accept_all, raise_refusals
    from penstock.config import EngineConfig
    from penstock.engine.inputs.pooling_prompts import refuse_generation
    from penstock.features.lora.request import parts_of_adapter

    refused = {index: item.error for index, item in enumerate(work) if item.error is not None}
    if is_strict:
        raise_refusals(refused, len(work))
    config = EngineConfig.create(model, **engine)
    refuse_generation(config.model)
    with ExitStack() as stack:
        writer, answered = None, set[int]()
        out = None if as_json else standard_output(as_json=False)
        if as_json:
            named = () if adapter is None else (adapter.lora_name, adapter.lora_path)
            hashes = request_hashes(work, config, named)
            sink = stack.enter_context(open_results(output, resumes=resumes))
            if output is not None and isinstance(sink, PartialFile) and resumes:
                answered = take_answers(output, sink, work, hashes)
            writer = ResultWriter(sink, [item.format for item in work], hashes)
        session, requests = None, dict[int, "AcceptedRequest"]()
        if len(refused) + len(answered) < len(work):
            from penstock.contract import RpcCall
            from penstock.engine.session import Session

            session = stack.enter_context(closing(Session(config)))
            begin_collection()
            if adapter is not None:
                session.collective_rpc(RpcCall("add_lora", (adapter,)))
            requests, refused = accept_all(session, work, answered, parts_of_adapter(adapter))
            if is_strict:
                raise_refusals(refused, len(work))
        if writer is not None:
            failure = _write_results(session, work, requests, refused, writer, shows_bar=output is not None)
        else:
            assert session is not None, "one prompt, which was refused, has raised"
            assert out is not None
            with closing(session.run(list(requests.values()))) as steps:
                failure = stream_text(steps, out).error
    if failure is not None:
        print(f"penstock: {printable.lines(failure)}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


def _write_results(
    session: Session | None,
    work: list[Work],
    requests: dict[int, AcceptedRequest],
    refused: dict[int, InvalidRequest],
    writer: ResultWriter,
    *,
    shows_bar: bool,
) -> str | None:
    """Write all results. Returns a message about failed requests, if there are any.

    requests, refused: requests that run, and errors of the others, by index. session: None if no request runs.
    """
    if refused:
        print(f"penstock: {_about_refused(refused, len(work))}", file=sys.stderr)
    try:
        for index, error in refused.items():
            writer.add_refusal(index, error)
        if session is not None:
            _answer(session, requests, writer, shows_bar=shows_bar)
    except OutputClosed:
        raise
    except BaseException:
        # Answers are kept when the run is interrupted.
        _write_rest(writer)
        raise
    if not writer.num_failed:
        return None
    return f"{writer.num_failed} of {len(work)} requests failed; their lines say why (error)."


def _answer(session: Session, requests: dict[int, AcceptedRequest], writer: ResultWriter, *, shows_bar: bool) -> None:
    from penstock.observability.progress_bar import progress_bar

    index_of = {accepted.request.req_id: index for index, accepted in requests.items()}
    with progress_bar(len(requests), is_wanted=shows_bar) as bar:

        def refuse(accepted: AcceptedRequest, error: InvalidRequest) -> None:
            writer.add_refusal(index_of[accepted.request.req_id], error)
            bar.update()

        with closing(session.run(list(requests.values()), refuse)) as steps:
            for progress in steps:
                if progress.finished:
                    writer.add(index_of[progress.req_id], progress.output(), session.tokenizer)
                    bar.update()


def _write_rest(writer: ResultWriter) -> None:
    try:
        writer.write_rest()
    except OutputClosed:
        discard_output()


def _about_refused(refused: dict[int, InvalidRequest], num_requests: int) -> str:
    first = next(iter(refused.values()))
    which = f"{len(refused):,} of {num_requests:,} requests cannot be answered, and their lines will say why"
    return f"{which} (--strict ends the command instead). The first: {first}"
