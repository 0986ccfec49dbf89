"""Tokenizer of a model folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Encoding, normalizers
from tokenizers import Tokenizer as FastTokenizer

from penstock.checkpoints.gguf.folder import check_tokenizer
from penstock.checkpoints.hf_tokenizer import TOKENIZER_FILE, WHAT_TO_DO, load_hf_tokenizer
from penstock.checkpoints.sentence_transformers_modules import lower_cases
from penstock.errors import InvalidRequest, TokenizerError
from penstock.templates.chat_template import choose_template, knows_tools, render_chat
from penstock.templates.content_format import AUTO
from penstock.templates.files import ModelTemplates
from penstock.templates.renderer import TemplateRenderer
from penstock.templates.told_tools import WriteCalls, plain_calls
from penstock.text.detokenizer import (
    SKIPPED,
    Detokenizer,
    SpecialTokens,
    WindowFactory,
    detokenizer_factory,
    window_decode,
)
from penstock.text.tokenizer_files import TokenizerFiles, longest_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters from which on a text is tokenised with the GIL released, since that takes more than a millisecond.
LONG_TEXT = 4000
# Characters of a long text that are tokenised first for each token that is kept, and tokens beyond those.
_CHARACTERS_PER_TOKEN, _MARGIN = 8, 32
# Time of a short text that shows a pattern in the tokenizer's file that backtracks.
_SLOW_S = 0.1
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "tekken.json")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of `folder`, without importing Transformers where `tokenizer.json` is sufficient.

    Raises TokenizerError when files are missing or damaged.
    """
    if not folder.is_dir():
        raise TokenizerError(f"The tokenizer folder {folder} does not exist. Give a folder with {TOKENIZER_FILE}.")
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        check_tokenizer(folder)
        raise TokenizerError(f"{folder} has no tokenizer. {WHAT_TO_DO}")
    files = TokenizerFiles.read(folder)
    if files.fast is not None and files.tokenizer_json_decides():
        return _fast_tokenizer(
            folder,
            files.fast,
            bos=files.special_token("bos_token"),
            eos=files.special_token("eos_token"),
            read_templates=files.templates if files.names_special_tokens else None,
        )
    return _transformers_tokenizer(folder)


class EncodedText(NamedTuple):
    """token_ids: special ones included. second_start: where a pair's second text begins; None for one text."""

    token_ids: list[int]
    second_start: int | None = None


class TextToEncode(NamedTuple):
    """A text, or a pair, cut to `limit` tokens if there are more, special ones included.

    side: "right" drops the end, "left" the beginning; None as the tokenizer's files say. Of a pair, the longer text is
    cut.
    """

    first: str
    second: str | None = None
    add_special_tokens: bool = True
    limit: int | None = None
    side: str | None = None

    @property
    def is_long(self) -> bool:
        return len(self.first) >= LONG_TEXT or len(self.second or "") >= LONG_TEXT


class Tokenizer:
    """The engine's tokenizer: encodes, decodes and renders conversations. Thread-safe.

    vocab_size: upper bound of token ids, added tokens included. bos_token_id, eos_token_id: None if the model has none.
    encoding: tokenizer of Transformers that `backend` wraps, if any.
    read_templates: reads the folder's chat templates; None if only Transformers can.
    media_markers: gives the texts that stand for an image, audio or a video in a prompt, its placeholder first, by what
    the engine takes; it sets them.
    """

    def __init__(
        self,
        folder: Path,
        backend: FastBackend | PythonBackend,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_id: int | None,
        encoding: Any = None,
        read_templates: Callable[[], ModelTemplates] | None = None,
    ) -> None:
        self.media_markers: Mapping[str, Callable[[], tuple[str, ...]]] = {}
        self.folder = folder
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._backend = backend
        self._encoding = encoding
        self._read_templates = read_templates
        self._for_callers: Any = None
        self._hf_lock = threading.Lock()
        self._renderer = TemplateRenderer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens)

    def encode_up_to(self, text: str, add_special_tokens: bool, limit: int) -> list[int] | int:
        """Encode a text; returns only the number of tokens if there are more than `limit`."""
        return self._backend.encode_up_to(text, add_special_tokens, limit)

    def encode_texts(self, texts: Sequence[TextToEncode]) -> list[EncodedText]:
        """Encode texts and pairs, cut where they are too long. Several are encoded in parallel, without the GIL.

        No more of a long text is tokenised than is needed. Raises InvalidRequest for a text that cannot be encoded.
        """
        return self._backend.encode_texts(texts)

    @property
    def quick_characters(self) -> int:
        """Characters from which on a text is tokenised beside an event loop; 0 once a short text took long."""
        return self._backend.quick_characters

    @cached_property
    def longest_token(self) -> int | None:
        """Most characters of text per token; None if there is no known limit."""
        return longest_token(self._backend.fast) if isinstance(self._backend, FastBackend) else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens)

    @property
    def is_fast(self) -> bool:
        """Whether it is a tokenizer of the `tokenizers` library."""
        return isinstance(self._backend, FastBackend)

    def as_json(self) -> str | None:
        """Serialise the tokenizer as `tokenizer.json`; None if it is not of the `tokenizers` library."""
        return self._backend.fast.to_str() if isinstance(self._backend, FastBackend) else None

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary; None for a text that is no token."""
        return self._backend.token_id(token)

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special tokens included."""
        return self._backend.detokenizers.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a single token, which may be part of a character."""
        return self._backend.detokenizers.token_bytes(token_id)

    def start_detokenizer(self, prompt_token_ids: Sequence[int] = (), special: SpecialTokens = SKIPPED) -> Detokenizer:
        """Create a detokeniser for output that continues the prompt."""
        return self._backend.detokenizers.start(prompt_token_ids, special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | Path | None = None,
        tools: Sequence[Any] | None = None,
        write_calls: WriteCalls = plain_calls,
        variables: Mapping[str, Any] | None = None,
        content_format: str = AUTO,
    ) -> str:
        """Render the conversation as the prompt's text; encode it with add_special_tokens=False.

        messages: plain data. chat_template: a Jinja template or the path of one, instead of the folder's own.
        write_calls: form of calls that a template which knows no tools is told in messages.
        variables: template variables, such as `documents` or `enable_thinking`.
        content_format: see `in_content_format`.

        Raises InvalidRequest when there is no template, ChatTemplateError when it refuses the messages or exceeds its
        limits of time, memory or output.
        """
        templates = self.templates
        template = choose_template(templates, self.folder, chat_template, tools)
        return render_chat(
            self._renderer,
            template,
            messages,
            templates.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            write_calls=write_calls,
            variables=variables,
            content_format=content_format,
        )

    def knows_tools(self, chat_template: str | Path | None = None) -> bool:
        """Whether the template of conversations with tools has a variable for them. Raises as `apply_chat_template`."""
        return knows_tools(self._renderer, choose_template(self.templates, self.folder, chat_template, ({},)))

    def close(self) -> None:
        """End the processes that render templates."""
        self._renderer.close()

    def for_callers(self) -> PreTrainedTokenizerBase:
        """Return the Transformers tokenizer of the folder, always the same object; imports Transformers.

        From the first call on, its templates are used. It never encodes or decodes for the engine, so a caller may
        use it in any thread and set truncation or padding.

        Raises TokenizerError when Transformers cannot load the folder.
        """
        with self._hf_lock:
            if self._for_callers is None:
                self._for_callers = load_hf_tokenizer(self.folder)
            counterpart: PreTrainedTokenizerBase = self._for_callers
            return counterpart

    def prepare(self, *, for_callers: bool) -> None:
        """Create now what is otherwise created on first use and would block event loops.

        for_callers: also the tokenizer of Transformers, which takes seconds to import.
        """
        _ = self.longest_token
        # The error is raised again by the call that needs them.
        with suppress(TokenizerError):
            _ = self.for_callers() if for_callers else self.templates

    @property
    def templates(self) -> ModelTemplates:
        """Chat templates: those of `for_callers` from its first call on. Raises TokenizerError for damaged files."""
        if self._for_callers is None and self._encoding is not None:
            return ModelTemplates.of_transformers(self._encoding)
        if self._for_callers is None and self._read_templates is not None:
            return self._folder_templates
        return ModelTemplates.of_transformers(self.for_callers())

    @cached_property
    def _folder_templates(self) -> ModelTemplates:
        assert self._read_templates is not None, "`templates` asks for it only then"
        return self._read_templates()


class FastBackend:
    """Backend of the `tokenizers` library: thread-safe, and releases the GIL for batches."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._side = str((fast.truncation or {}).get("direction") or "right").lower()
        fast.no_truncation()
        fast.no_padding()
        self.fast = fast
        self.detokenizers = detokenizer_factory(fast)
        self.quick_characters = LONG_TEXT

    def token_id(self, token: str) -> int | None:
        return self.fast.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoding(text, add_special_tokens).ids

    def encode_up_to(self, text: str, add_special_tokens: bool, limit: int) -> list[int] | int:
        encoding = self._encoding(text, add_special_tokens)
        # Avoids building a list of millions of integers.
        return encoding.ids if len(encoding) <= limit else len(encoding)

    def encode_texts(self, texts: Sequence[TextToEncode]) -> list[EncodedText]:
        together = self._short_ones(texts) if len(texts) > 1 else {}
        return [together.get(index) or self._encode_one(text) for index, text in enumerate(texts)]

    def _short_ones(self, texts: Sequence[TextToEncode]) -> dict[int, EncodedText]:
        """Encode short texts in one call, in parallel; without those that are to be cut. By their numbers."""
        found: dict[int, EncodedText] = {}
        for add_special_tokens in (True, False):
            numbers = [
                number
                for number, text in enumerate(texts)
                if text.add_special_tokens is add_special_tokens and not text.is_long
            ]
            inputs = [
                text.first if text.second is None else (text.first, text.second)
                for text in (texts[number] for number in numbers)
            ]
            try:
                encodings = self.fast.encode_batch_fast(inputs, add_special_tokens=add_special_tokens)
            except BaseException as error:  # encoded one by one, which finds the text
                _raise_others(error)
                return {}
            for number, encoding in zip(numbers, encodings, strict=True):
                limit = texts[number].limit
                if limit is None or len(encoding) <= limit:
                    start = _second_start(encoding.type_ids, texts[number].second)
                    found[number] = EncodedText(encoding.ids, start)
        return found

    def _encode_one(self, given: TextToEncode) -> EncodedText:
        text, second, add_special_tokens, limit, side = given
        if limit is None:
            encoding = self._encoding(text, add_special_tokens, second)
            return EncodedText(encoding.ids, _second_start(encoding.type_ids, second))
        side = side or self._side
        num_special = self.fast.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        room = max(0, limit - num_special)
        first, other = (self._cut(one, room, side) for one in (text, second))
        assert first is not None, "there is a first text"
        lengths = shares_of_pair(len(first), 0 if other is None else len(other), room)
        for one, length in ((first, lengths[0]), (other, lengths[1])):
            if one is not None and len(one) > length:
                one.truncate(length, direction=side)
        whole = self.fast.post_process(first, other, add_special_tokens)
        return EncodedText(whole.ids[:limit], _second_start(whole.type_ids, second))

    def _cut(self, text: str | None, room: int, side: str) -> Encoding | None:
        """Encode so much of a text that it has `room` tokens, if it has."""
        if text is None:
            return None
        size = max(LONG_TEXT, _CHARACTERS_PER_TOKEN * room)
        while size < len(text):
            # Where words end, so that those before the end are tokenised as in the whole text.
            pieces = text[:size].rsplit(None, 1) if side == "right" else text[-size:].split(None, 1)
            if len(pieces) == 2:
                encoding = self._encoding(pieces[0 if side == "right" else -1], False)
                if len(encoding) >= room + _MARGIN:
                    return encoding
            size *= 4
        return self._encoding(text, False)

    def _encoding(self, text: str, add_special_tokens: bool, second: str | None = None) -> Encoding:
        try:
            if max(len(text), len(second or "")) < self.quick_characters:
                begin_s = time.thread_time()
                encoding = self.fast.encode(text, second, add_special_tokens=add_special_tokens)
                if time.thread_time() - begin_s > _SLOW_S:
                    self.quick_characters = 0
                return encoding
            inputs = text if second is None else (text, second)
            return self.fast.encode_batch_fast([inputs], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            _raise_others(error)
            if not isinstance(error, Exception):
                self.quick_characters = 0
            raise InvalidRequest(
                f"The tokenizer cannot encode this text: {error}. Its {TOKENIZER_FILE} lacks what this text needs."
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) < LONG_TEXT:
            return self.fast.decode(ids, skip_special_tokens=skip_special_tokens)
        # A batch is decoded without the GIL.
        return self.fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]


def _raise_others(error: BaseException) -> None:
    """Raise an error again, unless `tokenizers` raises it for a text.

    It raises bare Exceptions, and a PanicException, which is none, where a pattern exceeds its limit of retries.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


class PythonBackend:
    """Backend of a tokenizer that Transformers implements in Python; one thread at a time."""

    quick_characters = LONG_TEXT

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer
        self.lock = threading.Lock()
        self.detokenizers = WindowFactory(window_decode(self.decode, frozenset(hf_tokenizer.all_special_ids)))

    def token_id(self, token: str) -> int | None:
        found: int | None = self.hf_tokenizer.get_vocab().get(token)
        return found

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self.lock:
            return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_texts(self, texts: Sequence[TextToEncode]) -> list[EncodedText]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, given: TextToEncode) -> EncodedText:
        text, second, add_special_tokens, limit, side = given
        cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
        with self.lock:
            before = self.hf_tokenizer.truncation_side
            self.hf_tokenizer.truncation_side = side or before
            try:
                encoded = self.hf_tokenizer(
                    text, second, add_special_tokens=add_special_tokens, return_token_type_ids=True, **cut
                )
            finally:
                self.hf_tokenizer.truncation_side = before
        return EncodedText(list(encoded["input_ids"]), _second_start(encoded["token_type_ids"], second))

    def encode_up_to(self, text: str, add_special_tokens: bool, limit: int) -> list[int] | int:
        ids = self.encode(text, add_special_tokens)
        return ids if len(ids) <= limit else len(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with self.lock:
            return str(self.hf_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def shares_of_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that each of two texts keeps: the longer one is cut, and both where half of the room is too little."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def _second_start(type_ids: Sequence[int], second: str | None) -> int | None:
    """Position of the first token of type 1. None for a single text, or without token types."""
    return type_ids.index(1) if second is not None and 1 in type_ids else None


def _with_lower_case(fast: FastTokenizer) -> None:
    """Lower texts before anything else, as sentence-transformers does, unless the tokenizer's own steps do."""
    own = fast.normalizer
    steps: list[Any] = [] if own is None else [own]
    if isinstance(own, normalizers.Sequence):
        steps = list(own)  # type: ignore[call-overload]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def _fast_tokenizer(
    folder: Path,
    fast: FastTokenizer,
    *,
    bos: str | None,
    eos: str | None,
    encoding: Any = None,
    read_templates: Callable[[], ModelTemplates] | None = None,
) -> Tokenizer:
    if lower_cases(folder):
        _with_lower_case(fast)
    return Tokenizer(
        folder,
        FastBackend(fast),
        vocab_size=fast.get_vocab_size(with_added_tokens=True),
        bos_token_id=None if bos is None else fast.token_to_id(bos),
        eos_token_id=None if eos is None else fast.token_to_id(eos),
        encoding=encoding,
        read_templates=read_templates,
    )


def _transformers_tokenizer(folder: Path) -> Tokenizer:
    hf = load_hf_tokenizer(folder)
    fast = getattr(hf, "backend_tokenizer", None)
    if isinstance(fast, FastTokenizer):
        return _fast_tokenizer(folder, fast, bos=hf.bos_token, eos=hf.eos_token, encoding=hf)
    if lower_cases(folder):
        raise TokenizerError(
            f"{folder} has do_lower_case=true, which needs a tokenizer with {TOKENIZER_FILE}. Convert the tokenizer."
        )
    return Tokenizer(
        folder,
        PythonBackend(hf),
        vocab_size=len(hf),
        bos_token_id=hf.bos_token_id,
        eos_token_id=hf.eos_token_id,
        encoding=hf,
    )
