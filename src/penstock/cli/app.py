"""The commands of `penstock`. Each imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.bench import bench
from penstock.cli.bench_serve import ManyValuesCommand, bench_serve
from penstock.cli.chat import chat
from penstock.cli.command import EngineCommand
from penstock.cli.env import env
from penstock.cli.evaluate import evaluate
from penstock.cli.failures import readable_errors
from penstock.cli.generate import generate
from penstock.cli.plan import plan
from penstock.cli.pool import classify, embed, score
from penstock.cli.profile import profile, profile_serve
from penstock.cli.replay import replay
from penstock.cli.sections import with_dashes
from penstock.cli.serve import serve
from penstock.cli.top import top
from penstock.version import __version__


class CommandGroup(TyperGroup):
    """Group of the commands, whose names may have two words.

    Commands of vLLM's that Penstock does not have are refused by feature.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        if len(args) > 1 and self.get_command(ctx, both) is not None:
            args = [both, *args[2:]]
        if args and self.get_command(ctx, args[0]) is None:
            with readable_errors():
                from penstock.config import vllm

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
for _command in (embed, classify, score):
    app.command(cls=EngineCommand)(_command)
app.command(cls=EngineCommand)(serve)
app.command()(top)
app.command()(env)
app.command(cls=EngineCommand)(plan)
app.command(cls=EngineCommand)(bench)
app.command()(replay)
app.command(cls=EngineCommand)(profile)
app.command("profile serve")(profile_serve)
app.command("eval", cls=EngineCommand)(evaluate)
app.command("bench serve", cls=ManyValuesCommand)(bench_serve)


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
