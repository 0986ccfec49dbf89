"""`penstock run-batch`: answers to a file in OpenAI's batch format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.errors import ConfigError

_URLS = ("http://", "https://")


@options.engine_command(without=("revision", "block_size"))
def run_batch(
    input: Annotated[str, typer.Option("--input-file", "-i", help="JSONL in OpenAI's batch format")],
    output: Annotated[str, typer.Option("--output-file", "-o", help="Write the answers to this file")],
    resume: Annotated[bool, typer.Option("--resume", help="Skip requests answered earlier")] = False,
    model: options.Model = "demo",
    *,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests in OpenAI's batch format, as a server would.

    It is vLLM's command. `penstock generate --input` does the same with sampling parameters of its own.
    """
    from penstock.cli.generate import run_requests
    from penstock.cli.output_file import refuse_same_file
    from penstock.cli.requests import STANDARD_INPUT, read_jsonl
    from penstock.contract import SamplingParams
    from penstock.server.requests.sampling import chat_max_tokens

    for flag, path in (("--input-file", input), ("--output-file", output)):
        if path.startswith(_URLS):
            raise ConfigError(f"{flag} {path} is a URL. Allowed: a file of this machine.")
    refuse_same_file(Path(input), Path(output), is_standard_input=input == STANDARD_INPUT)
    defaults = SamplingParams(**options.with_defaults({}, model, engine))
    chats = defaults.clone(max_tokens=chat_max_tokens(None, defaults))
    work = read_jsonl(Path(input), defaults, model, chats)
    run_requests(work, model, engine, Path(output), None, as_json=True, is_strict=False, resumes=resume)
