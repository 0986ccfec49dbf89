"""Markdown of the page's answers: its script's function, run by Node where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")
# A document as far as the function needs it, and its elements as text.
DOCUMENT = """
"use strict";
function element(localName, properties = {}, ...childNodes) { return { localName, properties, childNodes }; }
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
function shown(node) {
  if (typeof node === "string") return escaped(node);
  const { href, start } = node.properties;
  const attributes = (href ? ` href=${href}` : "") + (start > 1 ? ` start=${start}` : "");
  return `<${node.localName}${attributes}>${node.childNodes.map(shown).join("")}</${node.localName}>`;
}
"""
RUN = """
const began = performance.now();
const texts = JSON.parse(require("fs").readFileSync(0, "utf8")).map((text) => markdown(text).map(shown).join(""));
console.log(JSON.stringify({ texts, seconds: (performance.now() - began) / 1000 }));
"""


def rendered(*texts: str) -> tuple[list[str], float]:
    """Elements of each text, and the seconds that they took."""
    page = files("penstock.server.page").joinpath("page.html").read_text(encoding="utf-8")
    (script,) = re.findall(r"// ---- Markdown -+\n(.*?)\n// ---- ", page, re.DOTALL)
    command = [str(NODE), "-e", DOCUMENT + script + RUN]
    result = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found["texts"], found["seconds"]


CASES = {
    "plain\ntext\n\nmore": "<p>plain\ntext</p><p>more</p>",
    "# One\n### Three #": "<h3>One</h3><h5>Three</h5>",
    "**bold**, *em*, _em_, ~~old~~, `a*b*`": "<p><strong>bold</strong>, <em>em</em>, <em>em</em>, <del>old</del>, "
    "<code>a*b*</code></p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "snake_case_name, 2 * 3 * 4, \\*literal\\*": "<p>snake_case_name, 2 * 3 * 4, *literal*</p>",
    "- a\n- b\n  - c\n\n  more\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li><li>d</li></ul>",
    "3. a\n4. b": "<ol start=3><li>a</li><li>b</li></ol>",
    "- a\n1. b": "<ul><li>a</li></ul><ol><li>b</li></ol>",
    "text\n- a": "<p>text</p><ul><li>a</li></ul>",
    "> quoted\n> **more**\nafter": "<blockquote><p>quoted\n<strong>more</strong></p></blockquote><p>after</p>",
    "```python\nif a:\n    <b> ** c\n```\nafter": "<pre><code>if a:\n    &lt;b> ** c</code></pre><p>after</p>",
    "```\nnot ended": "<pre><code>not ended</code></pre>",
    "---\n***": "<hr></hr><hr></hr>",
    "| a | b |\n|---|:-:|\n| 1 | `x` |": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>"
    "<td>1</td><td><code>x</code></td></tr></tbody></table></div>",
    "| a \\| b | c |\n|---|---|": "<div><table><thead><tr><th>a | b</th><th>c</th></tr></thead>"
    "<tbody></tbody></table></div>",
    "[a](https://example.org/b)": "<p><a href=https://example.org/b>a</a></p>",
    "![a](http://example.org/b.png)": "<p><a href=http://example.org/b.png>a</a></p>",
    "[a](javascript:alert(1)) [b](data:x)": "<p>[a](javascript:alert(1)) [b](data:x)</p>",
    "<script>alert(1)</script>": "<p>&lt;script>alert(1)&lt;/script></p>",
    "ROMEO:\nBut soft!\n\nJULIET:\nO Romeo": "<p>ROMEO:\nBut soft!</p><p>JULIET:\nO Romeo</p>",
    "": "",
}


def test_texts_become_elements_and_html_stays_text() -> None:
    texts, _ = rendered(*CASES)
    assert dict(zip(CASES, texts, strict=True)) == CASES


def test_no_text_takes_long_or_is_nested_too_deep() -> None:
    hostile = [">" * 5000, "- " * 5000, " *a" * 20_000, "`a" * 20_000, "[a](" * 20_000, "**a " * 20_000, "_a" * 20_000]
    hostile += ["\n".join(" " * depth + "- a" for depth in range(500)), "|a" * 5000 + "\n" + "|-" * 5000]
    hostile += ["# a" + " " * 200_000 + "x", "|a\n" + " " * 200_000 + "x|", "|a\n|-" + " " * 200_000 + "x"]
    hostile += ["```" + " " * 200_000 + "`", "```" + "a" * 200_000 + "`"]
    texts, seconds = rendered(*hostile)
    assert len(texts) == len(hostile)
    assert seconds < 20
