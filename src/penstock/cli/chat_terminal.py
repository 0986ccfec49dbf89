"""Terminal of `penstock chat`: input lines, streamed answers, commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import msgspec
from rich.console import Console

from penstock.cli.conversation import Conversation
from penstock.cli.media import Content, media_part, shown_content, with_media
from penstock.cli.output import standard_output, write
from penstock.cli.sections import parse_value
from penstock.contract import SamplingParams
from penstock.errors import ConfigError, InvalidRequest
from penstock.observability.printable import without_controls
from penstock.version import __version__

PROMPT = "> "
_MORE = "... "
_BLOCK = '"""'
_DEFAULT = "default"
# Example prompts of shipped models.
EXAMPLES = {"demo": ("What is 47 + 38?", "Reverse this list: apple, river, stone", "Who are you?")}


class ChatTerminal:
    """Loop over messages and commands. attached: images and other media of the first message."""

    def __init__(self, conversation: Conversation, model: str, attached: Sequence[dict[str, Any]] = ()) -> None:
        self._conversation = conversation
        self._attached = list(attached)
        self._model = model
        self._is_interactive = sys.stdin.isatty()
        # Only answers go to standard output.
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "this list", self._help),
            "/reset": ("", "forget the conversation", self._reset),
            "/system": ("[TEXT]", "show or set the system message; - removes it", self._system),
            "/retry": ("", "another answer to the last message", self._retry),
            "/undo": ("", "take back the last message and its answer", self._undo),
            "/image": ("FILE", "attach an image to the next message", self._image),
            "/audio": ("FILE", "attach audio to the next message", self._audio),
            "/video": ("FILE", "attach a video to the next message", self._video),
            "/history": ("", "show the conversation", self._history),
            "/set": (
                "[NAME VALUE]",
                "show or set a sampling parameter, such as temperature; default undoes it",
                self._set,
            ),
            "/quit": ("", "leave (also: Ctrl-D)", self._quit),
        }
        self._has_quit = False

    def run(self) -> None:
        """Run until the input ends or /quit. Ctrl-C stops an answer, or clears the line."""
        self._out = out = standard_output(as_json=False)
        with _interrupts_raised():
            if self._is_interactive:
                _edit_lines(list(self._commands))
                self._greet()
            while not self._has_quit:
                try:
                    text = self._read()
                    if text is None:
                        break
                    self._take(text)
                except InvalidRequest as error:
                    self._note(f"{type(error).__name__}: {error}")
                except KeyboardInterrupt:
                    if not self._is_interactive:
                        raise
                    write(out, "\n")

    def _greet(self) -> None:
        self._note(
            f"Penstock {__version__}, {self._model}, {self._conversation.max_model_len:,} tokens of context. "
            "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
        )
        if self._model in EXAMPLES:
            self._note("This small model has a few simple skills. Try: " + " | ".join(EXAMPLES[self._model]))

    def _read(self) -> str | None:
        """Read a message, of several lines if it begins with three quotation marks; None at the end."""
        line = self._read_line(PROMPT)
        if line is None or not line.lstrip().startswith(_BLOCK):
            return line
        lines = [line.lstrip().removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            line = self._read_line(_MORE)
            if line is None:
                break
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        if not self._is_interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            write(self._out, "\n")
            return None

    def _take(self, text: str) -> None:
        if not text.strip():
            return
        if not text.startswith("/"):
            attached, self._attached = self._attached, []
            self._say(with_media(text, attached))
            return
        name, _, rest = text.partition(" ")
        if name not in self._commands:
            self._note(f"There is no command {name}. /help lists them; a message cannot begin with a slash.")
            return
        self._commands[name][2](rest.strip())

    def _image(self, place: str) -> None:
        self._attach("image", place)

    def _audio(self, place: str) -> None:
        self._attach("audio", place)

    def _video(self, place: str) -> None:
        self._attach("video", place)

    def _attach(self, modality: str, place: str) -> None:
        try:
            self._attached.append(media_part(modality, place, f"/{modality}"))
        except ConfigError as error:
            self._note(str(error))
            return
        self._note(f"(attached to the next message: {shown_content(self._attached)})")

    def _say(self, content: Content) -> None:
        """Print the answer as it comes, up to its end or Ctrl-C."""
        conversation = self._conversation
        num_forgotten = conversation.num_forgotten
        ends_line = True
        try:
            with closing(conversation.say(content)) as pieces:
                for piece in pieces:
                    ends_line = piece.endswith("\n")
                    write(self._out, without_controls(piece))
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            write(self._out, "" if ends_line else "\n")
            self._note("(stopped)")
            return
        write(self._out, "" if ends_line else "\n")
        self._explain(num_forgotten)

    def _explain(self, num_forgotten: int) -> None:
        """Print notes about an answer: forgotten messages, failure, cut-off."""
        conversation = self._conversation
        if conversation.num_forgotten > num_forgotten:
            num_new = conversation.num_forgotten - num_forgotten
            self._note(f"(the oldest {num_new} messages no longer fit into the context, and were forgotten)")
        output = conversation.last_output
        assert output is not None, "an answer has an output"
        if output.error is not None:
            self._note(f"(failed: {output.error})")
        elif output.outputs[0].finish_reason == "length":
            self._note("(cut off: max_tokens or the context's end)")

    def _help(self, _rest: str) -> None:
        for name, (arguments, purpose, _) in self._commands.items():
            self._note(f"  {f'{name} {arguments}':<22}{purpose}")
        self._note(f"  {_BLOCK:<22}begins and ends a message of several lines")

    def _reset(self, _rest: str) -> None:
        self._conversation.reset()
        self._note("(forgotten)")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "-" else rest
        self._note(f"system: {self._conversation.system or '(nothing)'}")

    def _retry(self, _rest: str) -> None:
        content = self._conversation.undo()
        if content is None:
            self._note("(nothing was said)")
        else:
            self._say(content)

    def _undo(self, _rest: str) -> None:
        content = self._conversation.undo()
        self._note("(nothing was said)" if content is None else f"(taken back: {shown_content(content)})")

    def _history(self, _rest: str) -> None:
        for message in self._conversation.messages:
            self._note(f"{message['role']}: {shown_content(message['content'])}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if value.strip() == _DEFAULT:
            self._conversation.unset_parameter(name)
        elif value:
            self._conversation.set_parameter(name, parse_value(value.strip()))
        elif name:
            self._note("Give a name and a value, such as /set temperature 0.5")
            return
        defaults = SamplingParams()
        for field, current in msgspec.structs.asdict(self._conversation.params).items():
            if current != getattr(defaults, field) or field in ("temperature", "top_p", "max_tokens", "seed"):
                self._note(f"  {field} = {current!r}")

    def _quit(self, _rest: str) -> None:
        self._has_quit = True

    def _note(self, text: str) -> None:
        self._notes.print(without_controls(text), style="dim", markup=False)


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Let every Ctrl-C raise KeyboardInterrupt, as Python does by itself."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _edit_lines(commands: list[str]) -> None:
    """Enable line editing, history and completion, if this Python has readline."""
    try:
        import readline
    except ImportError:
        return

    def complete(text: str, index: int) -> str | None:
        matching = [command for command in commands if text.startswith("/") and command.startswith(text)]
        return matching[index] if index < len(matching) else None

    readline.set_completer_delims(" \t\n")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
