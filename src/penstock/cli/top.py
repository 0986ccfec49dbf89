"""`penstock top`: what a running server does, in a terminal."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Annotated, Any

import typer

from penstock.cli.api_key import authorization
from penstock.cli.failures import readable_errors
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
        server = _Server(url or _DEFAULT_URL, uds, api_key or next(iter(env.api_keys()), None))
        history = History()
        history.add(server.read(0.0))
        if once:
            time.sleep(_ONCE_S)
            history.add(server.read(0.0))
            _print(history, server.name)
        else:
            _watch(server, history, server.name, interval)


class _Server:
    """Client of `/live`. name: address on the screen. uds: path of a Unix socket to connect to, instead of the URL."""

    def __init__(self, url: str, uds: str | None, key: str | None) -> None:
        self.name = url if uds is None else f"unix:{uds}"
        self._url = (url if uds is None else "http://localhost").rstrip("/")
        self._option = f"--url {self._url}" if uds is None else f"--uds {uds}"
        self._headers = authorization(key)
        # A proxy has no part in a Unix socket.
        handlers = [] if uds is None else [urllib.request.ProxyHandler({}), _UnixHandler(uds)]
        self._opener = urllib.request.build_opener(*handlers)

    def read(self, after: float) -> Sample:
        """Numbers now, with the steps after a time. Raises ConfigError where there are none."""
        import msgspec

        from penstock.engine.live.live_view import Live

        try:
            request = urllib.request.Request(f"{self._url}/live?after={after!r}", headers=self._headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                body = response.read()
            msgspec.json.decode(body, type=Live)
            sample: Sample = json.loads(body, object_hook=_printable)
            return sample
        except urllib.error.HTTPError as error:
            raise ConfigError(self._refusal(error.code)) from error
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._option} answers at /live, but not with the live view of Penstock {__version__}: {error}."
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"{self._option} cannot be read: {reason}. Start it with penstock serve, or with LLM(live_view=PATH)."
            ) from error

    def _refusal(self, status: int) -> str:
        if status == 401:
            if self._headers:
                return f"{self._option} does not accept the API key. Give another --api-key."
            return f"{self._option} needs an API key. Give --api-key, or set PENSTOCK_API_KEY."
        if status == 404:
            return f"{self._option} has no route /live. Give the address of a server that runs penstock serve."
        return f"{self._option} answers with status {status}."


def _printable(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a server, whose texts must not command the terminal."""
    return {one_line(name): one_line(value) if isinstance(value, str) else value for name, value in values.items()}


class _UnixHandler(urllib.request.HTTPHandler):
    """Opens HTTP URLs at a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(lambda host, **options: _UnixConnection(self._path, host, **options), request)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


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
                problem = [Text(f"\n{one_line(str(error))}", "red")]
            live.update(Group(screen(history, url, console.width), *problem), refresh=True)
            time.sleep(interval)
