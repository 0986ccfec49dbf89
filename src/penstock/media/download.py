"""Downloads of media: only from public addresses, within limits of bytes, time and redirects.

The name of a server is resolved once per request of a download; all of its addresses are checked, and the connection
is made to a checked one, so that another answer of the DNS in between changes nothing. Proxies are not used.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, cast
from urllib.parse import quote, urljoin, urlsplit

from penstock.contract.param_checks import shown
from penstock.errors import InvalidMedia

_REDIRECTS = (301, 302, 303, 307, 308)
# The last 32 bits of these addresses are an IPv4 address, to which a router translates (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")
# Characters of a path or a query that are sent as they are.
_PLAIN = "%/?:@!$&'()*+,;=~[]"
_HEADERS = {"User-Agent": "penstock", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """max_bytes: of a file. timeout_s: of a whole download. max_redirects: followed by it."""

    max_bytes: int = 128 << 20
    timeout_s: float = 30.0
    max_redirects: int = 5


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, and so is the IPv4 address that it embeds, if it does."""
    ip: IPv4Address | IPv6Address = ip_address(address)
    if isinstance(ip, IPv6Address):
        if ip in _NAT64:
            ip = IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip.ipv4_mapped is not None or ip.teredo is not None or ip.is_site_local:
            return False
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def download(
    url: str,
    domains: Sequence[str] | None = None,
    limits: DownloadLimits | None = None,
    is_allowed: Callable[[str], bool] = is_public,
) -> bytes:
    """Return the content of an http or https URL.

    domains: names of servers that are allowed; None allows all. is_allowed: check of an IP address.
    Raises InvalidMedia.
    """
    limits = limits or DownloadLimits()
    deadline_s = time.monotonic() + limits.timeout_s
    asked = url
    try:
        for _ in range(limits.max_redirects + 1):
            with _response(url, domains, deadline_s, is_allowed) as response:
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    return _body(response, asked, limits)
                url = urljoin(url, location)
    except InvalidMedia:
        raise
    except TimeoutError:
        raise InvalidMedia(f"{shown(asked)} did not arrive within {limits.timeout_s:g} s.") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise InvalidMedia(f"{shown(asked)} could not be fetched: {_reason(error)}.") from None
    raise InvalidMedia(f"{shown(asked)} redirects more than {limits.max_redirects} times.")


@contextmanager
def _response(
    url: str, domains: Sequence[str] | None, deadline_s: float, is_allowed: Callable[[str], bool]
) -> Iterator[http.client.HTTPResponse]:
    """Answer of a URL's server: status, headers and body.

    Raises InvalidMedia for a URL or a server that is not allowed, ValueError for a malformed URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidMedia(f"{shown(url)} is not allowed. Allowed: URLs of http and https.")
    host = parts.hostname if ":" in parts.hostname else parts.hostname.rstrip(".").encode("idna").decode()
    if domains is not None and host.lower() not in (domain.lower() for domain in domains):
        allowed = ", ".join(domains) or "none"
        raise InvalidMedia(
            f"{shown(url)} is of {shown(host)}, which is not allowed. Allowed: {allowed} (allowed_media_domains)."
        )
    is_secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    with closing(kind(host, parts.port)) as connection:
        connection.sock = sock = _connected(host, connection.port, deadline_s, is_allowed)
        if is_secure:
            context = ssl.create_default_context()
            context.sslsocket_class = _TlsSocket
            # The socket's timeout is that of the whole handshake.
            connection.sock = sock = cast("_TlsSocket", context.wrap_socket(sock, server_hostname=host))
        sock.deadline_s = deadline_s
        query = f"?{quote(parts.query, safe=_PLAIN)}" if parts.query else ""
        connection.request("GET", quote(parts.path or "/", safe=_PLAIN) + query, headers=_HEADERS)
        with connection.getresponse() as response:
            yield response


class _Deadline(socket.socket):
    """Socket whose operations all end at one deadline. Raises TimeoutError."""

    deadline_s: float

    def recv_into(self, *args: Any) -> int:
        self.settimeout(_left_s(self.deadline_s))
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        self.settimeout(_left_s(self.deadline_s))
        super().sendall(*args)


class _TlsSocket(_Deadline, ssl.SSLSocket):
    """The same above TLS."""


def _connected(host: str, port: int, deadline_s: float, is_allowed: Callable[[str], bool]) -> _Deadline:
    """Connection to a server, of whose addresses each one must be allowed."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not found or not all(is_allowed(str(address[0])) for *_, address in found):
        raise InvalidMedia(
            f"The server {shown(host)} has an address that is not public, which is not allowed. Allowed: "
            "servers of the internet. Give the content as a data: URL instead."
        )
    errors = []
    for family, kind, protocol, _, address in found:
        sock = _Deadline(family, kind, protocol)
        try:
            sock.settimeout(_left_s(deadline_s))
            sock.connect(address)
        except OSError as error:
            sock.close()
            errors.append(error)
        else:
            return sock
    raise errors[-1]


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _body(response: http.client.HTTPResponse, url: str, limits: DownloadLimits) -> bytes:
    if response.status != 200:
        raise InvalidMedia(f"{shown(url)} could not be fetched: the server answered with status {response.status}.")
    expected = response.length or 0
    content = b"" if expected > limits.max_bytes else response.read(limits.max_bytes + 1)
    if max(expected, len(content)) > limits.max_bytes:
        raise InvalidMedia(f"{shown(url)} has more than {limits.max_bytes:,} bytes, which is the limit of a file.")
    if len(content) < expected:
        raise InvalidMedia(f"{shown(url)} ended after {len(content):,} of {expected:,} bytes.")
    return content


def _reason(error: Exception) -> str:
    """Why a download failed, in words that name no address."""
    if isinstance(error, ssl.SSLError):
        return f"the server's certificate or its TLS was refused ({error.reason or 'no reason'})"
    if isinstance(error, socket.gaierror):
        return "the name of its server was not found"
    if isinstance(error, ConnectionRefusedError):
        return "its server does not answer"
    if isinstance(error, (http.client.InvalidURL, ValueError)):
        return "it, or what it leads to, is not a valid URL"
    return type(error).__name__
