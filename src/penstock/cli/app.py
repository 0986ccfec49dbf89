"""The commands of `penstock`. Each imports what it needs when it runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.bench import bench
from penstock.cli.bench_serve import bench_serve
from penstock.cli.cache import cache_export, cache_import, cache_ls, cache_rm
from penstock.cli.chat import chat
from penstock.cli.command import EngineCommand, ManyValues, ServeCommand
from penstock.cli.env import env
from penstock.cli.evaluate import evaluate
from penstock.cli.failures import readable_errors
from penstock.cli.generate import generate
from penstock.cli.plan import plan
from penstock.cli.pool import classify, embed, score
from penstock.cli.profile import profile, profile_serve
from penstock.cli.replay import replay
from penstock.cli.run_batch import run_batch
from penstock.cli.sections import with_dashes
from penstock.cli.serve import serve
from penstock.cli.top import top
from penstock.cli.transcribe import transcribe
from penstock.errors import ConfigError
from penstock.version import __version__

_AT_FIRST_USE = "A model is fetched at its first use"
# Commands of other programs that run models, with what is typed here; {} is the model.
_INSTEAD = {
    "run": "Type `penstock chat {}` for a conversation, or `penstock serve {}` for a server.",
    "pull": f"{_AT_FIRST_USE}: type `penstock chat {{}}` or `penstock serve {{}}`, with --yes for a published one.",
    "list": f"{_AT_FIRST_USE}, from a folder, a GGUF file or a hub id; demo ships, smollm2 and minilm are fetched. "
    "Type `penstock plan {}` to see what one needs; a running server lists its own at /v1/models.",
}
_INSTEAD["ls"] = _INSTEAD["list"]


def _refuse_of_other_programs(args: Sequence[str]) -> None:
    """Raise ConfigError for a command of another program."""
    if (instead := _INSTEAD.get(args[0])) is not None:
        model = args[1] if len(args) > 1 and not args[1].startswith("-") else "MODEL"
        raise ConfigError(f"There is no command {args[0]}. {instead.replace('{}', shlex.quote(model))}")


class CommandGroup(TyperGroup):
    """Group of the commands, whose names may have two words.

    Commands of vLLM's that Penstock does not have are refused by feature, and those of other programs that run models
    with what to type instead.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        if len(args) > 1 and self.get_command(ctx, both) is not None:
            args = [both, *args[2:]]
        if args and self.get_command(ctx, args[0]) is None:
            with readable_errors():
                from penstock.config import vllm

                _refuse_of_other_programs(args)
                args = [vllm.command_as_ours(with_dashes(args[0])), *args[1:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
    help="An inference engine for language models.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["--help", "-h"],
        "max_content_width": 100,
        "token_normalize_func": with_dashes,
    },
)
app.command(cls=EngineCommand)(generate)
app.command(cls=EngineCommand)(chat)
app.command(cls=EngineCommand)(transcribe)
app.command("run-batch", cls=EngineCommand)(run_batch)
for _command in (embed, classify, score):
    app.command(cls=EngineCommand)(_command)
app.command(cls=ServeCommand)(serve)
app.command()(top)
app.command()(env)
for _name, _command in (("ls", cache_ls), ("rm", cache_rm), ("export", cache_export), ("import", cache_import)):
    app.command(f"cache {_name}")(_command)
app.command(cls=EngineCommand)(plan)
app.command(cls=EngineCommand)(bench)
app.command()(replay)
app.command(cls=EngineCommand)(profile)
app.command("profile serve")(profile_serve)
app.command("eval", cls=EngineCommand)(evaluate)
app.command("bench serve", cls=ManyValues)(bench_serve)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options_of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    pass
