"""`penstock top`: what a running server does, in a terminal."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Annotated, Any

import typer

from penstock.cli.failures import readable_errors
from penstock.cli.server_client import ServerClient
from penstock.cli.top_screen import History, Sample, screen
from penstock.errors import ConfigError
from penstock.observability.printable import one_line
from penstock.system import env
from penstock.version import __version__

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
# Time after which a first answer is followed by one that has steps: cores send them twice a second.
_ONCE_S = 1.2


def top(
    url: Annotated[str | None, typer.Option(help=f"URL of the server  [default: {_DEFAULT_URL}]")] = None,
    uds: Annotated[
        str | None, typer.Option(metavar="PATH", help="Unix socket instead: of LLM(live_view=PATH), or of a server")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Its API key  [default: PENSTOCK_API_KEY]")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two frames")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, without a terminal")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks")] = False,
) -> None:
    """Show requests, throughput, steps, KV blocks and recoveries of a running server or LLM, until Ctrl-C.

    It is the live view of the server's page: counts, and no prompts.
    """
    with readable_errors(debug=debug):
        if not interval > 0:
            raise ConfigError(f"--interval {interval} is not valid. Allowed: a number of seconds above 0.")
        if url is not None and uds is not None:
            raise ConfigError(f"--url {url} and --uds {uds} are two addresses. Leave one of them out.")
        server = live_client(url or _DEFAULT_URL, uds, api_key or next(iter(env.api_keys()), None))
        history = History()
        history.add(read_live(server, 0.0))
        if once:
            time.sleep(_ONCE_S)
            history.add(read_live(server, 0.0))
            from penstock.cli.output import show

            show(lambda width: screen(history, server.name, width))
        else:
            _watch(server, history, server.name, interval)


def live_client(url: str, uds: str | None, key: str | None) -> ServerClient:
    """Client of a server's live view."""
    return ServerClient(
        url,
        uds,
        key=key,
        key_name="API key",
        key_advice="--api-key, or set PENSTOCK_API_KEY",
        start_advice="Start it with penstock serve, or with LLM(live_view=PATH).",
        route_advice="has no route /live. Give the address of a server that runs penstock serve.",
    )


def read_live(server: ServerClient, after: float) -> Sample:
    """Numbers now, with the steps after a time. Raises ConfigError where there are none."""
    import msgspec

    from penstock.engine.live.live_view import Live

    body = server.call(f"/live?after={after!r}", timeout_s=_TIMEOUT_S)
    try:
        msgspec.json.decode(body, type=Live)
        sample: Sample = json.loads(body, object_hook=_printable)
        return sample
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(
            f"{server.option} answers at /live, but not with the live view of Penstock {__version__}: {error}."
        ) from error


def _printable(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a server, whose texts must not command the terminal."""
    return {one_line(name): one_line(value) if isinstance(value, str) else value for name, value in values.items()}


def _watch(server: ServerClient, history: History, url: str, interval: float) -> None:
    """Show a frame per interval until Ctrl-C. A server that does not answer for a while is shown as it was."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        raise ConfigError("Standard output is not a terminal. Give --once for one frame.")
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            problem: list[Any] = []
            try:
                history.add(read_live(server, history.last_step_at))
            except ConfigError as error:
                problem = [Text(f"\n{one_line(str(error))}", "red")]
            live.update(Group(screen(history, url, console.width), *problem), refresh=True)
            time.sleep(interval)
