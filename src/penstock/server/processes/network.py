"""Sockets and processes of the server: where it listens, with which certificates, and how it ends."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.config.checks import check_integer, check_seconds
from penstock.errors import ConfigError
from penstock.observability.unix_socket import listen_on_path
from penstock.server.http.loopback import is_loopback

_BACKLOG = 2048
# Memory of the system for what a client has not read; by itself it would grow to several times as much.
_SEND_BUFFER_BYTES = 512 << 10


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options of the sockets and processes of a server, with vLLM's names where it has them.

    host: address to listen on. port: TCP port; 0 takes a free one.
    uds: path of a Unix socket to listen on instead.
    api_server_count: front-end processes, which share the address.
    ssl_certfile: PEM file of the certificate for HTTPS. ssl_keyfile: PEM file of its key.
    ssl_keyfile_password: password of the key's file.
    ssl_ca_certs: PEM file of the authorities of client certificates.
    ssl_cert_reqs: whether clients need a certificate: 0 no, 1 optional, 2 required.
    timeout_keep_alive: seconds after which an idle connection is closed.
    shutdown_timeout: seconds that running requests have to finish after SIGTERM.

    Raises ConfigError.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_server_count: int = 1
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    timeout_keep_alive: float = 5.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port={self.port} is not valid. Allowed: 0 to 65535.")
        check_integer("api_server_count", self.api_server_count, 1)
        check_seconds("timeout_keep_alive", self.timeout_keep_alive)
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} is not valid. Allowed: 0 or more seconds.")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs={self.ssl_cert_reqs} is not valid. Allowed: 0, 1, 2.")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            raise ConfigError(f"{missing} is missing: HTTPS needs ssl_certfile and ssl_keyfile.")
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={path!r} is not a file. Give the path of a PEM file.")

    def check_certificates(self) -> None:
        """Raise ConfigError for certificates or a key that cannot be used."""
        if self.ssl_certfile is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one in the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: self.ssl_keyfile_password or "")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl_certfile={self.ssl_certfile!r} and ssl_keyfile={self.ssl_keyfile!r} cannot be used: {error}. "
                "Give PEM files of a certificate and its key, and ssl_keyfile_password if the key is encrypted."
            ) from error
        if self.ssl_ca_certs is None:
            return
        try:
            context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl_ca_certs={self.ssl_ca_certs!r} cannot be used: {error}. Give a PEM file."
            ) from error

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.uds is not None or is_loopback(self.host)

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Listening socket as a context, whose end removes the path of a Unix socket. Raises as `listen`."""
        with self.listen() as listener:
            try:
                yield listener
            finally:
                if self.uds is not None:
                    Path(self.uds).unlink(missing_ok=True)

    def listen(self) -> socket.socket:
        """Open the listening socket. Raises ConfigError when the address cannot be had."""
        if self.uds is not None:
            return listen_on_path(self.uds, "uds", _BACKLOG)
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
            # Accepted sockets inherit it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            advice = "another port, or end the process that has it" if is_taken else "an address of this machine"
            raise ConfigError(
                f"host={self.host!r} and port={self.port} cannot be listened on: {error.strerror or error}. "
                f"Give {advice}."
            ) from error
        return listener

    def url(self, listener: socket.socket) -> str:
        """Address for clients."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host, port = listener.getsockname()[:2]
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
