"""Stop strings, alone and in the text of a request."""

from __future__ import annotations

import tracemalloc
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract import SamplingParams
from penstock.engine.messages import EngineRequest
from penstock.engine.output.output_processor import OutputProcessor
from penstock.engine.output.progress import Progress, RequestProgress
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.text.stop_strings import StopScanner, StopStrings
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from support.fake_engine import byte_level_tokenizer, write_tokenizer

TEXT = st.text("ab<", max_size=24)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str], may_end_after: int = 0) -> tuple[int, str] | None:
    """By definition: read the text character by character, until it ends with a stop string."""
    for end in range(may_end_after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of the text that is a prefix of a stop string."""
    lengths = (length for stop in stops for length in range(1, len(stop) + 1) if text.endswith(stop[:length]))
    return max(lengths, default=0)


def cut(text: str, borders: list[int]) -> list[str]:
    ends = sorted({border % (len(text) + 1) for border in borders} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


@given(text=TEXT, stops=STOPS, borders=st.lists(st.integers(0, 24), max_size=6), includes=st.booleans())
def test_the_text_ends_at_the_first_complete_stop_string_wherever_the_borders_fall(
    text: str, stops: list[str], borders: list[int], includes: bool
) -> None:
    scanner = StopScanner(StopStrings(stops), includes_stop=includes)
    given_out = ""
    for piece in cut(text, borders):
        given_out += scanner.push(piece)
        if scanner.found is not None:
            break
    expected = first_stop(text, stops)
    if expected is None:
        assert scanner.found is None
        assert given_out + scanner.flush() == text
    else:
        end, stop = expected
        assert scanner.found == stop
        assert given_out == text[: end if includes else end - len(stop)]
        assert scanner.flush() == ""


@given(text=TEXT, stops=STOPS)
def test_what_may_become_a_stop_string_is_held_back_and_nothing_else(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops), includes_stop=False)
    given_out = ""
    for position, character in enumerate(text):
        given_out += scanner.push(character)
        if scanner.found is not None:
            return
        so_far = text[: position + 1]
        assert given_out == so_far[: len(so_far) - longest_beginning(so_far, stops)]


@given(text=TEXT, stops=STOPS, num_free=st.integers(0, 12))
def test_what_is_complete_too_early_does_not_count(text: str, stops: list[str], num_free: int) -> None:
    scanner = StopScanner(StopStrings(stops), includes_stop=False)
    given_out = scanner.push(text[:num_free], may_stop=False) + scanner.push(text[num_free:])
    expected = first_stop(text, stops, may_end_after=num_free)
    if expected is None:
        assert given_out + scanner.flush() == text
    else:
        end, stop = expected
        assert (scanner.found, given_out) == (stop, text[: end - len(stop)])


def test_the_choices_of_a_request_share_its_stop_strings() -> None:
    stops = StopStrings(["ab" * 25_000 + "c"])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        scanners = [StopScanner(stops, includes_stop=False) for _ in range(100)]
        assert tracemalloc.get_traced_memory()[0] - before < 100 * 200
    finally:
        tracemalloc.stop()
    assert scanners[0].push("xab" * 3) == "xabxabx"


def test_text_that_is_never_decided_is_searched_in_time_by_its_length() -> None:
    """A beginning of many characters that occurs at each place of the text, and is wrong at its end."""
    scanner = StopScanner(StopStrings(["a" * 8000 + "b", "ab" * 2000 + "c", "aab" * 1000]), includes_stop=False)
    given_out = scanner.push("a" * 7999)
    for piece in ["c", *["ab" * 3] * 400, "c"]:
        given_out += scanner.push(piece)
    assert given_out + scanner.flush() == "a" * 7999 + "c" + "ab" * 1200 + "c"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer()))


class Served:
    """Request whose tokens are those of a text, one per step."""

    def __init__(self, tokenizer: Tokenizer, **params: object) -> None:
        self.processor = OutputProcessor(tokenizer)
        sampling_params = SamplingParams(seed=0, max_tokens=None, **params)  # type: ignore[arg-type]
        request = EngineRequest(req_id="r", prompt_token_ids=[40], sampling_params=sampling_params)
        inbox: deque[Progress] = deque()
        progress, _ = self.processor.add(request, None, inbox)
        assert isinstance(progress, RequestProgress)
        self.progress = progress
        self.tokenizer = tokenizer
        self.aborted: list[str] = []
        self.pieces: list[str] = []

    def push(self, token_id: int, finish_reason: FinishReason | None = None) -> None:
        output = EngineCoreOutput(req_id="r", new_token_ids=[token_id], finish_reason=finish_reason)
        follow_up = self.processor.process([output])
        self.aborted += [] if follow_up is None else follow_up.req_ids_to_abort
        self.pieces.append(self.progress.take_text())

    def read(self, text: str, last: FinishReason | None = None) -> None:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for number, token_id in enumerate(ids, start=1):
            self.push(token_id, last if number == len(ids) else None)

    @property
    def ending(self) -> tuple[str, str | None, int | str | None]:
        completion = self.progress.output().outputs[0]
        return completion.text, completion.finish_reason, completion.stop_reason


def test_a_stop_string_ends_the_request_in_the_core_too(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, stop=["lazy d"])
    served.read("the lazy dog jumps")
    assert served.ending == ("the ", "stop", "lazy d")
    assert served.aborted == ["r"]
    assert len(served.processor) == 0
    num_tokens = len(served.progress.token_ids)
    assert tokenizer.decode(served.progress.token_ids).startswith("the lazy d")
    assert not tokenizer.decode(served.progress.token_ids[: num_tokens - 1]).startswith("the lazy d")


def test_a_stop_string_is_kept_when_asked(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, stop="lazy d", include_stop_str_in_output=True)
    served.read("the lazy dog jumps")
    assert served.ending == ("the lazy d", "stop", "lazy d")


def test_no_piece_of_a_stop_string_is_streamed(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, stop="lazy dog")
    served.read("the lazy fox, the lazy dog")
    assert "".join(served.pieces) == "the lazy fox, the "
    streamed = ""
    for piece in served.pieces:
        streamed += piece
        assert not streamed.endswith(("lazy", "la"))


def test_a_held_back_beginning_is_given_when_the_request_ends(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, stop="dog!")
    served.read("the lazy dog", last=FinishReason.LENGTH)
    assert served.ending == ("the lazy dog", "length", None)
    assert served.aborted == []


def test_a_stop_string_that_the_last_token_completes_goes_before_the_length(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, stop="dog")
    served.read("the lazy dog", last=FinishReason.LENGTH)
    assert served.ending == ("the lazy ", "stop", "dog")
    # The core has ended it already.
    assert served.aborted == []


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 7])
def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer: Tokenizer, min_tokens: int) -> None:
    text = "dog" * 5
    ids = tokenizer.encode(text, add_special_tokens=False)
    served = Served(tokenizer, stop="dog", min_tokens=min_tokens)
    for token_id in ids:
        if not served.progress.finished:
            served.push(token_id)
    # The first stop string whose last token comes after min_tokens others.
    ends = [tokenizer.decode(ids[:number]).count("dog") for number in range(len(ids) + 1)]
    before = ends[min_tokens]
    assert before == 0 or min_tokens > 0
    assert served.ending == ("dog" * before, "stop", "dog")
    assert len(served.progress.token_ids) > min_tokens


def test_half_a_character_at_the_end_does_not_hide_a_stop_string(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("Ж", add_special_tokens=False)[0]
    served = Served(tokenizer, stop="\ufffd")
    served.read("the")
    served.push(half, FinishReason.LENGTH)
    assert served.ending == ("the", "stop", "\ufffd")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_request_that_was_cut_off_did_not_stop(tokenizer: Tokenizer, reason: FinishReason) -> None:
    """An aborted request keeps its finish reason, even if flushing its text completes a stop string."""
    half = tokenizer.encode("Ж", add_special_tokens=False)[0]
    served = Served(tokenizer, stop="\ufffd")
    served.read("the")
    served.push(half)
    served.processor.process([EngineCoreOutput(req_id="r", finish_reason=reason)])
    assert served.ending[1:] == (str(reason), None)


def test_the_stop_tokens_text_is_kept_when_asked(tokenizer: Tokenizer) -> None:
    (dog,) = tokenizer.encode("g", add_special_tokens=False)
    texts = []
    for includes in (False, True):
        served = Served(tokenizer, stop_token_ids=[dog], include_stop_str_in_output=includes)
        served.read("the do")
        served.push(dog, FinishReason.STOP)
        texts.append(served.ending[0])
    assert texts == ["the do", "the dog"]


def test_special_tokens_are_shown_when_asked(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the", add_special_tokens=False), 2, 1]
    texts = []
    for skips in (True, False):
        served = Served(tokenizer, skip_special_tokens=skips)
        for token_id in ids:
            served.push(token_id)
        texts.append(served.ending[0])
    assert texts == ["the", "the<|user|></s>"]


def test_without_detokenize_there_is_no_text(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, detokenize=False)
    served.read("the lazy dog", last=FinishReason.LENGTH)
    assert served.ending == ("", "length", None)
    assert served.progress.token_ids == tokenizer.encode("the lazy dog", add_special_tokens=False)


def test_an_output_of_what_is_new_has_all_of_it_once(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer)
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)
    deltas = []
    for number, token_id in enumerate(ids):
        output = EngineCoreOutput(req_id="r", new_token_ids=[token_id])
        served.processor.process([output])
        if number % 3 != 1:
            deltas.append(served.progress.take_output().outputs[0])
    deltas.append(served.progress.take_output().outputs[0])
    assert "".join(delta.text for delta in deltas) == "the lazy dog"
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
    assert served.progress.take_output().outputs[0].token_ids == []
