"""The page at `/`: one file, which loads nothing, and runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from support.fake_engine import FakeCore, write_model
from support.servers import Reply, Served, serving


class Elements(HTMLParser):
    """Elements of a page, with their attributes, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._name = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        self._name = tag

    def handle_data(self, data: str) -> None:
        if self._name in ("script", "style"):
            self.texts[self._name] = self.texts.get(self._name, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._name = ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = EngineConfig.create(str(write_model(tmp_path_factory.mktemp("model"))))
    engine = AsyncEngine.from_config(config, load_core=lambda config: FakeCore())
    with serving(engine, api_keys=("secret",)) as served:
        yield served


@pytest.fixture(scope="module")
def reply(server: Served) -> Reply:
    return server.request("GET", "/")


@pytest.fixture(scope="module")
def page(reply: Reply) -> Elements:
    return Elements(reply.body.decode())


def test_the_page_loads_without_a_key_and_has_no_data(server: Served, reply: Reply) -> None:
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "secret" not in reply.body.decode()
    assert server.request("GET", "/v1/models").status == 401


def test_the_policy_allows_its_own_script_and_style_only(reply: Reply, page: Elements) -> None:
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"


def test_the_page_loads_nothing(page: Elements) -> None:
    assert not [tag for tag, attributes in page.attributes if "src" in attributes]
    links = [attributes["href"] for tag, attributes in page.attributes if tag in ("link", "a")]
    assert all(str(link).startswith(("data:", "#")) for link in links)
    assert "url(" not in page.texts["style"]
    assert "@import" not in page.texts["style"]


def test_texts_enter_the_page_as_texts_only(page: Elements) -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert not re.findall(unsafe, page.texts["script"])
    # The policy would ignore them.
    assert not [name for _, attributes in page.attributes for name in attributes if name == "style" or name[:2] == "on"]


def test_every_element_that_the_script_names_exists(page: Elements) -> None:
    ids = [str(attributes["id"]) for _, attributes in page.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([\w-]+)"\)', page.texts["script"])) <= set(ids)


def test_no_page_where_it_is_turned_off(server: Served) -> None:
    with serving(server.engine, page=False) as other:
        assert other.request("GET", "/").status == 405
