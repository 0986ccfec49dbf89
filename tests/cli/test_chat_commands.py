"""`penstock chat` fed from a pipe, in this process and over a core that makes up its tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from support.fake_engine import FakeCore, install_fake_core, write_model

Chat: TypeAlias = Callable[..., Any]
COMMAND_LINE = CliRunner(env={"COLUMNS": "100"})
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and 'forbidden' in message.content %}{{ raise_exception('not that') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "
)


class RememberedCore(FakeCore):
    """Answers with the words of a script, one request after the other, and tells the test what it was asked."""

    made: list[RememberedCore]
    context = 512

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.max_model_len = self.context
        self.answer = self._tokenizer().encode("the fox jumps", add_special_tokens=False)
        self.tokens = lambda request, position: self.answer[position] if position < len(self.answer) else 1
        self.made.append(self)

    def _tokenizer(self) -> Any:
        from penstock.text.tokenizer import load_tokenizer

        assert self.config is not None
        return load_tokenizer(self.config.model.tokenizer_folder)

    def prompts(self) -> list[str]:
        tokenizer = self._tokenizer()
        return [tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in self.added]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[RememberedCore]:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core(RememberedCore)
    monkeypatch.setattr(RememberedCore, "context", 512)
    RememberedCore.made = []
    return RememberedCore.made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model", longest_context=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def chat(model: Path, cores: list[RememberedCore]) -> Chat:
    def run(*lines: str, arguments: tuple[str, ...] = ()) -> Any:
        text = "".join(line + "\n" for line in lines)
        return COMMAND_LINE.invoke(app, ["chat", "--model", str(model), *arguments], input=text)

    return run


def test_each_line_is_answered_with_all_that_was_said_before(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("a dog", "", "a cat")
    assert result.exit_code == 0
    assert result.stdout == "the fox jumps\nthe fox jumps\n"
    assert result.stderr == ""
    assert cores[0].prompts() == [
        "[user] a dog\n[assistant] ",
        "[user] a dog\n[assistant] the fox jumps\n[user] a cat\n[assistant] ",
    ]
    assert cores[0].num_closes == 1


def test_three_quotation_marks_begin_and_end_a_message_of_several_lines(
    chat: Chat, cores: list[RememberedCore]
) -> None:
    chat('"""', "one", "", "/two", '"""', '"""three', 'four"""')
    assert "[user] one\n\n/two\n[assistant]" in cores[0].prompts()[0]
    assert cores[0].prompts()[1].endswith("[user] three\nfour\n[assistant] ")


def test_a_system_message_can_be_given_set_and_taken_back(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("a", "/system be short", "b", "/system", "/system -", "c", arguments=("--system", "be kind"))
    first, second, third = cores[0].prompts()
    assert first.startswith("[system] be kind\n[user] a")
    assert second.startswith("[system] be short\n[user] a")
    assert third.startswith("[user] a")
    assert "be short" in result.stderr
    assert "(nothing)" in result.stderr


def test_reset_forgets_all_but_the_system_message(chat: Chat, cores: list[RememberedCore]) -> None:
    chat("a", "/reset", "b", arguments=("--system", "be kind"))
    assert cores[0].prompts()[1] == "[system] be kind\n[user] b\n[assistant] "


def test_retry_answers_the_last_message_again(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("/retry", "a", "b", "/retry")
    prompts = cores[0].prompts()
    assert len(prompts) == 3
    assert prompts[1] == prompts[2]
    assert "nothing was said" in result.stderr
    seeds = {request.sampling_params.seed for request in cores[0].added}
    assert len(seeds) == 3


def test_undo_takes_back_a_message_and_its_answer(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("/undo", "a", "b", "/undo", "c")
    assert cores[0].prompts()[2] == "[user] a\n[assistant] the fox jumps\n[user] c\n[assistant] "
    assert "(taken back: b)" in result.stderr


def test_history_shows_what_was_said(chat: Chat) -> None:
    result = chat("a dog", "/history")
    assert "user: a dog\nassistant: the fox jumps\n" in result.stderr


def test_parameters_can_be_set(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("/set temperature 0.25", "a", '/set stop ["fox"]', "b", "/set", "/set seed")
    params = [request.sampling_params for request in cores[0].added]
    assert [one.temperature for one in params] == [0.25, 0.25]
    assert params[1].stop == ("fox",)
    assert result.stdout == "the fox jumps\nthe \n"
    assert "temperature = 0.25" in result.stderr
    assert "Give a name and a value" in result.stderr


def test_parameters_are_checked_together(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("/set max_tokens 200", "/set min_tokens 100", "a", "/set max_tokens 50", "b")
    assert "min_tokens=100 is not valid. Allowed: at most max_tokens=50." in result.stderr
    params = [request.sampling_params for request in cores[0].added]
    assert [(one.max_tokens, one.min_tokens) for one in params] == [(200, 100), (200, 100)]


def test_default_undoes_what_was_set(chat: Chat, cores: list[RememberedCore]) -> None:
    lines = ("/set temperature 0.25", '/set stop ["fox"]', "/set max_tokens 9", "a")
    undone = ("/set temperature default", "/set stop  default", "/set max_tokens default", "b", "/set nonsense default")
    result = chat(*lines, *undone, arguments=("--max-tokens", "7", "--temperature", "0.5"))
    first, second = (request.sampling_params for request in cores[0].added)
    assert (first.temperature, first.stop, first.max_tokens) == (0.25, ("fox",), 9)
    assert (second.temperature, second.stop, second.max_tokens) == (0.5, (), 7)
    assert "There is no parameter 'nonsense'" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature='hot' is not valid"),
        ("/set temprature 1", "Did you mean temperature"),
        ("/set n 3", "n cannot be set: a conversation goes on from one answer"),
        ("/set detokenize false", "detokenize cannot be set: an answer without text"),
        ("/set logprobs 500", "logprobs cannot be set: a chat shows no log-probabilities"),
        ("/set prompt_logprobs 1", "prompt_logprobs cannot be set: a chat shows no log-probabilities"),
        ("/set truncate_prompt_tokens 3", "truncate_prompt_tokens cannot be set: a chat forgets"),
        ("/set bad_words_token_ids [[3]]", "bad_words_token_ids cannot be set: the engine makes it of bad_words"),
        ("/rest", "There is no command /rest"),
        ("/system forbidden", "system: forbidden"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(
    chat: Chat, cores: list[RememberedCore], line: str, message: str
) -> None:
    result = chat(line, "/set", "/system -", "a dog")
    assert message in result.stderr
    assert result.exit_code == 0
    assert result.stdout == "the fox jumps\n"


def test_a_message_that_the_template_refuses_is_forgotten(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("/system forbidden", "a", "/system -", "b")
    assert "not that" in result.stderr
    assert cores[0].prompts() == ["[user] b\n[assistant] "]


def test_a_message_that_can_never_fit_is_refused(chat: Chat, cores: list[RememberedCore]) -> None:
    result = chat("word " * 300, "a dog")
    assert "ContextTooLong" in result.stderr
    assert cores[0].prompts() == ["[user] a dog\n[assistant] "]


def test_the_oldest_messages_are_forgotten_when_the_context_is_full(
    chat: Chat, cores: list[RememberedCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RememberedCore, "context", 200)
    result = chat(*(f"message {number}" for number in range(9)), arguments=("--system", "be kind"))
    assert result.stdout == "the fox jumps\n" * 9
    assert "messages no longer fit into the context, and were forgotten" in result.stderr
    last = cores[0].prompts()[-1]
    assert last.startswith("[system] be kind\n[user] message")
    assert "message 0" not in last
    assert "message 7" in last
    assert all(len(request.prompt_token_ids) <= 200 - 64 for request in cores[0].added)


def test_an_answer_that_was_cut_off_says_so(chat: Chat) -> None:
    result = chat("a", arguments=("--max-tokens", "2"))
    assert "(cut off" in result.stderr


def test_a_request_that_fails_says_why_and_the_conversation_goes_on(
    chat: Chat, cores: list[RememberedCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(core: RememberedCore, *arguments: Any) -> None:
        first_init(core, *arguments)
        core.on_step = lambda step: core.failing.add(core.added[0].prompt_token_ids[0]) if step == 1 else None
        core.fail_after = 1

    first_init = RememberedCore.__init__
    monkeypatch.setattr(RememberedCore, "__init__", fail_once)
    result = chat("a", "/set")
    assert "(failed: the logits are NaN)" in result.stderr
    assert result.exit_code == 0


def test_a_models_text_cannot_command_the_terminal(
    chat: Chat, cores: list[RememberedCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_init = RememberedCore.__init__

    def escape(core: RememberedCore, *arguments: Any) -> None:
        first_init(core, *arguments)
        core.answer = core._tokenizer().encode("the\x1b[2J\x07 fox\tjumps\n\x9b1m", add_special_tokens=False)

    monkeypatch.setattr(RememberedCore, "__init__", escape)
    result = chat("a", "/history")
    assert result.stdout == "the[2J fox\tjumps\n1m\n"
    assert "\x07" not in result.stderr


def test_another_template_can_be_given(chat: Chat, cores: list[RememberedCore], tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages[-1].content }}: ")
    chat("a dog", arguments=("--chat-template", str(tmp_path / "template")))
    assert cores[0].prompts() == ["a dog: "]


def test_quit_ends_it(chat: Chat, cores: list[RememberedCore]) -> None:
    assert chat("/quit", "a").stdout == ""
    assert cores[0].added == []


def test_help_lists_every_command(chat: Chat) -> None:
    from penstock.cli.chat_terminal import ChatTerminal

    err = chat("/help").stderr
    methods = {name.removeprefix("_") for name in vars(ChatTerminal)}
    listed = {line.split()[0].removeprefix("/") for line in err.splitlines() if line.lstrip().startswith("/")}
    assert {"help", "reset", "system", "quit", "retry", "undo", "set", "history", "image", "audio", "video"} == listed
    assert listed <= methods


def test_an_image_goes_with_the_next_message_which_a_model_of_text_refuses(
    chat: Chat, cores: list[RememberedCore], tmp_path: Path
) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"pixels")
    begins: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((), ("--image", str(image))), ((f"/image {image}",), ())]
    for begin, arguments in begins:
        result = chat(*begin, "a dog", "a cat", arguments=arguments)
        assert "messages[0].content[0] of type 'image_url' is an image, which this model does not take" in result.stderr
        assert cores[-1].prompts() == ["[user] a cat\n[assistant] "]
    assert "(attached to the next message: [image])" in result.stderr
    missing = chat("/image /missing.png", "a dog")
    assert "/image /missing.png cannot be opened" in missing.stderr
    assert cores[-1].prompts() == ["[user] a dog\n[assistant] "]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--image", "/missing.png"), "--image /missing.png cannot be opened"),
        (("--temperature", "-1"), "InvalidParameter: --temperature -1.0"),
        (("--chat-template", "/missing"), "--chat-template /missing cannot be opened"),
        (("--max-model-len", "many"), "ConfigError: --max-model-len many"),
        (("--option", "blok_size=3"), "Did you mean --block-size or --mamba-block-size?"),
        (("--option", "max_num_seqs=0"), "ConfigError: --max-num-seqs 0"),
    ],
)
def test_bad_options_are_one_readable_message(chat: Chat, arguments: tuple[str, ...], message: str) -> None:
    result = chat("a", arguments=arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_model_without_a_template_is_refused_at_once(chat: Chat, cores: list[RememberedCore], model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    result = chat("a")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
    assert cores[0].num_closes == 1
