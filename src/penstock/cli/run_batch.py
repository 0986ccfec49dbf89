"""`penstock run-batch`: answers to a file in OpenAI's batch format."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.errors import ConfigError


@options.engine_command(without=("revision", "block_size"))
def run_batch(
    input: Annotated[str, typer.Option("--input-file", "-i", help="JSONL in OpenAI's batch format: a file, or a URL")],
    output: Annotated[
        str, typer.Option("--output-file", "-o", help="Write the answers to this file, or send them to this URL (PUT)")
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Skip requests answered earlier")] = False,
    tool_call_parser: Annotated[str | None, typer.Option(help="Form of the model's tool calls")] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Let the model decide on calls in that form")
    ] = False,
    model: options.Model = "demo",
    *,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests in OpenAI's batch format, as a server would.

    It is vLLM's command. `penstock generate --input` does the same with sampling parameters of its own.
    """
    from penstock.cli.generate import run_requests
    from penstock.cli.output_file import refuse_same_file
    from penstock.cli.requests import STANDARD_INPUT, read_jsonl, server_options
    from penstock.cli.url_files import is_url, local_input, local_output
    from penstock.contract import SamplingParams
    from penstock.server.requests.sampling import chat_max_tokens

    if resume and is_url(output):
        raise ConfigError("--resume is for an --output-file on this machine, and this one is a URL. Leave it out.")
    engine = options.with_reasoning_parser(model, engine)
    server = server_options(
        model, engine, tool_call_parser=tool_call_parser, enable_auto_tool_choice=enable_auto_tool_choice
    )
    defaults = SamplingParams(**options.with_defaults({}, model, engine))
    chats = defaults.clone(max_tokens=chat_max_tokens(None, defaults))
    with local_input("--input-file", input) as source, local_output("--output-file", output) as target:
        refuse_same_file(source, target, is_standard_input=input == STANDARD_INPUT)
        work = read_jsonl(source, defaults, server, chats)
        run_requests(work, model, engine, target, None, as_json=True, is_strict=False, resumes=resume)
