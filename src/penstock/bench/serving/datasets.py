"""Datasets of a server benchmark: prompts, and how many tokens to generate for each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from penstock.bench.serving.settings import DatasetSettings
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

TokenizerLoader: TypeAlias = Callable[[], Tokenizer]
# Lengths of ShareGPT conversations that are used, in tokens: the customary ones of serving benchmarks.
_SHAREGPT_LEAST, _SHAREGPT_MOST_PROMPT, _SHAREGPT_MOST_TOTAL = 4, 1024, 2048
_CUSTOM_OUTPUT_LEN = 256
_TRIES_OF_TEXT = 16


@dataclass(frozen=True)
class SampleRequest:
    """A request of a dataset. prompt: text or token ids. prompt_len: tokens of the prompt; None if it is not known."""

    prompt: str | list[int]
    prompt_len: int | None
    output_len: int


def sample(settings: DatasetSettings, load_tokenizer: TokenizerLoader, num_more: int = 0) -> list[SampleRequest]:
    """Return the dataset's requests, equal for equal settings, and `num_more` after them for the warm-up.

    load_tokenizer: called only if the dataset needs it.

    Raises ConfigError for a file that cannot be read, and the errors of `load_tokenizer`.
    """
    requests = _DATASETS[settings.name](settings, load_tokenizer, settings.num_prompts + num_more)
    assert len(requests) == settings.num_prompts + num_more
    return requests


def as_text(request: SampleRequest, tokenizer: Tokenizer, rng: random.Random) -> SampleRequest:
    """Return a request whose prompt is text, for APIs without token ids; of as many tokens, if there is such a text.

    A text of random tokens may be read as fewer or more of them, so it is cut or extended a few times.
    """
    if isinstance(request.prompt, str):
        return request
    target = len(request.prompt)
    ids = request.prompt
    for _ in range(_TRIES_OF_TEXT):
        # Bytes that are no character would come back as another, longer one.
        text = tokenizer.decode(ids).replace("\ufffd", "")
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == target:
            break
        ids = ids[:target] + [rng.randrange(tokenizer.vocab_size) for _ in range(target - len(ids))]
    return SampleRequest(text, len(tokenizer.encode(text, add_special_tokens=False)), request.output_len)


def _random(settings: DatasetSettings, load_tokenizer: TokenizerLoader, num_requests: int) -> list[SampleRequest]:
    rng, tokens = _token_source(settings, load_tokenizer)
    prefix = tokens(settings.random_prefix_len)

    def length(mean: int) -> int:
        spread = int(mean * settings.random_range_ratio)
        return max(rng.randint(mean - spread, mean + spread), 1)

    requests = []
    for _ in range(num_requests):
        prompt = prefix + tokens(length(settings.random_input_len))
        requests.append(SampleRequest(prompt, len(prompt), length(settings.random_output_len)))
    return requests


def _prefix_repetition(
    settings: DatasetSettings, load_tokenizer: TokenizerLoader, num_requests: int
) -> list[SampleRequest]:
    rng, tokens = _token_source(settings, load_tokenizer)
    num_prefixes = settings.prefix_repetition_num_prefixes
    prefixes = [tokens(settings.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    # The measured requests have every prefix equally often; those of the warm-up come after them.
    order = [index % num_prefixes for index in range(num_requests)]
    measured, rest = order[: settings.num_prompts], order[settings.num_prompts :]
    rng.shuffle(measured)
    prompts = [prefixes[index] + tokens(settings.prefix_repetition_suffix_len) for index in measured + rest]
    return [SampleRequest(prompt, len(prompt), settings.prefix_repetition_output_len) for prompt in prompts]


def _sharegpt(settings: DatasetSettings, load_tokenizer: TokenizerLoader, num_requests: int) -> list[SampleRequest]:
    assert settings.path is not None
    tokenizer = load_tokenizer()
    found = []
    for prompt, answer in _in_order(list(_conversations(settings.path)), settings):
        prompt_len = len(tokenizer.encode(prompt))
        output_len = settings.sharegpt_output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        is_short = min(prompt_len, output_len) < _SHAREGPT_LEAST and settings.sharegpt_output_len is None
        is_long = prompt_len > _SHAREGPT_MOST_PROMPT or prompt_len + output_len > _SHAREGPT_MOST_TOTAL
        if not is_short and not is_long:
            found.append(SampleRequest(prompt, prompt_len, output_len))
        if len(found) == num_requests:
            break
    return _repeated(found, num_requests, settings.path)


def _custom(settings: DatasetSettings, _load_tokenizer: TokenizerLoader, num_requests: int) -> list[SampleRequest]:
    assert settings.path is not None
    found = []
    for line in _in_order(list(_json_lines(settings.path)), settings):
        prompt = line["prompt"]
        output_len = settings.custom_output_len or line.get("output_tokens", _CUSTOM_OUTPUT_LEN)
        found.append(SampleRequest(prompt, len(prompt) if isinstance(prompt, list) else None, output_len))
    return _repeated(found, num_requests, settings.path)


_DATASETS = {"random": _random, "prefix_repetition": _prefix_repetition, "sharegpt": _sharegpt, "custom": _custom}


def _token_source(
    settings: DatasetSettings, load_tokenizer: TokenizerLoader
) -> tuple[random.Random, Callable[[int], list[int]]]:
    """Random numbers of the settings' seed, and a function that makes so many random token ids."""
    rng = random.Random(settings.seed)
    vocab_size = load_tokenizer().vocab_size
    return rng, lambda length: [rng.randrange(vocab_size) for _ in range(length)]


def _in_order(found: list[Any], settings: DatasetSettings) -> list[Any]:
    if not settings.disable_shuffle:
        random.Random(settings.seed).shuffle(found)
    return found


def _repeated(found: Sequence[SampleRequest], num_requests: int, path: Path) -> list[SampleRequest]:
    """Requests of a file, from its begin again where it has too few."""
    if not found:
        raise ConfigError(f"--dataset-path {path} has no usable prompt. docs/benchmarking_servers.md has its format.")
    return [found[index % len(found)] for index in range(num_requests)]


def _conversations(path: Path) -> Iterator[tuple[str, str]]:
    """First message and first answer of each conversation."""
    try:
        entries = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}.") from error
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path {path} is not valid. Allowed: a list of objects with `conversations`.")
    for number, entry in enumerate(entries):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"--dataset-path {path}: entry {number} has no list `conversations`.")
        if len(turns) < 2:
            continue
        try:
            yield str(turns[0]["value"]), str(turns[1]["value"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"--dataset-path {path}: a turn of entry {number} has no text `value`.") from error


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON Lines file, checked."""
    for number, text in enumerate(_read(path).splitlines(), start=1):
        if not text.strip():
            continue
        where = f"--dataset-path {path}, line {number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}.") from error
        prompt = line.get("prompt") if isinstance(line, dict) else None
        is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
        if not is_ids and not (isinstance(prompt, str) and prompt):
            raise ConfigError(f'{where} is not valid. Allowed: an object with "prompt", a text or a list of token ids.')
        output_tokens = line.get("output_tokens", 1)
        if type(output_tokens) is not int or output_tokens < 1:
            raise ConfigError(f"{where}: output_tokens={output_tokens!r} is not valid. Allowed: 1 or more.")
        yield line


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}. Give another file.") from error
