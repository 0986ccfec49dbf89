"""Prompts and output lengths of datasets."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.serving.datasets import SampleRequest, as_text, sample
from penstock.bench.serving.settings import DatasetSettings
from penstock.checkpoints.resolve import resolve_metadata_folder
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer, load_tokenizer


def demo() -> Tokenizer:
    return load_tokenizer(resolve_metadata_folder("demo")[0])


def ids_of(request: SampleRequest) -> list[int]:
    assert isinstance(request.prompt, list)
    return request.prompt


def draw(num_more: int = 0, **settings: Any) -> list[SampleRequest]:
    return sample(DatasetSettings(num_prompts=20, **settings), demo, num_more)


def test_random_prompts_have_their_lengths_and_no_common_begin() -> None:
    requests = draw(random_input_len=16, random_output_len=5)
    assert {(len(ids_of(request)), request.prompt_len, request.output_len) for request in requests} == {(16, 16, 5)}
    assert len({tuple(ids_of(request)[:8]) for request in requests}) == 20


def test_random_lengths_vary_by_their_ratio() -> None:
    requests = draw(random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    lengths = [len(ids_of(request)) for request in requests]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 5
    assert {request.output_len for request in requests} <= set(range(5, 16))


def test_random_prompts_may_share_a_prefix() -> None:
    requests = draw(random_input_len=4, random_prefix_len=12)
    assert len({tuple(ids_of(request)[:12]) for request in requests}) == 1
    assert {request.prompt_len for request in requests} == {16}


def test_equal_seeds_give_equal_prompts_whatever_the_warm_up() -> None:
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw(num_more=5, seed=1)[:20] == draw(seed=1)


def test_prefixes_are_repeated_equally_often() -> None:
    requests = draw(
        name="prefix_repetition",
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=5,
        prefix_repetition_output_len=3,
    )
    assert Counter(Counter(tuple(ids_of(request)[:8]) for request in requests).values()) == {4: 5}
    assert {(len(ids_of(request)), request.output_len) for request in requests} == {(12, 3)}


def test_token_ids_become_text_of_as_many_tokens() -> None:
    tokenizer = demo()
    for request in draw(random_input_len=30):
        text = as_text(request, tokenizer, random.Random(0))
        assert isinstance(text.prompt, str)
        assert len(tokenizer.encode(text.prompt, add_special_tokens=False)) == text.prompt_len
        assert text.prompt_len == 30


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_custom_file_gives_prompts_and_lengths(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "output_tokens": 7}, {"prompt": [1, 2, 3]}, "")
    settings = DatasetSettings(name="custom", path=path, num_prompts=3, disable_shuffle=True)
    expected = [SampleRequest("a", None, 7), SampleRequest([1, 2, 3], 3, 256), SampleRequest("a", None, 7)]
    assert sample(settings, pytest.fail) == expected


def test_a_given_output_length_is_that_of_all_custom_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "output_tokens": 7}, {"prompt": "b"})
    settings = DatasetSettings(name="custom", path=path, num_prompts=2, custom_output_len=5)
    assert {request.output_len for request in sample(settings, pytest.fail)} == {5}


def test_files_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": str(number)} for number in range(20)))

    def prompts(**options: Any) -> list[Any]:
        return [request.prompt for request in draw(name="custom", path=path, **options)]

    assert prompts(disable_shuffle=True) == [str(number) for number in range(20)]
    assert prompts(seed=1) == prompts(seed=1) != prompts(seed=2)
    assert sorted(prompts(seed=1), key=int) == prompts(disable_shuffle=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ({"text": "a"}, "line 2 is not valid"),
        ({"prompt": []}, "line 2 is not valid"),
        ({"prompt": ["a"]}, "line 2 is not valid"),
        ({"prompt": "a", "output_tokens": 0}, "line 2: output_tokens=0"),
        ({"prompt": "a", "output_tokens": "many"}, "line 2: output_tokens='many'"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path, {"prompt": "a"}, line)
    with pytest.raises(ConfigError, match=message):
        draw(name="custom", path=path)


def conversation(prompt: str, answer: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]
    return {"conversations": [*turns, {"from": "human", "value": "more"}]}


def test_a_sharegpt_file_gives_first_messages_and_lengths_of_answers(tmp_path: Path) -> None:
    tokenizer = demo()
    prompt, reply = "To be, or not to be?", "That is the question, my lord."
    entries = [
        conversation(prompt, reply),
        {"conversations": []},
        conversation("a" * 5000, reply),
        conversation("", ""),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    expected = SampleRequest(
        prompt, len(tokenizer.encode(prompt)), len(tokenizer.encode(reply, add_special_tokens=False))
    )
    assert draw(name="sharegpt", path=path) == [expected] * 20
    assert {request.output_len for request in draw(name="sharegpt", path=path, sharegpt_output_len=3)} == {3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "a list of objects"),
        ("[1]", "entry 0"),
        ('[{"conversations": [{}, {}]}]', "a turn of entry 0"),
        ("[]", "no usable prompt"),
        ("nonsense", "is not JSON"),
    ],
)
def test_an_invalid_sharegpt_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        draw(name="sharegpt", path=path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sonnet"}, "--dataset-name sonnet"),
        ({"name": "custom"}, "needs --dataset-path"),
        ({"path": Path("x")}, "--dataset-path x means nothing"),
        ({"name": "custom", "path": Path("/does/not/exist")}, "/does/not/exist cannot be read"),
        ({"random_input_len": 0}, "--random-input-len 0"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio 1.0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(**settings)
