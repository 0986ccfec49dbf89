"""Downloads reach public addresses only, whatever a name, a redirect or a second answer of the DNS says."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidMedia
from penstock.media.download import DownloadLimits, download, is_public

PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1"]
NOT_PUBLIC = [
    "0.0.0.0", "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%1", "fc00::1",
    "fec0::1", "ff02::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2001:0:808:808::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_any_other_address_is_not_allowed(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0"]
)
def test_no_spelling_of_this_machine_is_fetched_from(host: str) -> None:
    with serving(lambda _: answer(b"secret")) as port, pytest.raises(InvalidMedia):
        download(f"http://{host}:{port}/")


def test_the_error_of_an_address_that_is_not_public_names_no_address() -> None:
    with pytest.raises(InvalidMedia, match="'localhost' has an address that is not public") as error:
        download("http://localhost:1/")
    assert "127.0.0.1" not in str(error.value)


def test_one_address_that_is_not_public_refuses_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ["8.8.8.8", "10.0.0.1"])
    with pytest.raises(InvalidMedia, match="not public"):
        download("http://rebinding.example/")


def test_the_connection_is_made_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer of the DNS would not be checked."""
    asked = answers(monkeypatch, ["127.0.0.1"], ["10.9.9.9"])
    with serving(lambda _: answer(b"content")) as port:
        assert download(f"http://changing.example:{port}/", is_allowed=lambda _: True) == b"content"
    assert asked == ["changing.example"]


def test_a_redirect_is_checked_as_the_first_address_is() -> None:
    """The first server is allowed for the test, the one that it names is not."""
    checked: list[str] = []

    def is_first(address: str) -> bool:
        checked.append(address)
        return len(checked) == 1

    elsewhere = redirect("http://169.254.169.254/latest/meta-data")
    with serving(lambda _: elsewhere) as port, pytest.raises(InvalidMedia, match=r"169\.254\.169\.254"):
        download(f"http://127.0.0.1:{port}/", is_allowed=is_first)
    assert checked == ["127.0.0.1", "169.254.169.254"]


def test_a_redirect_to_a_server_that_is_not_allowed_is_refused() -> None:
    with (
        serving(lambda _: redirect("http://other.example/")) as port,
        pytest.raises(InvalidMedia, match=re.escape("of 'other.example', which is not allowed. Allowed: 127.0.0.1")),
    ):
        download(f"http://127.0.0.1:{port}/", ["127.0.0.1"], is_allowed=lambda _: True)


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://8.8.8.8/", "//"])
def test_a_redirect_to_another_scheme_is_refused(place: str) -> None:
    with serving(lambda _: redirect(place)) as port, pytest.raises(InvalidMedia):
        download(f"http://127.0.0.1:{port}/", is_allowed=lambda _: True)


def test_redirects_are_followed_up_to_their_limit() -> None:
    limits = DownloadLimits(max_redirects=2)

    def hop(path: str) -> bytes:
        return answer(b"end") if path == "/2" else redirect(f"/{int(path[1:]) + 1}")

    with serving(hop) as port:
        assert download(f"http://127.0.0.1:{port}/0", limits=limits, is_allowed=lambda _: True) == b"end"
    with serving(lambda _: redirect("/again")) as port, pytest.raises(InvalidMedia, match="more than 2 times"):
        download(f"http://127.0.0.1:{port}/0", limits=limits, is_allowed=lambda _: True)


@pytest.mark.parametrize("url", ["http://x:99999/", "http://[bad/", "http://exa mple/", "http://a\r\nHost: b/"])
def test_what_is_no_url_is_refused_as_such(url: str) -> None:
    with pytest.raises(InvalidMedia, match="is not a valid URL"):
        download(url)


@pytest.mark.parametrize("domains", [[], ["other.example"], ["example"], ["www.example"]])
def test_a_server_outside_of_the_allowed_ones_is_not_asked(domains: list[str]) -> None:
    with pytest.raises(InvalidMedia, match="allowed_media_domains"):
        download("http://good.example/a.png", domains)


def test_names_of_allowed_servers_are_compared_as_the_dns_does(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ["127.0.0.1"])
    with serving(lambda _: answer(b"content")) as port:
        assert download(f"http://GOOD.example.:{port}/", ["good.Example"], is_allowed=lambda _: True) == b"content"


@pytest.mark.parametrize("declared", [True, False])
def test_a_file_beyond_the_limit_is_refused(declared: bool) -> None:
    content = answer(b"x" * 3000, declared=declared)
    with serving(lambda _: content) as port, pytest.raises(InvalidMedia, match="more than 2,000 bytes"):
        download(f"http://127.0.0.1:{port}/", limits=DownloadLimits(max_bytes=2000), is_allowed=lambda _: True)


def test_a_file_that_ends_early_is_refused() -> None:
    cut = answer(b"x" * 3000)[:-1000]
    with serving(lambda _: cut) as port, pytest.raises(InvalidMedia, match="after 2,000 of 3,000 bytes"):
        download(f"http://127.0.0.1:{port}/", is_allowed=lambda _: True)


def test_a_chunked_file_is_read_whole() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with serving(lambda _: chunked) as port:
        assert download(f"http://127.0.0.1:{port}/", is_allowed=lambda _: True) == b"abcde"


@pytest.mark.parametrize("status", [204, 206, 403, 404, 500])
def test_another_status_is_named(status: int) -> None:
    content = answer(b"", status=status)
    with serving(lambda _: content) as port, pytest.raises(InvalidMedia, match=f"status {status}"):
        download(f"http://127.0.0.1:{port}/", is_allowed=lambda _: True)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"])
def test_a_server_that_answers_drop_by_drop_is_left_after_the_timeout(begin: bytes) -> None:
    """The timeout is of the whole download, and not of each read."""
    with serving(lambda _: begin, drip=True) as port, pytest.raises(InvalidMedia, match=r"within 0\.4 s"):
        download(f"http://127.0.0.1:{port}/", limits=DownloadLimits(timeout_s=0.4), is_allowed=lambda _: True)


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a", "http://[::1", "http://a:port/", "http://a\x00b/", "http://a b/", "ftp://a/",
     f"http://{'a' * 70}/"],
)  # fmt: skip
def test_a_malformed_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidMedia, match=re.escape(repr(url)[:20])):
        download(url, is_allowed=lambda _: True)


def test_a_server_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(InvalidMedia, match="its server does not answer"):
        download(f"http://127.0.0.1:{port}/", is_allowed=lambda _: True)


def test_https_checks_the_certificate_for_the_name_and_not_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-subj", "/CN=good.example", "-addext", "subjectAltName=DNS:good.example", "-days", "2"]
    subprocess.run([*command, *name, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    answers(monkeypatch, ["127.0.0.1"], ["127.0.0.1"])
    with serving(lambda _: answer(b"secret"), context) as port:
        assert download(f"https://good.example:{port}/", is_allowed=lambda _: True) == b"secret"
        with pytest.raises(InvalidMedia, match="certificate or its TLS was refused"):
            download(f"https://other.example:{port}/", is_allowed=lambda _: True)


def answer(content: bytes, *, status: int = 200, declared: bool = True) -> bytes:
    length = f"Content-Length: {len(content)}\r\n" if declared else ""
    return f"HTTP/1.1 {status} x\r\n{length}\r\n".encode() + content


def redirect(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()


def answers(monkeypatch: pytest.MonkeyPatch, *resolved: list[str]) -> list[str]:
    """Resolve names ending in `.example` to these addresses, a list per question; returns the names asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        if not host.endswith(".example"):
            return real(host, port, *args, **kwargs)
        asked.append(host)
        return [info for address in resolved[len(asked) - 1] for info in real(address, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


@contextmanager
def serving(
    respond: Callable[[str], bytes], context: ssl.SSLContext | None = None, *, drip: bool = False
) -> Iterator[int]:
    """A server that answers by path. drip: then sends a byte at a time, without an end."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def run() -> None:
            while not ended.is_set():
                try:
                    raw, _ = listener.accept()
                    with context.wrap_socket(raw, server_side=True) if context else raw as connection:
                        path = connection.recv(65536).split()[1].decode()
                        connection.sendall(respond(path))
                        while drip and not ended.wait(0.02):
                            connection.sendall(b"x")
                except (OSError, IndexError):
                    continue

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            with socket.create_connection(listener.getsockname()):
                pass
            thread.join()
