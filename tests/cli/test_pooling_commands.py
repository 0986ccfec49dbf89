"""`penstock embed`, `classify` and `score`, compared with the offline API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock import LLM
from penstock.cli.app import app
from penstock.cli.pool import _model_of_words
from support.pooling_models import TINY_ENCODER, random_model, random_text, save

TEXTS = [random_text(num_words, seed=num_words) for num_words in (2, 9, 30)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    embedder = random_model("BertModel", "BertConfig", **TINY_ENCODER)
    reranker = random_model("BertForSequenceClassification", "BertConfig", **TINY_ENCODER, num_labels=1)
    return {"embed": save(embedder, folder / "embed"), "score": save(reranker, folder / "score")}


def write_lines(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_embeddings_are_written_as_lines_or_as_an_array(folders: dict[str, Path], tmp_path: Path) -> None:
    given = write_lines(tmp_path / "texts.jsonl", [TEXTS[0], {"text": TEXTS[1], "id": "b"}, {"text": TEXTS[2]}])
    with LLM(folders["embed"]) as llm:
        expected = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    command = ["embed", "-i", str(given), "--model", str(folders["embed"])]
    for name in ("out.jsonl", "out.npy"):
        result = CliRunner().invoke(app, [*command, "-o", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["embedding"] for line in lines] == expected
    assert [(line["index"], line["id"]) for line in lines] == [(0, None), (1, "b"), (2, None)]
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.array(expected, np.float32))


def test_scores_and_classes(folders: dict[str, Path], tmp_path: Path) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"query": TEXTS[0], "document": text} for text in TEXTS])
    texts = write_lines(tmp_path / "texts.jsonl", list(TEXTS))
    with LLM(folders["score"]) as llm:
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        probs = [output.outputs.probs for output in llm.classify(TEXTS, use_tqdm=False)]
    for command, given, key, expected in (("score", pairs, "score", scores), ("classify", texts, "probs", probs)):
        out = tmp_path / f"{command}.jsonl"
        result = CliRunner().invoke(app, [command, "-i", str(given), "-o", str(out), "-m", str(folders["score"])])
        assert result.exit_code == 0, result.output
        assert [line[key] for line in read_lines(out)] == expected


@pytest.mark.parametrize("given", [None, "\n".join(TEXTS) + "\n", "\n".join(map(json.dumps, TEXTS))], ids=str)
def test_texts_are_words_or_lines_plain_or_json(given: str | None, folders: dict[str, Path]) -> None:
    words = [] if given else TEXTS
    result = CliRunner().invoke(app, ["embed", *words, "-m", str(folders["embed"])], input=given)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    with LLM(folders["embed"]) as llm:
        expected = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    assert [line["embedding"] for line in lines] == expected


def test_a_text_is_scored_with_the_others_or_a_line_has_two(folders: dict[str, Path]) -> None:
    pairs = "".join(f"{TEXTS[0]}\t{other}\n" for other in TEXTS[1:])
    results = [
        CliRunner().invoke(app, ["score", *words, "-m", str(folders["score"])], input=given)
        for words, given in ((TEXTS, None), ((), pairs))
    ]
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].stdout == results[1].stdout
    assert len(results[0].stdout.splitlines()) == 2


@pytest.mark.parametrize("name", ["embed", "classify", "score"])
def test_the_model_may_be_the_first_word(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, texts = str(folders["embed" if name == "embed" else "score"]), TEXTS[: 2 if name == "score" else 1]
    line = "\t".join(texts) + "\n"
    (tmp_path / "lines").write_text(line)
    ways: list[tuple[list[str], str | None]] = [
        ([*texts, "--model", folder], None),
        ([folder, *texts], None),
        ([folder], line),
        ([folder, "-i", str(tmp_path / "lines")], None),
    ]
    results = [CliRunner().invoke(app, [name, *words], input=given) for words, given in ways]
    assert [result.exit_code for result in results] == [0] * 4, results[-1].output
    assert len({result.stdout for result in results}) == 1


@pytest.mark.parametrize(
    ("words", "num_texts", "model", "texts"),
    [
        (["one"], 1, None, ["one"]),
        (["demo"], 1, "demo", []),
        (["minilm", "one"], 1, "minilm", ["one"]),
        (["org/name", "one", "two"], 1, "org/name", ["one", "two"]),
        (["one", "two"], 2, None, ["one", "two"]),
        (["and / or"], 1, None, ["and / or"]),
        (["demo", "one", "two"], 2, "demo", ["one", "two"]),
        (["x" * 5000], 1, None, ["x" * 5000]),
        ([], 1, None, []),
    ],
)
def test_the_first_word_is_the_model_where_it_is_more_than_a_text(
    words: list[str], num_texts: int, model: str | None, texts: list[str]
) -> None:
    given: dict[str, Any] = {"texts": list(words), "input": None}
    assert _model_of_words(given, num_texts=num_texts) == model
    assert given["texts"] == texts


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        (["embed", "But soft!", "what light"], None, "'But soft!' is where the model is expected, and"),
        (["score", "one", "two", "three"], None, "'one' is where the model is expected, and names"),
        (["embed", "one", "-i", "f"], None, "'one' is where the model is expected, and names"),
        (["embed", "org/name"], "one\n", "'org/name' may be a text or a hub id, and --model is missing. Give --model"),
        (["score", "org/name", "one"], None, "'org/name' may be a text or a hub id"),
        (["score", "one"], None, "There is one text ('one'). Give a second one"),
        (["embed", "one", "-i", "f", "-m", "demo"], None, "There are texts ('one') and --input f. Give one of them"),
        (["score"], "one\n", "Line 1 is one. Allowed: two texts with a tab between, or JSON"),
        (["embed"], "{broken\n", "Line 1 is not JSON"),
    ],
)
def test_wrong_words_and_plain_lines_are_refused(command: list[str], given: str | None, message: str) -> None:
    result = CliRunner().invoke(app, command, input=given)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_long_texts_are_cut_with_a_warning(folders: dict[str, Path]) -> None:
    long = random_text(200)
    result, cut = (
        CliRunner().invoke(app, ["embed", TEXTS[0], long, "-m", str(folders["embed"]), *options])
        for options in ((), ("--truncate-prompt-tokens", "-1"))
    )
    assert result.exit_code == cut.exit_code == 0, result.output
    assert result.stdout == cut.stdout
    assert "warning: prompts[1]: The text has 202 tokens, but this engine takes 128 at most" in result.stderr
    assert "warning" not in cut.stderr


def test_a_wrong_line_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    given = write_lines(tmp_path / "texts.jsonl", [TEXTS[0], {"texts": "ba"}])
    result = CliRunner().invoke(app, ["embed", "-i", str(given), "-m", str(folders["embed"])])
    assert result.exit_code != 0
    assert "Line 2 is" in result.output


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    given = write_lines(tmp_path / "texts.jsonl", [TEXTS[0]])
    output = tmp_path / "none" / "out.npy"
    command = ["embed", "-i", str(given), "-m", str(tmp_path / "no model"), "-o", str(output)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"--output {output} cannot be opened" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "has no lines. Give a text per line"),
        (b'"ba"\n{"text": "be"\n', "Line 2 is not JSON"),
        (b'\xff"ba"\n', "is not UTF-8"),
        (b'\xef\xbb\xbf"ba"\n5\n', "Line 2 is 5. Allowed: a text, or an object"),
    ],
)
def test_broken_files_are_refused_by_their_line(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_bytes(text)
    result = CliRunner().invoke(app, ["embed", "-i", str(tmp_path / "texts.jsonl"), "-m", str(tmp_path)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("command", "model", "options", "message"),
    [
        ("classify", "embed", [], "cannot do classify: it has BertModel. Allowed: embed, token_embed"),
        pytest.param(
            "embed",
            "score",
            [],
            "cannot do embed: it has BertForSequenceClassification. Allowed: classify, score",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "embed", "embed", ["--dimensions", "4"], "was not trained for shorter embeddings", marks=pytest.mark.slow
        ),
        (
            "embed",
            "embed",
            ["--truncate-prompt-tokens", "999"],
            "--truncate-prompt-tokens 999 is not valid. Allowed: at most 128",
        ),
    ],
)
def test_bad_input_is_refused_by_name(
    command: str, model: str, options: list[str], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    given = write_lines(tmp_path / "texts.jsonl", [TEXTS[0], random_text(200)])
    result = CliRunner().invoke(app, [command, "-i", str(given), "-m", str(folders[model]), *options])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [["generate", "x"], ["chat"]])
def test_a_model_that_embeds_is_refused_where_text_is_generated(arguments: list[str], folders: dict[str, Path]) -> None:
    result = CliRunner().invoke(app, [*arguments, "-m", str(folders["embed"])])
    assert result.exit_code == 2
    assert "embed pools here, and generates no text. Its tasks: embed" in " ".join(result.output.split())
