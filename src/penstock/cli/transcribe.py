"""`penstock transcribe`: the text of a file with speech."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from penstock.cli import options

if TYPE_CHECKING:
    from penstock.cli.output_file import PartialFile
    from penstock.engine.output.outputs import RequestOutput


@options.engine_command(without=("block_size",))
def transcribe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Sound: WAV, or with the extra audio other formats")],
    language: Annotated[str | None, typer.Option(help="Its language, such as en  [default: detected]")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Translate into English")] = False,
    prompt: Annotated[str | None, typer.Option(help="Text before the speech, whose words and style it follows")] = None,
    form: Annotated[str, typer.Option("--format", "-f", help="text, json, verbose_json, srt or vtt")] = "text",
    temperature: Annotated[
        str, typer.Option(help="0 is greedy; several, such as 0,0.2,0.4, are tried in turn while a threshold is missed")
    ] = "0",
    compression_ratio_threshold: Annotated[
        float | None, typer.Option(help="Largest ratio of a text that does not repeat itself  [default: 2.4]")
    ] = None,
    logprob_threshold: Annotated[
        float | None, typer.Option(help="Smallest mean log-probability of a text  [default: -1]")
    ] = None,
    no_speech_threshold: Annotated[
        float | None,
        typer.Option(help="Largest probability of no speech where an unlikely text is kept  [default: 0.6]"),
    ] = None,
    word_timestamps: Annotated[
        bool, typer.Option("--word-timestamps", help="Times of words, with --format verbose_json")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file")] = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Transcribe speech, by a Whisper model.

    A sound longer than the encoder takes at once is cut where it is quiet. Thresholds have their defaults where several
    temperatures are given.
    """
    from penstock.config.checks import check_choice
    from penstock.engine.transcription.attempts import temperatures_of, thresholds_of
    from penstock.engine.transcription.speech_tokens import TASKS
    from penstock.engine.transcription.transcriber import Asked, Rounds, Transcriber
    from penstock.engine.transcription.transcript import FORMATS

    check_choice("format", form, ("verbose_json",) if word_timestamps else FORMATS)
    temperatures = temperatures_of(temperature)
    asked = Asked(
        task=TASKS[translate],
        language=language,
        prompt=prompt,
        timestamps=form in ("verbose_json", "srt", "vtt"),
        words=word_timestamps,
        temperatures=temperatures,
        thresholds=thresholds_of(
            temperatures,
            {
                "compression_ratio_threshold": compression_ratio_threshold,
                "logprob_threshold": logprob_threshold,
                "no_speech_threshold": no_speech_threshold,
            },
        ),
    )
    from penstock.cli.output_file import output_file, refuse_same_file
    from penstock.config import EngineConfig
    from penstock.engine.session import Session
    from penstock.media.item import AUDIO
    from penstock.media.loader import MediaLoader

    if output is not None:
        refuse_same_file(file, output, is_standard_input=False, flag="FILE")
    config = EngineConfig.create(model, **engine)
    # A sound that cannot be read, and an output that cannot be written, are found before the model is loaded.
    sound = MediaLoader.of(config.multimodal).load(AUDIO, file, str(file))
    with nullcontext() if output is None else output_file(output) as out:
        with closing(Session(config)) as session:
            transcriber = Transcriber(config, session.tokenizer, session.max_model_len)
            rounds = Rounds(transcriber.speech(sound, asked, str(file)).transcription())
            outputs: Sequence[RequestOutput] = ()
            while (prompts := rounds.after(outputs)) is not None:
                outputs = session.finish([session.accept(*one) for one in prompts], shows_bar=len(prompts) > 1)
        _write(rounds.result.written(form), out)


def _write(written: str | Mapping[str, Any], out: PartialFile | BinaryIO | None) -> None:
    """Write a text, or data as JSON. out: None is the standard output."""
    from penstock.cli.output import standard_output, write
    from penstock.cli.output_file import PartialFile

    is_text = isinstance(written, str)
    text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False, indent=2) + "\n"
    if out is None:
        write(standard_output(as_json=not is_text), text)
    else:
        put = out.put_bytes if isinstance(out, PartialFile) else out.write
        put(text.encode())
