"""Fields without an effect: each is documented, and accepted or refused as the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.protocol.other_fields import (
    MESSAGES_OTHER_FIELDS,
    OTHER_FIELDS,
    RESPONSES_OTHER_FIELDS,
    OtherField,
)
from support.servers import Served

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
MESSAGE = {"role": "user", "content": "x"}
BODIES = {
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 1},
}
TABLES = dict(zip(BODIES, (OTHER_FIELDS, RESPONSES_OTHER_FIELDS, MESSAGES_OTHER_FIELDS), strict=True))
FIELDS = [(path, name, field) for path, table in TABLES.items() for name, field in table.items()]


@pytest.mark.parametrize(("path", "name", "field"), FIELDS, ids=str)
def test_a_field_is_documented(path: str, name: str, field: OtherField) -> None:
    text = PAGE.read_text()
    assert f"`{name}`" in text or f"`{name}: " in text


@pytest.mark.parametrize("path", BODIES)
def test_values_that_ask_for_nothing_are_accepted_and_others_refused(server: Served, path: str) -> None:
    accepted = {name: (field.allowed or ["x"])[0] for name, field in TABLES[path].items() if field.allowed != ()}
    reply = server.post(path, {**BODIES[path], **accepted})
    assert reply.status == 200, reply.body
    for name, field in TABLES[path].items():
        if field.allowed is not None:
            reply = server.post(path, {**BODIES[path], name: "no such value"})
            assert reply.status == 400
            assert reply.json["error"]["message"].startswith(f"{name}=")
