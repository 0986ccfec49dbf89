"""`penstock embed`, `classify` and `score`: vectors, classes and scores of texts, as words or lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.checkpoints.json_file import parse_json_text
from penstock.cli import options
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest
from penstock.observability import printable

if TYPE_CHECKING:
    from penstock.contract import PoolingParams
    from penstock.llm import LLM

_STANDARD_INPUT = "-"
_TEXT_KEYS = ("text", "prompt", "input")
_PAIR_KEYS = (("text_1", "text_2"), ("query", "document"))

_MODEL_HELP = "without --model, the model may be the first word"
Texts = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL] TEXT", help=f"Texts, none reads --input; {_MODEL_HELP}")
]
Input = Annotated[
    Path | None, typer.Option("--input", "-i", help="JSONL or plain lines; - or none reads standard input")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write to this file: JSONL, or an array if it ends with .npy")
]
Truncate = Annotated[
    int | None, typer.Option(help="Most tokens of a text; -1 for as many as fit, which is the default with a warning")
]


class _Line(NamedTuple):
    """A line of the input. id: of the line, if it has one. texts: one, or a pair."""

    id: Any
    texts: tuple[str, ...]


def _model_of_words(given: dict[str, Any], *, num_texts: int) -> str | None:
    """Model as the first word of a command without `--model`, taken out of its texts; None for the default.

    It is the first of more words than `num_texts`, which the command needs at least, any word beside `--input`, and
    otherwise one that names a model here. Raises ConfigError for a word in its place that can be none, and for one of
    few words that may be a hub id.
    """
    from penstock.checkpoints.resolve import is_model_here

    texts: list[str] = given["texts"] or []
    if not texts:
        return None
    first = texts[0]
    may_be_hub_id = first.count("/") == 1 and first.split() == [first]
    if not is_model_here(first):
        is_in_its_place = len(texts) > num_texts or given["input"] is not None
        if not is_in_its_place and not may_be_hub_id:
            return None
        if not is_in_its_place or not may_be_hub_id:
            what = "may be a text or a hub id" if may_be_hub_id else "is where the model is expected, and names none"
            raise ConfigError(
                f"{first!r} {what}, and --model is missing. Give --model MODEL, beside which all words are texts."
            )
    given["texts"] = texts[1:]
    return first


@options.engine_command(without=("block_size",), model_of_words=partial(_model_of_words, num_texts=1))
def embed(
    texts: Texts = None,
    input: Input = None,
    output: Output = None,
    truncate_prompt_tokens: Truncate = None,
    dimensions: Annotated[int | None, typer.Option(help="Size that embeddings are cut to")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="Prompt of the model that is put before texts")] = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Embed texts.

    Without --model the first word is the model, unless it is the only one and names no model here. A line is a text, as
    JSON or as it is, or an object with "text" and perhaps "id". With an OUTPUT of .npy, the embeddings are written as
    one float32 array.
    """
    params = _params(truncate_prompt_tokens, dimensions=dimensions)

    def run(llm: LLM, lines: Sequence[_Line], params: PoolingParams) -> list[dict[str, Any]]:
        outputs = llm.embed([line.texts[0] for line in lines], pooling_params=params, prompt_name=prompt_name)
        return [{"embedding": one.outputs.embedding, "num_tokens": len(one.prompt_token_ids)} for one in outputs]

    lines = _read(texts, input, output, num_texts=1)
    _run(run, params, lines, output, model, engine, key="embedding")


@options.engine_command(without=("block_size",), model_of_words=partial(_model_of_words, num_texts=1))
def classify(
    texts: Texts = None,
    input: Input = None,
    output: Output = None,
    truncate_prompt_tokens: Truncate = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Classify texts: the likeliest label, and a probability for each.

    Words, input and output are those of `penstock embed`; an array has the probabilities.
    """
    params = _params(truncate_prompt_tokens)

    def run(llm: LLM, lines: Sequence[_Line], params: PoolingParams) -> list[dict[str, Any]]:
        outputs = llm.classify([line.texts[0] for line in lines], pooling_params=params)
        pooling = llm.config.model.pooling
        assert pooling is not None, "a model that classifies"
        return [
            {
                "label": pooling.labels[one.outputs.probs.index(max(one.outputs.probs))],
                "probs": one.outputs.probs,
                "num_tokens": len(one.prompt_token_ids),
            }
            for one in outputs
        ]

    lines = _read(texts, input, output, num_texts=1)
    _run(run, params, lines, output, model, engine, key="probs")


@options.engine_command(without=("block_size",), model_of_words=partial(_model_of_words, num_texts=2))
def score(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] TEXT", help=f"A text, and those that it is scored with; {_MODEL_HELP}"),
    ] = None,
    input: Input = None,
    output: Output = None,
    truncate_prompt_tokens: Truncate = None,
    score_template: Annotated[Path | None, typer.Option(help="Jinja template of a reranker")] = None,
    *,
    model: options.Model,
    engine: dict[str, Any],
) -> None:
    """Score pairs of texts: by a cross-encoder, or by the cosine of embeddings.

    Without --model the first word is the model, unless it is one of two and names no model here. A line is two texts
    with a tab between, or an object with "query" and "document", or "text_1" and "text_2", and perhaps "id".
    """
    params = _params(truncate_prompt_tokens)

    def run(llm: LLM, lines: Sequence[_Line], params: PoolingParams) -> list[dict[str, Any]]:
        first, second = ([line.texts[index] for line in lines] for index in (0, 1))
        outputs = llm.score(first, second, pooling_params=params, chat_template=score_template)
        return [{"score": one.outputs.score, "num_tokens": len(one.prompt_token_ids)} for one in outputs]

    lines = _read(texts, input, output, num_texts=2)
    _run(run, params, lines, output, model, engine, key="score")


def _params(truncate: int | None, **more: Any) -> PoolingParams:
    from penstock.contract import PoolingParams

    return PoolingParams(truncate_prompt_tokens=truncate, **more)


def _run(
    run: Callable[[LLM, Sequence[_Line], PoolingParams], list[dict[str, Any]]],
    params: PoolingParams,
    lines: Sequence[_Line],
    output: Path | None,
    model: str,
    engine: dict[str, Any],
    *,
    key: str,
) -> None:
    """Run the lines, and write the results. key: of the results' numbers, for an array."""
    from penstock.cli.output import standard_output, write
    from penstock.cli.output_file import PartialFile, output_file
    from penstock.cli.process import begin_collection
    from penstock.llm import LLM

    is_array = output is not None and output.suffix == ".npy"
    engine.setdefault("runner", "pooling")
    # An output that cannot be written is found before the model is loaded.
    with nullcontext() if output is None else output_file(output) as file:
        with LLM(model, **engine) as llm:
            begin_collection()
            results = _run_or_cut(partial(run, llm, lines), params)
        written = [{"index": index, "id": lines[index].id, **result} for index, result in enumerate(results)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in written)
        if file is None:
            write(standard_output(as_json=True), text)
        else:
            data = _as_array(results, key) if is_array else text.encode()
            (file.put_bytes if isinstance(file, PartialFile) else file.write)(data)
    if output is not None:
        print(f"penstock: {len(written):,} results in {output}", file=sys.stderr)


def _run_or_cut(run: Callable[[PoolingParams], list[dict[str, Any]]], params: PoolingParams) -> list[dict[str, Any]]:
    """Run the texts; where one is too long and --truncate-prompt-tokens is not given, with a warning and a cut."""
    try:
        return run(params)
    except ContextTooLong as error:
        what = str(error).partition(" Shorten it")[0]
        print(
            f"penstock: warning: {printable.one_line(what)} Texts beyond that are cut there, as with "
            "--truncate-prompt-tokens -1.",
            file=sys.stderr,
        )
        return run(params.clone(truncate_prompt_tokens=-1))


def _as_array(results: Sequence[dict[str, Any]], key: str) -> bytes:
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.array([result[key] for result in results], dtype=np.float32))
    return buffer.getvalue()


def _read(texts: Sequence[str] | None, input: Path | None, output: Path | None, num_texts: int) -> list[_Line]:
    """Texts of the command's words, or of the input's lines.

    Raises InvalidRequest for a line that is wrong, with its number, ConfigError without texts.
    """
    if texts and input is not None:
        raise ConfigError(f"There are texts ({texts[0]!r}) and --input {input}. Give one of them.")
    if not texts:
        return _read_lines(input, output, num_texts)
    if num_texts == 1:
        return [_Line(None, (text,)) for text in texts]
    if len(texts) == 1:
        raise ConfigError(f"There is one text ({texts[0]!r}). Give a second one to score it with.")
    return [_Line(None, (texts[0], other)) for other in texts[1:]]


def _read_lines(input: Path | None, output: Path | None, num_texts: int) -> list[_Line]:
    from penstock.cli.failures import read_file
    from penstock.cli.output_file import refuse_same_file

    path = input or Path(_STANDARD_INPUT)
    is_standard_input = str(path) == _STANDARD_INPUT
    if input is None and sys.stdin.isatty():
        raise InvalidRequest("There is no text. Give texts as words, on standard input, or with --input FILE.")
    if output is not None:
        refuse_same_file(path, output, is_standard_input=is_standard_input)
    content = sys.stdin.buffer.read() if is_standard_input else read_file("--input", path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--input {path} is not UTF-8: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--input {path} has no lines. Give a text per line.")
    read = _line if path.suffix == ".jsonl" or _is_json(numbered[0][1]) else _plain_line
    return [read(line, number, num_texts) for number, line in numbered]


def _is_json(first_line: str) -> bool:
    """Whether an input is JSON by its first line: a text in quotes, or an object."""
    try:
        return isinstance(parse_json_text(first_line), (str, dict))
    except ValueError:
        return first_line.startswith("{")


def _plain_line(text: str, number: int, num_texts: int) -> _Line:
    texts = tuple(text.rstrip("\r").split("\t")) if num_texts > 1 else (text.rstrip("\r"),)
    if len(texts) != num_texts:
        raise InvalidRequest(f"Line {number} is {text[:100]}. Allowed: two texts with a tab between, or JSON.")
    return _Line(None, texts)


def _line(text: str, number: int, num_texts: int) -> _Line:
    try:
        content = parse_json_text(text)
    except ValueError as error:
        raise InvalidRequest(f"Line {number} is not JSON: {error}.") from error
    if num_texts == 1 and isinstance(content, str):
        return _Line(None, (content,))
    if isinstance(content, dict):
        choices: Sequence[tuple[str, ...]] = _PAIR_KEYS if num_texts == 2 else [(key,) for key in _TEXT_KEYS]
        for keys in choices:
            unknown = content.keys() - {*keys, "id"}
            if all(isinstance(content.get(key), str) for key in keys) and not unknown:
                return _Line(content.get("id"), tuple(content[key] for key in keys))
    allowed = '"query" and "document", or "text_1" and "text_2"' if num_texts == 2 else '"text"'
    kind = "an object with " if num_texts == 2 else "a text, or an object with "
    raise InvalidRequest(f'Line {number} is {text[:100]}. Allowed: {kind}{allowed}, and perhaps "id".')
