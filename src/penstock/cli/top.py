"""`penstock top`: what a running server does, in a terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Annotated, Any

import typer

from penstock.cli.failures import readable_errors
from penstock.cli.top_screen import History, Sample, screen
from penstock.config import env
from penstock.errors import ConfigError

_TIMEOUT_S = 10.0
# Time after which a first answer is followed by one that has steps: cores send them twice a second.
_ONCE_S = 1.2


def top(
    url: Annotated[str, typer.Option(help="URL of the server")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Its API key  [default: PENSTOCK_API_KEY]")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two frames")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, without a terminal")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks")] = False,
) -> None:
    """Show requests, throughput, steps, KV blocks and recoveries of a running server, until Ctrl-C.

    It is the live view of the server's page: counts, and no prompts.
    """
    with readable_errors(debug=debug):
        if not interval > 0:
            raise ConfigError(f"--interval {interval} is not valid. Allowed: a number of seconds above 0.")
        server = _Server(url, api_key or next(iter(env.api_keys()), None))
        history = History()
        history.add(server.read(0.0))
        if once:
            time.sleep(_ONCE_S)
            history.add(server.read(0.0))
            _print(history, url)
        else:
            _watch(server, history, url, interval)


class _Server:
    """Client of `/live`."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def read(self, after: float) -> Sample:
        """Numbers now, with the steps after a time. Raises ConfigError where there are none."""
        try:
            request = urllib.request.Request(f"{self._url}/live?after={after!r}", headers=self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                sample: Sample = json.load(response)
                return sample
        except urllib.error.HTTPError as error:
            raise ConfigError(self._refusal(error.code)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"--url {self._url} cannot be read: {reason}. Start it with penstock serve.") from error

    def _refusal(self, status: int) -> str:
        if status == 401:
            return f"--url {self._url} needs an API key. Give --api-key, or set PENSTOCK_API_KEY."
        if status == 404:
            return f"--url {self._url} has no route /live. Give the URL of a server that runs penstock serve."
        return f"--url {self._url} answers with status {status}."


def _print(history: History, url: str) -> None:
    from rich.console import Console

    from penstock.cli.output import standard_output, write

    out = standard_output(as_json=False)
    console = Console(file=out, highlight=False)
    with console.capture() as capture:
        console.print(screen(history, url, console.width))
    write(out, capture.get())


def _watch(server: _Server, history: History, url: str, interval: float) -> None:
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
                history.add(server.read(history.last_step_at))
            except ConfigError as error:
                problem = [Text(f"\n{error}", "red")]
            live.update(Group(screen(history, url, console.width), *problem), refresh=True)
            time.sleep(interval)
