"""Client of a running server, for commands that show or change what it does."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.request
from typing import Any

from penstock.cli.api_key import authorization
from penstock.errors import ConfigError


class ServerClient:
    """Client of one server. uds: path of a Unix socket to connect to, instead of the URL.

    name: address on the screen. option: as it was typed, for errors. key_name, key_advice: of the key that the routes
    need, and how to give it. start_advice, route_advice: what to do where nothing answers, and without the route.
    """

    def __init__(
        self,
        url: str,
        uds: str | None,
        *,
        key: str | None,
        key_name: str,
        key_advice: str,
        start_advice: str,
        route_advice: str,
    ) -> None:
        self.name = url if uds is None else f"unix:{uds}"
        self._url = (url if uds is None else "http://localhost").rstrip("/")
        self.option = f"--url {self._url}" if uds is None else f"--uds {uds}"
        self._headers = {"Content-Type": "application/json"} | authorization(key)
        self._has_key = key is not None
        self._key_name, self._key_advice = key_name, key_advice
        self._start_advice, self._route_advice = start_advice, route_advice
        # A proxy has no part in a Unix socket.
        handlers = [] if uds is None else [urllib.request.ProxyHandler({}), _UnixHandler(uds)]
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, route: str, fields: dict[str, Any] | None = None, *, timeout_s: float) -> bytes:
        """Body of an answer. fields: of a POST; None for a GET. Raises ConfigError with the reason."""
        data = None if fields is None else json.dumps(fields).encode()
        try:
            request = urllib.request.Request(self._url + route, data, self._headers)
            with self._opener.open(request, timeout=timeout_s) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            raise ConfigError(self._refusal(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"{self.option} cannot be read: {reason}. {self._start_advice}") from error

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            if self._has_key:
                return f"{self.option} does not accept the {self._key_name}. Give another {self._key_advice}."
            return f"{self.option} needs its {self._key_name}. Give {self._key_advice}."
        if error.code == 404:
            return f"{self.option} {self._route_advice}"
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{self.option} answers with status {error.code}."


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
