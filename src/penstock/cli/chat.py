"""`penstock chat`: a conversation in the terminal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.failures import read_text_file
from penstock.cli.process import begin_collection


@options.engine_command(without=("revision", "block_size", "max_num_seqs", "max_num_batched_tokens"))
def chat(
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File of a Jinja chat template, instead of the model's")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer  [default: 512]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy  [default: 0.7]")] = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every answer")] = None,
    image: options.Images = None,
    audio: options.Audios = None,
    video: options.Videos = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Chat with a model.

    Answers are streamed; Ctrl-C stops one, Ctrl-D leaves, and /help lists the commands. Lines from a file or a pipe are
    messages, one per line. Images, audio and video are of the first message. Sampling defaults are the model's
    (generation_config.json), if it has any.
    """
    from penstock.config import EngineConfig
    from penstock.contract import SamplingParams
    from penstock.engine.inputs.pooling_prompts import refuse_generation

    flags = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    params = SamplingParams(**options.with_defaults(flags, model, engine, max_tokens=512, temperature=0.7))
    template = None if chat_template is None else read_text_file("--chat-template", chat_template)
    attached = options.media_parts(image, audio, video)
    config = EngineConfig.create(model, **{"max_num_seqs": 1, **engine})
    refuse_generation(config.model)
    from penstock.cli.chat_terminal import ChatTerminal
    from penstock.cli.conversation import Conversation
    from penstock.engine.session import Session

    with closing(Session(config)) as session:
        begin_collection()
        conversation = Conversation(session, params, system=system, chat_template=template)
        ChatTerminal(conversation, model, attached).run()
