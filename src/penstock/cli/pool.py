"""`penstock embed`, `classify` and `score`: vectors, classes and scores of a JSONL file's texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.checkpoints.json_file import parse_json_text
from penstock.cli import options
from penstock.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from penstock.contract import PoolingParams
    from penstock.llm import LLM

_STANDARD_INPUT = "-"
_TEXT_KEYS = ("text", "prompt", "input")
_PAIR_KEYS = (("text_1", "text_2"), ("query", "document"))

Input = Annotated[Path, typer.Option("--input", "-i", help="JSONL, a text per line; - reads standard input")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write to this file: JSONL, or an array if it ends with .npy")
]
Truncate = Annotated[int | None, typer.Option(help="Most tokens of a text; -1 for as many as fit")]
_DEFAULT_INPUT = Path(_STANDARD_INPUT)


class _Line(NamedTuple):
    """A line of the input. id: of the line, if it has one. texts: one, or a pair."""

    id: Any
    texts: tuple[str, ...]


@options.engine_command(without=("block_size",))
def embed(
    input: Input = _DEFAULT_INPUT,
    output: Output = None,
    truncate_prompt_tokens: Truncate = None,
    dimensions: Annotated[int | None, typer.Option(help="Size that embeddings are cut to")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="Prompt of the model that is put before texts")] = None,
    model: options.Model = "demo",
    *,
    engine: dict[str, Any],
) -> None:
    """Embed texts.

    A line is a text as JSON, or an object with "text" and perhaps "id". With an OUTPUT of .npy, the embeddings are
    written as one float32 array.
    """
    params = _params(truncate_prompt_tokens, dimensions=dimensions)

    def run(llm: LLM, lines: Sequence[_Line]) -> list[dict[str, Any]]:
        outputs = llm.embed([line.texts[0] for line in lines], pooling_params=params, prompt_name=prompt_name)
        return [{"embedding": one.outputs.embedding, "num_tokens": len(one.prompt_token_ids)} for one in outputs]

    _run(run, input, output, model, engine, key="embedding", num_texts=1)


@options.engine_command(without=("block_size",))
def classify(
    input: Input = _DEFAULT_INPUT,
    output: Output = None,
    truncate_prompt_tokens: Truncate = None,
    model: options.Model = "demo",
    *,
    engine: dict[str, Any],
) -> None:
    """Classify texts: the likeliest label, and a probability for each.

    Input and output are those of `penstock embed`; an array has the probabilities.
    """
    params = _params(truncate_prompt_tokens)

    def run(llm: LLM, lines: Sequence[_Line]) -> list[dict[str, Any]]:
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

    _run(run, input, output, model, engine, key="probs", num_texts=1)


@options.engine_command(without=("block_size",))
def score(
    input: Input = _DEFAULT_INPUT,
    output: Output = None,
    truncate_prompt_tokens: Truncate = None,
    score_template: Annotated[Path | None, typer.Option(help="Jinja template of a reranker")] = None,
    model: options.Model = "demo",
    *,
    engine: dict[str, Any],
) -> None:
    """Score pairs of texts: by a cross-encoder, or by the cosine of embeddings.

    A line is an object with "query" and "document", or "text_1" and "text_2", and perhaps "id".
    """
    params = _params(truncate_prompt_tokens)

    def run(llm: LLM, lines: Sequence[_Line]) -> list[dict[str, Any]]:
        first, second = ([line.texts[index] for line in lines] for index in (0, 1))
        outputs = llm.score(first, second, pooling_params=params, chat_template=score_template)
        return [{"score": one.outputs.score, "num_tokens": len(one.prompt_token_ids)} for one in outputs]

    _run(run, input, output, model, engine, key="score", num_texts=2)


def _params(truncate: int | None, **more: Any) -> PoolingParams:
    from penstock.contract import PoolingParams

    return PoolingParams(truncate_prompt_tokens=truncate, **more)


def _run(
    run: Callable[[LLM, Sequence[_Line]], list[dict[str, Any]]],
    input: Path,
    output: Path | None,
    model: str,
    engine: dict[str, Any],
    *,
    key: str,
    num_texts: int,
) -> None:
    """Read the lines, run them, and write the results. key: of the results' numbers, for an array."""
    from penstock.cli.output import standard_output, write
    from penstock.cli.output_file import PartialFile, output_file, refuse_same_file
    from penstock.cli.process import begin_collection
    from penstock.llm import LLM

    is_array = output is not None and output.suffix == ".npy"
    if output is not None:
        refuse_same_file(input, output, is_standard_input=str(input) == _STANDARD_INPUT)
    lines = _read(input, num_texts)
    engine.setdefault("runner", "pooling")
    # An output that cannot be written is found before the model is loaded.
    with nullcontext() if output is None else output_file(output) as file:
        with LLM(model, **engine) as llm:
            begin_collection()
            results = run(llm, lines)
        written = [{"index": index, "id": lines[index].id, **result} for index, result in enumerate(results)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in written)
        if file is None:
            write(standard_output(as_json=True), text)
        else:
            data = _as_array(results, key) if is_array else text.encode()
            (file.put_bytes if isinstance(file, PartialFile) else file.write)(data)
    if output is not None:
        print(f"penstock: {len(written):,} results in {output}", file=sys.stderr)


def _as_array(results: Sequence[dict[str, Any]], key: str) -> bytes:
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.array([result[key] for result in results], dtype=np.float32))
    return buffer.getvalue()


def _read(input: Path, num_texts: int) -> list[_Line]:
    """Read all lines. Raises InvalidRequest for one that is wrong, with its number, ConfigError without lines."""
    from penstock.cli.failures import read_file

    content = sys.stdin.buffer.read() if str(input) == _STANDARD_INPUT else read_file("--input", input)
    try:
        texts = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"--input {input} is not UTF-8: {error}.") from error
    lines = [_line(text, number, num_texts) for number, text in enumerate(texts, start=1) if text.strip()]
    if not lines:
        raise ConfigError(f"--input {input} has no lines. Give a text per line, as JSON.")
    return lines


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
