"""Route `/`: the page of the server, which is one file."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

router = APIRouter()


@router.get("/", response_class=HTMLResponse, summary="The page: a playground, and a live view")
async def page() -> Response:
    text, headers = _page()
    return HTMLResponse(text, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """Text of the page, and its headers: only its own script and style may run, and it talks to this server only."""
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", text),
        "style-src": _hash_of("style", text),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return text, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # A new version of Penstock has another page, and its answers may differ.
        "Cache-Control": "no-cache",
    }


def _hash_of(name: str, text: str) -> str:
    """Source expression of the content of the page's only element of this name."""
    (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
